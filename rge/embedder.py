"""Embed with a finished checkpoint: users, evaluation and every integration call `Embedder`.

    from rge import Embedder

    embedder = Embedder.from_pretrained("runs/demo/joint/final")
    query = embedder.encode_query("What do you need to open this?", images="padlock.png")
    scores = embedder.similarity(query, embedder.encode_document(images=["key.png", "nail.png"]))

All embeddings of evaluations and services come from `Embedder.encode`. An embedder is thread-safe. torch and transformers are
imported when a checkpoint is loaded.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from PIL import Image

from rge.checkpoints.settings import CheckpointError, CheckpointSettings, Settings, read_settings
from rge.common.commands import progress_bar
from rge.common.errors import UserError, not_one_of
from rge.common.files import checkpoint_folder
from rge.common.images import fetch_picture, load_image
from rge.common.modes import Mode
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded, ImageRef, Item
from rge.distributed.workers import Work, Workers

if TYPE_CHECKING:
    from rge.inference import EncodeOptions, Inference, OnProgress, Side
    from rge.model.embedding_model import EmbeddingModel
    from rge.model.prompts import Prompt, PromptBuilder
    from rge.rollout.vllm_writer import VllmWriter

Picture = ImageRef | Path | Image.Image
"""A path, ``library.parquet#row``, a web address, a data URL, encoded bytes, or a decoded picture."""

DTYPES = ("float32", "bfloat16", "float16")

WINDOW_BATCHES = 4
"""Batches whose items are prepared together and sorted by length; the pictures of two such windows are in memory at a time."""


@dataclass(frozen=True)
class Job:
    """A window of items, and how to embed them; see `Embedder.encode`."""

    items: Sequence[Item]
    side: "Side"
    options: "EncodeOptions"


