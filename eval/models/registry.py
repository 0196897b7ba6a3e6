"""Find the adapter for a model: our checkpoints, and other families.

    load_model("runs/demo/joint/final")          # rge.json -> rge
    load_model("openai/clip-vit-large-patch14")  # config.json -> clip
    load_model("DIR", adapter="vlm2vec")         # an explicit choice

A name is a directory or an id on the Hugging Face hub, which is fetched into the hub's cache. What the files say of
themselves decides the adapter; the choice, the revision and the wording go into ``results.json``. Nothing of a family
is imported before it is used. `register_embedder` adds one, also from a module of the user's (docs/extending.md).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from eval.embedding.fill_cache import Embeds
from eval.sets.retrieval_set import RetrievalSet
from rge.common.errors import UserError
from rge.common.files import checkpoint_folder, read_json
from rge.common.options import one_of
from rge.common.prompt_profiles import PROFILES
from rge.common.registry import Registry

RELEASED = "qwen2_5_vl"
"""Architecture of the released RGE checkpoint."""
QWEN = ("qwen2_vl", "qwen2_5_vl")
ON_THE_HUB = {"MCG-NJU/RGE": "lcxrocks/RGE"}
"""Names that a paper or a repository goes by -> where its weights are, which is tried when the name itself is not there."""
NOT_HERE = {
    "phi3_v": "VLM2Vec and UniME on Phi-3.5-V are such models. Model and picture processor are code of their own "
    "repository, which transformers does not have and which is not run here. VLM2Vec on Qwen's models is supported "
    "(VLM2Vec/VLM2Vec-Qwen2VL-2B, VLM2Vec/VLM2Vec-V2.0)",
}
"""Known architectures -> why no adapter takes them."""
GUESSED = {
    "rge-release": "{name} has no rge.json and was taken for the released RGE checkpoint because it knows <emb>: its prompt, "
    "256 to 1024 patches a picture, 128 tokens. A checkpoint trained here has a rge.json; without it prompt, sizes "
    "and cap are another model's. adapter=rge-release says that it is meant",
    "qwen-vl": "{name} says of itself only that it is a {model_type}: it is asked with RGE's wording, last token",
    "vlm2vec": "{name} is asked as VLM2Vec because it is a LoRA on a Qwen model or is named so; adapter=vlm2vec says it",
}
"""Adapters whose models' files do not say whose they are -> a warning that it is a guess."""
FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")
"""What of a hub repository is fetched."""


@dataclass(frozen=True)
class Facts:
    """What a model's files say of it.

    Attributes:
        path: its directory.
        name: what the user wrote.
        revision: commit on the hub; None for a directory.
        model_type: of ``config.json``, or of the base model where there is only a LoRA; empty if neither says.
        files: relative names.
        tokens: added tokens of the tokenizer.
        base: of the model that a LoRA belongs to; None for a model with weights of its own.
        fetched: name that the hub knows it by, where that is not ``name``.
    """

    path: Path
    name: str
    revision: str | None
    model_type: str
    files: frozenset[str]
    tokens: frozenset[str]
    base: "Facts | None" = None
    fetched: str | None = None


@dataclass(frozen=True)
class Adapter:
    """How one family is recognised and loaded.

    Attributes:
        name: what ``adapter=`` takes.
        about: one line for the command's help and error messages.
        matches: whether a model is of this family; the first adapter that says yes is taken.
        target: called with `Facts` and the keywords of `load_model`; ``module:function`` is imported when needed.
        released: the same for ``as=release``; None where that does not exist.
    """

    name: str
    about: str
    matches: Callable[[Facts], bool]
    target: str | Callable[..., Embeds]
    released: str | None = None

    def load(self, facts: Facts, *, as_released: bool = False, **options: Any) -> Embeds:
        """Load a model of this family.

        Raises:
            UserError: as its release asks it, which is not known.
        """
        target = self.released if as_released else self.target
        if target is None:
            raise UserError(
                f"adapter={self.name} has no as=release, only {', '.join(one.name for one in adapters() if one.released)}"
            )
        if callable(target):
            return target(facts, **options)
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)(facts, **options)


