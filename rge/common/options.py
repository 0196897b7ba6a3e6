"""Parse ``key=value`` arguments and YAML files into typed dataclasses.

A command's options are a dataclass. Pydantic checks values against its annotations; ``--help`` and docs/reference.md print the
docstrings of its fields. Arguments override a command's YAML file, if it has one::

    options = parse_options(RunOptions, ["set=data/test", "out=runs/x"])
    recipe = parse_file(Recipe, ["recipe=demo", "joint.lr=1e-4"], key="recipe", folder=RECIPES)
"""

import ast
import difflib
import inspect
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from rge.common.errors import Fault, UserError, not_one_of, shortened
from rge.common.registry import PluginOptions, load_plugins

T = TypeVar("T")
Layers = Sequence[tuple[str, dict[str, Any]]]
"""Nested values to be merged, each with its origin for messages."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
AtLeastOne = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Quoting = Literal["auto", "quoted", "none"]
"""How quotation marks in a CSV or TSV are read, see `rge.tables.delimited`."""

MAY_DIFFER, ROUNDING, IN_COLD_START = "may differ", "rounding", "in the cold start"
"""Marks of a recipe's keys (`marked`), by which `rge.checkpoints.resume` compares recipes: keys that do not affect the result; keys
of memory and speed, which affect only rounding; and keys that the cold start uses of a section that it otherwise ignores."""

HELP = ("--help", "-h", "help")

MEANS = {
    name: key
    for key, names in {
        "alpha": "lora_alpha",
        "batch_size": "batch train_batch_size global_batch_size",
        "checkpoint": "model",
        "dropout": "lora_dropout",
        "dtype": "precision torch_dtype",
        "epochs": "epoch num_train_epochs num_epochs",
        "every": "eval_steps eval_every",
        "keep_last": "save_total_limit",
        "log_every": "logging_steps",
        "lr": "learning_rate",
        "max_grad_norm": "clip grad_clip gradient_clipping",
        "max_prompt_tokens": "max_length max_seq_length",
        "micro_batch_size": "gradient_accumulation_steps per_device_train_batch_size",
        "name": "optimizer",
        "num_gpus": "gpus",
        "num_processes": "nproc",
        "num_rationales": "num_generations",
        "num_workers": "dataloader_num_workers workers",
        "out": "output output_dir out_dir output_file",
        "path": "model_name_or_path model_name",
        "rank": "r lora_r",
        "save_every": "checkpoint_every save_steps",
        "schedule": "lr_scheduler_type scheduler",
        "set": "data",
        "sources": "dataset data_path train_files",
        "steps": "max_steps num_steps train_steps",
        "targets": "target_modules",
        "temperature": "tau",
        "trackers": "report_to",
        "warmup_steps": "warmup",
        "weight_decay": "wd",
    }.items()
    for name in names.split()
}
"""For hints: what other projects call a key -> the last part of our dotted key."""


@dataclass(frozen=True)
class Key:
    """One key of a command or a recipe."""

    name: str  # with dots; ``[]`` stands for each entry of a list, ``*`` for each name of a mapping
    kind: str  # its type, for people
    default: str | None  # in the notation of arguments; None: the key is required
    about: str  # its documentation


def parse_options(schema: type[T], words: Sequence[str], command: str = "") -> T:
    """Read ``key=value`` arguments into a dataclass, and import the modules of its ``plugins``; UserError if something is wrong.

    Texts, paths and choices are taken literally; other values are YAML with the numbers of YAML 1.2. A list of texts or numbers
    may be written with commas; ``null`` is None if the type allows it. Fields without a default are required. ``--help`` prints
    `command`, which is what the user typed so far, and all keys, and exits.
    """
    offer_help(schema, words, command)
    pairs = [split_word(word) for word in words]
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise UserError(f"{key} is given twice").about(Fault("twice", key))
    options = build(schema, [("", nested(key, read_word(schema, key, text))) for key, text in pairs])
    if isinstance(options, PluginOptions):
        load_plugins(options.plugins)
    return options


def parse_file(schema: type[T], words: Sequence[str], *, key: str, folder: Path, command: str = "") -> T:
    """Read the YAML file that one argument names into a dataclass, and apply the other arguments as overrides.

    That argument is ``KEY=NAME``: a file of `folder` without its ending, or a path. The file's ``base: NAME`` is read first; mappings
    are merged, lists replaced. If the dataclass has a field with the name of `key`, that gets the file's name.
    """
    offer_help(schema, words, command)
    pairs = [split_word(word) for word in words]
    known = available(folder)
    names = [value for name, value in pairs if name == key]
    if len(names) != 1:
        raise UserError(
            f"give exactly one {key}=NAME or {key}=FILE.yaml; there are: {', '.join(known)}"
        ).about(Fault("missing", key, tuple(known)))
    path = Path(names[0]) if names[0].endswith((".yaml", ".yml")) else folder / f"{names[0]}.yaml"
    if not path.is_file():
        message = f"{path} does not exist: {not_one_of(key, names[0], known)}"
        raise UserError(message).about(Fault("choice", key, tuple(known)))
    layers = _layers(path, folder, key)
    layers += [("", nested(name, read_word(schema, name, text))) for name, text in pairs if name != key]
    if key in names_of(schema):
        layers.append(("", {key: path.stem}))
    return build(schema, layers)


def _layers(path: Path, folder: Path, key: str, derived: tuple[Path, ...] = ()) -> list[tuple[str, Any]]:
    """The contents of a file, after those of its chain of ``base:`` files."""
    tree, derived = read_yaml(path), (*derived, path.resolve())
    base = tree.pop("base", None)
    layer = (f"{path}: ", tree)
    if base is None:
        return [layer]
    sibling = path.parent / f"{base}.yaml"
    base_path = sibling if sibling.is_file() else folder / f"{base}.yaml"
    if not isinstance(base, str) or not base_path.is_file():
        others = nearest(str(base), available(folder))
        raise UserError(f"it must name another {key}, got {base!r}{others}", path, key="base", kind="unknown")
    if base_path.resolve() in derived:
        raise UserError(f"{base} leads back to itself", path, key="base", kind="circle")
    return [*_layers(base_path, folder, key, derived), layer]


def available(folder: Path) -> list[str]:
    """Names of the YAML files in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping, with the numbers of YAML 1.2 and without duplicate keys.

    Raises:
        UserError: it cannot be read, or contains something else.
    """
    try:
        document = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it cannot be read: {error}", path, kind="unreadable") from error
    except yaml.YAMLError as error:
        raise UserError(f"it is not valid YAML: {error}", path, kind="yaml") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(
            f"it must be a mapping of keys to values, got {type(document).__name__}", path, kind="mapping"
        )
    return document


def split_word(word: str) -> tuple[str, str]:
    """Split ``key=value``, ignoring leading dashes; anything else raises a `UserError`."""
    key, mark, value = word.partition("=")
    key = key.lstrip("-")
    if not mark or not key:
        raise UserError(f"arguments must be key=value, got {shortened(repr(word))}", kind="argument")
    if not value:
        raise UserError(f"{key} needs a value: {key}=...").about(Fault("missing", key))
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{word!a} is not UTF-8: rename the file or folder, or change the terminal's encoding",
            kind="encoding",
        ) from None
    return key, value


def positional(words: Sequence[str], *names: str) -> list[str]:
    """Turn leading positional arguments into values of `names`, in this order: ``INDEX "a question"``.

    Only an identifier before ``=`` makes a ``key=value``, so a question may contain an ``=``.
    """
    pairs = list(words)
    for number, name in enumerate(names[: len(pairs)]):
        if pairs[number] in HELP or re.match(r"-*[A-Za-z_][\w.\[\]]*=", pairs[number]):
            break
        pairs[number] = f"{name}={pairs[number]}"
    return pairs


def names_of(schema: type) -> set[str]:
    """The names of a dataclass's top-level keys, as typed by the user."""
    return {_typed(item.name) for item in fields(schema)}


