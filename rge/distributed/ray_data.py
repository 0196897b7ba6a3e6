"""Work on many machines: Ray Data maps blocks over actors, one per device.

    for result in mapped(make, blocks, address="auto"):
        ...

Ray restarts an actor whose process or machine died, where there is room, and gives it its blocks again; a block is therefore work that
may be done twice. Blocks are drawn `AHEAD` per device at a time and wait in Ray's object store, which spills to disk; then all devices
finish, and load their models again.
"""

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from rge.common.commands import in_thread
from rge.common.errors import UserError, portable
from rge.common.registry import load_plugins, plugins_loaded

WAIT_S = 1800.0
"""How long no block may be finished, while actors start, load models or are moved from a machine that died."""
AHEAD = 64
"""Blocks per device that are drawn at once: what waits, and how often loading a model pays."""
PASSED_ON = ("HF_", "MKL_", "OMP_")
"""Variables of this process that actors get too: they change results, or what can be reached."""


class RayError(UserError):
    """Ray cannot do the work; the message says what is missing, or what failed in a block."""


def mapped(
    make: Callable[[], Callable[[Any], Any]],
    blocks: Iterable[Any],
    *,
    address: str | None,
    ahead: int = AHEAD,
) -> Iterator[Any]:
    """Results of all blocks.

    Args:
        make: called once in each actor; what it returns is called with each block. Pickled: a module's function or a partial of one.
        blocks: pickled, each is the work of seconds or minutes; drawn lazily.
        address: of a cluster, ``auto`` for the one that this machine belongs to; None: a local one, which ends with this process.
        ahead: as `AHEAD`; fewer for blocks that hold pictures.

    Raises:
        RayError: Ray is not installed, there is no cluster, a block failed, or none was finished for `WAIT_S`.
    """
    left: Iterator[bytes] = map(pickle.dumps, blocks)
    if (first := next(left, None)) is None:
        return
    ray = _connected(address)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    # Without GPUs a machine is one device. It asks for one CPU, so that a machine that is left can take the place of another.
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    device = {"num_gpus": 1} if num_gpus else {"num_cpus": 1}  # Ray Data spreads its actors
    num_devices = num_gpus or num_nodes
    environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    left = chain([first], left)
    while drawn := [{"block": block} for block in islice(left, ahead * num_devices)]:
        size = min(num_devices, len(drawn))
        data = ray.data.from_items(drawn, override_num_blocks=len(drawn)).map_batches(
            _Actor,
            fn_constructor_args=(make, plugins_loaded(), environment, os.getcwd()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2),
            **device,
        )
        del drawn
        for row in _within_time(iter(data.iter_batches(batch_size=1, prefetch_batches=0))):
            [(is_fault, result)] = map(pickle.loads, row["result"])
            if is_fault:
                raise result
            yield result


class _Actor:
    """What Ray Data keeps on each device."""

    def __init__(
        self,
        make: Callable[[], Callable[[Any], Any]],
        plugins: Sequence[str],
        environment: dict[str, str],
        folder: str,
    ):
        if os.path.isdir(folder):  # relative paths mean the same as to the command
            os.chdir(folder)
        if "OMP_NUM_THREADS" not in environment:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: one thread for each CPU that was asked for
        os.environ |= environment
        load_plugins(plugins)
        self._work = make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = []
        for block in batch["block"]:
            try:
                results.append((False, self._work(pickle.loads(block))))  # noqa: S301
            except Exception as error:  # noqa: BLE001 - raised again by `mapped`; another attempt would end the same way
                results.append((True, portable(error)))
        return {"result": [pickle.dumps(result) for result in results]}


def _connected(address: str | None) -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        why = "engine=ray needs Ray, which is not installed: pip install -e '.[ray]'"
        raise RayError(why, kind="not installed") from None
    for name in ("ray.data._internal.progress", "ray.data._internal.execution"):
        logging.getLogger(name).setLevel(logging.ERROR)  # the command shows its own progress
    if not ray.is_initialized():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "lancedb fork support"
                )  # Ray's processes begin with another program
                ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise RayError(
                f"no Ray cluster answers at address={address} (one that asks for a token needs RAY_AUTH_MODE=token here too): {error}"
            ) from None
    return ray


def _within_time(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches, at most `WAIT_S` apart."""
    while True:
        batch = in_thread(partial(next, batches))
        try:
            error = batch.exception(WAIT_S)
        except TimeoutError:
            raise RayError(
                f"no block was finished for {WAIT_S:.0f} s: `ray status` tells whether machines or devices are missing; "
                "the same command continues",
                kind="silent",
            ) from None
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise RayError(f"Ray could not finish a block: {' '.join(str(error).split())}") from error
        yield batch.result()