OURS = (
    Adapter(
        "rge",
        "a finished checkpoint of rge: a directory with rge.json",
        lambda facts: "rge.json" in facts.files,
        "eval.models.rge:load_own",
    ),
    Adapter(
        "rge-release",
        "the released RGE checkpoint: Qwen2.5-VL with an <emb> token, without rge.json",
        lambda facts: facts.model_type == RELEASED and "<emb>" in facts.tokens,
        "eval.models.rge:load_release",
        "eval.models.released:load_as_released",
    ),
    Adapter(
        "ume-r1",
        "UME-R1: Qwen2-VL with <gen_emb> and <disc_emb>; reasoning is its generative mode, direct its discriminative one",
        lambda facts: facts.model_type in QWEN and {"<gen_emb>", "<disc_emb>"} <= facts.tokens,
        "eval.models.ume:load_ume",
    ),
    Adapter(
        "vlm2vec",
        "VLM2Vec on Qwen's models: a LoRA, or a name with vlm2vec in it; last token, no chat template",
        lambda facts: (
            facts.model_type in QWEN and ("config.json" not in facts.files or "vlm2vec" in facts.name.lower())
        ),
        "eval.models.qwen:load_vlm2vec",
    ),
    Adapter(
        "qwen-vl",
        "plain Qwen2-VL, Qwen2.5-VL, Qwen3-VL: last token of the chat template",
        lambda facts: facts.model_type in (*QWEN, "qwen3_vl", "qwen3_vl_moe"),
        "eval.models.qwen:load_plain",
    ),
    Adapter(
        "clip",
        "CLIP, SigLIP, SigLIP 2: text and picture features added",
        lambda facts: facts.model_type in ("clip", "siglip", "siglip2"),
        "eval.models.clip:load_clip",
    ),
    Adapter(
        "sentence-transformers",
        "any model of that library (modules.json), most of them of texts only; asked with its own prompts",
        lambda facts: "modules.json" in facts.files,
        "eval.models.sentence:load_sentences",
    ),
)


EMBEDDERS: Registry[Adapter] = Registry("adapter", "rge.embedders")
for _one in OURS:
    EMBEDDERS.add(_one.name, _one)

Loader = TypeVar("Loader", bound=Callable[..., Embeds])


def register_embedder(
    name: str, *, about: str, matches: Callable[[Facts], bool]
) -> Callable[[Loader], Loader]:
    """Decorator that makes a function the loader of a family of embedders.

    The function gets `Facts` and ``device``, ``dtype``, ``max_new_tokens`` and ``temperature`` of `load_model`, and
    returns something that `Embeds`; see `eval.models.common.DirectEncoder` for one that writes no rationale.

    The other arguments are those of `Adapter`; families added here are asked before ours.

    Raises:
        UserError: the name is taken.
    """

    def register(load: Loader) -> Loader:
        EMBEDDERS.add(name, Adapter(name, about, matches, load))
        return load

    return register


def adapters() -> list[Adapter]:
    """All families in the order in which they are asked whether a model is theirs: ours last."""
    return sorted(EMBEDDERS.values(), key=lambda one: one in OURS)


def load_model(
    model: str | Path,
    *,
    adapter: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    as_released: bool = False,
    base: str | None = None,
    engine: str = "own",
    **of_engine: Any,
) -> Embeds:
    """Load any embedder that there is an adapter for.

    ``model``: directory, or id on the Hugging Face hub; None as a dtype or cap takes the model's own. ``of_engine``: its
    ``vllm_memory`` and ``vllm_rows``. The others are as in `ModelOptions`.

    Raises:
        UserError: there is no such model, no adapter for it, or an option that it has no use for.
    """
    # looked up first: an unknown name is an error before anything is fetched
    asked = None if adapter is None else EMBEDDERS[adapter]
    facts = facts_of(model, revision, base)
    chosen = _chosen(facts, asked)
    options = {"device": device, "dtype": dtype, "max_new_tokens": max_new_tokens, "temperature": temperature}
    if engine != "own":
        if chosen.name != "rge":
            raise UserError(
                f"engine={engine} is for checkpoints of rge, and {model} is asked as {chosen.name}"
            )
        options |= {"engine": engine, **of_engine}
    if base is not None and facts.base is None:
        if chosen.name != "rge":
            raise UserError(f"base={base} is for adapters, and {model} has all its weights")
        options["base"] = base
    encoder = chosen.load(facts, as_released=as_released, **options)
    notes = []
    if facts.fetched:
        notes.append(f"{model} was fetched as {facts.fetched}, since the hub has nothing by its own name")
    if asked is None and chosen.name in GUESSED:
        notes.append(GUESSED[chosen.name].format(name=facts.name, model_type=facts.model_type))
    encoder.settings = encoder.settings.but(device=_device(device), notes=notes)
    return encoder


