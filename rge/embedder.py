"""Embed with a finished checkpoint: users, evaluation and every integration call `Embedder`.

    from rge import Embedder

    embedder = Embedder.from_pretrained("runs/demo/joint/final")
    query = embedder.encode_query("What do you need to open this?", images="padlock.png")
    scores = embedder.similarity(query, embedder.encode_document(images=["key.png", "nail.png"]))

All embeddings of evaluations and services come from `Embedder.encode`. An embedder is thread-safe. torch and transformers are
imported when a checkpoint is loaded.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import numpy as np
from PIL import Image

from rge.checkpoints.settings import CheckpointError, CheckpointSettings, Settings, read_settings
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import checkpoint_folder
from rge.common.images import WEB, load_image, names_picture
from rge.common.modes import Mode
from rge.common.parts import (
    Content,
    ImagePart,
    ImageRef,
    Part,
    TextPart,
    content_of,
    part_to_json,
    parts_from_json,
)
from rge.common.schema import Encoded, Item
from rge.content.references import part_of
from rge.distributed.workers import Work, Workers
from rge.web.client import fetch_picture

if TYPE_CHECKING:
    from rge.inference import Inference, OnProgress, Side
    from rge.model.embedding_model import EmbeddingModel
    from rge.model.prompts import Prompt, PromptBuilder

Picture = ImageRef | Path | Image.Image
"""A path, ``library.parquet#row``, a web address, a data URL, encoded bytes, or a decoded picture."""

DTYPES = ("float32", "bfloat16", "float16")

PARTS = get_args(Part)
"""Types of parts."""
WINDOW_BATCHES = 4
"""Batches whose items are prepared together and sorted by length; the pictures of two such windows are in memory at a time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A window of items, and how to embed them; see `Embedder.encode`."""

    items: Sequence[Item]
    side: "Side"
    mode: Mode
    batch_size: int
    seeds: Sequence[int] | None
    caps: Sequence[int] | None = None
    start: int = 0  # the first item's number in the call
    batch_tokens: int | None = None

    def part(self, rows: slice) -> "Job":
        """Some of its items."""
        seeds, caps = (None if each is None else each[rows] for each in (self.seeds, self.caps))
        return replace(self, items=self.items[rows], seeds=seeds, caps=caps, start=self.start + rows.start)


_Prepared = tuple[Job, list["Prompt"], float]
"""A job, its prompts, and the mean time in ms that making one took."""


