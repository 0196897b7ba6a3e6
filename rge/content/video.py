"""Frames of clips by time of presentation: sampled, and counted without decoding; PyAV reads the files.

What a header says about the number of frames or the duration is never used by itself, since many containers say nothing, and some
something wrong: presentation times come from the packets. Times are in seconds from the first frame.
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from rge.common.errors import UserError
from rge.common.files import POINTER_NOTE, is_pointer
from rge.common.images import load_image, picture_bytes, picture_size
from rge.common.parts import ImageRef
from rge.content.media_errors import MediaError, title

if TYPE_CHECKING:
    import av

SUFFIXES = (
    ".3g2", ".3gp", ".asf", ".avi", ".f4v", ".flv", ".m1v", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts",
    ".ogv", ".rm", ".vob", ".webm", ".wmv",
)  # fmt: skip
"""Endings of clips in a folder. Files that end in .ts, .ogg and .swf are mostly something else, and GIFs are pictures."""
FORMATS = (
    "3g2", "3gp", "apng", "asf", "avi", "dv", "flv", "gif", "h264", "hevc", "ivf", "matroska", "mj2", "mov", "mp4", "mpeg",
    "mpegts", "mpegvideo", "mxf", "nut", "ogg", "rm", "swf", "webm", "webp_anim", "yuv4mpegpipe",
)  # fmt: skip
"""Containers that are read. Playlists are not: they name other files and addresses, which FFmpeg would open."""
UPLOAD_FORMATS = ("mov", "mp4", "matroska", "webm", "avi", "gif", "mpeg", "mpegts")
"""Containers that clients may send."""
MAX_FRAME_PIXELS = 8192 * 8192
"""Largest frame that is decoded."""
LISTED_BYTES = 64 << 20
"""Files up to this size are read through, so that every frame's time is known. Of larger ones, begin and end are."""
SEEK_S = 1.0
"""Frames that are further apart are reached by seeking, if there is a key frame between them."""
TOLERANCE_S = 1e-4
TRUNCATED_S = 1.0
"""A decoder that ends this long before the last packet has lost frames."""
Source = str | bytes | tuple[ImageRef, ...]
"""A path, ``library.parquet#row-id``, the bytes themselves, or the frames as pictures."""


class VideoError(MediaError):
    """A clip is missing, damaged, or has no frames."""

    noun = "video"


