"""Embed with a finished checkpoint: `Embedder` is what users, evaluation and every integration call.

    from rge import Embedder

    embedder = Embedder.from_pretrained("runs/demo/joint/final")
    query = embedder.encode_query("What do you need to open this?", images="padlock.png")
    scores = embedder.similarity(query, embedder.encode_document(images=["key.png", "nail.png"]))

Every figure of an evaluation comes from `Embedder.encode`, and so does every embedding of a service built on a checkpoint.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rge.checkpoints.description import renamed_card
from rge.checkpoints.export import CheckpointError, checkpoint_hash, read_settings
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.files import checkpoint_folder
from rge.common.images import fetch_picture
from rge.common.schema import Encoded, ImageRef, Item
from rge.distributed.workers import Work, Workers
from rge.model.backbone import BackboneError, collapsed_ids, load_backbone, read_config
from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import Branch, by_length
from rge.model.prompts import Prompt, PromptBuilder
from rge.rollout.generate import generate

if TYPE_CHECKING:
    from rge.rollout.vllm_states import VllmStates  # imports vLLM

CLOSE = {"greedy": 2e-3, "drawn": 1e-4}
"""`Rationale.margin` below which float32 in another batch might choose another token; rounding moves it by some 1e-5."""

Picture = ImageRef | Path | Image.Image
"""A path, ``library.parquet#row``, a web address, a data URL, encoded bytes, or a decoded picture."""


WINDOW_BATCHES = 8
"""Batches whose items are prepared together and sorted by length: as many pictures are in memory at a time."""


@dataclass(frozen=True)
class Job:
    """Items whose pictures are in memory together, and how they are to be embedded; see `Embedder.encode`."""

    items: Sequence[Item]
    side: str
    mode: Literal["reasoning", "direct"]
    batch_size: int
    seeds: Sequence[int] | None
    exact: bool


_Row = tuple[np.ndarray, str, int, str, float, float]
"""What `Encoded` holds of one prompt, in its fields' order."""


