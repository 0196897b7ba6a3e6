"""Find the adapter for a model: our checkpoints, and other families.

    load_model("runs/demo/joint/final")          # rge.json -> rge
    load_model("openai/clip-vit-large-patch14")  # config.json -> clip
    load_model("DIR", adapter="vlm2vec")         # an explicit choice

A name is a directory or an id on the Hugging Face hub, which is fetched into the hub's cache. The adapter is inferred from
the files; adapter, revision and prompts are recorded in ``results.json``. Families are imported on use. `register_embedder`
adds a family, also from a plugin (docs/extending.md).
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from rge.checkpoints.settings import read_settings
from rge.common.errors import Fault, UserError
from rge.common.files import checkpoint_folder, read_json
from rge.common.options import AtLeastOne, NotNegative, Share, one_of
from rge.common.prompt_profiles import PROFILES
from rge.common.registry import Registry
from rge.vectors.fill_cache import Cluster, Embeds

RELEASED = "qwen2_5_vl"
"""Architecture of the released RGE checkpoint."""
QWEN = ("qwen2_vl", RELEASED)
CLIPS = ("clip", "metaclip_2", "siglip", "siglip2")
Combine = Literal["sum", "weighted", "slerp"]
GUESSED = {
    "rge-release": "{name} has no rge.json and is treated as the released RGE checkpoint because it has an <emb> token. "
    "A checkpoint trained here needs its rge.json, or its prompt is wrong. adapter=rge-release confirms the choice",
    "qwen-vl": "{name} only identifies itself as a {model_type}: it is prompted with RGE's wording, last token",
    "vlm2vec": "{name} is prompted as VLM2Vec because it is a LoRA on a Qwen model or has that name; adapter=vlm2vec confirms it",
}
"""Adapters whose models cannot be identified with certainty -> warning that it is a guess."""
FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")
"""Patterns of the files to fetch from a hub repository."""


@dataclass(frozen=True)
class Facts:
    """Information about a model from its files."""

    path: Path
    name: str  # as given by the user
    revision: str | None  # commit on the hub; None for a directory
    model_type: str  # from ``config.json``, or that of a LoRA's base model; "" if unknown
    files: frozenset[str]  # relative names
    tokens: frozenset[str]  # added to the tokenizer
    base: "Facts | None" = None  # of a LoRA
    code: tuple[str, ...] = ()  # what its configuration loads from the repository's own Python files


@dataclass(frozen=True)
class Adapter:
    """How one family is recognised and loaded."""

    name: str
    about: str  # one line for help and error messages
    matches: Callable[[Facts], bool]  # the first match is used
    target: str | Callable[..., Embeds]
    """Called with `Facts` and the keywords of `load_model`; ``module:function`` is imported on use."""


OURS = (
    Adapter(
        "rge",
        "a finished checkpoint of rge: a directory with rge.json",
        lambda facts: "rge.json" in facts.files,
        "rge.embedders.rge:load_own",
    ),
    Adapter(
        "rge-release",
        "the released RGE checkpoint: Qwen2.5-VL with an <emb> token, without rge.json",
        lambda facts: facts.model_type == RELEASED and "<emb>" in facts.tokens,
        "rge.embedders.rge:load_release",
    ),
    Adapter(
        "ume-r1",
        "UME-R1: Qwen2-VL with <gen_emb> and <disc_emb>; reasoning is its generative mode, direct its discriminative one",
        lambda facts: facts.model_type in QWEN and {"<gen_emb>", "<disc_emb>"} <= facts.tokens,
        "rge.embedders.ume:load_ume",
    ),
    Adapter(
        "vlm2vec",
        "VLM2Vec on Qwen's models: a LoRA, or a name with vlm2vec in it; last token, no chat template",
        lambda facts: (
            facts.model_type in QWEN and ("config.json" not in facts.files or "vlm2vec" in facts.name.lower())
        ),
        "rge.embedders.qwen:load_vlm2vec",
    ),
    Adapter(
        "own-code",
        "a model whose repository brings its own code, such as GME, BGE-VL, Jina-CLIP: with trust_code=true only",
        lambda facts: bool(facts.code),
        "rge.embedders.own_code:load_own_code",
    ),
    Adapter(
        "qwen-vl",
        "plain Qwen2-VL, Qwen2.5-VL, Qwen3-VL: last token of the chat template",
        lambda facts: facts.model_type in (*QWEN, "qwen3_vl", "qwen3_vl_moe"),
        "rge.embedders.qwen:load_plain",
    ),
    Adapter(
        "clip",
        "CLIP, Meta CLIP 2, SigLIP, SigLIP 2: text and picture features added",
        lambda facts: facts.model_type in CLIPS,
        "rge.embedders.clip:load_clip",
    ),
    Adapter(
        "sentence-transformers",
        "any model of that library (modules.json), most of them of texts only; asked with its own prompts",
        lambda facts: "modules.json" in facts.files,
        "rge.embedders.sentence:load_sentences",
    ),
)


EMBEDDERS: Registry[Adapter] = Registry("adapter", "rge.embedders")
for _one in OURS:
    EMBEDDERS.add(_one.name, _one)

Loader = TypeVar("Loader", bound=Callable[..., Embeds])


def register_embedder(
    name: str, *, about: str, matches: Callable[[Facts], bool]
) -> Callable[[Loader], Loader]:
    """Decorator that registers a function as loader of a family of embedders; it is matched before ours.

    The function gets `Facts` and ``device``, ``dtype``, ``max_new_tokens`` and ``temperature`` of `load_model`, and
    returns something that `Embeds`; see `rge.embedders.common.DirectEncoder` for one without rationales. ``about`` and
    ``matches``: see `Adapter`.
    """

    def register(load: Loader) -> Loader:
        EMBEDDERS.add(name, Adapter(name, about, matches, load))
        return load

    return register


def adapters() -> list[Adapter]:
    """All families in matching order: ours last."""
    return sorted(EMBEDDERS.values(), key=lambda adapter: adapter in OURS)


def load_model(
    model: str | Path,
    *,
    adapter: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    max_prompt_tokens: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    as_released: bool = False,
    base: str | None = None,
    engine: str = "own",
    trust_code: bool = False,
    combine: Combine = "sum",
    text_weight: float | None = None,
    endpoint: str | None = None,
    endpoint_key_env: str | None = None,
    **of_engine: Any,
) -> Embeds:
    """Load any supported embedder; a `UserError` if there is none, or an option does not apply to it.

    ``model``: directory, or id on the Hugging Face hub; a dtype or cap of None means the model's own. ``of_engine``:
    ``vllm_memory`` and ``vllm_rows``. The others are as in `ModelOptions`.
    """
    # first, so that an unknown name is reported before anything is fetched
    requested = None if adapter is None else EMBEDDERS[adapter]
    if endpoint is not None:
        given = {
            "adapter": adapter, "revision": revision, "device": device, "dtype": dtype, "max_new_tokens": max_new_tokens,
            "temperature": temperature, "max_prompt_tokens": max_prompt_tokens, "min_pixels": min_pixels,
            "max_pixels": max_pixels, "as": as_released, "base": base, "engine": engine != "own", "trust_code": trust_code,
            "combine": combine != "sum", "text_weight": text_weight,
        }  # fmt: skip
        if useless := [key for key, value in given.items() if value is not None and value is not False]:
            raise UserError(
                f"{', '.join(useless)}: the model at endpoint={endpoint} decides that itself"
            ).about(*useless)
        served: Embeds = pkgutil.resolve_name("rge.embedders.endpoint:load_endpoint")(
            str(model), endpoint, endpoint_key_env
        )
        return served
    facts = facts_of(model, revision, base, trust_code=trust_code)
    chosen = _chosen(facts, requested)
    options: dict[str, Any] = {
        "device": device, "dtype": dtype, "max_new_tokens": max_new_tokens, "temperature": temperature,
    }  # fmt: skip
    further = {
        ("rge-release", "as=release"): {"as_released": True} if as_released else {},
        ("rge", f"engine={engine}"): {} if engine == "own" else {"engine": engine, **of_engine},
        ("rge", f"base={base}"): {} if base is None or facts.base is not None else {"base": base},
        ("own-code", "trust_code=true"): {"trust_code": True} if trust_code else {},
        ("clip", f"combine={combine}"): {} if combine == "sum" else {"combine": combine},
        ("clip", f"text_weight={text_weight}"): {} if text_weight is None else {"text_weight": text_weight},
    }
    prompts = {"max_prompt_tokens": max_prompt_tokens, "min_pixels": min_pixels, "max_pixels": max_pixels}
    given = {key: value for key, value in prompts.items() if value is not None}
    further |= {("rge", f"{key}={value}"): {key: value} for key, value in given.items()}
    for (only, word), of_one in further.items():
        if of_one and chosen.name != only:
            raise UserError(
                f"{word} is for adapter={only}, but this is loaded as {chosen.name}", model
            ).about(word.partition("=")[0], Fault("choice", "adapter", (only,)))
        options |= of_one
    target = chosen.target
    encoder = (target if callable(target) else pkgutil.resolve_name(target))(facts, **options)
    guess = GUESSED.get(chosen.name) if requested is None else None
    notes = [guess.format(name=facts.name, model_type=facts.model_type)] if guess else []
    encoder.settings = encoder.settings.but(device=_device(device), notes=notes)
    return encoder


@dataclass(kw_only=True)
class ModelOptions:
    """Options of commands that embed: which embedder, how to load it and how to prompt it."""

    checkpoint: Path | None = None
    """Checkpoint directory with ``rge.json``, or ``demo``; equivalent to model=DIR."""
    model: str | None = None
    """Any embedder (docs/evaluation.md lists the kinds): a directory, or an id on the Hugging Face hub."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible endpoint (http://HOST/v1) whose /embeddings serves the model named by model=."""
    endpoint_key_env: str | None = None
    """Environment variable with its key; null: no key."""
    trust_code: bool = False
    """Run Python code from the model's repository, which some embedders need; it runs with your rights."""
    adapter: str | None = None
    """How that embedder is prompted; null: inferred from its files."""
    as_: Literal["release"] | None = None
    """release: prompt the released RGE checkpoint as its authors' own evaluation does (docs/evaluation.md), with MMEB
    imported with verbatim=true; null: as rge prompts every model of that kind."""
    revision: str | None = None
    """Commit, tag or branch of an id on the hub."""
    base: str | None = None
    """Base model of adapters (a checkpoint of rge, or a LoRA): a directory or an id on the hub; null: the one in their files."""
    batch_size: AtLeastOne = 32
    """Items embedded, and rationales written, at once; affects speed and memory, not the embeddings."""
    batch_tokens: AtLeastOne | None = None
    """Most prompt tokens embedded at once, each item counted as the longest, for models whose prompts rge makes; null: no limit."""
    exact: bool | None = None
    """Embed every item alone, so that run.trec is the same to the last digit for any batch_size= and number of
    processes; null: only in float32 on a CPU. Without it, embeddings differ by rounding (about 1e-6)."""
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of the weights; null: float32 on CPU, the recipe's on GPU."""
    engine: Literal["own", "vllm", "ray"] = "own"
    """What embeds: the model itself, with vLLM for its rationales (docs/serving.md), or a copy of it on every device of a cluster, by
    Ray Data (docs/scaling.md), with the same result."""
    address: str | None = None
    """With ``engine=ray``: address of a cluster, ``auto`` for the one that this machine belongs to; null: this machine alone."""
    vllm_memory: float = 0.5
    """Share of a GPU's memory for vLLM, which holds a second copy of the language model and its cache."""
    max_prompt_tokens: AtLeastOne | None = None
    """Cap on a prompt in tokens; null: that of its training. Raise it for queries with several pictures
    (docs/evaluation.md)."""
    min_pixels: AtLeastOne | None = None
    """Smallest picture, width times height after scaling; null: that of its training."""
    max_pixels: AtLeastOne | None = None
    """Largest picture, which determines its number of tokens; null: that of its training."""
    max_new_tokens: AtLeastOne | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    temperature: NotNegative | None = None
    """Sampling temperature of rationales; null: the checkpoint's setting, which is greedy."""
    prompts: str | None = None
    """Prompt profile; null: the set's if it names one, else the checkpoint's."""
    task: str | None = None
    """Training task of a checkpoint of rge whose prompt profile, picture sizes and maximum length to use; ``rge.json`` lists them.
    null: those of most tasks. `prompts`, `min_pixels` and so on go first."""
    query_prompt: str | None = None
    """Words every query for any embedder, in place of its own prompt, such as 'Instruct: {instruction} Query: {text}';
    without {text}, it comes before the text."""
    combine: Combine = "sum"
    """How adapter=clip joins features of a text and of pictures: their sum, or, at unit length, a weighted sum or a point of
    the arc between them (slerp)."""
    text_weight: Share | None = None
    """Share of the text's feature in the last two; 0 is the pictures alone."""

    def check_model(self) -> None:
        """Raise a `UserError` for options that contradict each other, before anything is read."""
        if self.prompts is not None:
            one_of("prompts", [self.prompts], tuple(PROFILES))
        if self.exact and self.engine == "vllm":
            raise UserError(
                "exact=true embeds every item alone, which vLLM does not do: use engine=own"
            ).about("exact")
        if self.endpoint is None and self.endpoint_key_env is not None:
            raise UserError("endpoint_key_env= is the key of endpoint=ADDRESS, which is not given").about(
                "endpoint"
            )
        if (self.combine == "sum") != (self.text_weight is None):
            raise UserError(
                "combine=weighted and combine=slerp need text_weight=, and only they take it"
            ).about("text_weight")
        if self.endpoint is not None and self.model is None:
            raise UserError("endpoint= needs model=NAME, the model's name there").about("model")
        if (self.checkpoint is None) == (self.model is None):
            given = "neither" if self.model is None else f"{self.checkpoint} and {self.model}"
            raise UserError(f"give checkpoint=DIR or model=NAME, got {given}").about("checkpoint", "model")

    def loader(self) -> Callable[[], Embeds]:
        """`load_model` with these options; a `UserError` if ``checkpoint`` is unfinished."""
        if self.checkpoint is not None and self.adapter is None:
            read_settings(checkpoint_folder(self.checkpoint))
        name = self.model if self.checkpoint is None else checkpoint_folder(self.checkpoint)
        keys = (
            "device", "dtype", "max_new_tokens", "temperature", "max_prompt_tokens", "min_pixels", "max_pixels", "adapter",
            "revision", "base", "engine", "trust_code", "combine", "text_weight", "endpoint", "endpoint_key_env",
        )  # fmt: skip
        chosen = {key: getattr(self, key) for key in keys}
        if self.engine == "ray":  # its actors load the model
            chosen["engine"] = "own"
        if self.engine == "vllm":
            chosen |= {"vllm_memory": self.vllm_memory, "vllm_rows": self.batch_size}
        return partial(load_model, str(name), as_released=self.as_ == "release", **chosen)

    def cluster(
        self, meta: Mapping[str, Any] = MappingProxyType({}), named: Path | str = "", **changes: Any
    ) -> Cluster | None:
        """The devices that embed in place of this process, with ``engine=ray``; `changes` are those of `Embeds.with_`."""
        if self.engine != "ray":
            return None
        return Cluster(partial(_load_with, self, dict(meta), named, changes), self.address)

    def load(
        self,
        meta: Mapping[str, Any] = MappingProxyType({}),
        named: Path | str = "",
        load: Callable[[], Embeds] | None = None,
    ) -> Embeds:
        """Load the embedder with the prompts that options and a set require.

        ``meta`` is a retrieval set's ``meta.json``, ``named`` its path for messages; ``load`` replaces `loader`.
        """
        verbatim = meta.get("prompts") == "verbatim"
        if verbatim and self.as_ != "release":
            raise UserError(f"{named} was imported with verbatim=true, which only as=release supports")
        encoder = (load or self.loader())()
        settings, given = encoder.settings, meta.get("instructions")
        if verbatim and given != settings.mmeb_instructions:
            raise UserError(
                f"{named} was imported with instructions={given}; as=release needs instructions={settings.mmeb_instructions}"
            )
        exact = self.exact
        if exact is None:
            exact = self.engine != "vllm" and (settings.dtype, settings.device) == ("float32", "cpu")
        profile = self.prompts or meta.get("prompts")
        encoder = encoder.with_(
            exact=exact or None,
            profile=None if profile == settings.profile else profile,
            batch_tokens=self.batch_tokens,
        )
        if self.task is not None:
            from rge.embedder import Embedder

            if not isinstance(encoder, Embedder):
                raise UserError(f"task={self.task} is for checkpoints of rge: leave it out for other models")
            encoder = encoder.for_task(self.task)
        if self.query_prompt is None:
            return encoder
        if verbatim:
            raise UserError("query_prompt= cannot be used with as=release, whose prompts are fixed")
        prompted: Embeds = pkgutil.resolve_name("rge.embedders.common:Prompted")(encoder, self.query_prompt)
        return prompted


