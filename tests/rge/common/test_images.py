"""Pictures that can be read come out as RGB; those that cannot are named. None is replaced."""

import io
import struct
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about
from PIL import EpsImagePlugin, ExifTags, Image

from rge.common import images
from rge.common.images import (
    ImageError,
    PictureIndex,
    is_there,
    load_image,
    names_picture,
    open_picture,
    picture_bytes,
    picture_size,
    upload_header,
)


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def png(picture) -> bytes:
    return encode(picture(6, 4))


def test_bytes_path_and_library_row_are_the_same_picture(picture, tmp_path, png):
    (tmp_path / "egg.png").write_bytes(png)
    rows = {"plain": png, "struct": {"bytes": png, "path": None}}
    for name, value in rows.items():
        pq.write_table(pa.table({"id": ["noto/1F512"], "image": [value]}), tmp_path / f"{name}.parquet")
    refs = [png, str(tmp_path / "egg.png"), *(f"{tmp_path}/{name}.parquet#noto/1F512" for name in rows)]
    for ref in refs:
        assert picture_bytes(ref) == png
        assert np.array_equal(np.asarray(load_image(ref)), np.asarray(picture(6, 4)))


def test_a_text_that_names_a_picture_is_known(picture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(20, 20).save("a.PNG")
    pq.write_table(pa.table({"id": ["7"], "image": [b"x"]}), "b.parquet")
    Path("key").touch()
    texts = [
        "data:image/png;base64,aGVsbG8=",
        "DATA:image/x",
        "https://a.org/b.jpg?size=9#c",
        "HTTP://a.org/b.webp",
    ]
    assert all(names_picture(text) and names_picture(text, local=False) for text in texts)
    local = ["a.PNG", str(tmp_path / "a.PNG"), " a.PNG\n", "b.parquet#7"]
    assert all(names_picture(text) and not names_picture(text, local=False) for text in local)
    others = [
        "", "key", "b.png", "b.parquet#8", "a.PNG and more", "data:text/plain,a", "https://a.org/b", "see https://a.org/b.png",
        "https://a.org/b c.png", "\0.png", "x" * 9999 + ".png",
    ]  # fmt: skip
    assert not any(map(names_picture, others))


def test_a_library_may_number_its_rows_and_is_read_again_when_it_changes(tmp_path):
    library = tmp_path / "library.parquet"
    for data in (b"first", b"second"):
        pq.write_table(pa.table({"id": [7], "image": [data]}), library)
        assert picture_bytes(f"{library}#7") == data
        assert is_there(f"{library}#7")
        assert not is_there(f"{library}#8")
        assert PictureIndex().fault(f"{library}#7") is None


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (2, 2), 7), (7, 7, 7)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (200, 0, 0, 255)), (200, 0, 0)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.fromarray(np.full((2, 2), 0x4080, np.uint16)), (0x40, 0x40, 0x40)),
        (Image.new("RGB", (1, 1), (1, 2, 3)), (1, 2, 3)),
    ],
    ids=["gray", "bilevel", "transparent", "opaque", "gray transparent", "16 bit", "one pixel"],
)
def test_every_mode_becomes_rgb_with_transparency_on_white(image, expected):
    loaded = load_image(encode(image))
    assert (loaded.mode, loaded.size) == ("RGB", image.size)
    assert loaded.getpixel((0, 0)) == expected


def test_a_palette_with_a_transparent_entry():
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.putpixel((1, 0), 1)
    loaded = load_image(encode(image, transparency=0))
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (9, 8, 7)]


def test_cmyk():
    loaded = load_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100))
    assert loaded.mode == "RGB"
    red, green, blue = loaded.getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


