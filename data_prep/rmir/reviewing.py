"""The command line: ``rge data review run=DIR out=PAGE.html``, and ``apply=FILES`` to apply reviewers' verdicts."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from data_prep.rmir.config import RmirConfig, load_config
from data_prep.rmir.decisions import REVIEWED, write_about_panel
from data_prep.rmir.main import SETTINGS, run_stages
from data_prep.rmir.results import report
from data_prep.rmir.results.review import agreement_of, draw, page, read_verdicts, settle
from data_prep.rmir.run import Run
from rge.common.errors import UserError
from rge.common.files import write_text
from rge.common.options import AtLeastOne, parse_options


@dataclass
class ReviewOptions:
    """Write a page on which people review a sample of a run's triplets; or apply their verdicts."""

    run: Path
    """Folder of a finished run."""
    out: Path | None = None
    """The HTML file to write."""
    sample: Annotated[int, Field(ge=2)] = 200
    """Triplets on the page: half accepted by the panel and half rejected, if there are enough."""
    split: Literal["test", "train", "all"] = "test"
    """Split whose queries they are drawn from."""
    seed: int = 0
    """Seed of the sample."""
    side_px: Annotated[int, Field(ge=64)] = 800
    """Maximum side of the pictures embedded in the page, px: 200 triplets of photos take about 40 MB at 800."""
    apply: tuple[Path, ...] = ()
    """Files saved by the page, one per person, instead of out=: if these people agree against the panel, an answer is
    removed from the data set or added to it. Changes by an earlier apply= that these files do not support are undone."""
    agree: AtLeastOne = 2
    """Number of people who must give the same verdict on a triplet, with none disagreeing, for apply= to act on it."""


def review(words: Sequence[str]) -> None:
    """Write the page, or apply verdicts."""
    options = parse_options(ReviewOptions, words, "rge data review")
    if (options.out is None) == (not options.apply):
        raise UserError("give either out=FILE.html to write a page, or apply=FILES to apply verdicts")
    if options.out is None:
        apply(options.run, options.apply, options.agree)
        return
    chosen = draw(options.run, options.sample, options.split, options.seed)
    write_text(options.out, page(options.run, chosen, options.side_px))
    kept = sum(row["state"] == "kept" for row in chosen)
    print(
        f"{options.out}: {len(chosen)} triplets, {kept} accepted and {len(chosen) - kept} rejected by the panel"
    )


def apply(out: Path, files: Sequence[Path], agree: int) -> None:
    """Write ``reviewed.json`` and redo pool, sets, audit, report and card; makes no model calls."""
    if len(files) < agree:
        raise UserError(
            f"apply= has the verdicts of {len(files)} people, but agree={agree} people must give the same verdict"
        )
    config = _settings(out)
    with closing(Run(config)) as run:
        if run.done("keep") is None:
            raise UserError(
                f"the panel's decisions in {out} are not finished: run the command that made it again"
            )
        people = read_verdicts(out, files)
        found = settle(out, people, agree)
        write_about_panel(out / REVIEWED, found)
        agreement_of(out, people)
        run_stages(run, ("pool", "split", "audit"))
        report.write(run)
    print(
        f"{agree} or more of {len(people)} people agreed on {found['settled']} of {found['checked']} triplets: "
        f"{found['removed']} answers removed, {found['added']} added; {found['open']} left as the panel decided\n"
        f"{out / 'dataset'}"
    )


def _settings(out: Path) -> RmirConfig:
    """The settings of the last command that ran in a folder."""
    path = out / SETTINGS
    try:
        if not path.is_file():
            raise UserError(f"{path} does not exist")
        return load_config([f"config={path}", f"out={out}"])
    except UserError as error:  # perhaps of an earlier version, with other keys
        raise UserError(f"{error}: run the command that made {out} again (it makes no new calls)") from None
