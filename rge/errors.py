"""Errors that are the user's to mend: shown as one message, without a traceback."""

from rge.adapters import AdapterError
from rge.backbone import BackboneError
from rge.checkpoint import CheckpointError
from rge.config import RecipeError
from rge.images import ImageError
from rge.launch import LaunchError
from rge.run_lock import InUseError
from rge.sources import RecordError
from rge.watch import RankError

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
