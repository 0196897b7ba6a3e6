"""Parse ``key=value`` arguments and YAML files into typed dataclasses.

A command's options are a dataclass. Its annotations are what pydantic checks values against; the text below each field
is what ``--help`` and docs/reference.md print. Words overlay the file that a command reads, where it reads one::

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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from rge.common.errors import UserError
from rge.common.registry import PluginOptions, load_plugins

T = TypeVar("T")

HELP = ("--help", "-h", "help")

MEANS = {
    theirs: ours
    for ours, names in {
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
    for theirs in names.split()
}
"""Names of keys in other projects and here, for hints: the last part of a dotted key."""


@dataclass(frozen=True)
class Key:
    """One key of a command or a recipe.

    Attributes:
        name: with dots; ``[]`` stands for each entry of a list, ``*`` for each name of a mapping.
        kind: its type, for people.
        default: as it would be written; None: it has to be given.
        about: what documents it.
    """

    name: str
    kind: str
    default: str | None
    about: str


def parse_options(schema: type[T], words: Sequence[str], command: str = "") -> T:
    """Read ``key=value`` words into a dataclass.

    A word's value is a text, a path or a choice as it stands; anything else is YAML with the numbers of YAML 1.2. A list
    of texts or numbers may be written with commas, ``null`` is None where that is possible.

    Args:
        schema: a dataclass; fields without a default must be given.
        words: such as ``set=data/test``; the value may contain further ``=``. ``--help`` among them prints every key and
            ends the program.
        command: what is typed before the words, for ``--help``.

    Raises:
        UserError: a word is not ``key=value``, a key is unknown, given twice or missing, a value has another type, or a
            module of ``plugins=`` cannot be found.
    """
    offer_help(schema, words, command)
    pairs = [split_word(word) for word in words]
    for key in {key for key, _ in pairs}:
        if sum(other == key for other, _ in pairs) > 1:
            raise UserError(f"{key} is given twice")
    options = build(schema, [("", nested(key, read_word(schema, key, text))) for key, text in pairs])
    if isinstance(options, PluginOptions):
        load_plugins(options.plugins)
    return options


def parse_file(
    schema: type[T],
    words: Sequence[str],
    *,
    key: str,
    folder: Path,
    command: str = "",
) -> T:
    """Read a YAML file into a dataclass and apply ``key=value`` words; later ones win.

    A file's ``base: NAME`` is read first; its mappings are merged, its lists replaced.

    Args:
        schema: a dataclass.
        words: ``KEY=NAME``, once: a file of `folder` without its ending, or a path; and overrides with dots.
        key: of the word that names the file.
        folder: of the files that come with this package.
        command: what is typed before the words, for ``--help``.

    Returns:
        What was read. A field with the name of `key` holds the file's name.

    Raises:
        UserError: no file or several, one that cannot be read, an unknown key, or a value of another type.
    """
    offer_help(schema, words, command)
    pairs = [split_word(word) for word in words]
    there = available(folder)
    names = [value for name, value in pairs if name == key]
    if len(names) != 1:
        raise UserError(f"give exactly one {key}=NAME or {key}=FILE.yaml; there are: {', '.join(there)}")
    path = Path(names[0]) if names[0].endswith((".yaml", ".yml")) else folder / f"{names[0]}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(names[0], there, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"unknown {key} {names[0]!r}: {hint}there are: {', '.join(there)}")
    layers = _layers(path, folder, key)
    layers += [("", nested(name, read_word(schema, name, text))) for name, text in pairs if name != key]
    if key in names_of(schema):
        layers.append(("", {key: path.stem}))
    return build(schema, layers)


def _layers(
    path: Path, folder: Path, key: str, above: tuple[Path, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """A file's keys over those of the file that its ``base:`` names, and so on.

    Raises:
        UserError: a base that does not exist, or that has itself for one.
    """
    tree, below = read_yaml(path), (*above, path.resolve())
    base = tree.pop("base", None)
    own = (f"{path}: ", tree)
    if base is None:
        return [own]
    beside = path.parent / f"{base}.yaml"
    found = beside if beside.is_file() else folder / f"{base}.yaml"
    if not isinstance(base, str) or not found.is_file():
        raise UserError(
            f"{path}: base must name another {key}, got {base!r}{nearest(str(base), available(folder))}"
        )
    if found.resolve() in below:
        raise UserError(f"{path}: base {base} leads back to itself")
    return [*_layers(found, folder, key, below), own]


def available(folder: Path) -> list[str]:
    """Names of the YAML files in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; numbers are those of YAML 1.2, and no key stands twice.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    try:
        document = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(f"{path} must be a mapping of keys to values, got {type(document).__name__}")
    return document


