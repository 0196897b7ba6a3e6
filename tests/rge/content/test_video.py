"""Frames are those that a player shows at equally spaced times; what cannot be read is a `VideoError` that names the file."""

import importlib.util
import io
import pickle
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import clip, frame, number, sound
from PIL import Image

from rge.common.errors import UserError
from rge.content import video
from rge.content.video import VideoError, VideoRule, count, probe, sample

STEADY = list(range(0, 4000, 40))  # 25 frames a second
FFV1 = {"container": "matroska", "codec": "ffv1"}
ONE = VideoRule(fps=1, multiple=1)


def numbers(source, rule: VideoRule, *args, **options) -> list[int]:
    """The frames that are sampled; as many as were counted."""
    found = sample(source, rule, *args, **options)
    assert len(found.images) == len(found.seconds) == count(source, rule, *args, **options)
    assert found.seconds == sorted(found.seconds)
    assert {(picture.mode, picture.size) for picture in found.images} == {("RGB", found.images[0].size)}
    return [number(picture) for picture in found.images]


@pytest.fixture(scope="module")
def steady() -> bytes:
    return clip(STEADY)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx"), ("mpegts", "libx264")],
)  # fmt: skip
def test_frames_are_chosen_by_time(container, codec):
    source = clip(STEADY, container, codec)
    assert numbers(source, ONE) == [0, 25, 50, 75]
    assert numbers(source, VideoRule(fps=2, multiple=1)) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert sample(source, ONE).seconds == pytest.approx([0, 1, 2, 3], abs=0.002)
    assert probe(source)[:2] == (64, 32)
    assert probe(source).seconds == pytest.approx(4, abs=0.05)
    assert probe(source).num_frames == 100


def test_the_rule_bounds_the_number_of_frames(steady):
    assert numbers(steady, VideoRule(fps=2, max_frames=4)) == [0, 25, 50, 75]
    assert numbers(steady, VideoRule(fps=1, num_frames=5, multiple=1)) == [0, 20, 40, 60, 80]
    assert numbers(steady, VideoRule(fps=1, num_frames=5)) == [0, 25, 50, 75]
    assert len(numbers(steady, VideoRule(fps=1000, max_frames=1000))) == 100  # no frame is made up
    assert numbers(steady, VideoRule(fps=0.01)) == [0, 50]
    assert numbers(clip([0]), VideoRule()) == [0, 0]
    assert numbers(clip([0, 40, 80]), VideoRule(num_frames=8, multiple=4)) == [0, 1, 2, 2]


