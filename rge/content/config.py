"""The section `data.video`: which frames of a clip a prompt shows."""

from dataclasses import dataclass

from rge.common.options import AtLeastOne, Positive


@dataclass(frozen=True)
class VideoConfig:
    """Which frames of a video are shown, and how large; what a part says precedes it. A checkpoint keeps it."""

    fps: Positive = 1.0
    """Frames per second."""
    max_frames: AtLeastOne = 16
    """Most frames of a clip; those of a longer one are further apart."""
    max_pixels: AtLeastOne = 100_352
    """Most pixels of a frame; larger ones are scaled down."""
    total_pixels: AtLeastOne = 1_605_632
    """Most pixels of all frames of a clip."""
