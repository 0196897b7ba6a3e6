"""Fetch a picture from a client's URL, public addresses only (no SSRF).

A name is resolved here, all its addresses are checked, and the connection goes to a checked address, since a second lookup might
return another one. This happens for each connection, including redirects.
"""

import asyncio
import ipaddress
import socket
import string
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, urljoin

import httpcore

from rge.common.images import FETCH_S, WEB, ImageError

MAX_REDIRECTS = 4
_EMBEDDING = tuple(
    ipaddress.ip_network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
"""IPv6 networks whose addresses stand for IPv4 ones, which may be private."""


def is_public(address: str) -> bool:
    """Whether an IP address is reachable from anywhere on the internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if any(ip in network for network in _EMBEDDING):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class _Public(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} is not known") from error
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        if not addresses or not all(map(is_public, addresses)):
            raise ImageError("it is not on the public internet", host, kind="private")
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)


async def fetch_public(address: str, count: Callable[[int], object]) -> bytes:
    """Encoded bytes of a picture on a public host; `ImageError` after `FETCH_S` seconds, or if it cannot be fetched.

    `count` is called with the number of bytes of each part before it is kept, and may raise to end the download.
    """
    shown = address[:80] + ("..." if len(address) > 80 else "")
    try:
        async with asyncio.timeout(FETCH_S):
            return await _fetch(address, count, shown)
    except TimeoutError:
        raise ImageError(f"it did not arrive within {FETCH_S} s", shown, kind="time") from None
    except ImageError:
        raise
    except (
        httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, httpcore.UnsupportedProtocol,
        OSError, ValueError,
    ) as error:  # fmt: skip
        raise ImageError(
            f"it cannot be fetched: {error or type(error).__name__}", shown, kind="network"
        ) from None


async def _fetch(address: str, count: Callable[[int], object], shown: str) -> bytes:
    # No proxy from the environment and no keep-alive: each request makes and checks a new connection.
    async with httpcore.AsyncConnectionPool(network_backend=_Public(), max_keepalive_connections=0) as pool:
        for _ in range(MAX_REDIRECTS + 1):
            if not address.startswith(WEB):
                raise ImageError("only http and https addresses are fetched", shown, kind="scheme")
            # As browsers do; leaves quoted characters alone.
            address = quote(address, safe=string.punctuation)
            headers = [("Accept", "image/*, video/*, application/pdf"), ("Accept-Encoding", "identity")]
            async with pool.stream("GET", address, headers=headers) as response:
                if response.status in (301, 302, 303, 307, 308):
                    headers_given = {key.lower(): value for key, value in response.headers}
                    target = quote(headers_given.get(b"location", b""), safe=string.punctuation)
                    address = urljoin(address, target)
                    continue
                if response.status != 200:
                    raise ImageError(
                        f"it cannot be fetched: its server says {response.status}", shown, kind="status"
                    )
                data = bytearray()
                async for part in response.aiter_stream():
                    count(len(part))
                    data += part
                return bytes(data)
    raise ImageError(f"it cannot be fetched: more than {MAX_REDIRECTS} redirects", shown, kind="redirects")