@dataclass(kw_only=True)
class ModelOptions:
    """What a command that embeds is told of the embedder: which one, how it is loaded and how it is asked."""

    checkpoint: Path | None = None
    """Checkpoint directory with ``rge.json``, or ``demo``; equivalent to model=DIR."""
    model: str | None = None
    """Any embedder of `eval.models.registry`: a directory, or an id on the Hugging Face hub."""
    adapter: str | None = None
    """How that embedder is prompted; null: inferred from its files."""
    as_: Literal["release"] | None = None
    """release: prompt the released RGE checkpoint as its authors' own evaluation does (`eval.models.released`), with
    MMEB imported with verbatim=true; null: as rge prompts every model of that kind."""
    revision: str | None = None
    """Commit, tag or branch of an id on the hub."""
    base: str | None = None
    """Directory or hub id of the base model of adapters (a checkpoint of rge, or a LoRA); null: the one in their files."""
    batch_size: int = 32
    """Items embedded, and rationales written, at once; affects speed and memory, not the embeddings."""
    exact: bool | None = None
    """Embed every item alone, so that run.trec is the same to the last digit for any batch_size= and number of
    processes; null: only in float32 on a CPU. Without it, embeddings differ by rounding (about 1e-6)."""
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of the weights; null: float32 on CPU, the recipe's on GPU."""
    engine: Literal["own", "vllm"] = "own"
    """What writes the rationales of a checkpoint of rge: the model itself, or vLLM (docs/serving.md)."""
    vllm_memory: float = 0.5
    """Share of a GPU's memory for vLLM, which holds a second copy of the language model and its cache."""
    max_new_tokens: int | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    temperature: float | None = None
    """Sampling temperature of rationales; null: the checkpoint's setting, which is greedy."""
    prompts: str | None = None
    """Prompt profile; null: the set's if it names one, else the checkpoint's."""

    def check_model(self) -> None:
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UserError: naming the option and the fix.
        """
        if self.prompts is not None:
            one_of("prompts", [self.prompts], tuple(PROFILES))
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.exact and self.engine != "own":
            raise UserError("exact=true embeds every item alone, which vLLM does not do: use engine=own")
        if (self.checkpoint is None) == (self.model is None):
            given = "neither" if self.model is None else f"{self.checkpoint} and {self.model}"
            raise UserError(f"give checkpoint=DIR or model=NAME, got {given}")

    def loader(self) -> Callable[..., Embeds]:
        """`load_model` with what only it knows; `load` gives it the rest.

        Raises:
            UserError: ``checkpoint`` is no finished checkpoint.
        """
        if self.checkpoint is not None:
            _check_checkpoint(checkpoint_folder(self.checkpoint), self.adapter)
        asked: dict[str, Any] = {"engine": self.engine}
        if self.engine != "own":
            asked |= {"vllm_memory": self.vllm_memory, "vllm_rows": self.batch_size}
        return partial(
            load_model,
            adapter=self.adapter,
            revision=self.revision,
            base=self.base,
            as_released=self.as_ == "release",
            **asked,
        )

    def load(self, wanted: RetrievalSet, load: Callable[..., Embeds] | None = None) -> Embeds:
        """The embedder, ready to ask as the options and the set want; ``load`` takes the place of `loader`.

        Raises:
            UserError: there is no such embedder, or it does not read texts as the set has them.
        """
        verbatim = wanted.meta.get("prompts") == "verbatim"
        if verbatim and self.as_ != "release":
            raise UserError(
                f"{wanted.path} was imported with verbatim=true: its texts hold places for pictures, which only as=release reads"
            )
        name = self.model if self.checkpoint is None else checkpoint_folder(self.checkpoint)
        encoder = (load or self.loader())(
            str(name),
            device=self.device,
            dtype=self.dtype,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
        )
        told, given = encoder.settings, wanted.meta.get("instructions")
        if verbatim and given != told.mmeb_instructions:
            raise UserError(
                f"{wanted.path} was imported with instructions={given}; as=release needs instructions={told.mmeb_instructions}"
            )
        in_full = self.engine == "own" and (told.dtype, told.device) == ("float32", "cpu")
        exact = in_full if self.exact is None else self.exact
        profile = self.prompts or wanted.meta.get("prompts")
        return encoder.with_(exact=exact or None, profile=None if profile == told.profile else profile)


def _check_checkpoint(checkpoint: Path, adapter: str | None) -> None:
    if not checkpoint.is_dir():
        raise UserError(
            f"checkpoint {checkpoint} does not exist; model=NAME also takes an id on the Hugging Face hub"
        )
    if adapter is None and not (checkpoint / "rge.json").is_file():
        raise UserError(
            f"checkpoint {checkpoint} has no rge.json, which says how it is asked: it is not finished, or lost it on the "
            "way. An embedder of others is named by model="
        )


def _chosen(facts: Facts, asked: Adapter | None) -> Adapter:
    """The family that was asked for, else the first that a model's files fit.

    Raises:
        UserError: there is none, or its model code is not here.
    """
    chosen = asked or _recognised(facts)
    if facts.model_type in NOT_HERE and chosen in (None, *OURS):
        raise UserError(
            f"{facts.name} is a {facts.model_type}: {NOT_HERE[facts.model_type]}. A ranking made by the model's own code goes "
            "through `rge eval score`; docs/extending.md shows how to add an embedder"
        )
    if chosen is None:
        kinds = "\n".join(f"  {one.name}: {one.about}" for one in adapters())
        raise UserError(
            f"{facts.name} ({facts.model_type or 'no model_type in config.json'}) is none of the known embedders, which are\n"
            f"{kinds}\nadapter=NAME chooses one; a ranking made by any other program goes through `rge eval score`"
        )
    return chosen


def _recognised(facts: Facts) -> Adapter | None:
    """The first family that a model's files fit.

    Raises:
        UserError: the files are of a checkpoint of rge that lost its rge.json.
    """
    if "<emb>" in facts.tokens and "rge.json" not in facts.files and facts.model_type != RELEASED:
        raise UserError(
            f"{facts.name} knows <emb>, so it was trained by rge, but its rge.json is missing, which says how it is asked; it "
            f"is not the released RGE checkpoint either, which is a {RELEASED}. Copy rge.json from where it was trained"
        )
    return next((one for one in adapters() if one.matches(facts)), None)


def _device(device: str | None) -> str:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def facts_of(model: str | Path, revision: str | None = None, base_named: str | None = None) -> Facts:
    """Look at a model's files, fetching them from the hub where ``model`` is no directory; of a LoRA, at its base's too.

    Raises:
        UserError: there is no such directory and no such id, or a file is broken.
    """
    path, commit, fetched = Path(model), None, None
    if not path.is_dir():
        path, commit, fetched = _fetch(str(model), revision)
    elif revision is not None:
        raise UserError(f"revision={revision} is for models on the hub, {model} is a directory")
    files = frozenset(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    config, base = _json(path / "config.json"), None
    if not config:
        base = _base_of(path, base_named)
        config = _json(base.path / "config.json") if base else {}
    kind = str(config.get("model_type") or "")
    return Facts(path, str(model), commit, kind, files, _tokens(path), base, fetched)


def _base_of(lora: Path, named: str | None) -> Facts | None:
    """The model that a LoRA belongs to: the one that the user names, else that of its files; None for anything else."""
    told = _json(lora / "adapter_config.json")
    own = told.get("base_model_name_or_path") or ""
    name = (named or own) if told else ""
    if not name or Path(name) == lora:
        return None
    return facts_of(name, told.get("revision") if name == own and not Path(name).is_dir() else None)


def _fetch(model: str, revision: str | None) -> tuple[Path, str, str | None]:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(
            f"model {model} does not exist: give a directory, or an id on the Hugging Face hub (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    first: Exception | None = None
    for name in dict.fromkeys((model, ON_THE_HUB.get(model, model))):  # its own name first
        try:
            found = Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            first = first or error
            continue
        return found, found.name, None if name == model else name  # the cache names a snapshot by its commit
    raise UserError(
        f"model {model} is neither a directory nor could it be fetched from the hub: {str(first).splitlines()[0]}"
    ) from None


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _tokens(path: Path) -> frozenset[str]:
    """Added tokens, from whichever of the three files a tokenizer was saved with."""
    listed = _json(path / "tokenizer.json").get("added_tokens") or []
    decoder = _json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found = {str(one.get("content")) for one in [*listed, *decoder.values()]}
    return frozenset(found | set(_json(path / "added_tokens.json")))
