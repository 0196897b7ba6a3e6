"""The server process: start, signals, shutdown."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch
import uvicorn
from asgi_correlation_id import CorrelationIdFilter

from rge.calls.keys import read_key
from rge.common.errors import UserError
from rge.common.files import raise_descriptor_limit
from rge.embedder import Embedder
from rge.index.store import Index
from rge.serving.address import cannot_listen, is_local, url_of
from rge.serving.app import Service
from rge.serving.options import ServeOptions


def serve(options: ServeOptions, listener: socket.socket) -> int:
    """Load the checkpoint and answer requests until a signal ends it.

    Returns:
        Exit code: 0 after SIGTERM, 130 after Ctrl-C; 1 if requests were dropped.

    Raises:
        UserError: no checkpoint, no key, or an index of another checkpoint.
    """
    if options.exact and options.engine == "vllm":
        raise UserError(
            "true computes every state alone, which vLLM does not do: use engine=own", key="exact"
        )
    if options.max_inputs > options.max_queue:
        raise UserError(
            f"{options.max_inputs} is more than max_queue={options.max_queue} admits at once",
            key="max_inputs",
        )
    key = None if options.key_env is None else read_key("rge serve", options.key_env)
    handler = logging.StreamHandler()
    handler.addFilter(CorrelationIdFilter(default_value="-"))
    logging.basicConfig(
        format="%(asctime)s %(levelname)s [%(correlation_id)s] %(message)s", handlers=[handler]
    )
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    raise_descriptor_limit()
    return Server(load(options, key), options, listener).run()


def load(options: ServeOptions, key: str | None = None) -> Service:
    """Open the index, load the checkpoint, and start the service."""
    index = None if options.index is None else Index.open(options.index)  # first: it takes no time
    torch.set_float32_matmul_precision("highest")
    embedder = Embedder.from_pretrained(
        options.checkpoint,
        revision=options.revision,
        base=options.base,
        device=options.device,
        dtype=options.dtype,
        max_prompt_tokens=options.max_prompt_tokens,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        max_new_tokens=options.max_new_tokens,
        engine=options.engine,
        vllm_memory=options.vllm_memory,
        vllm_rows=options.batch_size,
    )
    embedder = embedder.with_(exact=options.exact, batch_tokens=options.batch_tokens)
    if index is not None:
        index.check(options.checkpoint, embedder.checkpoint_hash)
    service = Service(embedder, options, key=key, index=index)
    service.start()
    return service


class Server(uvicorn.Server):
    """Uvicorn in this thread, the model in its own.

    After the first signal new requests are refused, and those in progress get ``drain_s`` seconds before the rest are answered
    with 503. A second signal ends the process immediately.
    """

    def __init__(self, service: Service, options: ServeOptions, listener: socket.socket):
        config = uvicorn.Config(
            service.app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=options.access_log,
            server_header=False,
            timeout_keep_alive=75,
            # two more seconds for the 503s
            timeout_graceful_shutdown=int(options.drain_s) + 2,
        )
        super().__init__(config)
        self._service, self._options, self._listener = service, options, listener
        self._first: int | None = None
        self._gave_up = False

    def run(self, sockets: list[socket.socket] | None = None) -> int:  # type: ignore[override]
        """Serve until a signal; returns the exit code."""
        try:
            super().run([self._listener])
        except OSError as error:
            raise cannot_listen(self._options.host, self._options.port, error) from None
        self._service.stop()
        code = 1 if self._gave_up else 130 if self._first == signal.SIGINT else 0
        if self._service.batches.is_running:
            _exit_now(code)
        return code

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which would re-raise the signal after the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and print the address."""
        await super().startup(sockets)
        url = url_of(self._listener)
        about = f"{self._service.name}, engine {self._options.engine}, {self._service.embedder.model.device}"
        _say(f"rge serve: {url} ({about})")
        if self._options.key_env is None and not is_local(self._listener.getsockname()[0]):
            _say(
                f"rge serve: anyone who can reach {url.removeprefix('http://')} can use it; key_env= asks for a key, "
                "host=127.0.0.1 listens on this machine only"
            )

    def _end(self, number: int) -> None:
        if self._first is not None:
            _say("rge serve: ended by a second signal")
            _exit_now(128 + number)
        self._first = number
        _say(
            f"rge serve: {signal.Signals(number).name}: refusing new requests, finishing those in progress for up to "
            f"{self._options.drain_s:g} s"
        )
        self._service.guard.is_draining = True
        asyncio.get_running_loop().call_later(self._options.drain_s, self._give_up)
        self.should_exit = True

    def _give_up(self) -> None:
        count = self._service.guard.give_up()
        self._gave_up = count > 0
        _say(f"rge serve: requests given up after drain_s={self._options.drain_s:g}: {count}")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - output of a command


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
