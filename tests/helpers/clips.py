"""Small clips whose frames say which they are."""

import io
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

TICKS = 1000
"""Times of frames are whole milliseconds."""


def frame(number: int, size: tuple[int, int] = (64, 32)) -> Image.Image:
    """A frame that shows its number: eight stripes, black or white, the lowest bit at the left; the upper half is grey."""
    width, height = size
    pixels = np.full((height, width, 3), 128, np.uint8)
    for bit in range(8):
        stripe = slice(bit * width // 8, (bit + 1) * width // 8)
        pixels[height // 2 :, stripe] = 255 if number >> bit & 1 else 0
    return Image.fromarray(pixels)


def number(picture: Image.Image) -> int:
    """The number that a frame shows, scaled or not."""
    pixels = np.asarray(picture.convert("L"))
    height, width = pixels.shape
    middles = [pixels[height * 3 // 4, int((bit + 0.5) * width / 8)] for bit in range(8)]
    return sum(1 << bit for bit, value in enumerate(middles) if value > 127)


def clip(
    times_ms: Sequence[int],
    container: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (64, 32),
    rotation: int | None = None,
    key_every: int = 12,
    pixels: str = "yuv420p",
    index_first: bool = False,
    first: int = 0,
    **options: str,
) -> bytes:
    """An encoded clip; frame i is shown from `times_ms[i]` on, with the number `first` + i. `rotation`: in degrees, as phones note it."""
    file = tempfile.NamedTemporaryFile()  # FFmpeg opens it again to move the index
    flags = {"movflags": "faststart"} if index_first else {}
    with file, av.open(file.name, "w", format=container, options=flags) as out:
        stream = out.add_stream(codec, rate=25, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.time_base = Fraction(1, TICKS)
        stream.codec_context.time_base = Fraction(1, TICKS)
        stream.codec_context.gop_size = key_every
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for index, time in enumerate(times_ms):
            one = av.VideoFrame.from_image(frame((first + index) % 256, size))
            one.pts, one.time_base = time, Fraction(1, TICKS)
            out.mux(stream.encode(one))
        out.mux(stream.encode())
        out.close()
        return Path(file.name).read_bytes()


def sound(container: str = "mp4") -> bytes:
    """A file with sound alone."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream("aac", rate=8000)
        for index in range(10):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.sample_rate, silence.pts = 8000, index * 1024
            out.mux(stream.encode(silence))
        out.mux(stream.encode())
    return file.getvalue()