@dataclass(frozen=True)
class VideoRule:
    """Which frames of a clip are used, and how large they are.

    Frames are equally spaced from the start. Their number is rounded down to a multiple of `multiple`, and never exceeds the
    number of frames that the clip has; one with fewer than `multiple` repeats its last.

    Attributes:
        fps: frames per second.
        max_frames: most frames of a clip; a longer one gets them further apart.
        num_frames: this many frames, whatever the clip's length, instead of `fps`.
        max_pixels: most pixels of one frame; larger frames are scaled down.
        total_pixels: most pixels of all frames of a clip.
        multiple: the model's temporal patch: frames that become one row of patches.
    """

    fps: float = 1.0
    max_frames: int = 64
    num_frames: int | None = None
    max_pixels: int = 602_112
    total_pixels: int = 1 << 24
    multiple: int = 2

    def __post_init__(self) -> None:
        for name in ("fps", "max_frames", "num_frames", "max_pixels", "total_pixels", "multiple"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} of a video must be positive, got {value!r}")

    def count(self, seconds: float, available: int | None) -> int:
        """The number of frames of a clip of this length that has so many frames, as far as that is known."""
        wanted = self.num_frames or max(1, round(seconds * self.fps))
        wanted = min(wanted, self.max_frames, wanted if available is None else available)
        return max(1, wanted // self.multiple) * self.multiple

    def frame_size(self, size: tuple[int, int], count: int) -> tuple[int, int]:
        """Width and height at which frames of this size are returned, where there are so many."""
        most = max(1, min(self.max_pixels, self.total_pixels // count))
        width, height = size
        scale = min(1.0, (most / (width * height)) ** 0.5)
        return max(1, int(width * scale)), max(1, int(height * scale))


class Probe(NamedTuple):
    """What a clip is: the size of its frames, upright, its length, and the number of its frames, where that is known."""

    width: int
    height: int
    seconds: float
    num_frames: int | None


class Frames(NamedTuple):
    """Sampled frames as RGB, upright and of one size, and when each was shown, in seconds from the start of the sampled span."""

    images: list[Image.Image]
    seconds: list[float]


class _Timeline(NamedTuple):
    """When a file's frames are shown.

    Attributes:
        first: time of the first frame on the file's own clock, from which all others are counted.
        last: time of the last frame.
        seconds: end of the last frame.
        size: width and height by the file's header, before it is turned upright; 0 where that says nothing.
        times: times of all frames in order; None: not known.
        keys: times of the key frames; None: not known.
    """

    first: float
    last: float
    seconds: float
    size: tuple[int, int]
    times: np.ndarray | None
    keys: np.ndarray | None


def probe(source: Source, source_fps: float | None = None) -> Probe:
    """What a clip is; decodes its first frame alone. Raises `VideoError`.

    `source_fps` is the rate of a clip that is given as frames; None: 1.
    """
    if isinstance(source, tuple):
        width, height = _picture_size(source)
        return Probe(width, height, len(source) / (source_fps or 1.0), len(source))
    timeline = _timeline(source)
    with _Opened(source) as clip:
        frame = next(clip.frames(), None)
    if frame is None:
        raise VideoError("none of its frames can be decoded", title(source))
    width, height = frame.width, frame.height
    if _orientation(frame) in _TURNED:
        width, height = height, width
    return Probe(width, height, timeline.seconds, None if timeline.times is None else len(timeline.times))


def header_size(source: Source) -> tuple[int, int]:
    """Width and height of a clip's frames without decoding one; a clip that is turned upright has them swapped. Raises `VideoError`."""
    if isinstance(source, tuple):
        return _picture_size(source)
    size = _timeline(source).size
    return size if all(size) else probe(source)[:2]


def num_frames(source: str | bytes) -> int:
    """The number of frames, counted without decoding. Raises `VideoError`."""
    with _Opened(source) as clip:
        return sum(1 for _ in clip.packets())


def numbered(source: str | bytes, numbers: Iterable[int]) -> Iterator[tuple[int, Image.Image]]:
    """The frames with these numbers, from 0, upright; for rules that count frames. Raises `VideoError`."""
    wanted = set(numbers)
    with _Opened(source) as clip:
        for number, frame in enumerate(islice(clip.frames(), max(wanted, default=-1) + 1)):
            if number in wanted:
                yield number, _upright(frame)


def check_upload(source: bytes) -> None:
    """A `VideoError` unless a client's clip is in one of `UPLOAD_FORMATS`; FFmpeg's readers of the rare ones are hardly audited."""
    with _Opened(source, UPLOAD_FORMATS):
        pass


def count(
    source: Source,
    rule: VideoRule,
    start: float | None = None,
    end: float | None = None,
    source_fps: float | None = None,
) -> int:
    """The number of frames that `sample` returns, without decoding. Arguments and errors as there."""
    return len(_wanted(source, rule, start, end, source_fps)[1])


def times(
    source: Source,
    rule: VideoRule,
    start: float | None = None,
    end: float | None = None,
    source_fps: float | None = None,
) -> list[float]:
    """When the frames of `sample` are shown, without decoding; of files too large to list, when they are asked for."""
    origin, targets = _wanted(source, rule, start, end, source_fps)
    if isinstance(source, tuple):
        rate = source_fps or rule.fps
        found = [min(len(source) - 1, int((time + TOLERANCE_S) * rate)) / rate for time in targets]
    elif (listed := _timeline(source).times) is None:
        found = targets
    else:
        places = np.searchsorted(listed, np.array(targets) + TOLERANCE_S, side="right") - 1
        found = listed[places.clip(min=0)].tolist()
    return [max(0.0, time - origin) for time in found]


def sample(
    source: Source,
    rule: VideoRule,
    start: float | None = None,
    end: float | None = None,
    source_fps: float | None = None,
) -> Frames:
    """Equally spaced frames: at each time, the frame that a player shows.

    Args:
        source: the clip.
        rule: how many frames, and their size.
        start: begin of the span that is sampled, in seconds; None: the first frame.
        end: its end, in seconds; None: that of the clip.
        source_fps: the rate of a clip that is given as frames; None: `rule.fps`, so that all are used up to the limit.

    Raises:
        VideoError: the file is missing, damaged, cut short, of no known container, or without frames in the span.
    """
    shown = list(frames(source, rule, start, end, source_fps))
    return Frames([picture for picture, _ in shown], [time for _, time in shown])


def frames(
    source: Source,
    rule: VideoRule,
    start: float | None = None,
    end: float | None = None,
    source_fps: float | None = None,
) -> Iterator[tuple[Image.Image, float]]:
    """The frames and times of `sample`, one after the other. Arguments and errors as there."""
    origin, targets = _wanted(source, rule, start, end, source_fps)
    if isinstance(source, tuple):
        _picture_size(source)
        rate = source_fps or rule.fps
        index, picture = -1, Image.new("RGB", (1, 1))
        for target in targets:
            wanted = min(len(source) - 1, int((target + TOLERANCE_S) * rate))
            if wanted != index:
                index, picture = wanted, load_image(source[wanted])
                picture = _scaled(picture, rule.frame_size(picture.size, len(targets)))
            yield picture, max(0.0, index / rate - origin)
        return
    timeline, done = _timeline(source), 0
    try:
        for picture, time in _shown(source, timeline, targets, rule, seeking=True):
            done += 1
            yield picture, max(0.0, time - origin)
    except _SeekFailed:
        rest = _shown(source, timeline, targets, rule, seeking=False)
        for picture, time in islice(rest, done, None):
            yield picture, max(0.0, time - origin)


def _wanted(
    source: Source, rule: VideoRule, start: float | None, end: float | None, source_fps: float | None
) -> tuple[float, list[float]]:
    """The start of the span, and the times whose frames are wanted."""
    times: np.ndarray | None
    if isinstance(source, tuple):
        if not source:
            raise VideoError("there are no frames", title(source))
        rate = source_fps or rule.fps
        times, seconds = np.arange(len(source)) / rate, len(source) / rate
    else:
        timeline = _timeline(source)
        times, seconds = timeline.times, timeline.seconds
    begin, stop = start or 0.0, seconds if end is None else min(end, seconds)
    if not 0 <= begin < stop:
        span = f"from {begin:g} s to {'its end' if end is None else f'{end:g} s'}"
        raise VideoError(f"there is no frame {span}: it is {seconds:.3f} s long", title(source))
    available = None
    if times is not None:
        inside = (times > begin + TOLERANCE_S) & (times < stop - TOLERANCE_S)
        available = 1 + int(inside.sum())  # and the one that is shown at the beginning
    number = rule.count(stop - begin, available)
    distinct = number if available is None else min(number, available)
    targets = [begin + (stop - begin) * index / distinct for index in range(distinct)]
    return begin, targets + targets[-1:] * (number - distinct)


def _picture_size(source: tuple[ImageRef, ...]) -> tuple[int, int]:
    if not source:
        raise VideoError("there are no frames", title(source))
    size = picture_size(source[0])
    for ref in source[1:]:
        if (other := picture_size(ref)) != size:
            sizes = f"{size[0]} x {size[1]} and {other[0]} x {other[1]}"
            raise VideoError(f"its frames differ in size: {sizes}", title(ref))
    return size


# -- Files ------------------------------------------------------------------------------------------------------------


class _SeekFailed(Exception):
    """The file cannot be entered in the middle."""


class _Opened:
    """An open container and its video stream, as a context manager; FFmpeg's errors inside become a `VideoError`."""

    def __init__(self, source: str | bytes, formats: Sequence[str] = FORMATS):
        self.source, self.formats = source, formats

    def __enter__(self) -> "_Opened":
        self.library = library()
        data = picture_bytes(self.source) if _is_in_library(self.source) else self.source
        try:
            self.file: io.BufferedIOBase = io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb")
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise VideoError(str(getattr(error, "strerror", None) or error), title(self.source)) from None
        self.num_bytes = self.file.seek(0, io.SEEK_END)
        self.file.seek(0)
        self.container: Any = None
        try:
            # A file and not its name, which FFmpeg might take for an address; a list of formats, since it opens what playlists name.
            self.container = self.library.open(
                self.file, options={"format_whitelist": ",".join(self.formats)}
            )
            streams = [
                stream
                for stream in self.container.streams.video
                if not stream.disposition & self.library.stream.Disposition.attached_pic
            ]
            if not streams:
                kinds = sorted({stream.type for stream in self.container.streams})
                raise VideoError(
                    f"it has no pictures, only {', '.join(kinds) or 'an empty container'}", title(self.source)
                )
            self.stream: av.VideoStream = streams[0]
            if self.stream.codec_context is None:
                raise VideoError("FFmpeg has no decoder for it", title(self.source))
            self.stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.container is not None:
            self.container.close()
        is_fault = isinstance(error, (self.library.error.FFmpegError, OSError))  # FFmpeg may seek to nowhere
        start = b""
        if is_fault:
            self.file.seek(0)
            start = self.file.read(64)
        self.file.close()
        if is_fault:
            reason = getattr(error, "strerror", None) or error
            if is_pointer(start):
                raise VideoError(POINTER_NOTE, title(self.source)) from None
            what = "it cannot be decoded" if self.container is not None else "it is no container that is read"
            raise VideoError(f"{what} ({reason})", title(self.source)) from None

    def frames(self) -> Iterator["av.VideoFrame"]:
        """All frames from here on."""
        return self.container.decode(self.stream)

    def packets(self) -> "Iterator[av.Packet]":
        return (packet for packet in self.container.demux(self.stream) if packet.size)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height by the header."""
        context = self.stream.codec_context
        return (context.width or 0, context.height or 0)

    @property
    def frame_s(self) -> float:
        """A frame's length by the stream's rate."""
        rate = self.stream.guessed_rate or self.stream.average_rate
        return float(1 / rate) if rate else 0.04


def library() -> Any:
    """PyAV; `UserError` if it is not installed."""
    try:
        import av
    except ImportError:
        raise UserError("videos need PyAV: pip install -e '.[video]'") from None
    return av


def _is_in_library(source: str | bytes) -> bool:
    return isinstance(source, str) and ".parquet#" in source


def _timeline(source: str | bytes) -> _Timeline:
    if isinstance(source, bytes) or _is_in_library(source):
        return _read_timeline(source)
    try:
        stat = os.stat(source)
    except (OSError, ValueError) as error:
        raise VideoError(str(getattr(error, "strerror", None) or error), title(source)) from None
    if not os.path.isfile(source):
        raise VideoError("it is not a file", title(source))
    return _known_timeline(os.path.abspath(source), source, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _known_timeline(_path: str, source: str, _size: int, _time_ns: int) -> _Timeline:
    return _read_timeline(source)


def _read_timeline(source: str | bytes) -> _Timeline:
    with _Opened(source) as clip:
        _check_complete(clip)
        found = _from_packets(clip)
    if found is None:
        raise VideoError("it has no frames", title(source))
    return found


def _check_complete(clip: _Opened) -> None:
    """The index of an MP4 names every frame's bytes: a file that was cut would pass for a shorter clip."""
    if any(entry.pos + entry.size > clip.num_bytes for entry in clip.stream.index_entries):
        raise VideoError("it is cut short: its index names frames beyond its end", title(clip.source))


def _from_packets(clip: _Opened) -> _Timeline | None:
    """From the packets: all, or of a large file the first and the last."""
    stream = clip.stream
    packets = clip.packets()
    begin = list(islice(packets, 256))
    hint = stream.duration
    if hint is None and clip.container.duration and stream.time_base:
        hint = int(clip.container.duration / 1e6 / stream.time_base)
    stamps = [packet.pts for packet in begin if packet.pts is not None]
    if clip.num_bytes <= LISTED_BYTES or not hint or not stamps:
        return _of_times(clip, chain(begin, packets))
    first = min(stamps)
    clip.container.seek(first + hint, stream=stream, backward=True)
    last = max((packet.pts for packet in clip.packets() if packet.pts is not None), default=first)
    length = (last - first) * float(stream.time_base or 0)
    return _Timeline(
        first * float(stream.time_base or 0), length, length + clip.frame_s, clip.size, None, None
    )


def _of_times(clip: _Opened, packets: "Iterator[av.Packet]") -> _Timeline | None:
    unit = float(clip.stream.time_base or 0)
    times: list[float] = []
    keys: list[float] = []
    for packet in packets:
        stamp = packet.dts if packet.pts is None else packet.pts
        times.append(len(times) * clip.frame_s if stamp is None else stamp * unit)
        if packet.is_keyframe:
            keys.append(times[-1])
    if not times:
        return None
    first = min(times)
    return _listed(clip, first, np.sort(times) - first, np.sort(keys) - first)


def _listed(clip: _Opened, first: float, times: np.ndarray, keys: np.ndarray) -> _Timeline:
    """The last frame is shown as long as the others usually are."""
    length = float(np.median(np.diff(times))) if len(times) > 1 else clip.frame_s
    end = float(times[-1]) + max(length, TOLERANCE_S * 10)
    return _Timeline(first, float(times[-1]), end, clip.size, times, keys)


def _shown(
    source: str | bytes, timeline: _Timeline, targets: Sequence[float], rule: VideoRule, seeking: bool
) -> Iterator[tuple[Image.Image, float]]:
    """The frames that are shown at these times, and since when."""
    shown: Image.Image | None = None
    with _Opened(source) as clip:
        player = _Player(clip, timeline)
        last: av.VideoFrame | None = None
        for target in targets:
            if seeking and player.is_far(target):
                player.seek(target)
            frame, time = player.at(target)
            if frame is last and shown is not None:
                yield shown, time
                continue
            if frame.is_corrupt:
                raise VideoError(f"the frame at {time:.3f} s is damaged", title(source))
            picture = _upright(frame)
            size = rule.frame_size(picture.size, len(targets)) if shown is None else shown.size
            shown, last = _scaled(picture, size), frame
            yield shown, time


class _Player:
    """Plays a clip forward, and skips ahead by seeking."""

    def __init__(self, clip: _Opened, timeline: _Timeline):
        self.clip, self.timeline = clip, timeline
        self._frames = self._timed(clip.frames(), 0.0)
        self._shown: tuple[av.VideoFrame, float] | None = None
        self._next: tuple[av.VideoFrame, float] | None = None

    def _timed(
        self, frames: "Iterator[av.VideoFrame]", start: float
    ) -> "Iterator[tuple[av.VideoFrame, float]]":
        time = start - self.clip.frame_s
        for frame in frames:
            # Some streams have no times of their own.
            time = time + self.clip.frame_s if frame.time is None else frame.time - self.timeline.first
            yield frame, time

    def at(self, target: float) -> "tuple[av.VideoFrame, float]":
        """The frame that is shown at a time, which is not before that of the last call."""
        while self._next is None or self._next[1] <= target + TOLERANCE_S:
            self._shown = self._next or self._shown
            self._next = next(self._frames, None)
            if self._next is None:
                break
        shown = self._shown or self._next
        if shown is None:
            raise VideoError("none of its frames can be decoded", title(self.clip.source))
        if self._next is None and shown[1] < min(target, self.timeline.last) - TRUNCATED_S:
            where = f"after {shown[1]:.3f} s of {self.timeline.seconds:.3f} s"
            raise VideoError(f"it is damaged or cut short: decoding ends {where}", title(self.clip.source))
        return shown

    def is_far(self, target: float) -> bool:
        """Whether seeking pays."""
        position = self._next[1] if self._next else 0.0
        if target - position < SEEK_S:
            return False
        keys = self.timeline.keys
        # A margin, since seeking goes by times of decoding, which are up to some frames earlier.
        return keys is None or bool(((keys > position + SEEK_S / 2) & (keys <= target - SEEK_S / 2)).any())

    def seek(self, target: float) -> None:
        """Go on at the last key frame before a time. Raises `_SeekFailed`."""
        stream = self.clip.stream
        for earlier in (0.0, 10.0):
            time = max(0.0, target - earlier) + self.timeline.first
            try:
                self.clip.container.seek(int(time / (stream.time_base or 1)), stream=stream, backward=True)
                frames = self._timed(self.clip.frames(), time)
                # What comes before the key frame refers to frames that were not decoded.
                start = next((pair for pair in frames if pair[0].key_frame), None)
            except self.clip.library.error.FFmpegError:
                raise _SeekFailed from None
            if start is None or start[0].time is None:
                raise _SeekFailed
            if start[1] <= target + TOLERANCE_S:
                self._frames, self._shown, self._next = frames, None, start
                return
        raise _SeekFailed


_T = Image.Transpose
_ORIENTATIONS = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): _T.ROTATE_270,
    (-1, 0, 0, -1): _T.ROTATE_180,
    (0, -1, 1, 0): _T.ROTATE_90,
    (-1, 0, 0, 1): _T.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): _T.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): _T.TRANSPOSE,
    (0, -1, -1, 0): _T.TRANSVERSE,
}
"""What makes a frame upright, by the signs of its display matrix."""
_TURNED = (_T.ROTATE_90, _T.ROTATE_270, _T.TRANSPOSE, _T.TRANSVERSE)


def _orientation(frame: "av.VideoFrame") -> Image.Transpose | None:
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return None
    matrix = np.frombuffer(bytes(data), np.int32)
    a, b, c, d = (int(np.sign(np.round(matrix[index] / 65536))) for index in (0, 1, 3, 4))
    return _ORIENTATIONS.get((a, b, c, d))


def _upright(frame: "av.VideoFrame") -> Image.Image:
    picture, turn = frame.to_image(), _orientation(frame)
    return picture if turn is None else picture.transpose(turn)


def _scaled(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)
