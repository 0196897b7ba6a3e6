"""Registries: built-in entries, those of ``plugins=`` modules, and those of installed packages.

A module registers what it defines when it is imported. Ours are imported by their names, a user's by ``plugins=``
(`load_plugins`), an installed package's through the entry point group of the registry, such as ``rge.metrics``.
"""

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rge.common.errors import UserError

T = TypeVar("T")

OURS = ("rge", "eval", "data_prep")
"""Packages whose modules are imported by what needs them."""

_plugins: dict[str, dict[str, bool]] = {}
"""Other modules that register something, in the order in which they were imported -> what they registered, such as
``metric rbp``, and whether that can change an embedding."""


class Registry(Generic[T]):
    """Things by name: names in alphabetical order, so that it does not matter which module was imported first.

    Args:
        kind: what one of them is, for messages: ``metric``.
        group: entry points in which installed packages name their modules: ``rge.metrics``.
        built_in: modules of ours that add theirs when they are imported.
        figures_only: a thing can change the figures of an evaluation, but no embedding.
    """

    def __init__(self, kind: str, group: str, built_in: Sequence[str] = (), *, figures_only: bool = False):
        self.kind, self.group, self.built_in = kind, group, tuple(built_in)
        self.figures_only = figures_only
        self._things: dict[str, T] = {}
        self._complete = False

    def add(self, name: str, thing: T) -> T:
        """Register an entry.

        Raises:
            UserError: another one has the name.
        """
        if name in self._things and self._things[name] != thing:
            raise UserError(f"there are two {self.kind}s called {name!r}: rename the new one")
        self._things[name] = thing
        _registering_module()[f"{self.kind} {name}"] = not self.figures_only
        return thing

    def __getitem__(self, name: str) -> T:
        """Look up an entry by name.

        Raises:
            UserError: nothing is called so; the message has the nearest name.
        """
        self._load()
        if name in self._things:
            return self._things[name]
        near = difflib.get_close_matches(name, self._things, n=1, cutoff=0.5)
        raise UserError(
            f"{self.kind} must be one of {', '.join(self)}, got {name!r}"
            f"{f'; did you mean {near[0]!r}?' if near else ''} (plugins=MODULE adds those of a module of yours)"
        )

    def __iter__(self) -> Iterator[str]:
        """Names, sorted."""
        self._load()
        return iter(sorted(self._things))

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered."""
        self._load()
        return name in self._things

    def values(self) -> list[T]:
        """All entries, in registration order."""
        self._load()
        return list(self._things.values())

    def _load(self) -> None:
        if self._complete:
            return
        self._complete = True  # first: a module that registers may look something up
        for module in self.built_in:
            importlib.import_module(module)
        for entry in importlib.metadata.entry_points(group=self.group):
            try:
                entry.load()
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                self._complete = False
                raise UserError(
                    f"entry point {entry.name} = {entry.value} of {self.group} cannot be loaded: "
                    f"{type(error).__name__}: {error}; fix or uninstall the package that provides it"
                ) from error


@dataclass(kw_only=True)
class PluginOptions:
    """What options derive from where modules of the user's may register something."""

    plugins: tuple[str, ...] = ()
    """Modules that register something, such as a benchmark, a metric or a model family (docs/extending.md); imported
    first."""


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register something; the current folder counts as installed.

    Raises:
        UserError: there is no such module, with where it was looked for.
    """
    here = str(Path.cwd())
    if modules and here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    for name in modules:
        try:
            importlib.import_module(name)
            _plugins.setdefault(name, {})
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports something that is not
            raise UserError(
                f"plugins={name}: no module of that name in {here}, on PYTHONPATH or installed "
                "(a name such as my_module, not a path)"
            ) from None


def plugins_loaded() -> list[str]:
    """Modules that `load_plugins` imported, and others that have registered something: what another process must import."""
    return list(_plugins)


def registered_by(module: str, *, figures: bool = True) -> list[str] | None:
    """What a plugin has registered, such as ``metric rbp``.

    Args:
        module: of `plugins_loaded`.
        figures: False gives None for a plugin that registered nothing but what decides figures.
    """
    things = _plugins[module]
    return None if things and not figures and not any(things.values()) else list(things)


def _registering_module() -> dict[str, bool]:
    """The entry of the module that registers something; of ours and of scripts, which cannot be imported, none that is kept."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")).split(".")[0] in OURS and frame.f_back:
        frame = frame.f_back
    # Behind what ours register stands the import itself.
    if getattr(sys.modules.get(name), "__spec__", None) and not name.startswith("importlib."):
        return _plugins.setdefault(name, {})
    return {}