def given(options: Any) -> dict[str, Any]:
    """Non-default values: key as typed -> JSON value."""
    changed = (item for item in fields(options) if getattr(options, item.name) != _default(item))
    return json.loads(_json({_typed(item.name): getattr(options, item.name) for item in changed}))


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda part: vars(part) if is_dataclass(part) else str(part))


def read_word(schema: type, key: str, text: str) -> Any:
    """Parse the value of an argument by its key's type, or as YAML if the key is unknown; `UserError` if it is not valid."""
    kinds = _alternatives(_kind_at(schema, key.split(".")))
    if text == "null" and NoneType in kinds:
        return None
    try:
        return _read(text, kinds)
    except yaml.YAMLError as error:
        raise UserError(f"{key}={text}: the value is not valid YAML: {error}").about(
            Fault("value", key)
        ) from error


_QUOTED = re.compile(r"""'([^']|'')*'|"([^"\\]|\\.)*\"""", re.DOTALL)
"""One quoted text from beginning to end, unlike ``'Rome' = album or album = 'Paris'``."""


def _read(text: str, kinds: Iterable[Any]) -> Any:
    if _QUOTED.fullmatch(text):
        return _parse(text)
    if any(kind in (str, Path) or get_origin(kind) is Literal for kind in kinds):
        # Shells leave the tilde of key=~/x alone, and many paths are texts, since they may be URLs.
        return os.path.expanduser(text)
    inner = {get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)}
    if inner & {str, Path, int, float} and not text.startswith("["):
        return [_read(part.strip(), inner) for part in text.split(",")]
    return _parse(text)


def nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b`` and v as ``{a: {b: v}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def build(schema: type[T], layers: Layers) -> T:
    """Merge layers; a `UserError` lists all problems, one per line."""
    tree: dict[str, Any] = {}
    unresolved = []
    for origin, layer in layers:
        tree = _merged(tree, layer)
        unresolved += [f"{origin}{pair}" for pair in _interpolated(layer)]
    if unresolved:
        raise UserError(
            "${...} of OmegaConf and Hydra is not resolved here; write the value itself (a shell resolves ${NAME} in double "
            "quotes; in a recipe's out, {recipe} stands for its name):\n" + "\n".join(unresolved)
        )
    try:
        # As JSON: strict about types (a text is not a number), but lists may become tuples and texts paths.
        options: T = _adapter(schema).validate_json(json.dumps(tree, default=str), strict=True)  # type: ignore[arg-type]
        return options
    except ValidationError as error:
        problems = [_sentence(schema, details, layers) for details in error.errors(include_url=False)]
        missing = [problem for problem in problems if problem.startswith("missing ")]
        if len(missing) > 1:
            problems = [problem for problem in problems if problem not in missing]
            problems.append("missing " + ", ".join(problem.removeprefix("missing ") for problem in missing))
        faults = [_fault(schema, details) for details in error.errors(include_url=False)]
        raise UserError("\n".join(dict.fromkeys(problems))).about(*dict.fromkeys(faults)) from None


def _interpolated(value: Any, name: str = "") -> Iterator[str]:
    """``key=value`` of every text with ``${...}``, which would otherwise become a folder of that name."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            inner = f"[{key}]" if isinstance(value, list) else f".{key}"
            yield from _interpolated(item, f"{name}{inner}".removeprefix("."))
    elif isinstance(value, str) and re.search(r"\$\{[^}]*\}", value):
        yield f"{name}={value}"


def one_of(key: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse an empty list, and values that are not allowed or given twice."""
    for value in values:
        if value not in allowed:
            raise UserError.choice(key, value, allowed)
    if not values or len(set(values)) < len(values):
        message = f"{key} must list at least one value and each only once, got {','.join(values)!r}"
        raise UserError(message).about(Fault("value", key))


def nearest(key: str, known: Iterable[str]) -> str:
    """Hint for an unknown key: similar keys, else all keys."""
    known = list(known)
    if similar := similar_keys(key, known):
        return f"; did you mean {' or '.join(similar)}?"
    return f"; there are: {', '.join(sorted(known))}"


def similar_keys(key: str, known: Iterable[str]) -> list[str]:
    """At most three keys that an unknown one may stand for, the nearest first.

    First by meaning (the same last part in another section, or another project's name, see `MEANS`), then by spelling.
    """
    plain = {re.sub(r"\[\d+\]", "[]", name): name for name in known}
    key = re.sub(r"\[\d+\]", "[]", key)
    section, _, last = key.rpartition(".")

    def ending_in(*parts: str | None) -> list[str]:
        return [name for name in plain if name.rpartition(".")[2] in parts]

    by_meaning = ending_in(MEANS.get(last))
    similar = (
        [name for name in by_meaning if name.rpartition(".")[0] == section]
        or ending_in(last)
        or difflib.get_close_matches(key, plain, n=1, cutoff=0.75)
        or by_meaning
        or difflib.get_close_matches(key, plain, n=1, cutoff=0.5)
        or ending_in(*difflib.get_close_matches(last, {name.rpartition(".")[2] for name in plain}, n=1))
    )
    similar = sorted(similar, key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())[:3]
    return [plain[name] for name in similar]


# ---------------------------------------------------------------------------------------------------------------- help


def offer_help(schema: type, words: Sequence[str], command: str = "") -> None:
    """If ``--help`` is among the arguments, print the keys and exit.

    Other arguments narrow the list: ``joint --help`` prints the keys below ``joint``.
    """
    if any(word in HELP for word in words):
        sections = [word for word in words if word not in HELP and "=" not in word]
        print(help_text(schema, command, sections))  # noqa: T201 - output of a command
        sys.exit(0)


def help_text(schema: type, command: str = "", sections: Sequence[str] = ()) -> str:
    """What a command does, and every key (of these sections) with its default, type and meaning."""
    lines = [f"{command} key=value ...", ""] if command else []
    if not sections:
        lines += [inspect.cleandoc(schema.__doc__ or ""), ""]
    for key in keys(schema):
        if sections and not any(f"{key.name}.".startswith((f"{name}.", f"{name}[")) for name in sections):
            continue
        lines.append(f"  {key.name}={'...' if key.default is None else key.default}  ({key.kind})")
        lines += textwrap.wrap(key.about, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def keys(schema: type, prefix: str = "", owner: object = None) -> list[Key]:
    """Every key of a dataclass and of those inside it, in order; the values of `owner` replace the defaults of the class."""
    notes, hints = _notes(schema), get_type_hints(schema)
    listed = []
    for item in fields(schema):
        default = getattr(owner, item.name, MISSING) if owner is not None else _default(item)
        name, kind = prefix + _typed(item.name), hints[item.name]
        inner, mark = _section(kind)
        if inner is None or mark or not is_dataclass(default):
            written = None if default is MISSING else _written(default)
            listed.append(Key(name, _kind_name(kind), written, notes.get(item.name, "")))
        if inner is not None:
            listed += keys(inner, f"{name}{mark}.", default if is_dataclass(default) else None)
    return listed


def marked(schema: type, mark: str, prefix: str = "") -> Iterator[str]:
    """Names of the keys and sections of a dataclass, and of those inside it, whose annotation has the mark."""
    for name, hint in get_type_hints(schema, include_extras=True).items():
        inner, _ = _section(hint)
        if mark in getattr(hint, "__metadata__", ()):
            yield prefix + name
        elif inner is not None:
            yield from marked(inner, mark, f"{prefix}{name}.")


@cache
def _notes(schema: type) -> dict[str, str]:
    """The docstring of each field, which Python does not keep."""
    notes = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
            for node, note in zip(body, body[1:], strict=False):
                match node, note:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)):
                        notes[name] = " ".join(str(text).split())
    return notes