@pytest.mark.parametrize("key", ["fps", "max_frames", "num_frames", "max_pixels", "total_pixels", "multiple"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_rule_is_checked(key, value):
    with pytest.raises(UserError):
        VideoRule(**{key: value})


def test_a_span_is_sampled_like_the_clip_cut_there(steady):
    assert numbers(steady, ONE, 1.0, 3.0) == [25, 50]
    assert sample(steady, ONE, 1.0, 3.0).seconds == pytest.approx([0, 1])
    assert numbers(steady, ONE, start=2.5) == [62, 81]  # .75 s apart, since the span is 1.5 s long
    assert numbers(steady, ONE, end=99) == [0, 25, 50, 75]
    for start, end in ((4.0, None), (3, 2), (-1, None), (1, 1), (float("nan"), None)):
        with pytest.raises(VideoError):
            count(steady, ONE, start, end)


def test_variable_rates_show_what_a_player_shows():
    for container, codec in (("mp4", "libx264"), ("matroska", "ffv1"), ("mp4", "mpeg4")):
        source = clip([0, 40, 80, 2500, 5000], container, codec)
        assert numbers(source, VideoRule(num_frames=5, multiple=1), end=5.0) == [0, 2, 3, 3]
        # Four frames are shown before the end of the span, and each target shows the last that has begun.


@pytest.mark.parametrize(
    ("rotation", "upright"), [(0, (64, 32)), (90, (32, 64)), (180, (64, 32)), (-90, (32, 64))]
)
def test_rotated_phones(rotation, upright):
    source = clip(STEADY[:10], rotation=rotation)
    found = sample(source, ONE).images[0]
    assert probe(source)[:2] == found.size == upright
    # Turning the player's way, against the clock, gives back the frame as it was drawn.
    assert np.abs(np.asarray(found.rotate(-rotation, expand=True)).astype(int) - np.asarray(sample(clip(STEADY[:10]), ONE).images[0])).max() < 3  # fmt: skip


def test_frames_are_scaled_to_the_pixels_of_the_rule(steady):
    small = sample(steady, VideoRule(max_pixels=512, multiple=1))
    assert small.images[0].size == (32, 16)
    assert [number(picture) for picture in small.images] == [0, 25, 50, 75]
    assert sample(steady, VideoRule(total_pixels=4 * 512)).images[0].size == (32, 16)
    assert VideoRule(max_pixels=512).frame_size((64, 32), 4) == (32, 16)
    assert VideoRule(max_pixels=1).frame_size((10_000, 1), 4) == (100, 1)


def test_a_list_of_frames_is_a_clip_with_its_own_rate(tmp_path):
    paths = []
    for index in range(12):
        frame(index).save(tmp_path / f"{index}.png")
        paths.append(str(tmp_path / f"{index}.png"))
    source = tuple(paths)
    assert numbers(source, ONE) == list(range(12))
    assert numbers(source, VideoRule(fps=2, multiple=2), source_fps=4) == [0, 2, 4, 6, 8, 10]
    assert sample(source, VideoRule(fps=2), source_fps=4).seconds == [0, 0.5, 1, 1.5, 2, 2.5]
    assert numbers(source, VideoRule(max_frames=4)) == [0, 3, 6, 9]
    assert numbers(source, ONE, 1, 2, source_fps=4) == [4]
    assert probe(source, 4) == (64, 32, 3.0, 12)
    assert numbers(source[:1], VideoRule()) == [0, 0]
    Image.new("RGB", (9, 9)).save(tmp_path / "odd.png")
    for bad in ((), (*source, str(tmp_path / "odd.png"))):
        with pytest.raises(VideoError):
            sample(bad, ONE)


def test_paths_bytes_and_rows_are_the_same_clip(steady, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file:a.mp4").write_bytes(steady)  # no address
    pq.write_table(pa.table({"id": ["a"], "image": [steady]}), "lib.parquet")
    for source in ("file:a.mp4", "lib.parquet#a", steady):
        assert numbers(source, ONE) == [0, 25, 50, 75]


def test_seeking_finds_the_same_frames(monkeypatch):
    times = list(range(0, 60_000, 250))
    rule = VideoRule(num_frames=7, multiple=1)
    sought: list[float] = []
    seek = video._Player.seek
    monkeypatch.setattr(
        video._Player, "seek", lambda self, target: (sought.append(target), seek(self, target))
    )
    for container, codec in (
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("mpegts", "libx264"),
        ("avi", "mpeg4"),
    ):
        source = clip(times, container, codec)
        before = len(sought)
        fast = sample(source, rule)
        assert len(sought) > before
        with monkeypatch.context() as patched:
            patched.setattr(video._Player, "is_far", lambda self, target: False)
            slow = sample(source, rule)
        assert fast.seconds == slow.seconds
        assert [picture.tobytes() for picture in fast.images] == [
            picture.tobytes() for picture in slow.images
        ]


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4")])
def test_ten_hours_are_entered_by_seeking(container, codec, tmp_path, monkeypatch):
    path = str(tmp_path / "long")
    with open(path, "wb") as file:
        file.write(clip(range(0, 36_000_000, 5_000), container, codec, size=(16, 16), key_every=10))
    monkeypatch.setattr(video, "LISTED_BYTES", 1000)
    decoded = []
    timed = video._Player._timed

    def watched(self, frames, start):
        for pair in timed(self, frames, start):
            decoded.append(pair)
            yield pair

    monkeypatch.setattr(video._Player, "_timed", watched)
    start = time.process_time()
    found = sample(path, VideoRule(num_frames=8))
    assert found.seconds == pytest.approx([index * 4500 for index in range(8)], abs=5)
    assert len(decoded) < 8 * 14  # of 7,200
    assert time.process_time() - start < 3


FAULTS = {
    "nothing": b"",
    "text": b"What is this?",
    "sound": sound(),
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
    "ffconcat": b"ffconcat version 1.0\nfile /etc/hostname\n",
    "cut": clip(STEADY, index_first=True)[:2600],
    "no frames": clip([], "matroska", "ffv1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_named(fault, tmp_path):
    path = tmp_path / "x.mp4"
    path.write_bytes(FAULTS[fault])
    for source in (str(path), FAULTS[fault]):
        for read in (probe, lambda source: sample(source, ONE)):
            with pytest.raises(VideoError) as caught:
                read(source)
            assert caught.value.file == (source if isinstance(source, str) else f"<{len(source)} bytes>")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (type(copy), copy.file, str(copy)) == (VideoError, caught.value.file, str(caught.value))


@pytest.mark.parametrize(
    "path", ["missing.mp4", "", "a\0b.mp4", "/dev/zero", ".", "http://127.0.0.1:9/x.mp4"]
)
def test_what_is_no_file_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VideoError) as caught:
        sample(path, ONE)
    assert caught.value.file == path


def test_a_clip_that_loses_its_end_is_an_error_and_a_shorter_clip_is_not():
    """A Matroska file that is cut is a shorter clip; frames in the middle that cannot be decoded are lost."""
    whole = clip(STEADY, **FFV1)
    assert numbers(whole[: len(whole) // 2], VideoRule(num_frames=2, multiple=1))[0] == 0
    damaged = clip(STEADY, "matroska", "libx264", key_every=1000)
    half = len(damaged) // 2
    damaged = damaged[:half] + bytes(200) + damaged[half + 200 :]
    with pytest.raises(VideoError):
        sample(damaged, VideoRule(num_frames=50))


def test_a_frame_too_large_to_decode_is_named(monkeypatch, steady):
    monkeypatch.setattr(video, "MAX_FRAME_PIXELS", 1000)
    with pytest.raises(VideoError):
        sample(steady, ONE)


@pytest.mark.skipif(importlib.util.find_spec("decord") is None, reason="decord2 is not installed")
def test_decord_decodes_the_same_pixels(tmp_path):
    import decord

    (tmp_path / "a.mp4").write_bytes(clip(STEADY, codec="libx264"))
    reader = decord.VideoReader(str(tmp_path / "a.mp4"))
    found = sample(str(tmp_path / "a.mp4"), ONE)
    for index, picture in zip((0, 25, 50, 75), found.images, strict=True):
        assert np.array_equal(reader[index].asnumpy(), np.asarray(picture))


def test_an_animation_is_a_clip():
    file = io.BytesIO()
    frames = [frame(index).convert("P") for index in range(10)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=200)
    assert numbers(file.getvalue(), VideoRule(fps=2.5, multiple=1)) == [0, 2, 4, 6, 8]
