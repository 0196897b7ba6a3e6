"""A service of `rge serve` behind a real socket."""

import asyncio
import contextlib
import socket
import threading

import uvicorn


@contextlib.contextmanager
def running(service):
    """The service in a thread of this process; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            service.app, lifespan="off", ws="none", log_level="critical", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        service.stop()
        assert not thread.is_alive()