def _default(item: Any) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _section(kind: Any) -> tuple[type | None, str]:
    """The dataclass inside a type, and the mark of its keys: ``[]`` in a list, ``.*`` in a mapping."""
    for option in _alternatives(kind):
        if is_dataclass(option):
            return option, ""  # type: ignore[return-value]
        inner = get_args(option)
        if inner and is_dataclass(inner[-1] if get_origin(option) is dict else inner[0]):
            return (inner[-1], ".*") if get_origin(option) is dict else (inner[0], "[]")
    return None, ""


def _kind_name(kind: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", NoneType: "null", Any: "anything"}  # fmt: skip
    parts = []
    for option in _alternatives(kind):
        origin, inner = get_origin(option), get_args(option)
        if origin is Literal:
            parts.append(" | ".join(map(str, inner)))
        elif origin is dict:
            parts.append(f"mapping to {_kind_name(inner[1])}")
        elif origin in (list, tuple) and (origin is list or inner[-1] is ...):
            parts.append(f"list of {_kind_name(inner[0])}")
        elif origin is tuple:
            parts.append(f"{len(inner)} of {_kind_name(inner[0])}")
        else:
            parts.append("keys below" if is_dataclass(option) else names.get(option, str(option)))
    return " | ".join(parts)


def _written(value: Any) -> str:
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return _json(value)


# ------------------------------------------------------------------------------------------------------------ checking


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    # Dataclasses inside it have no configuration of their own, and get this one.
    schema.__pydantic_config__ = {"extra": "forbid", "alias_generator": _typed}  # type: ignore[attr-defined]
    return TypeAdapter(schema)


def _typed(name: str) -> str:
    """A field's name as typed: ``for_`` and ``with_`` would clash with Python's keywords."""
    return name.removesuffix("_")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _kind_at(kind: Any, parts: Sequence[str]) -> Any:
    """The type of a dotted key; Any if there is no such key."""
    for part in parts:
        inner = Any
        for option in _alternatives(kind):
            if is_dataclass(option):
                hints = {_typed(name): hint for name, hint in get_type_hints(option).items()}
                inner = hints.get(part, Any)
            elif get_origin(option) is dict:
                inner = get_args(option)[1]
            elif get_origin(option) in (list, tuple) and part.isdigit():
                inner = get_args(option)[0]
        kind = inner
    return kind


def _merged(base: Any, override: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(override, dict)):
        return override
    return base | {key: _merged(base.get(key), value) for key, value in override.items()}


def _name_at(loc: Sequence[str | int]) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    return shortened(name)


def _fault(schema: type, details: Any) -> Fault:
    loc, kind = details["loc"], details["type"]
    name = _name_at(loc)
    if kind == "unexpected_keyword_argument":
        return Fault("unknown", name, tuple(similar_keys(name, _known_keys(schema, loc))))
    if kind == "literal_error":
        return Fault("choice", name, _choices(schema, loc))
    of = (
        "missing"
        if kind == "missing"
        else "range"
        if kind in _SIGNS
        else "type"
        if kind in _WANTED
        else "value"
    )
    return Fault(of, name)  # type: ignore[arg-type]  # one of these


def _choices(schema: type, loc: Sequence[str | int]) -> tuple[str, ...]:
    kinds = _alternatives(_kind_at(schema, [str(part) for part in loc]))
    return next(get_args(option) for option in kinds if get_origin(option) is Literal)


def _sentence(schema: type, details: Any, layers: Layers) -> str:
    loc, kind, got = details["loc"], details["type"], details["input"]
    name = _name_at(loc)
    given_loc = loc[:-1] if kind == "missing" else loc
    where = next((origin for origin, layer in reversed(layers) if _contains(layer, given_loc)), "")
    if kind == "unexpected_keyword_argument":
        return f"{where}unknown key {name}{nearest(name, _known_keys(schema, loc))}"
    if kind == "missing":
        return f"missing {name}=..." if len(loc) == 1 else f"{where}missing {name}"
    if kind == "literal_error":
        return where + not_one_of(name, got, _choices(schema, loc))
    shown = json.dumps(got) if got is None or isinstance(got, (bool, dict, list)) else repr(got)
    wanted = _WANTED.get(kind)
    if kind in _SIGNS:
        wanted = f"{_SIGNS[kind]} {next(iter(details['ctx'].values())):.12g}"
    rule = f" must be {wanted}" if wanted else f": {details['msg']}"
    return f"{where}{name}{rule}, got {shortened(shown)}"


_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text (in YAML, quote it)",
    "path_type": "a path",
    "dataclass_type": "a mapping of keys to values",
    "dict_type": "a mapping of names to values",
    "list_type": "a list",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_SIGNS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def _known_keys(schema: type, loc: Sequence[str | int]) -> list[str]:
    """Every key and section, with the numbers of the list entries on the way to `loc`."""
    paths = [key.name.split(".") for key in keys(schema)]
    known = dict.fromkeys(".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1))
    for part, number in zip(loc, loc[1:], strict=False):
        if isinstance(number, int):
            known = {key.replace(f"{part}[]", f"{part}[{number}]"): None for key in known}
    return list(known)


def _contains(layer: Any, loc: Sequence[str | int]) -> bool:
    try:
        for part in loc:
            layer = layer[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- YAML


# The C parser is ten times as fast, and PyYAML's wheels have it.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):
    """YAML with the numbers of YAML 1.2: ``1:10`` is a text, not seventy; ``1e-4`` is a number; a date is a text.

    Duplicate keys are an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"found the key {key.value!r} twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_OLD = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OLD]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML's own would read 010 as eight.
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node).replace("_", ""))
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.?|\d[\d_]*\.\d[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)  # a safe one
