"""Pictures without metadata: equal pixels, and no trace of what was written beside them."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from rge.common.images import ImageError, load_image
from rge.content.picture_metadata import without_metadata

SECRETS = (b"MyPhone", b"a secret place", b"my comment", b"GPS", b"Exif")


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def exif(orientation: int = 1) -> Image.Exif:
    made = Image.Exif()
    made[0x0110] = "MyPhone"
    made[0x0112] = orientation
    made.get_ifd(0x8825)[29] = "a secret place"
    return made


def encoded(image: Image.Image, kind: str, **settings) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(load_image(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_keeps_its_pixels_and_nothing_else(mode, progressive):
    data = encoded(
        noise(mode),
        "JPEG",
        exif=exif(),
        comment="my comment",
        icc_profile=b"my comment",
        progressive=progressive,
    )
    # a phone's second picture, with data of its own
    data += encoded(noise("L"), "JPEG", exif=exif())
    clean = without_metadata(data)
    assert np.array_equal(pixels(clean), pixels(data))
    assert not any(secret in clean for secret in SECRETS)
    assert dict(Image.open(io.BytesIO(clean)).getexif()) == {}
    assert without_metadata(clean) == clean, "what is clean stays as it is"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1"])
def test_a_png_keeps_its_pixels_and_nothing_else(mode):
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", "my comment")
    texts.add_itxt("XML:com.adobe.xmp", "a secret place", zip=False)
    data = encoded(noise(mode), "PNG", exif=exif(), pnginfo=texts, icc_profile=b"x" * 200) + b"my comment"
    clean = without_metadata(data)
    assert np.array_equal(pixels(clean), pixels(data))
    assert not any(secret in clean for secret in SECRETS)
    assert without_metadata(clean) == clean


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webp_keeps_its_pixels_and_nothing_else(mode, lossless):
    data = encoded(
        noise(mode), "WEBP", lossless=lossless, exif=exif(), xmp=b"a secret place", icc_profile=b"GPS" * 9
    )
    clean = without_metadata(data)
    assert np.array_equal(pixels(clean), pixels(data))
    assert not any(secret in clean for secret in SECRETS)
    assert without_metadata(clean) == clean


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_picture_on_its_side_is_turned_upright(kind, orientation):
    picture = Image.new("RGB", (60, 40), "white")
    picture.paste("red", (0, 0, 30, 20))
    data = encoded(picture, kind, exif=exif(orientation))
    clean = without_metadata(data)
    assert Image.open(io.BytesIO(clean)).format == kind
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    found = np.asarray(Image.open(io.BytesIO(clean)).convert("RGB")).astype(int)
    assert found.shape == upright.shape
    assert abs(found - upright).mean() <= (3 if kind == "JPEG" else 0), "the red corner is where it belongs"
    assert not any(secret in clean for secret in SECRETS)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "GIF"])
def test_other_formats_become_png(kind):
    data = encoded(noise(), kind)
    clean = without_metadata(data)
    assert Image.open(io.BytesIO(clean)).format == "PNG"
    assert np.array_equal(pixels(clean), pixels(data))


def test_a_heic_becomes_png_in_a_process_that_has_read_none(monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    held = io.BytesIO()
    pillow_heif.from_pillow(noise()).save(held, quality=95)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    clean = without_metadata(held.getvalue())
    assert Image.open(io.BytesIO(clean)).format == "PNG"
    assert np.array_equal(pixels(clean), pixels(held.getvalue()))


def test_broken_containers_are_written_anew_or_refused(tmp_path: Path):
    data = encoded(noise(), "JPEG", exif=exif())
    garbage = data[:2] + b"\xff\xe1\x00\x01" + data[2:]  # a part shorter than its own length field
    try:
        clean = without_metadata(garbage)
    except ImageError:
        clean = b""
    assert not any(secret in clean for secret in SECRETS)
    with pytest.raises(ImageError):
        without_metadata(b"no picture")


def test_an_animation_of_one_frame_stays_a_picture():
    """Its pixels are in a part of their own kind, which an ordinary WebP does not have."""
    out = io.BytesIO()
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    data = out.getvalue()
    second = data.rindex(b"ANMF")
    one = data[:4] + struct.pack("<I", second - 8) + data[8:second]
    expected = load_image(one)
    assert expected.getpixel((0, 0)) == (255, 0, 0)
    assert load_image(without_metadata(one)).tobytes() == expected.tobytes()
