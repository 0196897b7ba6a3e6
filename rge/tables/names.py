"""What a name in a table may mean as the path of a picture.

Tables are made on other systems and by other programs, which write paths as addresses, with other slashes or as their own links.
A file of exactly the written name always comes first.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

_SCHEME = re.compile(r"(https?)://", re.IGNORECASE)
_UPLOAD = re.compile(r"/data/(upload/(\d+/)([0-9a-f]{8}-)(.+))$")
"""What Label Studio calls an uploaded file: the project and eight digits come before its name."""


def web_address(name: str) -> str | None:
    """The address of a picture on the web, whose scheme may be in upper case; None of any other name."""
    name = name.strip()
    found = _SCHEME.match(name)
    return f"{found[1].lower()}://{name[found.end() :]}" if found else None


def spellings(name: str, folder: str = "") -> list[str]:
    r"""Paths that a name may mean, the name itself first; of an address on the web, only those of Label Studio's links.

    Spaces around it, ``file:`` addresses, Label Studio's links, backslashes, percent codes, and composed or decomposed accents are
    seen through. `folder` is the name of the folder that the paths are relative to: of ``C:\\\\me\\\\photos\\\\a.png``, what follows
    it is one, too.
    """
    found = [name] if web_address(name) is None else [*_exported(name.strip())]
    for step in (
        _stripped,
        _local,
        _exported,
        _slashes,
        _decoded,
        lambda path: _below(folder, path),
        _composed,
    ):
        found += [path for known in tuple(found) for path in step(known)]
    return [path for path in dict.fromkeys(found) if path.strip()]


def resolved(name: str, folder: str, is_there: Callable[[str], bool] = os.path.exists) -> str:
    """The file that a name means, as a path joined to `folder`, or its address on the web.

    If there is no such file, the path as it is written.
    """
    file, mark, row = name.partition(".parquet#")
    address, as_written = web_address(name), os.path.join(folder, file) + mark.removesuffix("#")
    path: str | None = as_written
    other = spellings(file, os.path.basename(os.path.abspath(folder)))
    if other != [file] and (address is not None or not is_there(as_written)):
        tried = (os.path.join(folder, path) + mark.removesuffix("#") for path in other)
        path = next(filter(is_there, tried), None)
    if path is None:
        return address or os.path.join(folder, name)
    return f"{path}#{row}" if mark else path


def _stripped(path: str) -> Iterator[str]:
    yield path.strip()


def _local(path: str) -> Iterator[str]:
    if path[:5].lower() == "file:":
        escaped = path[5:].replace("\\", "/").replace("#", "%23").replace("?", "%3F")
        parts = _split(f"file:{escaped}")
        host = "" if parts.netloc == "localhost" else parts.netloc
        for local in (unquote(host + parts.path), host + parts.path):
            yield local[1:] if re.match(r"/[A-Za-z]:", local) else local


def _exported(path: str) -> Iterator[str]:
    """Label Studio's links to files on disk, and to uploaded files."""
    if "/data/" not in path:
        return
    parts = _split(path)
    if parts.path.endswith("/data/local-files/"):
        yield from parse_qs(parts.query).get("d", [])
    elif upload := _UPLOAD.search(parts.path):
        whole, project, digits, name = upload.groups()
        for inside in (whole, project + digits + name, digits + name, name):
            yield unquote(inside)


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # such as a bracket that is not closed
        return SplitResult("", "", address, "", "")


def _slashes(path: str) -> Iterator[str]:
    if "\\" in path:
        yield path.replace("\\", "/")


def _decoded(path: str) -> Iterator[str]:
    if "%" in path:
        yield unquote(path)


def _below(folder: str, path: str) -> Iterator[str]:
    parts = path.split("/")
    if folder and folder in parts[:-1]:
        yield "/".join(parts[len(parts) - parts[::-1].index(folder) :])


def _composed(path: str) -> Iterator[str]:
    if not path.isascii():
        yield from (unicodedata.normalize(form, path) for form in ("NFC", "NFD"))
