"""Errors that are the user's to mend: shown as one message, without a traceback."""

from rge.checkpoints.export import CheckpointError
from rge.checkpoints.run_lock import InUseError
from rge.common.images import ImageError
from rge.config import RecipeError
from rge.data.sources import RecordError
from rge.distributed.failure_detection import RankError
from rge.distributed.launch import LaunchError
from rge.model.adapters import AdapterError
from rge.model.backbone import BackboneError

USER_ERRORS = (
    RecipeError,
    RecordError,
    ImageError,
    AdapterError,
    BackboneError,
    CheckpointError,
    LaunchError,
    RankError,
    InUseError,
)


def explain(error: Exception) -> str:
    """The message alone, also where a data worker has wrapped it in its own traceback."""
    message = str(error).strip()
    if message.startswith("Caught "):
        message = message.rpartition(f"{type(error).__name__}: ")[2]
    return message
