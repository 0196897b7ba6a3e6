"""Is this the same model everywhere, and if not, why?

    rge verify CHECKPOINT [items=FILE] [against=st,transformers,bf16,server:URL] [out=FILE.json]

Embeds a small sample over each route that is installed or named, and compares it with `Embedder`: each item alone, in float32. Where a
route differs, a closed set of causes is tried, and the one that explains it is named. Exit codes: 0 the same, 1 it differs, 2 it
cannot be run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rge
from rge.common.commands import start
from rge.common.files import checkpoint_folder, find_shipped, write_json, write_text
from rge.common.options import AtLeastOne, Count, parse_options
from rge.common.registry import PluginOptions

if TYPE_CHECKING:
    from eval.verify.routes import Found, Route, View

SAMPLE = "data_prep/demo/data/valid"
"""The shipped retrieval set."""
TOLERANCE = 1e-4
"""Largest difference of a component that float32 rounding explains."""
LOW_PRECISION = 0.99
"""Smallest cosine that rounding to 16 bits explains."""
TOP = 10


@dataclass
class VerifyOptions(PluginOptions):
    """Compare a checkpoint's embeddings over every route, and name the cause where they differ."""

    checkpoint: str
    """Checkpoint directory, id on the hub, or demo; or any model that `rge eval run` loads. Short form: `rge verify CHECKPOINT`."""
    items: Path = Path(SAMPLE)
    """Training records (FILE.jsonl, or the folder of a data set) or a retrieval set to draw the sample from."""
    against: tuple[str, ...] = ()
    """Routes: batches, reversed, transformers, bf16, st (sentence-transformers), adapters (not merged), flash, vllm, server:URL;
    none: all that are installed, without servers."""
    limit: AtLeastOne = 8
    """Number of queries."""
    candidates: AtLeastOne = 24
    """Number of candidates, right ones first."""
    base: str | None = None
    """Base model of a checkpoint of adapters; null: the one in its ``rge.json``."""
    seed: Count = 0
    """Seed of the sample."""
    out: Path | None = None
    """JSON file for the result; null: print only."""
    card: bool = False
    """Write into the checkpoint's model card with what it was verified."""


@dataclass
class Row:
    """A route compared with the reference in one view."""

    route: str
    view: str
    difference: float  # largest of a component
    cosine: float  # smallest
    rationales: float | None = None  # share of equal ones
    overlap: float | None = None  # mean share of the first `TOP` candidates that are the same
    same: bool = True
    cause: str = ""


