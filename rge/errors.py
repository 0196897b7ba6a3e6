"""Errors that are the user's to mend: shown as one message, without a traceback."""

from rge.checkpoints.export import CheckpointError
from rge.common.images import ImageError
from rge.config import RecipeError
from rge.data.loader import WorkerError
from rge.data.sources import RecordError
from rge.distributed.failure_detection import RankError
from rge.distributed.launch import LaunchError
from rge.model.adapters import AdapterError
from rge.model.backbone import BackboneError

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
