"""From a folder of photos and a spreadsheet to a report, in one command.

    rge eval mine PHOTOS TABLE.xlsx [checkpoint=DIR] [out=DIR]

Imports the two (`eval.benchmarks.folder.importer`), checks the set (`eval.commands.check`) and evaluates it
(`eval.commands.run`). When repeated, it imports the table again and embeds only new content.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from eval.benchmarks.folder.importer import FolderOptions, TableOptions, import_folder
from eval.commands.check import CheckOptions, check
from eval.commands.run import RunOptions, run_command
from rge.vectors.fill_cache import Embeds


@dataclass(kw_only=True)
class MineOptions(TableOptions):
    """Make a set from your photos and a table of queries, evaluate a checkpoint, write a report: `mine PHOTOS TABLE`."""

    src: Path
    """Folder with the pictures, at any depth; may be given as the first word."""
    out: Path | None = None
    """Folder for the set, the figures and the report; null: next to src, with its name and _eval."""
    checkpoint: Path | None = None
    """Checkpoint directory; null: demo, the small one that ships with the package and only knows drawings."""
    model: str | None = None
    """Any other embedder instead, as in `run`."""
    query_mode: tuple[str, ...] = ("reasoning", "direct")
    """Any of reasoning (a query writes a rationale before it is embedded), direct and auto (docs/modes.md)."""
    metrics: tuple[str, ...] = ()
    """Further metrics, such as recall@100 or ndcg@5."""
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    overwrite: bool = False
    """Replace existing figures of another version of the table, or of another model."""


def mine(options: MineOptions, load: Callable[[], Embeds] | None = None) -> Path:
    """Import, check, evaluate, and return the page; problems of folder and table are all listed before anything is embedded."""
    source = options.src.resolve()
    out = options.out or source.with_name(f"{source.name}_eval")
    table = {
        item.name: getattr(options, item.name) for item in fields(TableOptions) if item.name != "plugins"
    }
    wanted = import_folder(FolderOptions(src=options.src, out=out / "set", overwrite=True, **table))
    check(CheckOptions(set=wanted.path))
    checkpoint = Path("demo") if options.model is None and options.checkpoint is None else options.checkpoint
    run_options = RunOptions(
        set=wanted.path, out=out, checkpoint=checkpoint, model=options.model, query_mode=options.query_mode,
        metrics=options.metrics, device=options.device, overwrite=options.overwrite,
    )  # fmt: skip
    if len(run_options.query_mode) == 1:  # `run` would write a single condition to out itself, beside the set
        run_options = replace(run_options, out=out / run_options.query_mode[0], cache=out / ".cache")
    run_command(run_options, load)
    return run_options.out / "report.html"
