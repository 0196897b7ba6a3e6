"""``key=value`` command lines: typed by a dataclass, unknown keys are an error that names the nearest."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from rge.common.errors import UserError

T = TypeVar("T")


def parse_options(schema: type[T], argv: Sequence[str]) -> T:
    """Read ``key=value`` words into a dataclass.

    Field types understood: ``str``, ``int``, ``float``, ``bool`` (``true`` or ``false``), ``Path``, each also
    ``| None`` (the word ``null``), and ``tuple[str, ...]`` (values separated by commas).

    Args:
        schema: a dataclass; fields without a default must be given.
        argv: words such as ``set=data/test``; the value may contain further ``=``.

    Returns:
        An instance of ``schema``.

    Raises:
        UserError: a word is not ``key=value``, a key is unknown, given twice or missing, or a value has another type.
    """
    types = get_type_hints(schema)
    known = {field.name: field for field in fields(schema)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in argv:
        key, mark, text = word.partition("=")
        if not mark:
            raise UserError(f"expected key=value, got {word!r}; keys are {', '.join(known)}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise UserError(
                f"unknown key {key!r}{f', did you mean {near[0]!r}?' if near else '.'} Keys are {', '.join(known)}"
            )
        if key in values:
            raise UserError(f"{key} is given twice")
        values[key] = _convert(key, text, types[key])
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise UserError(f"missing {', '.join(f'{name}=...' for name in missing)}")
    return schema(**values)


def explain(schema: type) -> str:
    """One line a key: its default, or that it has to be given, and the string that documents the field.

    Args:
        schema: a dataclass in a source file, as for `parse_options`; it may derive from another.
    """
    own = [base for base in reversed(schema.__mro__) if is_dataclass(base)]
    bodies: list[list[Any]] = [ast.parse(textwrap.dedent(inspect.getsource(one))).body[0].body for one in own]  # type: ignore[attr-defined]
    notes = {
        field.target.id: " ".join(ast.literal_eval(note.value).split())
        for body in bodies
        for field, note in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
    }
    words = {
        field.name: f"{field.name}={'...' if field.default is MISSING else _word(field.default)}"
        for field in fields(schema)
    }
    width = max(map(len, words.values()))
    return "\n".join(f"  {word:<{width}}  {notes.get(name, '')}".rstrip() for name, word in words.items())


def one_of(key: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Check listed values against the allowed ones.

    Raises:
        UserError: none given, one is not allowed, or one is given twice.
    """
    for value in values:
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
            raise UserError(
                f"{key} must be one of {', '.join(allowed)}, got {value!r}"
                f"{f'; did you mean {near[0]!r}?' if near else ''}"
            )
    if not values or len(set(values)) < len(values):
        raise UserError(f"{key} must list at least one value and each only once, got {','.join(values)!r}")


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _convert(key: str, text: str, kind: Any) -> Any:
    choices = get_args(kind)
    if type(None) in choices:
        if text == "null":
            return None
        kind = next(choice for choice in choices if choice is not type(None))
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(","))
    if kind is bool:
        if text not in ("true", "false"):
            raise UserError(f"{key} must be true or false, got {text!r}")
        return text == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise UserError(
                f"{key} must be {'an integer' if kind is int else 'a number'}, got {text!r}"
            ) from None
    if not text:
        raise UserError(f"{key} must not be empty")
    return Path(text) if kind is Path else text
