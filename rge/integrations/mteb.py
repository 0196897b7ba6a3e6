"""A checkpoint for MTEB: queries reason, documents do not.

    meta = register("runs/demo/joint/final")
    mteb.evaluate(meta, mteb.get_tasks(["CIRRIT2IRetrieval"]))

Wraps `rge.embedder.Embedder`. `eval.benchmarks.mteb_tasks` turns our retrieval sets into MTEB's tasks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Video
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from torch.utils.data import DataLoader

from rge.checkpoints.export import checkpoint_hash
from rge.checkpoints.settings import read_settings
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedder import WINDOW_BATCHES, Embedder, local_folder
from rge.integrations.sentence_transformers import clip_of
from rge.model.adapter_files import base_of
from rge.model.families import FAMILIES


class ReasoningEncoder(AbsEncoder):
    """The model that MTEB calls; `mteb.get_model` passes its arguments, further `options` go to `Embedder.from_pretrained`.

    `mode` is that of queries: ``reasoning`` or ``direct``; None: as trained. `instruction` is put before every query; '': none; None:
    the query's own if the task has them, else the task's, else that of training. `prompts` is a prompt profile instead of the
    checkpoint's, such as ``plain`` for MMEB, whose texts contain their instructions. `exact` computes every row alone, so that the
    batch size does not affect the last digit; None: in float32 on a CPU, as ``rge eval run`` does.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        *,
        device: str | None = None,
        checkpoint: str,
        mode: str | None = None,
        instruction: str | None = None,
        prompts: str | None = None,
        exact: bool | None = None,
        **options: Any,
    ):
        embedder = Embedder.from_pretrained(checkpoint, device=device, **options)
        if exact is None:
            exact = embedder.settings.dtype == "float32" and embedder.model.device.type == "cpu"
        self.model = self.embedder = embedder.with_(exact=exact, profile=prompts)
        self.mode: Any = mode or embedder.query_mode
        self.instruction = instruction

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        batch_size: int = 32,
        **_: Any,
    ) -> np.ndarray:
        """Embed the batches of a loader, (N, D) float32, unit norm; only queries reason."""
        is_query = prompt_type == PromptType.query
        inputs = _undecoded(inputs)
        fallback = self._instruction(task_metadata) if is_query else None
        items = (item for batch in inputs for item in _items(batch, fallback, is_query=is_query))
        if self.instruction is not None and is_query:
            items = (replace(item, instruction=self.instruction or None) for item in items)
        asked: Any = {"side": "candidate", "mode": "direct", "batch_size": batch_size}
        if is_query:
            asked |= {"side": "query", "mode": self.mode}
        parts = [np.empty((0, self.embedder.size), np.float32)]
        while window := list(islice(items, WINDOW_BATCHES * batch_size)):
            parts.append(self.embedder.encode(window, **asked).embeddings)
        return np.concatenate(parts)

    def _instruction(self, task_metadata: Any) -> str | None:
        prompt = task_metadata.prompt
        if isinstance(prompt, dict):
            prompt = prompt.get("query")
        return self.embedder.default_instruction if prompt is None else prompt or None


class _Meta(ModelMeta):
    def _resolve_extras_groups(self) -> list[str]:
        """MTEB's optional requirements without torchcodec, by which it decodes clips: here PyAV does."""
        return [group for group in super()._resolve_extras_groups() if group != "video"]


def register(
    checkpoint: str | Path, name: str | None = None, *, revision: str | None = None, **options: Any
) -> ModelMeta:
    """Register a checkpoint, a folder or an id on the hub, with MTEB: `mteb.get_model` loads it by name (``owner/name``).

    `name` defaults to the id on the hub, or the last two parts of the folder. `options` are `ReasoningEncoder`'s, and part of the key of
    MTEB's cached results.

    Returns:
        MTEB's description of the model, which `mteb.evaluate` accepts. Its revision is the hash of all files, so cached results
        never belong to another checkpoint.

    Raises:
        CheckpointError: not a checkpoint of rge.
    """
    folder = local_folder(checkpoint, revision)
    settings = read_settings(folder)
    places = [place for place in (folder, base_of(folder, options.get("base"))) if place is not None]
    weights = [path for place in places for path in place.glob("[!.]*.safetensors")]
    if name is None:
        on_hub = "/" in str(checkpoint) and not Path(checkpoint).expanduser().exists()
        name = str(checkpoint) if on_hub else "/".join(folder.resolve().parts[-2:])
    meta = _Meta(
        loader=cast(Any, ReasoningEncoder),
        loader_kwargs={"checkpoint": str(folder)},
        experiment_kwargs=options or None,
        name=name,
        revision=checkpoint_hash(folder),
        release_date=None,
        languages=["eng-Latn"],
        n_parameters=sum(map(_num_parameters, weights)),
        memory_usage_mb=round(sum(path.stat().st_size for path in weights) / 2**20),
        max_tokens=settings.max_prompt_tokens,
        embed_dim=None,
        license=None,
        open_weights=True,
        public_training_code=None,
        public_training_data=None,
        framework=["PyTorch", "Transformers"],
        similarity_fn_name=ScoringFunction.DOT_PRODUCT,
        use_instructions=True,
        training_datasets=None,
        adapted_from=settings.recipe.model.path,
        modalities=["text", "image", *["video"] * _reads_clips(places)],
    )
    MODEL_REGISTRY[name] = meta
    return meta


def _reads_clips(places: Sequence[Path]) -> bool:
    """Whether the family of a checkpoint, or of its base, reads clips."""
    [path, *_] = (place / "config.json" for place in places if (place / "config.json").is_file())
    return FAMILIES[json.loads(path.read_text(encoding="utf-8"))["model_type"]].reads_clips


def _num_parameters(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(path, "pt") as weights:
        return sum(int(np.prod(weights.get_slice(key).get_shape())) for key in weights.keys())


def _items(batch: dict[str, Any], fallback: str | None, *, is_query: bool) -> Iterator[Item]:
    """Items of a batch, with texts from before MTEB inserted instructions."""
    texts = batch.get("query", batch.get("text")) if is_query else batch.get("text")
    images, clips = batch.get("image"), batch.get("video")
    own = batch.get("instruction") if is_query else None
    columns = (texts, images, clips)
    for row in range(next((len(column) for column in columns if column is not None), 0)):
        text, pictures, clip = (None if column is None else column[row] for column in columns)
        several = pictures if isinstance(pictures, list) else [] if pictures is None else [pictures]
        instruction = (own[row] or None) if own is not None else fallback
        shown = content_of(text, several)
        if clip is not None:  # after the pictures, as in sentence-transformers' form
            shown = (*shown[: len(several)], clip_of(clip), *shown[len(several) :])
        yield Item(str(row), shown, instruction)


def _undecoded(inputs: Any) -> Any:
    """The loader with clips as files, so that the checkpoint's own rule chooses their frames, and torchcodec is not needed."""
    features = getattr(getattr(inputs, "dataset", None), "features", None) or {}
    if not isinstance(features.get("video"), Video) or not features["video"].decode:
        return inputs
    clips = inputs.dataset.cast_column("video", Video(decode=False))
    return DataLoader(clips, inputs.batch_size, collate_fn=inputs.collate_fn, num_workers=inputs.num_workers)