def _load_with(
    options: ModelOptions, meta: Mapping[str, Any], named: Path | str, changes: dict[str, Any]
) -> Embeds:
    return options.load(meta, named).with_(**changes)


def _chosen(facts: Facts, requested: Adapter | None) -> Adapter:
    """The requested family, else the first that matches a model's files."""
    unlike_ours = "<emb>" in facts.tokens and "rge.json" not in facts.files and facts.model_type != RELEASED
    if requested is None and unlike_ours:
        raise UserError(
            f"it has an <emb> token but no rge.json, and is not the released RGE checkpoint, a {RELEASED}: copy its rge.json from "
            "the training output",
            facts.name,
            kind="rge.json",
        )
    chosen = requested or next((adapter for adapter in adapters() if adapter.matches(facts)), None)
    if chosen is None:
        kinds = "\n".join(f"  {adapter.name}: {adapter.about}" for adapter in adapters())
        raise UserError(
            f"it ({facts.model_type or 'no model_type in config.json'}) is not a known embedder. Known are\n{kinds}\n"
            "adapter=NAME chooses one; rankings from any other program can be scored with `rge eval score`",
            facts.name,
            key=facts.model_type,
            kind="unknown",
        )
    return chosen


def _device(device: str | None) -> str:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def facts_of(
    model: str | Path, revision: str | None = None, base_named: str | None = None, *, trust_code: bool = False
) -> Facts:
    """Inspect a model's files, fetched from the hub unless ``model`` is a directory, and those of a LoRA's base.

    Python files are only fetched with ``trust_code``.
    """
    path, commit = Path(model), None
    if not path.is_dir():
        path = _fetch(str(model), revision, trust_code=trust_code)
        commit = path.name  # the cache names a snapshot by its commit
    elif revision is not None:
        why = f"revision={revision} is for models on the hub, and this is a directory"
        raise UserError(why, model).about("revision")
    files = frozenset(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    config = _json(path / "config.json")
    base = None if config else _base_of(path, base_named)
    if base is not None:
        config = _json(base.path / "config.json")
    kind = str(config.get("model_type") or "")
    return Facts(path, str(model), commit, kind, files, _tokens(path), base, _code(path, config))


def _code(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Classes that a model's configuration names in Python files of its, or another, repository."""
    loaded = config.get("auto_map") or {}
    names = [str(name) for kind, name in loaded.items() if kind in ("AutoModel", "AutoConfig")]
    modules = read_json(path / "modules.json")
    kinds = (
        [str(one.get("type")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    names += [kind for kind in kinds if kind.count(".") == 1]  # FILE.CLASS; the library's own are deeper
    return tuple(sorted(set(names)))


def _base_of(lora: Path, named: str | None) -> Facts | None:
    """A LoRA's base model: as named by the user, else by its files; None for other models."""
    config = _json(lora / "adapter_config.json")
    recorded = config.get("base_model_name_or_path") or ""
    name = (named or recorded) if config else ""
    if not name or Path(name) == lora:
        return None
    return facts_of(name, config.get("revision") if name == recorded and not Path(name).is_dir() else None)


def _fetch(model: str, revision: str | None, *, trust_code: bool) -> Path:
    # not at the top: torch is slow to import, and an option's error needs none of it
    from rge.model.adapter_files import fetched, is_hub_id

    if not is_hub_id(model):
        raise UserError(
            f"model {model} is not a directory: pass one, or an id on the Hugging Face hub (owner/name)"
        )
    return fetched(model, revision, [*FILES, *(["*.py"] if trust_code else [])])


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _tokens(path: Path) -> frozenset[str]:
    """Added tokens, from any of the three tokenizer file formats."""
    listed = _json(path / "tokenizer.json").get("added_tokens") or []
    decoder = _json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
    tokens = {str(token.get("content")) for token in [*listed, *decoder.values()]}
    return frozenset(tokens | set(_json(path / "added_tokens.json")))