class Embedder:
    """A trained model with its prompts and its generation settings; `with_` changes settings."""

    base: Path | None = None
    """Directory of the base model, for a checkpoint of adapters."""

    def __init__(
        self,
        model: "EmbeddingModel",
        builder: "PromptBuilder",
        checkpoint: Path,
        settings: Settings,
        engine: "VllmWriter | None" = None,
    ):
        from rge.inference import Inference

        self._inference = Inference(model, builder, engine)
        self._describe(checkpoint, settings)

    def _describe(self, checkpoint: Path, settings: Settings) -> None:
        from rge.checkpoints.export import checkpoint_hash

        self.checkpoint, self.settings = checkpoint, settings
        self.checkpoint_hash = checkpoint_hash(checkpoint)

    @classmethod
    def _of(cls, inference: "Inference", checkpoint: Path, settings: Settings) -> "Embedder":
        return cls(inference.model, inference.builder, checkpoint, settings, inference.engine)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        *,
        revision: str | None = None,
        base: str | Path | None = None,
        device: str | Sequence[str] | None = None,
        dtype: str | None = None,
        quantization: Literal["8bit", "4bit"] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        engine: Literal["own", "vllm"] = "own",
        vllm_memory: float = 0.5,
        vllm_rows: int = 64,
    ) -> "Embedder":
        """Load a finished checkpoint.

        Args:
            checkpoint: directory with weights, processor and ``rge.json``, or an id on the Hugging Face hub; ``demo``: the small
                one that comes with the package.
            revision: commit, tag or branch on the hub.
            base: directory or hub id of the base model of a checkpoint of adapters (``export.adapters_only``); None: the one in
                its ``rge.json``.
            device: e.g. ``cuda:0``; None: a GPU if there is one. Several, e.g. ``["cuda:0", "cuda:1"]``, share the work, each in
                its own process, which starts when it is first needed.
            dtype: of the weights, one of `DTYPES`; None: float32 on CPU, the recipe's on GPU.
            quantization: quantize the text model with bitsandbytes (extra ``quantization``). Embeddings then differ from the
                checkpoint's own.
            max_new_tokens: overrides the checkpoint's cap on a rationale.
            temperature: overrides the checkpoint's greedy decoding.
            engine: ``vllm``: vLLM writes the rationales (docs/serving.md), on one device, beside the model.
            vllm_memory: share of a GPU's memory for vLLM.
            vllm_rows: rows that vLLM processes at once.

        Raises:
            CheckpointError: not a checkpoint of rge, or the hub cannot be reached.
            BackboneError: weights or processor cannot be loaded, or have no ``<emb>``.
            AdapterError: the base of the adapters does not exist, or has other weights.
        """
        import torch

        from rge.inference import Inference, VllmOptions

        folder = local_folder(checkpoint, revision)
        settings = read_settings(folder)
        base_folder = _base(folder, base)
        several = device if isinstance(device, list | tuple) else [device]
        devices = [None if name is None else str(name) for name in several]
        if not devices:
            raise ValueError("device is empty; None uses a GPU if there is one")
        first = devices[0] or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype and str(dtype).removeprefix("torch.")
        choices = {"dtype": (dtype, (None, *DTYPES)), "engine": (engine, ("own", "vllm"))}
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise UserError(not_one_of(key, value, filter(None, allowed)))
        settings = settings.asking(**_given(max_new_tokens=max_new_tokens, temperature=temperature)).but(
            dtype=dtype or ("float32" if first == "cpu" else settings.recipe["model"]["dtype"]),
            **_given(quantization=quantization),
        )
        if engine == "vllm":
            if len(devices) > 1 or quantization is not None:
                raise UserError("engine=vllm needs a single device and unquantized weights")
            vllm = VllmOptions(vllm_memory, vllm_rows)
            inference = Inference.load(folder, settings, first, vllm, base_folder)
            assert inference.engine is not None
            return cls._of(inference, folder, settings.but(engine=inference.engine.name))
        if len(devices) > 1:
            names = [name for name in devices if name is not None]
            return _SpreadEmbedder(folder, settings, names, base_folder)
        embedder = cls._of(Inference.load(folder, settings, first, base=base_folder), folder, settings)
        embedder.base = base_folder
        return embedder

    @property
    def model(self) -> "EmbeddingModel":
        """The model."""
        return self._inference.model

    @property
    def builder(self) -> "PromptBuilder":
        """The builder of prompts."""
        return self._inference.builder

    def with_(
        self,
        *,
        exact: bool | None = None,
        profile: str | None = None,
        temperature: float | None = None,
        min_new_tokens: int | None = None,
    ) -> Self:
        """An embedder on the same model with other settings.

        Args:
            exact: compute every row's state alone, see `encode`.
            profile: name of a prompt profile, see `rge.common.prompt_profiles`.
            temperature: of sampled rationales.
            min_new_tokens: ``<emb>`` is suppressed before this many tokens.
        """
        other = copy(self)
        generation = _given(temperature=temperature, min_new_tokens=min_new_tokens)
        other.settings = self.settings.asking(**generation).but(**_given(exact=exact, profile=profile))
        other._begin(self.settings.profile)
        return other

    def _begin(self, profile: str) -> None:
        """Rebuild the prompts after a change of settings, such as another prompt profile."""
        if self.settings.profile == profile:
            return
        self._inference = self._inference.worded(PROFILES[self.settings.profile])

    @property
    def engine(self) -> "VllmWriter | None":
        """The vLLM engine, if it writes rationales."""
        return self._inference.engine

    @property
    def size(self) -> int:
        """Number of components of an embedding."""
        return self._inference.size

    def close(self) -> None:
        """End the worker processes of several devices. They also end with this object, and restart when needed."""

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise `UserError` if embeddings cannot be truncated to this many components."""
        if dimensions is not None and dimensions not in self.sizes:
            raise UserError(
                f"dimensions must be one of {', '.join(map(str, self.sizes))}, the sizes this checkpoint was trained for, "
                f"got {dimensions}"
            )

    @property
    def sizes(self) -> list[int]:
        """The sizes that an embedding can be truncated to, including its full size."""
        return sorted({self.size, *self.settings.dimensions})

    @property
    def query_mode(self) -> Mode:
        """How queries were trained: with a rationale, after think tokens alone, or directly."""
        if self.settings.reasons != "none":
            return "reasoning"
        return "latent" if self.settings.think_tokens else "direct"

    @property
    def default_instruction(self) -> str | None:
        """The instruction that most training queries had; None if most had none, or it is unknown."""
        return self.settings.instructions.default if self.settings.instructions else None

    def encode_query(
        self,
        texts: str | Sequence[str | None] | None = None,
        images: Picture | Sequence[Any] | None = None,
        *,
        mode: Mode | None = None,
        instruction: str | None = None,
        task: str | None = None,
        dimensions: int | None = None,
        return_rationales: bool = False,
        as_tensor: bool = False,
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Embed queries: the model writes a rationale, and the embedding is its state at the final ``<emb>``.

        Args:
            texts: a question, or N of them; None for pictures alone.
            images: with one question, its picture or pictures; with N, N entries, each None, a picture or several. A
                picture is a path, a web address, a data URL, bytes or a PIL image.
            mode: ``reasoning``, ``direct`` (no rationale), ``latent`` (think tokens instead) or ``auto`` (the model decides per
                query); the last two need a checkpoint trained for them, docs/modes.md. None: as trained.
            instruction: put before every question; '': none; None: that of `task`, or the most frequent one of training. One
                that was not used in training causes a warning.
            task: name of a training task (``rge.json`` lists them) whose instruction to use.
            dimensions: truncate embeddings to this many components, a size that the checkpoint was trained for.
            return_rationales: return the rationales too.
            as_tensor: torch instead of numpy.
            batch_size: rows per forward.
            seeds: one per query, needed for sampling (``temperature=`` of `from_pretrained`).
            progress: show a progress bar; None: for long lists on a terminal.

        Returns:
            Unit-norm float32 embeddings, (N, D), or (D,) for one question; with `return_rationales`, a pair of these and the
            rationales (a list of N texts, or one text).

        Raises:
            ValueError: wrong arguments, or an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        instruction, warning = self.instruction_for(instruction, task)
        single, items = _items(texts, images, instruction)
        if warning:
            warnings.warn(warning, stacklevel=2)
        self.check_dimensions(dimensions)
        encoded = self.encode(
            items, side="query", mode=mode or self.query_mode, batch_size=batch_size, seeds=seeds, progress=progress
        )  # fmt: skip
        return self._shaped(encoded, single, dimensions, return_rationales, as_tensor)

    def encode_document(
        self,
        texts: str | Sequence[str | None] | None = None,
        images: Picture | Sequence[Any] | None = None,
        *,
        mode: Literal["reasoning", "direct"] = "direct",
        dimensions: int | None = None,
        return_rationales: bool = False,
        as_tensor: bool = False,
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Embed candidates: texts, pictures, or both; arguments and results as in `encode_query`.

        Candidates are trained without a rationale, hence the default mode.
        """
        single, items = _items(texts, images)
        self.check_dimensions(dimensions)
        encoded = self.encode(
            items, side="candidate", mode=mode, batch_size=batch_size, seeds=seeds, progress=progress
        )
        return self._shaped(encoded, single, dimensions, return_rationales, as_tensor)

    @staticmethod
    def similarity(queries: Any, documents: Any) -> Any:
        """Cosine similarities of unit-norm embeddings: (N, M), or fewer axes for single ones; numpy or torch as given."""
        return queries @ documents.T

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the checkpoint with its model card to ``user/name``, which is created if needed; returns the commit's URL."""
        from huggingface_hub import HfApi

        from rge.checkpoints.description import renamed_card

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            # Symlinks: only the card differs, whose examples use the checkpoint's name on the hub.
            for path in self.checkpoint.iterdir():
                (Path(folder) / path.name).symlink_to(path.resolve())
            card = self.checkpoint / "README.md"
            if card.is_file():
                (Path(folder) / card.name).unlink()
                text = card.read_text(encoding="utf-8")
                (Path(folder) / card.name).write_text(renamed_card(text, repo_id), encoding="utf-8")
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))

    def instruction_for(self, given: str | None, task: str | None = None) -> tuple[str | None, str | None]:
        """The instruction of a query, and a warning if training did not use it.

        `given` takes precedence over the instruction of `task`, a training task; an empty one is none.

        Raises:
            ValueError: an unknown task.
        """
        known = self.settings.instructions
        if given is not None:
            if given and known and given not in known.known:
                return given, (
                    f"{self.checkpoint.name} was not trained with the instruction {given!r}; known are "
                    + "; ".join(map(repr, known.known[:8]))
                )
            return given or None, None
        if task is not None:
            tasks = known.by_task if known else {}
            if task not in tasks:
                raise ValueError(
                    f"{self.checkpoint} knows no task {task!r}; known are {', '.join(tasks) or 'none'}"
                )
            return tasks[task], None
        if known is None and self.settings.recipe:
            return None, (
                f"{self.checkpoint.name} does not say with which instructions it was trained (an older export): give "
                "instruction="
            )
        return self.default_instruction, None

    def cut(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Truncate embeddings (N, D) and normalise them again.

        Raises:
            UserError: a size that the checkpoint was not trained for.
        """
        self.check_dimensions(dimensions)
        if dimensions is None or dimensions == self.size:
            return vectors
        vectors = vectors[:, :dimensions]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _shaped(
        self, encoded: Encoded, single: bool, dimensions: int | None, return_rationales: bool, as_tensor: bool
    ) -> Any:
        vectors: Any = self.cut(encoded.embeddings, dimensions)
        if as_tensor:
            import torch

            vectors = torch.from_numpy(vectors)
        if not return_rationales:
            return vectors[0] if single else vectors
        return (vectors[0], encoded.rationales[0]) if single else (vectors, encoded.rationales)

    def encode(
        self,
        items: Sequence[Item],
        *,
        side: "Side",
        mode: Mode,
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        on_progress: Callable[[int], object] | None = None,
        progress: bool | None = False,
    ) -> Encoded:
        """Embed items. Except for rounding, a row does not depend on the other rows, the batch size or padding.

        With the setting ``exact`` there is no rounding either: every row's state is computed alone. In float32, rationales are
        still written in batches, and those that a rounding error might have changed (`rge.inference.CLOSE`) are written again
        alone; in other dtypes, all are written alone.

        Args:
            items: what to embed.
            side: determines the wording of the prompt.
            mode: ``reasoning``: the model writes a rationale first; ``direct``: ``<emb>`` is prefilled; ``latent``: think tokens
                and ``<emb>`` are; ``auto``: the model decides, and a rationale is empty where it answered directly.
            batch_size: rows per forward.
            seeds: one per item, needed for sampling.
            on_progress: called with the number of items just finished.
            progress: show a progress bar; None: for long lists on a terminal.

        Raises:
            UserError: the checkpoint was not trained for the mode.
            ValueError: an unknown mode, or an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        from rge.inference import EncodeOptions

        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        self.settings.check_mode(mode)
        if self.settings.exact and self.engine is not None:
            raise ValueError(
                "exact embeddings are computed row by row, which vLLM does not do: use engine=own"
            )
        num, window = len(items), WINDOW_BATCHES * batch_size
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if seeds is not None and len(seeds) != num:
            raise ValueError(f"{len(seeds)} seeds for {num} items: give one per item")
        encoded = Encoded(
            embeddings=np.empty((num, self.size), np.float32),
            rationales=[""] * num,
            num_rationale_tokens=np.zeros(num, np.int64),
            stop_reasons=[""] * num,
            generate_ms=np.zeros(num),
            embed_ms=np.zeros(num),
        )
        jobs = (
            Job(
                items[start : start + window],
                side,
                EncodeOptions(mode, batch_size, None if seeds is None else seeds[start : start + window]),
            )
            for start in range(0, num, window)
        )

        def put(number: int, part: Encoded) -> None:
            rows = slice(number * window, number * window + len(part.rationales))
            for field in fields(Encoded):
                getattr(encoded, field.name)[rows] = getattr(part, field.name)

        if progress is None:
            progress = num > 4 * batch_size and sys.stderr.isatty()
        with progress_bar(total=num, disable=not progress, unit="item") as bar:
            self._run(jobs, put, on_progress or bar.update)
        return encoded

    def _run(
        self, jobs: Iterable[Job], put: Callable[[int, Encoded], object], on_progress: "OnProgress"
    ) -> None:
        remaining = iter(jobs)

        def prepare_next() -> tuple[Job, list["Prompt"], float] | None:
            job = next(remaining, None)
            return None if job is None else (job, *self._prepare(job.items, job.side))

        # A thread reads and scales the next window's pictures while the device works on this one's.
        with ThreadPoolExecutor(1, "rge-prepare") as pool:
            upcoming = pool.submit(prepare_next)
            for number in count():
                prepared = upcoming.result()
                if prepared is None:
                    return
                job, prompts, prepare_ms = prepared
                upcoming = pool.submit(prepare_next)
                put(
                    number,
                    self._inference.embed(prompts, job.options, self.settings, on_progress, prepare_ms),
                )

    def _window(self, job: Job, on_progress: "OnProgress") -> Encoded:
        prompts, prepare_ms = self._prepare(job.items, job.side)
        return self._inference.embed(prompts, job.options, self.settings, on_progress, prepare_ms)

    def _prepare(self, items: Sequence[Item], side: "Side") -> tuple[list["Prompt"], float]:
        """The prompts of a window, and the mean preparation time in ms."""
        began = time.perf_counter()
        prompts = [
            self._inference.prompt(item, side, [load_image(_fetched(ref)) for ref in item.images])
            for item in items
        ]
        self.warn_of_truncation(prompts)
        return prompts, (time.perf_counter() - began) * 1000 / len(prompts)

    def prompt(self, item: Item, side: "Side", images: Sequence[Image.Image] | None = None) -> "Prompt":
        """The prompt of an item, for `encode_prompts`; decoded `images` are used in place of ``item.images``.

        Raises:
            ValueError: an empty item, or one whose pictures alone are too long.
            ImageError: a picture cannot be read.
        """
        return self._inference.prompt(item, side, images)

    def warn_of_truncation(self, prompts: Sequence["Prompt"]) -> None:
        """Warn about texts that were too long for the checkpoint's prompts."""
        if num_cut := sum(prompt.num_cut_tokens > 0 for prompt in prompts):
            warnings.warn(
                f"{num_cut} of {len(prompts)} prompts had more than {self.builder.max_tokens} tokens and lost the end of their text",
                stacklevel=3,
            )

    def encode_prompts(self, prompts: Sequence["Prompt"], *, mode: Mode, batch_size: int = 64) -> Encoded:
        """Embed prompts made by `prompt`: a server makes them when requests arrive."""
        from rge.inference import EncodeOptions

        return self._inference.embed(prompts, EncodeOptions(mode, batch_size), self.settings)

    def direct_probabilities(self, items: Iterable[Item], *, batch_size: int = 64) -> np.ndarray:
        """Probabilities (N,) of ``<emb>`` as the first token of each query, by which ``mode=auto`` decides.

        Raises:
            UserError: the checkpoint was not trained to decide.
        """
        self.settings.check_mode("auto")
        remaining, parts = iter(items), [np.empty(0, np.float32)]
        while window := list(islice(remaining, WINDOW_BATCHES * batch_size)):
            prompts, _ = self._prepare(window, "query")
            parts.append(self._inference.direct_probabilities(prompts, batch_size))
        return np.concatenate(parts)

    def encode_after(
        self, prompts: Sequence["Prompt"], rationales: Sequence[Sequence[int]], *, batch_size: int = 64
    ) -> np.ndarray:
        """Embeddings (N, D) of prompts after given rationales: token ids without ``<emb>``, empty for direct mode."""
        return self._inference.embed_after(prompts, rationales, batch_size)


class _SpreadEmbedder(Embedder):
    """An `Embedder` whose model is in worker processes, one per device; it has no `model` or `builder`."""

    settings: CheckpointSettings

    def __init__(
        self, checkpoint: Path, settings: CheckpointSettings, devices: Sequence[str], base: Path | None
    ):
        import torch

        self._describe(checkpoint, settings)
        self.base = base
        self._devices, self._threads = devices, max(1, torch.get_num_threads() // len(devices))
        self._begin(settings.profile)

    def _begin(self, profile: str) -> None:
        work = partial(_worker, self.checkpoint, self.settings, self.base, self._threads)
        self._workers = Workers(work, self._devices)  # start when needed

    engine = None

    @property
    def _inference(self) -> "Inference":  # type: ignore[override]
        raise AttributeError(
            "model, builder and prompts of an embedder on several devices are in its worker processes"
        )

    @property
    def size(self) -> int:
        from rge.model.backbone import read_config

        return read_config(self.checkpoint).get_text_config().hidden_size

    def close(self) -> None:
        self._workers.close()

    def _run(
        self, jobs: Iterable[Job], put: Callable[[int, Encoded], object], on_progress: "OnProgress"
    ) -> None:
        self._workers.run(jobs, put, on_progress)


def _worker(folder: Path, settings: CheckpointSettings, base: Path | None, threads: int, device: str) -> Work:
    """A worker's task, see `rge.distributed.workers`."""
    import torch

    from rge.inference import Inference

    embedder = Embedder._of(Inference.load(folder, settings, device, base=base), folder, settings)
    if device == "cpu":
        torch.set_num_threads(threads)
    return embedder._window


def _base(folder: Path, base: str | Path | None) -> Path | None:
    """The base of a checkpoint of adapters; None if the checkpoint has all its weights."""
    from rge.model.adapter_files import find_base, is_adapter_checkpoint

    if is_adapter_checkpoint(folder):
        return find_base(folder, base)
    if base is not None:
        raise UserError(f"base={base} is for checkpoints of adapters, and {folder} has all its weights")
    return None


def _given(**options: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def local_folder(checkpoint: str | Path, revision: str | None) -> Path:
    """The checkpoint's directory; downloads it from the hub if needed."""
    folder, name = checkpoint_folder(Path(checkpoint).expanduser()), str(checkpoint)
    is_path = isinstance(checkpoint, Path) or name.startswith((".", "/", "~")) or name.count("/") != 1
    if folder.exists() or is_path:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision))
    except (OSError, ValueError) as error:  # the bases of the hub's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is not a directory here, and could not be fetched from the Hugging Face hub: {reason}"
        ) from error


