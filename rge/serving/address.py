"""The address that a server listens on, bound before a model is loaded."""

import ipaddress
import socket

from rge.common.errors import UserError


def bound(host: str, port: int, *, listens: bool = False) -> socket.socket:
    """Bind a socket to an address; unless `listens`, clients are refused until the server starts."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(
            f"it is not an address to listen on: {error.strerror or error}", host, key="host"
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if listens:
            listener.listen(128)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    return listener


def cannot_listen(host: str, port: int, error: OSError) -> UserError:
    """The error of an address that cannot be bound."""
    fix = f"it cannot be listened on: {error.strerror or error}; give another port=, or port=0 for a free one"
    return UserError(fix, f"{host}:{port}")


def url_of(listener: socket.socket) -> str:
    """The URL of the server behind a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