@dataclass
class Verdict:
    """The result: one row for each route and view."""

    checkpoint: str
    checkpoint_hash: str
    rows: list[Row] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether all routes agree."""
        return all(row.same for row in self.rows)


def main(words: list[str]) -> int:
    """Verify, print the table, and say whether all is the same."""
    if words and "=" not in words[0] and not words[0].startswith("-"):
        words = [f"checkpoint={words[0]}", *words[1:]]
    options = parse_options(VerifyOptions, words, "rge verify CHECKPOINT")
    verdict = verify(options)
    print(table(verdict))
    if options.out is not None:
        write_json(options.out, to_json(verdict))
        print(f"written: {options.out}")
    if options.card:
        write_card(checkpoint_folder(Path(options.checkpoint)), verdict)
    return 0 if verdict.same else 1


def verify(options: VerifyOptions) -> Verdict:
    """Compare all routes.

    Raises:
        UserError: the checkpoint, the sample or a route cannot be used.
    """
    from eval.verify.plain import PlainModel
    from eval.verify.routes import default_routes, own_routes, routes_of
    from rge.common.errors import UserError
    from rge.embedder import Embedder
    from rge.embedders.registry import load_model

    folder = checkpoint_folder(Path(options.checkpoint))
    is_ours = not folder.is_dir() or (folder / "rge.json").is_file()
    embedder: Any
    if is_ours:
        embedder = Embedder.from_pretrained(options.checkpoint, base=options.base, dtype="float32")
        names = list(options.against) or default_routes(embedder)
    else:
        embedder = load_model(options.checkpoint, base=options.base, dtype="float32")
        names = list(options.against) or ["batches", "reversed"]
        if unknown := set(names) - {"batches", "reversed"}:
            raise UserError(
                f"against={','.join(sorted(unknown))}: of a model without rge.json only batches and reversed are known routes"
            )
    views = sample(options, embedder)
    verdict = Verdict(str(options.checkpoint), embedder.checkpoint_hash)
    plain = PlainModel(embedder) if is_ours else None
    routes = routes_of(embedder, plain, names) if plain else own_routes(embedder, names)
    exact = embedder.with_(exact=True) if is_ours else embedder
    references = {view.name: reference(exact, view) for view in views}
    for route in routes:
        compare(verdict, embedder, plain, route, views, references)
    return verdict


def reference(embedder: Any, view: "View") -> "Found":
    """Each item alone, in float32."""
    from eval.verify.routes import Found

    encoded = embedder.encode(view.items, side=view.side, mode=view.mode, batch_size=1)
    return Found(encoded.embeddings, encoded.rationales)


def sample(options: VerifyOptions, embedder: Any) -> list["View"]:
    """Queries in every mode that the checkpoint writes or does not write, and candidates."""
    from eval.verify.routes import View
    from rge.diagnose.pairs import read_pairs

    items = options.items if options.items.exists() else find_shipped(str(options.items))
    pairs = read_pairs(items, options.limit, options.seed)
    right = pairs.right_QC.any(axis=0)
    order = np.argsort(~right, kind="stable")[: options.candidates]
    candidates = tuple(pairs.candidates[row] for row in order)
    modes = ["direct"]
    if embedder.settings.reasons in ("query", "both"):
        modes.append("reasoning")
    queries: list[View] = [View("query", mode, tuple(pairs.queries)) for mode in modes]  # type: ignore[arg-type]
    return [*queries, View("candidate", "direct", candidates)]


def compare(
    verdict: Verdict,
    embedder: Any,
    plain: Any,
    route: "Route",
    views: Sequence["View"],
    references: "dict[str, Found]",
) -> None:
    """Add a row for each view that the route has."""
    found = {view.name: route.embed(view) for view in views}
    candidates = found.get("candidates")
    for view in views:
        got, expected = found[view.name], references[view.name]
        if got is None:
            continue
        row = measured(route, view, got, expected)
        if view.side == "query" and candidates is not None:
            row.overlap = overlap(
                expected.embeddings @ references["candidates"].embeddings.T,
                got.embeddings @ candidates.embeddings.T,
            )
        if not row.same:
            row.cause = cause_of(embedder, plain, route, view, got, expected, verdict.checkpoint_hash)
        verdict.rows.append(row)


def measured(route: "Route", view: "View", got: "Found", expected: "Found") -> Row:
    """How far a route's embeddings are from the reference's."""
    same = np.ones(len(view.items), dtype=bool)
    share = None
    if got.rationales is not None and view.mode == "reasoning":
        same = np.array([a == b for a, b in zip(expected.rationales or (), got.rationales, strict=True)])
        share = float(same.mean())
    ours_ND, theirs_ND = expected.embeddings[same], got.embeddings[same]
    difference, cosine = float("nan"), float("nan")
    if ours_ND.shape != theirs_ND.shape:
        cosine = -1.0
    elif len(ours_ND):
        difference = float(np.abs(ours_ND - theirs_ND).max())
        cosine = float(((ours_ND * theirs_ND).sum(axis=1) / np.linalg.norm(theirs_ND, axis=1)).min())
    if route.low_precision:
        agrees = cosine >= LOW_PRECISION or share == 0.0
    else:
        agrees = difference < TOLERANCE and share in (None, 1.0)
    return Row(route.name, view.name, difference, cosine, share, same=bool(agrees))


def overlap(ours_QC: np.ndarray, theirs_QC: np.ndarray) -> float:
    """Mean share of each query's first `TOP` candidates that are the same."""
    first, second = (
        np.argsort(-score_QC, axis=1, kind="stable")[:, :TOP] for score_QC in (ours_QC, theirs_QC)
    )
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(first, second, strict=True)]))


