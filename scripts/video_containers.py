"""What becomes of one clip in many containers, as a Markdown table.

The page on content speaks of that of the package iscc-samples, which is not installed::

    pip download --no-binary :all: --no-deps iscc-samples==0.6.0 && tar xzf iscc_samples-0.6.0.tar.gz
    python scripts/video_containers.py folder=iscc_samples-0.6.0/iscc_samples/files/video

A row says what the header declares, and what is found: the length by the packets, the frames that are sampled, and whether those that
were reached by seeking are those of a decoder that starts at the first frame.
"""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from rge.common.commands import start
from rge.common.options import parse_options
from rge.content import video
from rge.content.video import VideoError, VideoRule


@dataclass(frozen=True)
class Options:
    """The folder of clips, and how they are sampled."""

    folder: Path
    """Folder whose files are clips."""
    fps: float = 0.5
    """Frames per second."""


def declared(path: Path) -> tuple[int, float | None]:
    """The number of frames and the seconds that the header declares. Raises what PyAV raises."""
    with video.library().open(str(path)) as container:
        stream = container.streams.video[0]
        seconds = stream.duration and float(stream.duration * stream.time_base)
        return stream.frames, seconds


def row(path: Path, rule: VideoRule) -> str:
    """A clip's row of the table."""
    frames, seconds = declared(path)
    header = f"| {path.suffix} | {frames:,} | {'none' if seconds is None else f'{seconds:.2f}'} |"
    try:
        about = video.probe(str(path))
        found = video.sample(str(path), rule)
        with patch.object(video._Player, "is_far", lambda self, target: False):
            played = video.sample(str(path), rule)
    except VideoError as error:
        return f"{header} refused: {error.reason} | | |"
    pixels = [[picture.tobytes() for picture in images] for images in (found.images, played.images)]
    same = "yes" if pixels[0] == pixels[1] and found.seconds == played.seconds else "NO"
    return f"{header} {about.num_frames:,} | {about.seconds:.2f} | {len(found.images)}, {same} |"


def main(words: list[str]) -> None:
    """Print the table."""
    options = parse_options(Options, words, "python scripts/video_containers.py")
    print(
        "| file | frames declared | seconds declared | frames found | seconds found | sampled, the same by seeking |"
    )
    print("|---|---|---|---|---|---|")
    for path in sorted(options.folder.iterdir()):
        if path.is_file():
            print(row(path, VideoRule(fps=options.fps)))


if __name__ == "__main__":
    start(main)
