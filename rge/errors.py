"""Errors that are the user's to mend: shown as one message, without a traceback."""

from rge.adapters import AdapterError
from rge.backbone import BackboneError
from rge.checkpoint import CheckpointError
from rge.config import RecipeError
from rge.images import ImageError
from rge.launch import LaunchError
from rge.loader import WorkerError
from rge.sources import RecordError
from rge.watch import RankError

USER_ERRORS = (
    RecipeError,
    RecordError,
    WorkerError,
    ImageError,
    AdapterError,
    BackboneError,
    CheckpointError,
    LaunchError,
    RankError,
)
