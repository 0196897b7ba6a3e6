"""Registries: built-in entries, those of ``plugins=`` modules, and those of installed packages.

A module registers its definitions when it is imported: ours by name, a user's by ``plugins=`` (`load_plugins`), those of installed
packages through the registry's entry point group, such as ``rge.metrics``.
"""

import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rge.common.errors import Fault, UserError, not_one_of

T = TypeVar("T")

OURS = ("rge", "eval", "data_prep")
"""Packages whose modules are not plugins."""

_plugins: dict[str, dict[str, bool]] = {}
"""Plugin modules in import order -> their entries, such as ``metric rbp``, and whether each can change an embedding."""


class Registry(Generic[T]):
    """Entries by name, in alphabetical order, which does not depend on the order of imports.

    Args:
        kind: what an entry is, for messages: ``metric``.
        group: entry points of installed packages: ``rge.metrics``.
        built_in: our modules that register entries when they are imported.
        figures_only: entries can change the figures of an evaluation, but no embedding.
        reserved: names that no entry may have.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Sequence[str] = (),
        *,
        figures_only: bool = False,
        reserved: Sequence[str] = (),
    ):
        self.kind, self.group, self.built_in, self.reserved = kind, group, tuple(built_in), reserved
        self.figures_only = figures_only
        self._entries: dict[str, T] = {}
        self._complete = False

    def add(self, name: str, entry: T) -> T:
        """Register an entry. Raises `UserError`: the name is taken."""
        if name in self.reserved:
            raise UserError(
                f"a {self.kind} must not have the name of a figure in the log: rename it",
                key=name,
                kind="reserved",
            )
        if name in self._entries and self._entries[name] != entry:
            why = f"there are two {self.kind}s of this name: rename the new one"
            raise UserError(why, key=name, kind="twice")
        self._entries[name] = entry
        _registering_module()[f"{self.kind} {name}"] = not self.figures_only
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: `add` the entry."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        """Look up an entry by name. Raises `UserError`: unknown name; the message has the nearest one."""
        self._load()
        if name in self._entries:
            return self._entries[name]
        known = tuple(self)
        message = f"{not_one_of(self.kind, name, known)} (plugins=MODULE adds those of your own module)"
        raise UserError(message).about(Fault("choice", self.kind, known))

    def __iter__(self) -> Iterator[str]:
        """Names, sorted."""
        self._load()
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered."""
        self._load()
        return name in self._entries

    def values(self) -> list[T]:
        """All entries, in registration order."""
        self._load()
        return list(self._entries.values())

    def _load(self) -> None:
        if self._complete:
            return
        self._complete = True  # before importing: a module may look something up
        for module in self.built_in:
            importlib.import_module(module)
        for entry in importlib.metadata.entry_points(group=self.group):
            try:
                entry.load()
            except Exception as error:  # a plugin may raise anything
                self._complete = False
                raise UserError(
                    f"it cannot be loaded: {type(error).__name__}: {error}; fix or uninstall the package that provides it",
                    f"entry point {entry.name} = {entry.value} of {self.group}",
                    kind="entry point",
                ) from error


@dataclass(kw_only=True)
class PluginOptions:
    """Base of the options of commands that load plugins."""

    plugins: tuple[str, ...] = ()
    """Modules that register something, such as a benchmark, a metric or a model family (docs/extending.md); imported
    first."""


def load_plugins(modules: Sequence[str]) -> None:
    """Import plugin modules, also from the current folder; a `UserError` names the places that were searched."""
    here = str(Path.cwd())
    if modules and here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    for name in modules:
        try:
            importlib.import_module(name)
            _plugins.setdefault(name, {})
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _not_imported(name, error) from error  # it exists, and imports one that does not
            raise UserError(
                f"plugins={name}: no module of that name in {here}, on PYTHONPATH or installed "
                "(a name such as my_module, not a path)"
            ).about("plugins") from None
        except UserError:
            raise
        except Exception as error:  # it may raise anything
            raise _not_imported(name, error) from error


def _not_imported(name: str, error: Exception) -> UserError:
    if isinstance(error, SyntaxError):
        return UserError(f"plugins={name} cannot be imported: {error}").about("plugins")
    places = [
        frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")
    ]
    where = f" (line {places[-1].lineno} of {places[-1].filename})" if places else ""
    return UserError(f"plugins={name} cannot be imported: {type(error).__name__}: {error}{where}").about(
        "plugins"
    )


def said_by_plugin(error: BaseException) -> str:
    """An error that a plug-in's code caused: what, and in which file and line of it."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    where = place_in_plugin(error)
    return f"{kind}{error}" + (f" ({where})" if where else "")


def place_in_plugin(error: BaseException) -> str | None:
    """File and line of the innermost frame of an error that is in a plug-in; None if there is none."""
    files = {getattr(sys.modules.get(name), "__file__", None): name for name in _plugins}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return None
    return f"plug-in {files[frames[-1].filename]}, line {frames[-1].lineno} of {frames[-1].filename}"


def plugins_loaded() -> list[str]:
    """All plugin modules, which another process must import too: those of `load_plugins`, and others that registered something."""
    return list(_plugins)


def registered_by(module: str, *, figures: bool = True) -> list[str] | None:
    """The entries of a plugin module, such as ``metric rbp``; without `figures`, None if none of them can change an embedding."""
    entries = _plugins[module]
    return None if entries and not figures and not any(entries.values()) else list(entries)


def _registering_module() -> dict[str, bool]:
    """The entries of the module that is registering; a throw-away dict for our modules and for scripts, which cannot be imported."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")).split(".")[0] in OURS and frame.f_back:
        frame = frame.f_back
    # Where one of our modules registers something, the frame above is the import machinery.
    if getattr(sys.modules.get(name), "__spec__", None) and not name.startswith("importlib."):
        return _plugins.setdefault(name, {})
    return {}