def test_exif_rotation_is_applied(picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    image = picture(6, 4)
    loaded = load_image(encode(image, "PNG", exif=exif))
    assert loaded.size == (4, 6)
    assert np.array_equal(np.asarray(loaded), np.asarray(image.rotate(-90, expand=True)))


def test_a_phones_picture_with_previews_is_its_first_frame(picture):
    data = encode(picture(16, 16, 1), "MPO", save_all=True, append_images=[picture(16, 16, 2)], quality=100)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    first = Image.open(io.BytesIO(encode(picture(16, 16, 1), "JPEG", quality=100)))
    assert np.array_equal(np.asarray(load_image(data)), np.asarray(first))


@pytest.mark.parametrize(("kind", "frames"), [("GIF", 2), ("PNG", 3), ("WEBP", 2)])
def test_an_animation_is_refused(picture, kind, frames):
    data = encode(
        picture(8, 8, 0), kind, save_all=True, append_images=[picture(8, 8, n) for n in range(1, frames)]
    )
    with error_about(ImageError, "animated"):
        load_image(data)
    assert load_image(encode(picture(8, 8, 0), kind)).size == (8, 8)
    assert load_image(data, first_frame=True).size == (8, 8)


def test_a_phones_heic_is_read(picture, monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    held = io.BytesIO()
    pillow_heif.from_pillow(picture(64, 48)).save(held, quality=95)
    assert load_image(held.getvalue()).size == (64, 48)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    with pytest.raises(ImageError):
        load_image(held.getvalue())


@pytest.mark.parametrize(
    "kind", "AVIF BMP DDS DIB GIF ICO JPEG JPEG2000 PCX PNG PPM SGI TGA TIFF WEBP".split()
)
def test_a_format_that_pillow_decodes_itself_is_read(picture, kind):
    assert load_image(encode(picture(32, 32), kind)).size == (32, 32)


@pytest.mark.parametrize("kind", ["EPS", "GRIB"])
def test_a_format_for_which_a_program_would_be_started_is_refused(picture, tmp_path, monkeypatch, kind):
    """Pillow passes PostScript, a programming language, to Ghostscript."""
    ran = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: ran.append(given))
    eps = encode(picture(8, 8), "EPS") if kind == "EPS" else b"GRIB\0\0\0\1" + bytes(100)
    (tmp_path / "a.png").write_bytes(eps)
    for ref in (eps, str(tmp_path / "a.png")):
        for look in (load_image, picture_size):
            with error_about(ImageError, ref if isinstance(ref, str) else f"<{len(ref)} bytes>"):
                look(ref)
    with pytest.raises(Image.UnidentifiedImageError):
        open_picture(eps)
    assert not ran


def peak_bytes(data: bytes) -> int:
    """Memory that `load_image` takes at most beyond what this process has."""

    def of_process(name):
        [line] = [
            line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
        ]
        return int(line.split()[1]) << 10

    load_image(data)  # the plugin is imported
    Path("/proc/self/clear_refs").write_text("5")
    before = of_process("VmRSS")
    load_image(data)
    return of_process("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux' /proc")
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("PNG", "RGB", {}), ("PNG", "RGBA", {}), ("PNG", "LA", {}), ("PNG", "P", {}), ("PNG", "I;16", {}), ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}), ("JPEG", "CMYK", {"progressive": True}),
        ("WEBP", "RGB", {"lossless": True}), ("WEBP", "RGBA", {"lossless": True}), ("GIF", "P", {"transparency": 0}),
        ("BMP", "RGB", {}),
    ],
)  # fmt: skip
def test_a_header_says_how_much_memory_decoding_takes(kind, mode, options):
    data = encode(Image.new(mode, (1500, 1500)), kind, **options)
    header = upload_header(data)
    assert header[:2] == (1500, 1500)
    assert peak_bytes(data) <= header.num_bytes + (2 << 20)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "AVIF"])
def test_a_client_may_send_common_formats_only(picture, kind):
    data = encode(picture(32, 32), kind)
    with error_about(ImageError, f"<{len(data)} bytes>"):
        upload_header(data)


