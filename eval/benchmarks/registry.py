"""Registry of benchmarks: those of `eval.benchmarks.releases`, and user-defined plugins.

    register_benchmark(Benchmark("birds", import_birds, (Protocol("birds", "clean", ("recall@1",)),)))

makes ``rge eval import birds`` and ``benchmark=birds`` work, and prints its published rows beside measured ones. See
docs/extending.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from eval.scoring.metrics import parse_name
from eval.scoring.protocol import PROFILES, Protocol
from eval.sets.retrieval_set import RetrievalSet, load_set
from rge.common.errors import UserError
from rge.common.options import Count, one_of
from rge.common.registry import PluginOptions, Registry

GENERIC = "generic"
"""Name of the protocol for sets that belong to no benchmark."""


@dataclass(frozen=True)
class Benchmark:
    """Importer, protocols and published figures of a benchmark; a `UserError` if the protocols do not fit it."""

    name: str  # name for ``import`` and ``benchmark=``
    importer: Callable[[Any], object]
    """A function of one annotated argument, a dataclass of options, that writes a retrieval set and returns it, or writes
    a suite and returns its members' names."""
    protocols: tuple[Protocol, ...]  # one per profile, with this benchmark's name
    published: Path | None = None  # folder of published tables, see `eval.benchmarks.published_tables`

    def __post_init__(self) -> None:
        one_of(f"profiles of {self.name}", [protocol.profile for protocol in self.protocols], PROFILES)
        for protocol in self.protocols:
            if protocol.benchmark != self.name:
                raise UserError(
                    f"it has a protocol of {protocol.benchmark!r}", key=self.name, kind="protocol"
                )

    def options(self) -> type:
        """The class of the importer's options."""
        kinds = [kind for name, kind in get_type_hints(self.importer).items() if name != "return"]
        if len(kinds) != 1:
            raise UserError(
                "its importer must take exactly one annotated argument", key=self.name, kind="importer"
            )
        return kinds[0]


@dataclass(kw_only=True)
class MeasureOptions(PluginOptions):
    """Options of every command that measures a set."""

    set: Path
    """Retrieval set directory (docs/own_data.md), or a suite of them (docs/evaluation.md)."""
    out: Path
    """Output directory."""
    by: tuple[str, ...] = ()
    """Further query columns to report figures by, besides the set's ``report_by``."""
    metrics: tuple[str, ...] = ()
    """Further metrics, at any cutoff: recall@100, ndcg@5."""
    benchmark: str = "generic"
    """Protocol to use: rmir, mmeb, mmeb2, mmbright, pinpoint, mrmr, karpathy, uvrb, manual, one that plugins= adds, or generic."""
    profile: str = "clean"
    """clean: the protocol that we consider sound; official: what the benchmark's released code computes."""
    seed: Count = 0
    """Seed of the resampling."""
    overwrite: bool = False
    """Replace existing output of another checkpoint, run or set, or with other settings."""

    def protocol(self, wanted: RetrievalSet | None = None) -> Protocol:
        """See `protocol_for`."""
        return protocol_for(self.benchmark, self.profile, wanted, self.metrics)

    def prepared(self) -> tuple[Protocol, RetrievalSet]:
        """The protocol, and the set as prepared by it."""
        wanted = load_set(self.set, by=self.by)
        protocol = self.protocol(wanted)
        return protocol, protocol.prepare(wanted)


_RELEASES = ("rmir", "mmeb", "mmeb2", "mmbright", "pinpoint", "mrmr", "karpathy", "uvrb", "manual")
BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark", "rge.benchmarks", [f"eval.benchmarks.releases.{name}" for name in _RELEASES]
)


def register_benchmark(benchmark: Benchmark) -> Benchmark:
    """Register a benchmark."""
    if benchmark.name == GENERIC:
        raise UserError("the name is reserved for sets without a benchmark", key=GENERIC, kind="reserved")
    return BENCHMARKS.add(benchmark.name, benchmark)


def protocol_for(
    benchmark: str, profile: str, wanted: RetrievalSet | None = None, metrics: Sequence[str] = ()
) -> Protocol:
    """The protocol of a benchmark and profile, with further metrics.

    Raises:
        UserError: an unknown benchmark, profile or metric, or `wanted` belongs to another benchmark.
    """
    one_of("benchmark", [benchmark], (GENERIC, *BENCHMARKS))
    one_of("profile", [profile], PROFILES)
    known = (Protocol(),) if benchmark == GENERIC else BENCHMARKS[benchmark].protocols
    protocol = next((candidate for candidate in known if candidate.profile == profile), None)
    if protocol is None:
        raise UserError(f"{benchmark} has only {known[0].profile}, got {profile}", key="profile")
    if wanted is not None and benchmark != GENERIC and wanted.meta.get("benchmark") != benchmark:
        other = f"it was not imported as {benchmark}, but as {wanted.meta.get('benchmark')!r}"
        fix = f"run rge eval import {benchmark} src=DIR out=DIR"
        raise UserError(f"{other}: {fix}", wanted.path, key="benchmark")
    for name in metrics:
        parse_name(name)
    protocol = replace(protocol, metrics=tuple(metrics))
    if wanted is not None and (taken := set(wanted.report_by).intersection(protocol.names(wanted))):
        raise UserError("figures cannot be reported by the name of a metric", wanted.path, key=min(taken))
    return protocol