def split_word(word: str) -> tuple[str, str]:
    """Split ``key=value``, ignoring leading dashes; anything else raises a `UserError`."""
    key, mark, value = word.partition("=")
    key = key.lstrip("-")
    if not mark or not key:
        raise UserError(f"arguments must be key=value, got {word!r}")
    if not value:
        raise UserError(f"{key} needs a value: {key}=...")
    return key, value


def positional(words: Sequence[str], *names: str) -> list[str]:
    """Leading words that are no ``key=value``, as the values of `names` in this order: ``INDEX "a question"``.

    What stands before the ``=`` of a ``key=value`` is a key's name, so a question with an ``=`` in it is still one.
    """
    found = list(words)
    for place, name in enumerate(names[: len(found)]):
        if found[place] in HELP or re.match(r"-*[A-Za-z_][\w.\[\]]*=", found[place]):
            break
        found[place] = f"{name}={found[place]}"
    return found


def names_of(schema: type) -> set[str]:
    """The names of a dataclass's own keys, as they are typed."""
    return {_typed(item.name) for item in fields(schema)}


def given(options: Any) -> dict[str, Any]:
    """Non-default values: key as typed -> JSON value."""
    values = {_typed(item.name): getattr(options, item.name) for item in fields(options)}
    defaults = {_typed(item.name): _default(item) for item in fields(options)}
    found = {name: value for name, value in values.items() if value != defaults[name]}
    return json.loads(json.dumps(found, default=lambda one: vars(one) if is_dataclass(one) else str(one)))


def read_word(schema: type, key: str, text: str) -> Any:
    """The value of a word, read as its key's type asks; an unknown key's as YAML.

    Raises:
        UserError: it is not valid YAML.
    """
    kinds = _alternatives(_kind_at(schema, key.split(".")))
    if text == "null" and NoneType in kinds:
        return None
    try:
        is_quoted = text[0] in "'\"" and text[-1] == text[0] and len(text) > 1
        return _parse(text) if is_quoted else _read_plain(text, kinds)
    except yaml.YAMLError as error:
        raise UserError(f"{key}={text}: the value is not valid YAML: {error}") from error


def _read_plain(text: str, kinds: Sequence[Any]) -> Any:
    if Path in kinds:
        return os.path.expanduser(text)
    if any(kind is str or get_origin(kind) is Literal for kind in kinds):
        return text
    inner = {get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)}
    if inner & {str, Path, int, float} and not text.startswith("["):
        parts = [part.strip() for part in text.split(",")]
        return parts if inner & {str, Path} else [_parse(part) for part in parts]
    return _parse(text)


def nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b`` and v as ``{a: {b: v}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def build(schema: type[T], layers: Sequence[tuple[str, dict[str, Any]]]) -> T:
    """Merge nested values and validate the result.

    Raises:
        UserError: everything that is wrong, a line each.
    """
    tree: dict[str, Any] = {}
    unresolved = []
    for origin, layer in layers:
        tree = _merged(tree, layer)
        unresolved += [f"{origin}{key}={text}{_NOT_RESOLVED}" for key, text in _interpolated(layer)]
    if unresolved:
        raise UserError("\n".join(unresolved))
    try:
        # As JSON: strict about kinds (a text is no number), but lists may become tuples and texts paths.
        found: T = _adapter(schema).validate_json(json.dumps(tree, default=str), strict=True)  # type: ignore[arg-type]
        return found
    except ValidationError as error:
        problems = [_sentence(schema, one, layers) for one in error.errors(include_url=False)]
        missing = [one for one in problems if one.startswith("missing ")]
        if len(missing) > 1:
            problems = [one for one in problems if one not in missing]
            problems.append("missing " + ", ".join(one.removeprefix("missing ") for one in missing))
        raise UserError("\n".join(dict.fromkeys(problems))) from None


_NOT_RESOLVED = (
    ": ${...} of OmegaConf and Hydra is not resolved here; write the value itself (a shell resolves ${NAME} in double quotes; "
    "in a recipe's out, {recipe} stands for its name)"
)


def _interpolated(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text that holds ``${...}``, which would else become a folder of that name, with its key."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _interpolated(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _interpolated(one, f"{name}[{place}]")
    elif isinstance(value, str) and re.search(r"\$\{[^}]*\}", value):
        yield name, value


def one_of(key: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Check listed values against the allowed ones.

    Raises:
        UserError: none given, one is not allowed, or one is given twice.
    """
    for value in values:
        if value not in allowed:
            raise UserError(_not_one_of(key, value, allowed))
    if not values or len(set(values)) < len(values):
        raise UserError(f"{key} must list at least one value and each only once, got {','.join(values)!r}")


def nearest(key: str, known: Iterable[str]) -> str:
    """Hint for an unknown key: similar keys, else all keys.

    By meaning first: the same last part elsewhere, or what other projects call it (`MEANS`). By spelling then.
    """
    known = list(known)
    plain = {re.sub(r"\[\d+\]", "[]", name): name for name in known}
    asked = re.sub(r"\[\d+\]", "[]", key)
    owner, _, last = asked.rpartition(".")
    by_name = [name for name in plain if name.rpartition(".")[2] == last]
    by_meaning = [name for name in plain if name.rpartition(".")[2] == MEANS.get(last)]
    within = [name for name in by_meaning if name.rpartition(".")[0] == owner]
    found = within or by_name or difflib.get_close_matches(asked, plain, n=1, cutoff=0.75) or by_meaning
    found = found or difflib.get_close_matches(asked, plain, n=1, cutoff=0.5)
    if not found:
        alike = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in plain}, n=1)
        found = [name for name in plain if name.rpartition(".")[2] in alike]
    if not found:
        return f"; there are: {', '.join(sorted(known))}"
    found = sorted(found, key=lambda name: -difflib.SequenceMatcher(None, asked, name).ratio())[:3]
    return f"; did you mean {' or '.join(plain[name] for name in found)}?"


# ---------------------------------------------------------------------------------------------------------------- help


def offer_help(schema: type, words: Sequence[str], command: str = "") -> None:
    """Print the keys and end the program where ``--help`` is among the words.

    Other words narrow the list: ``joint --help`` prints the keys below ``joint``.
    """
    if any(word in HELP for word in words):
        under = [word for word in words if word not in HELP and "=" not in word]
        print(help_text(schema, command, under))  # noqa: T201 - this is what was asked for
        sys.exit(0)


def help_text(schema: type, command: str = "", under: Sequence[str] = ()) -> str:
    """What a command does, and every key with its default, type and meaning."""
    chosen = [
        key for key in keys(schema)
        if not under or any(key.name == one or key.name.startswith((f"{one}.", f"{one}[")) for one in under)
    ]  # fmt: skip
    lines = [f"{command} key=value ...", ""] if command else []
    if not under:
        lines += [inspect.cleandoc(schema.__doc__ or ""), ""]
    for key in chosen:
        lines.append(f"  {key.name}={'...' if key.default is None else key.default}  ({key.kind})")
        lines += textwrap.wrap(key.about, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def keys(schema: type, prefix: str = "", owner: object = None) -> list[Key]:
    """Every key of a dataclass and of those inside it, in order.

    Args:
        schema: a dataclass in a source file.
        prefix: put before the names.
        owner: an instance whose values are the defaults, where the whole has others than its parts.
    """
    notes, hints = _notes(schema), get_type_hints(schema)
    found = []
    for item in fields(schema):
        default = getattr(owner, item.name, MISSING) if owner is not None else _default(item)
        name, kind = prefix + _typed(item.name), hints[item.name]
        inner, mark = _section(kind)
        if inner is None or mark or not is_dataclass(default):
            written = None if default is MISSING else _written(default)
            found.append(Key(name, _kind_name(kind), written, notes.get(item.name, "")))
        if inner is not None:
            found += keys(inner, f"{name}{mark}.", default if is_dataclass(default) else None)
    return found


@cache
def _notes(schema: type) -> dict[str, str]:
    """The text below each field, which Python does not keep."""
    notes = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
            for node, note in zip(body, body[1:], strict=False):
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and isinstance(note, ast.Expr)
                    and isinstance(note.value, ast.Constant)
                ):
                    notes[node.target.id] = " ".join(str(note.value.value).split())
    return notes


def _default(item: Any) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _section(kind: Any) -> tuple[type | None, str]:
    """The dataclass inside a type, and how its keys are marked: alone, in a list, in a mapping."""
    for one in _alternatives(kind):
        if is_dataclass(one):
            return one, ""  # type: ignore[return-value]
        inner = get_args(one)
        if inner and is_dataclass(inner[-1] if get_origin(one) is dict else inner[0]):
            return (inner[-1], ".*") if get_origin(one) is dict else (inner[0], "[]")
    return None, ""


def _kind_name(kind: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", NoneType: "null", Any: "anything"}  # fmt: skip
    parts = []
    for one in _alternatives(kind):
        origin, inner = get_origin(one), get_args(one)
        if origin is Literal:
            parts.append(" | ".join(map(str, inner)))
        elif origin is dict:
            parts.append(f"mapping to {_kind_name(inner[1])}")
        elif origin in (list, tuple) and (origin is list or inner[-1] is ...):
            parts.append(f"list of {_kind_name(inner[0])}")
        elif origin is tuple:
            parts.append(f"{len(inner)} of {_kind_name(inner[0])}")
        else:
            parts.append("keys below" if is_dataclass(one) else names.get(one, str(one)))
    return " | ".join(parts)


def _written(value: Any) -> str:
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return json.dumps(value, default=lambda one: vars(one) if is_dataclass(one) else str(one))


# ------------------------------------------------------------------------------------------------------------ checking


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    for one in _dataclasses(schema):
        one.__pydantic_config__ = {"extra": "forbid", "alias_generator": _typed}  # type: ignore[attr-defined]
    return TypeAdapter(schema)


def _dataclasses(kind: Any) -> set[type]:
    if is_dataclass(kind):
        return {kind}.union(*(_dataclasses(one) for one in get_type_hints(kind).values()))  # type: ignore[return-value]
    return set().union(*(_dataclasses(one) for one in get_args(kind)))


def _typed(name: str) -> str:
    """A field's name as it is typed: ``for_`` and ``with_`` are words that Python keeps for itself."""
    return name.removesuffix("_")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _kind_at(kind: Any, parts: Sequence[str]) -> Any:
    """The type of a dotted key; Any where there is no such key."""
    for part in parts:
        found = Any
        for one in _alternatives(kind):
            if is_dataclass(one):
                hints = {_typed(name): hint for name, hint in get_type_hints(one).items()}
                found = hints.get(part, Any)
            elif get_origin(one) is dict:
                found = get_args(one)[1]
            elif get_origin(one) in (list, tuple) and part.isdigit():
                found = get_args(one)[0]
        kind = found
    return kind


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _sentence(schema: type, problem: Any, layers: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """One of pydantic's findings in words: key, what it must be, what it is."""
    loc, kind, got = problem["loc"], problem["type"], problem["input"]
    name = _name(loc)
    there = loc[:-1] if kind == "missing" else loc
    where = next((origin for origin, layer in reversed(layers) if _holds(layer, there)), "")
    if kind == "unexpected_keyword_argument":
        return f"{where}unknown key {name}{nearest(name, _known_keys(schema, loc))}"
    if kind == "missing":
        return f"missing {name}=..." if len(loc) == 1 else f"{where}missing {name}"
    if kind == "literal_error":
        kinds = _alternatives(_kind_at(schema, [str(part) for part in loc]))
        allowed = next(get_args(one) for one in kinds if get_origin(one) is Literal)
        return where + _not_one_of(name, got, allowed)
    shown = json.dumps(got) if got is None or isinstance(got, (bool, dict, list)) else repr(got)
    wanted = _WANTED.get(kind)
    if kind in _SIGNS:
        wanted = f"{_SIGNS[kind]} {next(iter(problem['ctx'].values())):.12g}"
    said = f" must be {wanted}" if wanted else f": {problem['msg']}"
    return f"{where}{name}{said}, got {shown}"


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
    """Every key and section; of the list entry that `loc` leads to, with its number."""
    parts = [key.name.split(".") for key in keys(schema)]
    known = dict.fromkeys(".".join(one[:depth]) for one in parts for depth in range(1, len(one) + 1))
    for part, one in zip(loc, loc[1:], strict=False):
        if isinstance(one, int):
            known = {key.replace(f"{part}[]", f"{part}[{one}]"): None for key in known}
    return list(known)


def _name(loc: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _holds(layer: Any, loc: Sequence[str | int]) -> bool:
    for part in loc:
        if isinstance(layer, dict) and part in layer:
            layer = layer[part]
        elif isinstance(layer, list) and isinstance(part, int) and part < len(layer):
            layer = layer[part]
        else:
            return False
    return True


def _not_one_of(key: str, value: object, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r}{hint}"


# ---------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2: ``1:10`` is a text and not seventy, ``1e-4`` a number, a date is a text.

    A key given twice is an error, not a matter of order.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key.value!r} twice", key.start_mark
                )
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
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
