"""Filters on content: detectors of faces, of text, or one of the user's own.

A filter is a function of a picture that returns why to leave it out, or None. ``library.filters`` names those that run; the
card of the data set says which did and which did not.
"""

import importlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from PIL import Image

from rge.common.errors import UserError
from rge.common.registry import load_plugins

Filter = Callable[[Image.Image], str | None]

MIN_FACE_PX = 24
"""Smaller faces are not recognisable."""
MIN_CONFIDENCE, MAX_WORDS = 60, 3
"""Words that tesseract is so sure of (of 100), and how many a picture may show."""
TESSERACT_S = 60


def _faces() -> Filter:
    """Frontal faces, by OpenCV's Haar cascade (Viola and Jones, 2001), which comes with the package."""
    try:
        import cv2
    except ImportError:
        raise UserError(
            "library.filters: faces needs OpenCV: the extra filters: pip install 'opencv-python-headless<5' (5 has no cascades)"
        ) from None
    path = Path(getattr(cv2, "data", cv2).__file__ or "").parent / "haarcascade_frontalface_default.xml"
    if not path.is_file():
        raise UserError(
            f"library.filters: faces: this OpenCV ({cv2.__version__}) has no {path.name}; install one below 5"
        )
    return partial(_has_face, cv2, cv2.CascadeClassifier(str(path)))


def _has_face(cv2: Any, cascade: Any, image: Image.Image) -> str | None:
    import numpy as np

    grey = cv2.equalizeHist(np.asarray(image.convert("L")))
    found = cascade.detectMultiScale(
        grey, scaleFactor=1.1, minNeighbors=5, minSize=(MIN_FACE_PX, MIN_FACE_PX)
    )
    return "shows a face" if len(found) else None


def _text() -> Filter:
    """Writing, by the program tesseract: more than `MAX_WORDS` words of which it is sure."""
    program = shutil.which("tesseract")
    if program is None:
        raise UserError(
            "library.filters: text needs the program tesseract (such as apt install tesseract-ocr)"
        )
    return partial(_has_text, program)


def _has_text(program: str, image: Image.Image) -> str | None:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    command = [program, "-", "-", "--psm", "11", "tsv"]
    try:
        done = subprocess.run(
            command,
            input=encoded.getvalue(),
            capture_output=True,
            timeout=TESSERACT_S,
            check=True,
            # A picture is looked at on each core; threads of its own would only wait for one another.
            env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"library.filters: tesseract took over {TESSERACT_S} s for one picture") from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise UserError(
            f"library.filters: tesseract failed: {said.decode(errors='replace').strip()[:300]}"
        ) from None
    rows = [row.split("\t") for row in done.stdout.decode("utf-8", "replace").splitlines()[1:]]
    words = [row[11] for row in rows if len(row) > 11 and float(row[10]) >= MIN_CONFIDENCE]
    sure = [word for word in words if sum(letter.isalnum() for letter in word) > 1]
    return "shows text" if len(sure) > MAX_WORDS else None


FILTERS: dict[str, tuple[str, Callable[[], Filter]]] = {
    "faces": ("OpenCV's Haar cascade for frontal faces", _faces),
    "text": (f"tesseract, more than {MAX_WORDS} words", _text),
}
"""What each is, and what loads it."""


@lru_cache(maxsize=16)
def load_filter(name: str) -> Filter:
    """A filter by its name, or one of the user's own as ``module:function``; loaded once a process.

    Raises:
        UserError: there is none of that name, or what it needs is not installed.
    """
    if name in FILTERS:
        return FILTERS[name][1]()
    module, mark, function = name.partition(":")
    if not mark:
        raise UserError(f"library.filters must be of {', '.join(FILTERS)}, or module:function; got {name!r}")
    load_plugins([module])  # the current folder counts as installed
    found = getattr(sys.modules.get(module) or importlib.import_module(module), function, None)
    if not callable(found):
        raise UserError(f"library.filters: {name}: the module has no function {function}")
    return found


def unwanted(image: Image.Image, filters: Sequence[str]) -> str | None:
    """Why the first filter that objects does so; None where none does.

    Raises:
        UserError: a filter returned something else.
    """
    for name in filters:
        reason = load_filter(name)(image)
        if reason is not None and not isinstance(reason, str):
            raise UserError(
                f"library.filters: {name} must return a reason or None, got {type(reason).__name__}"
            )
        if reason:
            return reason
    return None


def described(filters: Sequence[str]) -> str:
    """What ran and what did not, for the card."""
    ran = [f"{name} ({FILTERS[name][0]})" if name in FILTERS else name for name in filters]
    missing = [name for name in FILTERS if name not in filters]
    lines = [
        f"Filters that ran over every picture: {', '.join(ran)}."
        if ran
        else "No filter ran over the pictures."
    ]
    if missing:
        lines.append(f"Not looked for: {' and '.join(missing)}.")
    return " ".join(lines)