class Embedder:
    """A trained model with its prompts and its pinned generation settings.

    Args:
        model: the model; put into evaluation mode.
        builder: makes prompts.
        checkpoint: directory it was loaded from.
        settings: content of ``rge.json``.
        engine: writes rationales and computes states in the model's place; None: the model does.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        builder: PromptBuilder,
        checkpoint: Path,
        settings: dict[str, Any],
        engine: "VllmStates | None" = None,
    ):
        self.model, self.builder, self.engine = model.eval(), builder, engine
        self._describe(checkpoint, settings)

    engine: "VllmStates | None" = None

    def _describe(self, checkpoint: Path, settings: dict[str, Any]) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.checkpoint_hash = checkpoint_hash(checkpoint)
        self.exact = False

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        *,
        revision: str | None = None,
        device: str | Sequence[str] | None = None,
        dtype: str | None = None,
        quantization: Literal["8bit", "4bit"] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        engine: Literal["own", "vllm"] = "own",
        vllm_memory: float = 0.8,
        vllm_rows: int = 64,
    ) -> "Embedder":
        """Load a finished checkpoint.

        Args:
            checkpoint: directory with weights, processor and ``rge.json``, or the id of one on the Hugging Face hub;
                ``demo`` is the small one that comes with the package.
            revision: commit, tag or branch on the hub.
            device: e.g. ``cuda:0``; None takes a GPU if there is one. Several, e.g. ``["cuda:0", "cuda:1"]``, embed
                together, each in a process of its own that is started when it is first needed; nothing is loaded here.
            dtype: weights' dtype; None takes float32 on CPU and the recipe's on GPU.
            quantization: the text model's matrices as bitsandbytes holds them, in 8 or in 4 bits (extra ``quantization``).
                Embeddings differ from the checkpoint's own then.
            max_new_tokens: overrides the checkpoint's cap on a rationale.
            temperature: overrides the checkpoint's greedy decoding.
            engine: ``vllm`` lets vLLM write rationales and compute states (docs/serving.md); on one device.
            vllm_memory: share of a GPU's memory for it.
            vllm_rows: rows that it works on at once.

        Raises:
            CheckpointError: not a checkpoint of rge, or the hub cannot be reached.
            BackboneError: its weights or processor cannot be loaded, or have no ``<emb>``.
        """
        folder = local_folder(checkpoint, revision)
        settings = read_settings(folder)
        devices = [device] if device is None or isinstance(device, str) else list(device)
        if not devices:
            raise ValueError("device names no device; None takes a GPU if there is one")
        first = devices[0] or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("float32" if first == "cpu" else settings["recipe"]["model"]["dtype"])
        generation = dict(settings["generation"])
        if max_new_tokens is not None:
            generation["max_new_tokens"] = max_new_tokens
        if temperature is not None:
            generation["temperature"] = temperature
        settings = {**settings, "generation": generation, "dtype": dtype}
        if quantization is not None:
            settings["quantization"] = quantization
        if engine == "vllm":
            if len(devices) > 1 or quantization is not None:
                raise UserError("engine=vllm is for one device and for weights as the checkpoint has them")
            return cls._load(folder, settings, first, {"memory": vllm_memory, "rows": vllm_rows})
        if len(devices) > 1:
            return _SpreadEmbedder(folder, settings, [each for each in devices if each is not None])
        return cls._load(folder, settings, first)

    @classmethod
    def _load(
        cls, folder: Path, settings: dict[str, Any], device: str, vllm: dict[str, Any] | None = None
    ) -> "Embedder":
        pixels = settings["pixels"]
        backbone = load_backbone(
            folder,
            dtype=settings["dtype"],
            min_pixels=pixels["min"],
            max_pixels=pixels["max"],
            quantization=settings.get("quantization"),
            device=device,
        )
        builder = PromptBuilder(backbone.processor, settings["profile"], settings["max_prompt_tokens"])
        model = EmbeddingModel(backbone)
        if vllm is None:
            return cls(model.to(device), builder, folder, settings)
        states = _vllm(model.eval(), folder, device, settings, **vllm)
        return cls(model, builder, folder, settings | {"engine": states.name}, states)

    @property
    def size(self) -> int:
        """Components of an embedding."""
        return self.model.model.config.get_text_config().hidden_size

    def close(self) -> None:
        """End what holds the model on several devices; it would also end with this object, and starts again when needed."""

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise `UserError` where embeddings cannot be cut to so many components."""
        if dimensions is not None and dimensions not in self.sizes:
            raise UserError(
                f"dimensions must be one of {', '.join(map(str, self.sizes))}, the sizes this checkpoint was trained for, "
                f"got {dimensions}"
            )

    @property
    def sizes(self) -> list[int]:
        """The sizes that an embedding may be cut to, its own included."""
        return sorted({self.size, *self.settings.get("dimensions", ())})

    @property
    def query_mode(self) -> Literal["reasoning", "direct"]:
        """How queries were trained: with a rationale or without."""
        return "direct" if self.settings["reasons"] == "none" else "reasoning"

    @property
    def default_instruction(self) -> str | None:
        """The instruction that most training queries carried; None where most carried none, or none is known."""
        return self.settings.get("instructions", {}).get("default")

    def encode_query(
        self,
        texts: str | Sequence[str | None] | None = None,
        images: Picture | Sequence[Any] | None = None,
        *,
        mode: Literal["reasoning", "direct"] | None = None,
        instruction: str | None = None,
        task: str | None = None,
        dimensions: int | None = None,
        return_rationales: bool = False,
        as_tensor: bool = False,
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Embed queries: the model writes what it sees and what is asked for, and is read at the ``<emb>`` that ends it.

        Args:
            texts: a question, or N of them; None for pictures alone.
            images: with one question, its picture or pictures; with N, N entries, each None, a picture or several. A
                picture is a path, a web address, a data URL, bytes or a PIL image.
            mode: ``reasoning`` or ``direct`` (no rationale); None as the checkpoint was trained.
            instruction: put before every question; None takes the one of `task`, or the most frequent one of training.
                An empty string puts nothing. One that training did not have is used, with a warning.
            task: name of a task of training (``rge.json`` lists them) whose instruction is to be used.
            dimensions: keep so many leading components, a size that the checkpoint was trained to be cut to.
            return_rationales: return the rationales too.
            as_tensor: torch instead of numpy.
            batch_size: rows a forward.
            seeds: one a query, needed for sampling (``temperature=`` of `from_pretrained`).
            progress: show a bar; None shows one for long lists on a terminal.

        Returns:
            Unit-norm float32 embeddings, (N, D), or (D,) for one question; with `return_rationales` a pair of them and
            the rationales (a list of N texts, or one text).

        Raises:
            ValueError: wrong arguments, or an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        single, rows = _rows(texts, images)
        asked, warning = self.instruction_for(instruction, task)
        if warning:
            warnings.warn(warning, stacklevel=2)
        items = _Items(rows, asked)
        mode = mode or self.query_mode
        return self._answer(
            items,
            "query",
            mode,
            single,
            dimensions,
            return_rationales,
            as_tensor,
            batch_size,
            seeds,
            progress,
        )

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
        """Embed candidates: texts, pictures, or both; arguments and results as of `encode_query`.

        Args:
            texts: a text, or N of them; None for pictures alone.
            images: with one text, its picture or pictures; without texts, one picture or N entries.
            mode: candidates are trained without a rationale.
            dimensions: as of `encode_query`.
            return_rationales: as of `encode_query`.
            as_tensor: as of `encode_query`.
            batch_size: as of `encode_query`.
            seeds: as of `encode_query`.
            progress: as of `encode_query`.
        """
        single, rows = _rows(texts, images)
        items = _Items(rows)
        return self._answer(
            items,
            "candidate",
            mode,
            single,
            dimensions,
            return_rationales,
            as_tensor,
            batch_size,
            seeds,
            progress,
        )

    @staticmethod
    def similarity(queries: Any, documents: Any) -> Any:
        """Cosine similarities of unit-norm embeddings: (N, M), or fewer axes for single ones; numpy or torch as given."""
        return queries @ documents.T

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the checkpoint with its model card.

        Args:
            repo_id: ``user/name``; made if it does not exist.
            private: for a new one.
            token: of the hub; None takes the one that ``hf auth login`` stored.

        Returns:
            The commit's address.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            # links: only the card differs, whose examples name the checkpoint as it is called there
            for path in self.checkpoint.iterdir():
                (Path(folder) / path.name).symlink_to(path.resolve())
            card = self.checkpoint / "README.md"
            if card.is_file():
                (Path(folder) / card.name).unlink()
                text = card.read_text(encoding="utf-8")
                (Path(folder) / card.name).write_text(renamed_card(text, repo_id), encoding="utf-8")
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))

    def instruction_for(self, given: str | None, task: str | None = None) -> tuple[str | None, str | None]:
        """The instruction that a query gets, and what there is to say about it.

        Args:
            given: by the caller; an empty one is none.
            task: name of a task of training, where nothing is given.

        Returns:
            The instruction, and a warning where training did not know it.

        Raises:
            ValueError: an unknown task.
        """
        known = self.settings.get("instructions")
        if given is not None:
            if given and known and given not in known["known"]:
                return given, (
                    f"{self.checkpoint.name} was not trained with the instruction {given!r}; known are "
                    + "; ".join(map(repr, known["known"][:8]))
                )
            return given or None, None
        if task is not None:
            tasks = known["by_task"] if known else {}
            if task not in tasks:
                raise ValueError(
                    f"{self.checkpoint} knows no task {task!r}; known are {', '.join(tasks) or 'none'}"
                )
            return tasks[task], None
        if known is None and "recipe" in self.settings and self.settings["recipe"]:
            return None, (
                f"{self.checkpoint.name} does not say with which instructions it was trained (an older export): give "
                "instruction="
            )
        return self.default_instruction, None

    def cut(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        """The leading components of embeddings (N, D), of unit norm again.

        Raises:
            UserError: a size that the checkpoint was not trained for.
        """
        self.check_dimensions(dimensions)
        if dimensions is None or dimensions == self.size:
            return vectors
        vectors = vectors[:, :dimensions]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _answer(
        self, items, side, mode, single, dimensions, return_rationales, as_tensor, batch_size, seeds, progress
    ):  # fmt: skip
        self.check_dimensions(dimensions)
        if progress is None:
            progress = len(items) > 4 * batch_size and sys.stderr.isatty()
        with progress_bar(total=len(items), disable=not progress, unit="item") as bar:
            found = self.encode(
                items, side=side, mode=mode, batch_size=batch_size, seeds=seeds, on_progress=bar.update
            )
        vectors = self.cut(found.embeddings, dimensions)
        answer: np.ndarray | Tensor = torch.from_numpy(vectors) if as_tensor else vectors
        if not return_rationales:
            return answer[0] if single else answer
        return (answer[0], found.rationales[0]) if single else (answer, found.rationales)

    def encode(
        self,
        items: Sequence[Item],
        *,
        side: Literal["query", "candidate"],
        mode: Literal["reasoning", "direct"],
        batch_size: int = 64,
        seeds: Sequence[int] | None = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> Encoded:
        """Embed items. A row does not depend on the other rows, on the batch size or on padding, but for rounding.

        Where ``self.exact`` is set it does not depend on them in the last bit either: every state is computed with its
        row alone. Rationales are still written in batches, in float32; one that a rounding error might have changed
        (`CLOSE`) is written again alone. In other dtypes all of them are.

        Args:
            items: what to embed.
            side: decides the wording of the prompt.
            mode: ``reasoning`` lets the model write a rationale first; ``direct`` prefills ``<emb>``.
            batch_size: rows a forward.
            seeds: one an item, needed where the settings ask for sampling.
            on_progress: called with the number of items just finished.

        Returns:
            Embeddings and what was written, in the order of the items.

        Raises:
            ValueError: an unknown mode, an item that cannot be embedded.
            ImageError: a picture cannot be read.
        """
        if mode not in ("reasoning", "direct"):
            raise ValueError(f"mode must be reasoning or direct, got {mode!r}")
        if self.exact and self.engine is not None:
            raise ValueError(
                "exact embeddings are computed row by row, which vLLM does not do: use engine=own"
            )
        num = len(items)
        found = Encoded(
            embeddings=np.empty((num, self.size), np.float32),
            rationales=[""] * num,
            num_rationale_tokens=np.zeros(num, np.int64),
            stop_reasons=[""] * num,
            generate_ms=np.zeros(num),
            embed_ms=np.zeros(num),
        )
        window = WINDOW_BATCHES * batch_size
        jobs = (
            Job(
                items[start : start + window],
                side,
                mode,
                batch_size,
                None if seeds is None else seeds[start : start + window],
                self.exact,
            )
            for start in range(0, num, window)
        )

        def put(number: int, part: Encoded) -> None:
            rows = slice(number * window, number * window + len(part.rationales))
            for field in fields(Encoded):
                getattr(found, field.name)[rows] = getattr(part, field.name)

        self._run(jobs, put, on_progress)
        return found

    def _run(
        self,
        jobs: Iterable[Job],
        put: Callable[[int, Encoded], object],
        on_progress: Callable[[int], object] | None,
    ) -> None:
        for number, job in enumerate(jobs):
            put(number, self._window(job, on_progress))

    def _window(self, job: Job, on_progress: Callable[[int], object] | None) -> Encoded:
        began = time.perf_counter()
        prompts = [self.builder.build(item, job.side) for item in job.items]
        if num_cut := sum(prompt.num_cut_tokens > 0 for prompt in prompts):
            warnings.warn(
                f"{num_cut} of {len(prompts)} prompts had more than {self.builder.max_tokens} tokens and lost the end of their text",
                stacklevel=2,
            )
        prepare_ms = (time.perf_counter() - began) * 1000 / len(prompts)
        return self._prompts(prompts, job.mode, job.batch_size, prepare_ms, job.seeds, on_progress)

    def encode_prompts(
        self, prompts: Sequence[Prompt], *, mode: Literal["reasoning", "direct"], batch_size: int = 64
    ) -> Encoded:
        """Embed prompts that `builder` has made before, as a server does, which makes them where they come in.

        Args:
            prompts: of items, at least one.
            mode: as of `encode`.
            batch_size: rows a forward.
        """
        return self._prompts(prompts, mode, batch_size, 0.0, None, None)

    def _prompts(
        self,
        prompts: Sequence[Prompt],
        mode: Literal["reasoning", "direct"],
        batch_size: int,
        prepare_ms: float,
        seeds: Sequence[int] | None,
        on_progress: Callable[[int], object] | None,
    ) -> Encoded:
        if mode == "direct":
            results = self._direct(prompts, batch_size, prepare_ms, on_progress)
        else:
            results = self._reasoning(prompts, batch_size, prepare_ms, seeds, on_progress)
        states, rationales, num_tokens, stop_reasons, generate_ms, embed_ms = zip(*results, strict=True)
        return Encoded(
            embeddings=np.stack(states),
            rationales=list(rationales),
            num_rationale_tokens=np.array(num_tokens, dtype=np.int64),
            stop_reasons=list(stop_reasons),
            generate_ms=np.array(generate_ms, dtype=np.float64),
            embed_ms=np.array(embed_ms, dtype=np.float64),
        )

    def _reasoning(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        prepare_ms: float,
        seeds: Sequence[int] | None,
        on_progress: Callable[[int], object] | None,
    ) -> list[_Row]:
        settings = self.settings["generation"]
        asked = {key: settings[key] for key in ("max_new_tokens", "temperature")}
        least = settings.get("min_new_tokens", 0)
        together = batch_size if not self.exact or self.settings["dtype"] == "float32" else 1
        if self.engine is not None:
            if least:
                raise UserError("engine=vllm cannot be kept from writing nothing: use engine=own")
            rationales = self.engine.generate(prompts, **asked, seeds=seeds)
            if on_progress is not None:
                on_progress(len(prompts))
        else:
            rationales = generate(
                self.model,
                prompts,
                **asked,
                batch_size=together,
                seeds=seeds,
                on_progress=on_progress,
                margins=self.exact and together > 1,
                min_new_tokens=least,
            )
        read_ms = [0.0] * len(rationales)
        if self.exact:
            close = CLOSE["drawn" if asked["temperature"] > 0 else "greedy"]
            for row, rationale in enumerate(rationales):
                if rationale.margin < close:
                    own = None if seeds is None else [seeds[row]]
                    rationales[row] = generate(
                        self.model, [prompts[row]], **asked, batch_size=1, seeds=own, min_new_tokens=least
                    )[0]
            for row, rationale in enumerate(rationales):
                state, read_ms[row] = self._state(prompts[row], rationale.ids)
                rationales[row] = replace(rationale, state_D=state)
        return [
            (
                cast(Tensor, rationale.state_D).float().cpu().numpy(),
                self.builder.decode(rationale.ids),
                len(rationale.ids),
                "forced" if rationale.forced else "emb",
                rationale.seconds * 1000,
                prepare_ms + ms,
            )
            for rationale, ms in zip(rationales, read_ms, strict=True)
        ]

    @torch.no_grad()
    def encode_after(
        self, prompts: Sequence[Prompt], rationales: Sequence[Sequence[int]], *, batch_size: int = 64
    ) -> np.ndarray:
        """Embeddings (N, D) of prompts after given rationales, whoever wrote them.

        Args:
            prompts: of `builder`.
            rationales: token ids, without ``<emb>``; empty ones are what direct mode reads.
            batch_size: rows a forward.
        """
        if self.engine is not None:
            return torch.stack(self.engine.states(prompts, rationales)).numpy()
        lengths = [
            len(prompt) + len(rationale) for prompt, rationale in zip(prompts, rationales, strict=True)
        ]
        found = np.empty((len(prompts), self.size), np.float32)
        for rows in by_length(lengths, batch_size):
            branches = [[Branch([*rationales[row], self.model.emb_id], read_state=True)] for row in rows]
            packed = self.model.pack([prompts[row] for row in rows], branches)
            found[rows] = self.model(packed)[0].state_ND.float().cpu().numpy()
        return found

    @torch.no_grad()
    def _state(self, prompt: Prompt, ids: Sequence[int]) -> tuple[Tensor, float]:
        """State (D,) after a rationale, computed alone, and milliseconds."""
        began = time.perf_counter()
        packed = self.model.pack([prompt], [[Branch([*ids, self.model.emb_id], read_state=True)]])
        state = self.model(packed)[0].state_ND[0]
        return state, (time.perf_counter() - began) * 1000

    @torch.no_grad()
    def _direct(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        prepare_ms: float,
        on_progress: Callable[[int], object] | None,
    ) -> list[_Row]:
        if self.engine is not None:
            began = time.perf_counter()
            states = self.engine.states(prompts)
            embed_ms = prepare_ms + (time.perf_counter() - began) * 1000 / len(prompts)
            if on_progress is not None:
                on_progress(len(prompts))
            return [(state.numpy(), "", 0, "prefilled", 0.0, embed_ms) for state in states]
        branch = Branch([self.model.emb_id], read_state=True)
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: dict[int, _Row] = {}
        together = 1 if self.exact else batch_size
        for start in range(0, len(order), together):
            rows = order[start : start + together]
            began = time.perf_counter()
            packed = self.model.pack([prompts[row] for row in rows], [[branch]] * len(rows))
            states = self.model(packed)[0].state_ND.float().cpu().numpy()
            embed_ms = (time.perf_counter() - began) * 1000 / len(rows)
            for row, state in zip(rows, states, strict=True):
                found[row] = (state, "", 0, "prefilled", 0.0, prepare_ms + embed_ms)
            if on_progress is not None:
                on_progress(len(rows))
        return [found[row] for row in range(len(prompts))]


class _SpreadEmbedder(Embedder):
    """An `Embedder` whose model is in worker processes, one a device; it has neither `model` nor `builder` itself."""

    def __init__(self, checkpoint: Path, settings: dict[str, Any], devices: Sequence[str]):
        self._describe(checkpoint, settings)
        threads = max(1, torch.get_num_threads() // len(devices))
        self._workers = Workers(partial(_worker, checkpoint, settings, threads), devices)

    @property
    def size(self) -> int:
        return read_config(self.checkpoint).get_text_config().hidden_size

    def close(self) -> None:
        self._workers.close()

    def _run(
        self,
        jobs: Iterable[Job],
        put: Callable[[int, Encoded], object],
        on_progress: Callable[[int], object] | None,
    ) -> None:
        self._workers.run(jobs, put, on_progress)


def _worker(folder: Path, settings: dict[str, Any], threads: int, device: str) -> Work:
    """What a worker does, see `rge.distributed.workers`."""
    if device == "cpu":
        torch.set_num_threads(threads)
    embedder = Embedder._load(folder, settings, device)

    def embed(job: Job, on_progress: Callable[[int], object]) -> Encoded:
        embedder.exact = job.exact
        return embedder._window(job, on_progress)

    return embed


def _vllm(
    model: EmbeddingModel, folder: Path, device: str, settings: dict[str, Any], memory: float, rows: int
) -> "VllmStates":
    """The checkpoint in vLLM; of `model`, what vLLM does not hold moves to the device.

    Raises:
        BackboneError: vLLM is not installed, does not know the family's pictures, or does not start.
    """
    if find_spec("vllm") is None:
        raise BackboneError(
            "engine=vllm needs vLLM, which is not installed: pip install -e '.[vllm]', in an environment of its own since it "
            "pins torch and transformers (without a GPU: see docs/serving.md); or use engine=own"
        )
    collapsed_ids(model.model, [])  # an unsupported family is an error before anything is started
    from rge.rollout.vllm_states import VllmStates

    try:
        return VllmStates(
            model,
            folder,
            device=device,
            dtype=settings["dtype"],
            max_prompt_tokens=settings["max_prompt_tokens"],
            max_new_tokens=settings["generation"]["max_new_tokens"],
            batch_size=rows,
            memory=memory,
        )
    except (ValueError, RuntimeError) as error:
        raise BackboneError(
            f"engine=vllm: vLLM does not start with vllm_memory={memory:g}: {error}"
        ) from error


def local_folder(checkpoint: str | Path, revision: str | None) -> Path:
    """The checkpoint's directory; one on the hub is fetched into the hub's cache."""
    folder = checkpoint_folder(Path(checkpoint).expanduser())
    name = str(checkpoint)
    if (
        folder.exists()
        or isinstance(checkpoint, Path)
        or name.startswith((".", "/", "~"))
        or name.count("/") != 1
    ):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(snapshot_download(name, revision=revision))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is no directory here, and could not be fetched from the Hugging Face hub: {reason}"
        ) from error


def _rows(texts: Any, images: Any) -> tuple[bool, list[tuple[str | None, tuple[Any, ...]]]]:
    """Whether one item was given, and each item's text and pictures."""
    if texts is None and images is None:
        raise ValueError("give texts, images, or both")
    if isinstance(texts, str):
        return True, [(texts, _pictures(images))]
    if texts is None and _is_picture(images):
        return True, [(None, _pictures(images))]
    texts = None if texts is None else list(texts)
    images = None if images is None else list(images)
    for name, values in (("texts", texts), ("images", images)):
        if values is not None and (texts is not None and len(values) != len(texts)):
            raise ValueError(
                f"{len(texts)} texts and {len(values)} {name}: one entry an item, None where there is none"
            )
    count = len(texts) if texts is not None else len(images or [])
    for text in texts or ():
        if text is not None and not isinstance(text, str):
            raise ValueError(f"a text must be a string, got {type(text).__name__}")
    return False, [
        (texts[row] if texts else None, _pictures(images[row] if images else None)) for row in range(count)
    ]


class _Items(Sequence[Item]):
    """Items of a caller. A picture on the web is fetched when its items' turn comes."""

    def __init__(self, rows: Sequence[tuple[str | None, tuple[Any, ...]]], instruction: str | None = None):
        self.rows, self.instruction = rows, instruction

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        """One item, or a list of them."""
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        text, pictures = self.rows[at]
        return Item(str(at), text, tuple(map(_fetched, pictures)), self.instruction)


def _fetched(picture: Any) -> Any:
    on_the_web = isinstance(picture, str) and picture.startswith(("http://", "https://", "data:"))
    return fetch_picture(picture) if on_the_web else picture


def _is_picture(value: Any) -> bool:
    return isinstance(value, str | bytes | Path | Image.Image)


def _pictures(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(_picture(one) for one in ([value] if _is_picture(value) else value))


def _picture(value: Any) -> Any:
    if not _is_picture(value):
        raise ValueError(
            f"a picture is a path, a web address, bytes or a PIL image, got {type(value).__name__}"
        )
    return str(value) if isinstance(value, Path) else value