def _items(texts: Any, images: Any, instruction: str | None = None) -> tuple[bool, list[Item]]:
    """Whether one item was given, and the items."""
    if texts is None and images is None:
        raise ValueError("give texts, images, or both")
    single = isinstance(texts, str) or (texts is None and _is_picture(images))
    if not single and _is_picture(images):
        raise ValueError("a list of texts and a single picture: give one entry per text, None if it has none")
    given = (texts, images)
    columns = [[value] if single else None if value is None else list(value) for value in given]
    lengths = [len(column) for column in columns if column is not None]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{lengths[0]} texts and {lengths[1]} images: give one entry per item, None if it has none"
        )
    items = []
    for row in range(lengths[0]):
        text, pictures = (None if column is None else column[row] for column in columns)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"a text must be a string, got {type(text).__name__}")
        items.append(Item(str(row), text, _pictures(pictures), instruction))
    return single, items


def _fetched(picture: Any) -> Any:
    on_the_web = isinstance(picture, str) and picture.startswith(("http://", "https://", "data:"))
    return fetch_picture(picture) if on_the_web else picture


def _is_picture(value: Any) -> bool:
    return isinstance(value, str | bytes | Path | Image.Image)


def _pictures(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(picture_ref(picture) for picture in ([value] if _is_picture(value) else value))


def picture_ref(value: Any) -> Any:
    """A picture as `Item` holds it; anything but a `Picture` is a ValueError."""
    if not _is_picture(value):
        raise ValueError(
            f"a picture is a path, a web address, bytes or a PIL image, got {type(value).__name__}"
        )
    return str(value) if isinstance(value, Path) else value