def cause_of(
    embedder: Any, plain: Any, route: "Route", view: "View", got: "Found", expected: "Found", known: str
) -> str:
    """The cause of a difference, in words."""
    from eval.verify.causes import OTHER_WEIGHTS, Cause, explain
    from eval.verify.routes import written_ids

    if route.weights is not None and route.weights != known:
        return str(
            Cause(OTHER_WEIGHTS, f"the server's have the hash {route.weights[:12]}, these {known[:12]}")
        )
    if got.embeddings.shape != expected.embeddings.shape:
        return f"{got.embeddings.shape[1]} components instead of {expected.embeddings.shape[1]}"
    if plain is None:
        return "the batch"
    after = (
        [[]] * len(view.items) if view.mode == "direct" else written_ids(embedder, expected.rationales or ())
    )
    cause = explain(plain, view.items, view.side, after, expected.embeddings, got.embeddings)
    if got.rationales is not None and view.mode == "reasoning":
        differing = sum(a != b for a, b in zip(expected.rationales or (), got.rationales, strict=True))
        if differing and cause.name == OTHER_WEIGHTS:
            return f"{differing} of {len(view.items)} rationales are others"
    return str(cause)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """For CI."""
    rows = [
        {key: None if value != value else value for key, value in vars(row).items()} for row in verdict.rows
    ]
    return {
        "checkpoint": verdict.checkpoint,
        "checkpoint_hash": verdict.checkpoint_hash,
        "same": verdict.same,
        "rows": rows,
    }


def write_card(folder: Path, verdict: Verdict) -> None:
    """Say in the model card over which routes and with which versions the checkpoint was verified.

    Raises:
        UserError: a route differs, or the checkpoint has no model card.
    """
    from importlib.metadata import version

    from rge.checkpoints.description import verified_card
    from rge.common.errors import UserError

    path = folder / "README.md"
    if not verdict.same:
        raise UserError("card=true: the model card is left as it is, since routes differ")
    if not path.is_file():
        raise UserError(f"card=true: {folder} has no model card README.md")
    routes = dict.fromkeys(row.route for row in verdict.rows)
    largest = max(row.difference for row in verdict.rows if row.route != "bfloat16")
    versions = ", ".join(
        [f"rge {rge.__version__}", *(f"{name} {version(name)}" for name in ("transformers", "torch"))]
    )
    said = f"{versions} over {len(routes)} routes ({', '.join(routes)}): largest difference {largest:.1e} in float32."
    write_text(path, verified_card(path.read_text(encoding="utf-8"), said))
    print(f"written: {path}")


def table(verdict: Verdict) -> str:
    """The printed table, and the verdict below it."""
    lines = [f"reference: each item alone, float32; checkpoint {verdict.checkpoint_hash[:12]}", ""]
    lines.append(f"{'route':<40}{'view':<20}{'difference':>11}{'cosine':>10}{'rationales':>11}{'top 10':>8}")
    for row in verdict.rows:
        rationales = "" if row.rationales is None else f"{100 * row.rationales:.0f} %"
        top = "" if row.overlap is None else f"{100 * row.overlap:.0f} %"
        mark = "" if row.same else f"  DIFFERS: {row.cause}"
        lines.append(
            f"{row.route:<40}{row.view:<20}{row.difference:>11.1e}{row.cosine:>10.5f}{rationales:>11}{top:>8}{mark}"
        )
    wrong = list(dict.fromkeys(row.route for row in verdict.rows if not row.same))
    says = f"differs: {', '.join(wrong)}" if wrong else "the same model over every route"
    return "\n".join([*lines, "", says])


if __name__ == "__main__":
    start(main)
