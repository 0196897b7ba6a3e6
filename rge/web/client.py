"""Make HTTP clients that obey the environment's proxies and certificates, and fetch pictures with them."""

import os
import time
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from rge.common.errors import UserError
from rge.common.images import FETCH_BYTES, FETCH_S, ImageError, decode_data_url, shortened

if TYPE_CHECKING:
    import ssl

    import httpx  # takes time, and most commands fetch nothing

C = TypeVar("C", "httpx.Client", "httpx.AsyncClient")
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Hosts that no proxy reaches: the demo's server is one."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables of proxies, in lower or upper case."""


def make_client(kind: type[C], **options: Any) -> C:
    """Make a client with the proxies and certificates of the environment; addresses of this machine are reached without a proxy.

    Args:
        kind: `httpx.Client` or `httpx.AsyncClient`.
        options: its arguments.

    Raises:
        UserError: a variable of the environment cannot be used.
    """
    import httpx

    try:
        trusted = _certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return kind(verify=trusted, mounts={f"all://{host}": None for host in LOCAL}, **options)
    # A certificate that is missing or none, an unknown scheme, SOCKS without its package, no address.
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        why, variable = _explained(error)
        raise UserError(why, key=variable) from None


@cache
def _certificates(file: str | None, folder: str | None) -> "ssl.SSLContext":
    """The certificates that these two variables name, read once: it takes longer than a request on this machine."""
    import httpx

    return httpx.create_ssl_context()


def _explained(error: Exception) -> tuple[str, str]:
    """What is wrong, and with which variable of the environment."""
    import httpx

    if isinstance(error, OSError):
        name = "SSL_CERT_FILE" if os.environ.get("SSL_CERT_FILE") else "SSL_CERT_DIR"
        return (
            f"{os.environ.get(name)!r} in the environment cannot be used: {error.strerror or error}. Set it to a file of certificates, "
            "or unset it"
        ), name
    for name in (spelt for lower in PROXIES for spelt in (lower, lower.upper())):
        address = os.environ.get(name)
        if not address:
            continue
        try:
            httpx.HTTPTransport(proxy=address if "://" in address else f"http://{address}")
        except ImportError:
            return (
                f"{_without_password(address)} in the environment is a SOCKS proxy, which needs a package: pip install 'httpx[socks]', "
                "or unset the variable"
            ), name
        except (ValueError, httpx.InvalidURL) as why:
            return (
                f"{_without_password(address)} in the environment is no proxy that can be used ({why}): give http://HOST:PORT or "
                "socks5://HOST:PORT, or unset the variable"
            ), name
    return f"this system's settings cannot be used: {error}", "proxies"


def _without_password(address: str) -> str:
    scheme, mark, rest = address.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def fetch_picture(address: str) -> bytes:
    """Encoded bytes of a picture on the web or in a ``data:`` URL.

    Raises:
        ImageError: it cannot be fetched within `FETCH_S` seconds, or has more than `FETCH_BYTES` bytes.
        UserError: see `make_client`.
    """
    if address.startswith("data:"):
        return decode_data_url(address)
    import httpx

    shown = shortened(address)
    data = bytearray()
    deadline = time.monotonic() + FETCH_S
    try:
        with (
            make_client(httpx.Client, timeout=FETCH_S, follow_redirects=True) as client,
            client.stream("GET", address) as response,
        ):
            response.raise_for_status()
            for part in response.iter_bytes():
                data += part
                if len(data) > FETCH_BYTES:
                    raise ImageError(f"it is larger than {FETCH_BYTES >> 20} MB", shown, kind="huge")
                if time.monotonic() > deadline:
                    raise ImageError(f"it did not arrive within {FETCH_S} s", shown, kind="time")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ImageError(
            f"it cannot be fetched: {error or type(error).__name__}", shown, kind="network"
        ) from error
    return bytes(data)