class Embedder:
    """A trained model with its prompts and its generation settings; `with_` changes settings."""

    def __init__(
        self, inference: "Inference | None", checkpoint: Path, settings: Settings, base: Path | None = None
    ):
        """`base` is the directory of the base model of a checkpoint of adapters."""
        self._loaded, self.checkpoint, self.settings, self.base = inference, checkpoint, settings, base
        self.batch_tokens: int | None = None
        self._of_task: dict[str, Embedder] = {}

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
        max_prompt_tokens: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
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
            max_prompt_tokens: overrides the checkpoint's cap on a prompt, for items with more pictures than in training.
            min_pixels: overrides the checkpoint's smallest picture, width times height after scaling.
            max_pixels: overrides its largest one.
            max_new_tokens: overrides the checkpoint's cap on a rationale.
            temperature: overrides the checkpoint's greedy decoding.
            engine: ``vllm``: vLLM writes the rationales (docs/serving.md), on one device, together with the model.
            vllm_memory: share of a GPU's memory for vLLM.
            vllm_rows: rows that vLLM processes at once.

        Raises:
            CheckpointError: not a checkpoint of rge, or the hub cannot be reached.
            BackboneError: weights or processor cannot be loaded, or have no ``<emb>``.
            AdapterError: the base of the adapters does not exist, or has other weights.
            UserError: an option's value is not allowed.
        """
        import torch

        from rge.inference import Inference
        from rge.model.adapter_files import base_of

        folder = local_folder(checkpoint, revision)
        settings, base = read_settings(folder), base_of(folder, base)
        given = device if isinstance(device, list | tuple) else [device]
        devices = [str(name or ("cuda" if torch.cuda.is_available() else "cpu")) for name in given]
        if not devices:
            raise ValueError("device is empty; None uses a GPU if there is one")
        dtype = dtype and str(dtype).removeprefix("torch.")
        choices = {"dtype": (dtype, (None, *DTYPES)), "engine": (engine, ("own", "vllm"))}
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise UserError.choice(key, value, filter(None, allowed))
        settings = settings.asking(max_new_tokens=max_new_tokens, temperature=temperature).but(
            dtype=dtype or ("float32" if devices[0] == "cpu" else settings.recipe.model.dtype),
            quantization=quantization,
        )
        settings = settings.with_prompts(
            max_prompt_tokens=max_prompt_tokens, min_pixels=min_pixels, max_pixels=max_pixels
        )
        vllm = {"memory": vllm_memory, "batch_size": vllm_rows} if engine == "vllm" else None
        if vllm and (len(devices) > 1 or quantization is not None):
            raise UserError("engine=vllm needs a single device and unquantized weights").about("engine")
        if len(devices) > 1:
            return _SpreadEmbedder(devices, folder, settings, base)
        inference = Inference.load(folder, settings, devices[0], base, vllm)
        return cls(inference, folder, settings.but(engine=inference.engine and inference.engine.name), base)

    @cached_property
    def checkpoint_hash(self) -> str:
        """`rge.checkpoints.export.checkpoint_hash` of the files as they are when it is first asked for; it reads all weights."""
        from rge.checkpoints.export import checkpoint_hash

        return checkpoint_hash(self.checkpoint)

    @property
    def _inference(self) -> "Inference":
        if self._loaded is None:
            raise AttributeError(
                "model, builder and prompts of an embedder on several devices are in its worker processes"
            )
        return self._loaded

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
        max_rationale_tokens: int | None = None,
        batch_tokens: int | None = None,
    ) -> Self:
        """An embedder on the same model with other settings.

        `exact` computes every row's state alone, see `encode`; `profile` is the name of a prompt profile, see
        `rge.common.prompt_profiles`; ``<emb>`` is suppressed before `min_new_tokens`, and follows after
        `max_rationale_tokens` unless a call says otherwise. `batch_tokens` limits the prompt tokens of a forward, each row
        counted as its longest, and so the pictures in memory: a long document is embedded alone, and short texts together.
        """
        self.settings.check_cap(max_rationale_tokens)
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, got {batch_tokens}").about("batch_tokens")
        settings = self.settings.asking(
            temperature=temperature, min_new_tokens=min_new_tokens, max_rationale_tokens=max_rationale_tokens
        )
        other = self._set(settings.but(exact=exact).with_prompts(profile))
        other.batch_tokens = batch_tokens or self.batch_tokens
        return other

    def for_task(self, task: str | None) -> Self:
        """An embedder with a training task's instruction, prompt profile, picture sizes and maximum length; None: this one.

        Arguments of `from_pretrained` and `with_` go first. UserError: an unknown task.
        """
        if task is None:
            return self
        if task not in self.tasks:
            raise UserError.choice("task", task, self.tasks or ["null"])
        if task not in self._of_task:
            settings = self.settings.of_task(task)
            self._of_task[task] = self if settings == self.settings else self._set(settings)
        return self._of_task[task]  # type: ignore[return-value]

    @property
    def tasks(self) -> list[str]:
        """Names of the training tasks that `for_task` knows."""
        return list(self.settings.instructions.by_task) if self.settings.instructions else []

    def _set(self, settings: Settings) -> Self:
        other = copy(self)
        other.settings, other._of_task = settings, {}
        before, now = (
            (one.profile, one.pixels, one.max_prompt_tokens, one.video) for one in (self.settings, settings)
        )
        if self._loaded is not None and before != now:
            pixels = None if settings.pixels == self.settings.pixels else settings.pixels
            other._loaded = self._loaded.prompting(settings, pixels)
        return other

    @property
    def size(self) -> int:
        """Number of components of an embedding."""
        return self._inference.size

    def close(self) -> None:
        """End the worker processes of several devices. They also end with this object, and restart when needed."""

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise `UserError` if embeddings cannot be truncated to this many components."""
        if dimensions is not None and dimensions not in self.sizes:
            raise UserError.choice("dimensions", dimensions, self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The sizes that an embedding can be truncated to, including its full size."""
        return sorted({self.size, *self.settings.dimensions})

    @property
    def query_mode(self) -> Mode:
        """How queries were trained, see `rge.checkpoints.settings.Settings.query_mode`."""
        return self.settings.query_mode

    @property
    def default_instruction(self) -> str | None:
        """The instruction that most training queries (or those of the task) had; None if most had none, or it is unknown."""
        return self.settings.instructions.default if self.settings.instructions else None

    def encode_query(
        self,
        texts: str | Sequence[str | None] | None = None,
        images: Picture | Sequence[Any] | None = None,
        *,
        content: Sequence[Any] | None = None,
        mode: Mode | None = None,
        max_rationale_tokens: int | Sequence[int] | None = None,
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
                picture is a path, a web address, a data URL, bytes or a PIL image; a path may also be that of a PDF, of a page
                of it (``manual.pdf#page=3``) or of a video (``talk.mp4#t=10,20``).
            content: instead of both, parts in their order (docs/content.md): a list of mappings such as ``{"text": ...}``,
                ``{"image": ...}``, ``{"video": ...}`` and ``{"pdf": ..., "pages": [1]}``, or N such lists.
            mode: ``reasoning``, ``direct`` (no rationale) or ``auto`` (the model decides per
                query); the last two need a checkpoint trained for them, docs/modes.md. None: as trained.
            max_rationale_tokens: the most tokens of a rationale, or one number per query, from 0 (as ``direct``) to
                `max_new_tokens` of `from_pretrained`; ``<emb>`` follows a rationale that reaches it. None: all that are allowed.
            instruction: put before every question; '': none; None: that of `task`, or the most frequent one of training. One
                that was not used in training causes a warning.
            task: name of a training task (``rge.json`` lists them) whose instruction, prompt profile and picture sizes to use.
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
        embedder = self.for_task(task)
        instruction, warning = embedder.instruction_for(instruction)
        single, items = _items(texts, images, content, instruction)
        if warning:
            warnings.warn(warning, stacklevel=2)
        self.check_dimensions(dimensions)
        mode = mode or self.query_mode
        encoded = embedder.encode(
            items,
            side="query",
            mode=mode,
            batch_size=batch_size,
            seeds=seeds,
            progress=progress,
            max_rationale_tokens=max_rationale_tokens,
        )
        return self._shaped(encoded, single, dimensions, return_rationales, as_tensor)

    def encode_document(
        self,
        texts: str | Sequence[str | None] | None = None,
        images: Picture | Sequence[Any] | None = None,
        *,
        content: Sequence[Any] | None = None,
        mode: Literal["reasoning", "direct"] = "direct",
        task: str | None = None,
        dimensions: int | None = None,
        return_rationales: bool = False,
        as_tensor: bool = False,
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Embed candidates: texts, pictures, both, or any parts; arguments and results as in `encode_query`.

        Candidates are trained without a rationale, hence the default mode.
        """
        single, items = _items(texts, images, content)
        self.check_dimensions(dimensions)
        encoded = self.for_task(task).encode(
            items, side="candidate", mode=mode, batch_size=batch_size, seeds=seeds, progress=progress
        )
        return self._shaped(encoded, single, dimensions, return_rationales, as_tensor)

    @staticmethod
    def similarity(queries: Any, documents: Any) -> Any:
        """Cosine similarities of unit-norm embeddings: (N, M), or fewer axes for single ones; numpy or torch as given."""
        return queries @ documents.T

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the checkpoint with its model card to ``user/name``, which is created if needed; returns the commit's URL."""
        from huggingface_hub import CommitOperationAdd, HfApi

        from rge.checkpoints.description import renamed_card

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        files: dict[str, Any] = {path.name: path for path in self.checkpoint.iterdir() if path.is_file()}
        if "README.md" in files:  # its examples use the checkpoint's name on the hub
            card = files["README.md"].read_text(encoding="utf-8")
            files["README.md"] = renamed_card(card, repo_id).encode()
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        return str(api.create_commit(repo_id, added, commit_message=f"Upload {repo_id}"))

    def instruction_for(self, given: str | None) -> tuple[str | None, str | None]:
        """The instruction of a query, and a warning if training did not use it; an empty one is none, None the default."""
        known, warning = self.settings.instructions, None
        if given is not None:
            if given and known and given not in known.known:
                some = "; ".join(map(repr, known.known[:8]))
                warning = (
                    f"{self.checkpoint.name} was not trained with the instruction {given!r}; known are {some}"
                )
            return given or None, warning
        return self.default_instruction, warning

    def cut(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Truncate embeddings (N, D) and normalise them again; UserError for a size that the checkpoint was not trained for."""
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
        max_rationale_tokens: int | Sequence[int] | None = None,
    ) -> Encoded:
        """Embed items. Except for rounding, a row does not depend on the other rows, the batch size or padding.

        With the setting ``exact`` there is no rounding either: every row's state is computed alone. In float32, rationales are
        still written in batches, and those that a rounding error might have changed (`rge.inference.CLOSE`) are written again
        alone; in other dtypes, all are written alone.

        The `side` determines the wording of the prompt; other arguments as in `encode_query`. With ``mode=auto``, a rationale is
        empty where the model answered directly. `on_progress` is called with the number of items just finished.

        Raises:
            UserError: the checkpoint was not trained for the mode, or an item is empty or too long.
            ValueError: an unknown mode.
            ImageError: a picture cannot be read.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        self.settings.check_mode(mode)
        if self.settings.exact and self.settings.engine is not None:
            raise ValueError(
                "exact embeddings are computed row by row, which vLLM does not do: use engine=own"
            )
        num, window = len(items), WINDOW_BATCHES * batch_size
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if seeds is not None and len(seeds) != num:
            raise ValueError(f"{len(seeds)} seeds for {num} items: give one per item")
        caps = self._caps(max_rationale_tokens, num)
        encoded = Encoded(
            embeddings=np.empty((num, self.size), np.float32),
            rationales=[""] * num,
            num_rationale_tokens=np.zeros(num, np.int64),
            stop_reasons=[""] * num,
            generate_ms=np.zeros(num),
            embed_ms=np.zeros(num),
        )
        whole = Job(items, side, mode, batch_size, seeds, caps, batch_tokens=self.batch_tokens)
        jobs = (whole.part(slice(start, start + window)) for start in range(0, num, window))

        def put(start: int, part: Encoded) -> None:
            rows = slice(start, start + len(part.rationales))
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
        # A thread reads and scales the next window's pictures while the device works on this one's.
        for prepared in one_ahead(part for job in jobs for part in self._prepare(job)):
            put(*self._embed(prepared, on_progress))

    def _prepare(self, job: Job) -> Iterator[_Prepared]:
        """A job with its prompts; in parts, if these have more tokens than fit into a window's batches."""
        began, prompts, num_tokens = time.perf_counter(), [], 0
        for end, item in enumerate(job.items, start=1):
            prompts.append(self.prompt(item, job.side))
            num_tokens += len(prompts[-1])
            if end == len(job.items) or self.fills_window(num_tokens):
                self.warn_of_truncation(prompts)
                prepare_ms = (time.perf_counter() - began) * 1000 / len(prompts)
                yield job.part(slice(end - len(prompts), end)), prompts, prepare_ms
                began, prompts, num_tokens = time.perf_counter(), [], 0

    def fills_window(self, num_tokens: int) -> bool:
        """Whether prompts of so many tokens are all that should be prepared together."""
        return self.batch_tokens is not None and num_tokens >= WINDOW_BATCHES * self.batch_tokens

    def _embed(self, prepared: _Prepared, on_progress: "OnProgress") -> tuple[int, Encoded]:
        """The number of the first item, and the embeddings."""
        job, prompts, prepare_ms = prepared
        encoded = self._inference.embed(
            prompts, self.settings, mode=job.mode, batch_size=job.batch_size, batch_tokens=job.batch_tokens,
            seeds=job.seeds, caps=job.caps, on_progress=on_progress,
        )  # fmt: skip
        return job.start, replace(encoded, embed_ms=encoded.embed_ms + prepare_ms)

    def prompt(
        self, item: Item, side: "Side", load: Callable[[ImageRef], Image.Image] | None = None
    ) -> "Prompt":
        """The prompt of an item, for `encode_prompts`; see `rge.model.prompts.PromptBuilder.build`.

        `load` decodes a picture; None: also fetches web addresses.
        """
        return self._inference.prompt(item, side, load or _decoded)

    def warn_of_truncation(self, prompts: Sequence["Prompt"]) -> None:
        """Warn about texts that were too long for the checkpoint's prompts."""
        if num_cut := sum(prompt.num_cut_tokens > 0 for prompt in prompts):
            warnings.warn(
                f"{num_cut} of {len(prompts)} prompts had more than {self.builder.max_tokens} tokens and lost the end of their text",
                stacklevel=3,
            )

    def encode_prompts(
        self,
        prompts: Sequence["Prompt"],
        *,
        mode: Mode,
        batch_size: int = 64,
        max_rationale_tokens: int | Sequence[int] | None = None,
    ) -> Encoded:
        """Embed prompts made by `prompt`: a server makes them when requests arrive."""
        caps = self._caps(max_rationale_tokens, len(prompts))
        most: Any = {"batch_size": batch_size, "batch_tokens": self.batch_tokens}
        return self._inference.embed(prompts, self.settings, mode=mode, caps=caps, **most)

    def _caps(self, given: int | Sequence[int] | None, num: int) -> list[int] | None:
        """`max_rationale_tokens` of each of `num` items; None: the settings'."""
        if given is None:
            return None
        caps = [*given] if isinstance(given, Sequence | np.ndarray) else [given] * num
        caps = [int(cap) if isinstance(cap, np.integer) else cap for cap in caps]
        if len(caps) != num:
            raise ValueError(
                f"max_rationale_tokens has {len(caps)} numbers for {num} items: give one per item"
            )
        for cap in dict.fromkeys(caps):
            self.settings.check_cap(cap)
        return caps

    def direct_probabilities(self, items: Iterable[Item], *, batch_size: int = 64) -> np.ndarray:
        """Probabilities (N,) of ``<emb>`` as the first token of each query, by which ``mode=auto`` decides."""
        self.settings.check_mode("auto")
        remaining, parts = iter(items), [np.empty(0, np.float32)]
        while window := list(islice(remaining, WINDOW_BATCHES * batch_size)):
            for _, prompts, _ in self._prepare(Job(window, "query", "auto", batch_size, None)):
                parts.append(self._inference.direct_probabilities(prompts, (batch_size, self.batch_tokens)))
        return np.concatenate(parts)

    def encode_after(
        self, prompts: Sequence["Prompt"], rationales: Sequence[Sequence[int]], *, batch_size: int = 64
    ) -> np.ndarray:
        """Embeddings (N, D) of prompts after given rationales: token ids without ``<emb>``, empty for direct mode."""
        return self._inference.embed_after(prompts, rationales, (batch_size, self.batch_tokens))


class _SpreadEmbedder(Embedder):
    """An `Embedder` whose model is in worker processes, one per device; it has no `model` or `builder`."""

    settings: CheckpointSettings

    def __init__(
        self, devices: Sequence[str], checkpoint: Path, settings: CheckpointSettings, base: Path | None
    ):
        import torch

        super().__init__(None, checkpoint, settings, base)
        threads = max(1, torch.get_num_threads() // len(devices))
        # They start when needed; embedders made by `with_` share them.
        self._workers = Workers(partial(_worker, checkpoint, settings, base, threads), devices)

    @property
    def size(self) -> int:
        from rge.model.backbone import read_config

        return read_config(self.checkpoint).get_text_config().hidden_size

    def close(self) -> None:
        self._workers.close()

    def _run(
        self, jobs: Iterable[Job], put: Callable[[int, Encoded], object], on_progress: "OnProgress"
    ) -> None:
        def put_all(_: int, parts: Iterable[tuple[int, Encoded]]) -> None:
            for start, part in parts:
                put(start, part)

        self._workers.run(((self.settings, job) for job in jobs), put_all, on_progress)


def _worker(folder: Path, settings: CheckpointSettings, base: Path | None, threads: int, device: str) -> Work:
    """A worker's task, see `rge.distributed.workers`."""
    import torch

    from rge.inference import Inference

    embedder = Embedder(Inference.load(folder, settings, device, base), folder, settings)
    if device == "cpu":
        torch.set_num_threads(threads)

    def work(given: tuple[Settings, Job], on_progress: "OnProgress") -> list[tuple[int, Encoded]]:
        nonlocal embedder
        asked, job = given
        if asked != embedder.settings:
            embedder = embedder._set(asked)
        embedder.batch_tokens = job.batch_tokens
        return [embedder._embed(prepared, on_progress) for prepared in embedder._prepare(job)]

    return work


def one_ahead(windows: Iterator[T]) -> Iterator[T]:
    """The same windows, each made by a thread while the one before is in use."""
    pool = ThreadPoolExecutor(1, "rge-prepare")
    try:
        upcoming = pool.submit(next, windows, None)
        while (window := upcoming.result()) is not None:
            upcoming = pool.submit(next, windows, None)
            yield window
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def local_folder(checkpoint: str | Path, revision: str | None) -> Path:
    """The checkpoint's directory; downloads it from the hub if needed."""
    from rge.model.adapter_files import fetched, is_hub_id
    from rge.model.adapters import AdapterError

    folder = checkpoint_folder(Path(checkpoint).expanduser())
    if folder.exists() or isinstance(checkpoint, Path) or not is_hub_id(checkpoint):
        return folder
    try:
        return fetched(checkpoint, revision)
    except AdapterError as error:
        raise CheckpointError.caused_by(error) from error


def _items(texts: Any, images: Any, content: Any, instruction: str | None = None) -> tuple[bool, list[Item]]:
    """Whether one item was given, and the items."""
    if content is not None:
        if texts is not None or images is not None:
            raise ValueError("give content alone: texts and images are its short form")
        content = list(content)
        single = any(isinstance(part, (Mapping, *PARTS)) for part in content)
        each = [content] if single else content
        return single, [Item(str(row), _parts(parts), instruction) for row, parts in enumerate(each)]
    if texts is None and images is None:
        raise ValueError("give texts, images, or both")
    # Of the library datasets, {"bytes": ..., "path": ...} would be taken for two paths.
    if isinstance(images, Mapping):
        picture_ref(images)
    single = isinstance(texts, str) or (texts is None and _is_picture(images))
    if single:
        texts, images = [texts], [images]
    elif _is_picture(images):
        raise ValueError("a list of texts and a single picture: give one entry per text, None if it has none")
    images = None if images is None else list(images)
    texts = [None] * len(images) if texts is None else list(texts)
    images = [None] * len(texts) if images is None else images
    if len(texts) != len(images):
        raise ValueError(
            f"{len(texts)} texts and {len(images)} images: give one entry per item, None if it has none"
        )
    for text in texts:
        if text is not None:
            check_text(text)
    items = [
        Item(str(row), (*map(_visual, _pictures(pictures)), *content_of(text)), instruction)
        for row, (text, pictures) in enumerate(zip(texts, images, strict=True))
    ]
    return single, items


def _parts(parts: Any) -> Content:
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes):
        raise ValueError('content is a list of parts, such as [{"text": ...}, {"image": ...}]')
    plain = [part_to_json(part) if isinstance(part, PARTS) else part for part in parts]
    found = parts_from_json(plain, live=True)
    for part in found:
        if isinstance(part, TextPart):
            check_text(part.text, '{"image": ...}')
    return found


def _decoded(picture: Any) -> Image.Image:
    on_the_web = isinstance(picture, str) and picture.startswith((*WEB, "data:"))
    return load_image(fetch_picture(picture) if on_the_web else picture)


def _visual(picture: Any) -> Part:
    """The part of a picture; a path may also name a document, a page or a clip."""
    if isinstance(picture, str) and not picture.startswith((*WEB, "data:")):
        return part_of(picture)
    return ImagePart(picture)


def _is_picture(value: Any) -> bool:
    return isinstance(value, str | bytes | Path | Image.Image)


def _pictures(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":  # paths as pandas reads them from Parquet
        value = value.tolist()
    # Not any iterable: an array of pixels would be taken for its rows, and a dict for its keys.
    return tuple(map(picture_ref, value if isinstance(value, list | tuple | Iterator) else [value]))


def check_text(value: Any, form: str = "images=") -> None:
    """ValueError for a value that is no text, and UserError for one that names a picture, which is given in this `form`."""
    if not isinstance(value, str):
        raise ValueError(f"a text must be a string, got {type(value).__name__}")
    if names_picture(value):
        raise UserError(
            f"the text {value[:60]!r} names a picture, and would be embedded as words: give it as a picture, {form}"
        )


def picture_ref(value: Any) -> Any:
    """A picture as `Item` holds it; anything but a `Picture` is a ValueError."""
    if not _is_picture(value):
        raise ValueError(
            f"a picture is a path, a web address, bytes or a PIL image, got {type(value).__name__}"
        )
    return str(value) if isinstance(value, Path) else value
