"""The address that a server listens on; taken before anything heavy is loaded, so that a wrong one shows at once."""

import socket

from rge.common.errors import UserError
from rge.serving.options import ServeOptions


def bound(options: ServeOptions) -> socket.socket:
    """A socket on ``host`` and ``port`` that does not listen yet.

    Raises:
        UserError: no such address here, or a port that somebody has.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(
            f"host={options.host} is no address to listen on: {error.strerror or error}"
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(options, error) from None
    return listener


def cannot_listen(options: ServeOptions, error: OSError) -> UserError:
    """What an address that cannot be had is told."""
    return UserError(
        f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; give another port=, or port=0 for a "
        "free one"
    )