def test_a_truncated_picture_of_pillows_is_refused(picture):
    data = encode(picture(40, 40), "PNG")
    with error_about(ImageError, "<40 x 40 picture>", "truncated"):
        load_image(Image.open(io.BytesIO(data[: len(data) // 2])))


def test_frames_are_not_counted():
    """A few megabytes hold so many that counting them takes a minute."""
    head = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff"
    frame = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0"
    began = time.process_time()
    with error_about(ImageError, "animated"):
        load_image(head + frame * 300_000 + b";")
    assert time.process_time() - began < 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_picture_is_refused(picture, tmp_path, kind, kept):
    data = encode(picture(40, 40), kind)
    (tmp_path / "cut.img").write_bytes(data[: int(len(data) * kept)])
    with error_about(ImageError, "cut.img"):
        load_image(str(tmp_path / "cut.img"))


def test_a_corrupt_picture_is_refused(png):
    broken = bytearray(png)
    broken[60] ^= 0xFF
    with error_about(ImageError, f"<{len(png)} bytes>"):
        load_image(bytes(broken))
    with error_about(ImageError, "<9 bytes>"):
        load_image(b"not an im")


def test_pixels_without_a_known_range_are_refused():
    with error_about(ImageError, "range"):
        load_image(encode(Image.new("F", (2, 2), 0.5), "TIFF"))


def bomb(side: int) -> bytes:
    """A PNG whose header claims side x side pixels, and that has none."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("side", [10_000, 20_000])
@pytest.mark.parametrize("look", [load_image, picture_size])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(side, look, action):
    """Pillow warns above 89 million pixels and raises above twice as many; both are an error here, whatever the filters."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with error_about(ImageError, "huge"):
            look(bomb(side))


def test_a_decompression_bomb_is_refused_while_another_thread_opens_a_picture(png, monkeypatch):
    first_entered, second_entered, first_left = (threading.Event() for _ in range(3))
    original = images.open_picture

    def slow(source, **more):
        if threading.current_thread().name == "first":
            first_entered.set()
            assert second_entered.wait(10)
        else:
            second_entered.set()
            assert first_left.wait(10)
        return original(source, **more)

    monkeypatch.setattr(images, "open_picture", slow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = list(warnings.filters)
        first = threading.Thread(target=lambda: (picture_size(png), first_left.set()), name="first")
        first.start()
        assert first_entered.wait(10)
        with error_about(ImageError, "huge"):
            picture_size(bomb(10_000))
        first.join()
        assert warnings.filters == before, "the filters of the process are not touched"


def test_an_icon_whose_picture_is_larger_than_it_says_is_refused(monkeypatch):
    icon = encode(Image.new("RGB", (48, 48)), "ICO", sizes=[(48, 48)])
    at = icon.index(b"\x89PNG")
    icon = icon[:6] + bytes([16, 16]) + icon[8:at] + icon[at:]
    monkeypatch.setattr(images, "MOST_PIXELS", 40 * 40)
    with error_about(ImageError, "huge"):
        load_image(icon)


@pytest.mark.parametrize(("kind", "size"), [("JPEG", (400, 300)), ("MPO", (400, 300)), ("JPEG", (301, 400))])
def test_a_jpeg_beyond_the_limit_is_decoded_at_a_smaller_size(kind, size, monkeypatch):
    """As if a phone's 108 megapixels were 120,000."""
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    data = encode(image, kind, quality=95)
    whole = load_image(data)
    assert whole.size == size
    monkeypatch.setattr(images, "MOST_PIXELS", 100_000)
    half = load_image(data)
    assert half.size == picture_size(data) == ((size[0] + 1) // 2, (size[1] + 1) // 2)
    difference = np.abs(np.asarray(half, float) - np.asarray(whole.resize(half.size, Image.Resampling.BOX)))
    assert difference.mean() < 3, "the same picture"
    assert load_image(data, near_px=50).width >= 50
    monkeypatch.setattr(images, "MOST_PIXELS", 3_000)
    assert load_image(data).size == ((size[0] + 7) // 8, (size[1] + 7) // 8)
    for look in (load_image, picture_size):
        with error_about(ImageError, "huge"):
            look(encode(image, "PNG"))
    monkeypatch.setattr(images, "MOST_JPEG_PIXELS", 110_000)
    with error_about(ImageError, "huge"):
        load_image(data)
    assert load_image(data, max_file_pixels=400 * 400).width <= 201
    assert load_image(encode(image, "PNG"), max_file_pixels=400 * 400).size == size


@pytest.mark.parametrize("look", [load_image, picture_size, upload_header])
def test_pillow_does_not_warn_in_its_own_words(look):
    """Its warning comes once per process, whatever becomes of the picture."""
    data = io.BytesIO()
    Image.new("L", (9_500, 9_500)).save(data, "JPEG", quality=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look(data.getvalue())


def test_what_is_missing_is_named(tmp_path, png):
    with error_about(ImageError, "gone.png", "unreadable"):
        load_image(str(tmp_path / "gone.png"))
    with error_about(ImageError, tmp_path, "unreadable"):
        load_image(str(tmp_path))
    with error_about(ImageError, "gone.parquet#a", "library"):
        load_image(f"{tmp_path}/gone.parquet#a")
    pq.write_table(pa.table({"id": ["a", "b"], "image": [png, png]}), tmp_path / "some.parquet")
    with error_about(ImageError, "some.parquet#c", "row"):
        load_image(f"{tmp_path}/some.parquet#c")
    pq.write_table(pa.table({"name": ["a"]}), tmp_path / "other.parquet")
    with error_about(ImageError, "other.parquet#a", "library"):
        load_image(f"{tmp_path}/other.parquet#a")
    (tmp_path / "text.parquet").write_text("no")
    with error_about(ImageError, "text.parquet#a", "library"):
        load_image(f"{tmp_path}/text.parquet#a")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_size_is_that_of_the_decoded_picture(tmp_path, kind, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / "picture"
    Image.new("RGB", (30, 20)).save(path, kind, exif=exif)
    for ref in (str(path), path.read_bytes()):
        assert picture_size(ref) == load_image(ref).size == ((20, 30) if orientation > 4 else (30, 20))


def test_a_size_is_read_without_decoding(tmp_path):
    Image.effect_noise((300, 200), 50).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:500])
    assert picture_size(str(tmp_path / "cut.png")) == (300, 200)
    (tmp_path / "text.png").write_text("no picture")
    Image.new("I", (3, 3)).save(tmp_path / "deep.tiff")
    for name, kind in (
        ("text.png", "format"),
        ("deep.tiff", "range"),
        ("gone.png", "unreadable"),
        ("", "unreadable"),
    ):
        with error_about(ImageError, tmp_path / name, kind):
            picture_size(str(tmp_path / name))


def num_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_one_picture_of_a_library_reads_one_row_group(tmp_path, monkeypatch):
    """Each worker of a training run read the whole table, into two to five times its size."""
    cells = [np.random.default_rng(row).bytes(40_000) for row in range(64)]
    library = tmp_path / "library.parquet"
    pq.write_table(pa.table({"id": [*map(str, range(64))], "image": cells}), library, row_group_size=4)
    before = num_bytes_read()
    assert picture_bytes(f"{library}#9") == cells[9]
    assert num_bytes_read() - before < library.stat().st_size / 8
    before = num_bytes_read()
    assert [picture_bytes(f"{library}#{row}") for row in (8, 9, 10, 11)] == cells[8:12]
    assert num_bytes_read() - before < 4_096, "they are in its group"
    monkeypatch.setattr(images, "LIBRARY_BYTES", 400_000)
    with ThreadPoolExecutor(8) as pool:
        rows = [*range(64), *reversed(range(64))]
        assert list(pool.map(lambda row: picture_bytes(f"{library}#{row}"), rows)) == [
            cells[row] for row in rows
        ]
    assert sum(map(images._num_bytes, images._groups.values())) <= 400_000
