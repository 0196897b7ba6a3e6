"""Pre-flight checks: report every problem that can be found before the model is loaded.

    python -m rge.check recipe=demo [pictures=true] [key=value of the recipe ...]
    accelerate launch -m rge.check recipe=qwen25vl_3b      # the launch too

Training runs the same checks first. They cover all stages, so that a wrong path of a late one is found before hours of training,
lay out every record from the headers of its pictures, and decode those of held-out records; ``pictures=true`` decodes every
picture once, on all cores. This file calls the `problems` functions of the rooms. The exit code is 2 if there is a problem.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rge.common.commands import answer_first, start
from rge.config import CheckOptions, Recipe, load_options
from rge.data.config import PromptedConfig, RecordsConfig, SourceConfig
from rge.optim.config import StageConfig


def read_options(arguments: Sequence[str]) -> CheckOptions:
    """The recipe to check."""
    return load_options(CheckOptions, arguments, command="rge check recipe=NAME")


if __name__ == "__main__":  # a mistyped key is answered before torch is imported, which takes seconds
    answer_first(read_options)

from accelerate import Accelerator

from rge import logs, validation
from rge.checkpoints import resume
from rge.common.errors import USER, UserError, brief, grouped
from rge.common.files import held, raise_descriptor_limit
from rge.common.schema import Target
from rge.data import collate, conflicts, layout
from rge.data.layout import Layout
from rge.data.readers import open_records, some_records
from rge.data.sources import MAX_REPORTED, Records, check_wording
from rge.data.verdicts import Verdicts
from rge.distributed import collectives as dist
from rge.distributed import launch
from rge.distributed.failure_detection import CoordinatedExit, after_main
from rge.losses import takes_teacher, try_out
from rge.mining import refresh
from rge.model.adapter_files import check_form, find_base, is_adapter_checkpoint
from rge.model.adapters import add_adapters
from rge.model.backbone import (
    check_sizes,
    collapsed_ids,
    lacks_head,
    processor_to_train,
    read_config,
    skeleton,
    stored_names,
    without_head,
)
from rge.model.hub_model import HubModel
from rge.objective import Objective
from rge.plan import machine
from rge.plan.costs import num_parameters
from rge.plan.estimate import Plans, banner
from rge.plan.known_models import outline
from rge.rl import reference, rewards
from rge.rl.pool import check_pool, read_pool, unusable
from rge.rollout import writer
from rge.rollout.micro_batches import Kept

T = TypeVar("T")
SCORES_READ = 1000
"""Records of a source that are looked at for a judge's scores."""


@dataclass
class Checked:
    """A run that can start."""

    stages: list[str]  # unfinished ones, in order
    records: dict[str, Records] = field(default_factory=dict)  # opened and checked, by `RecordsConfig.key`
    summary: list[str] = field(default_factory=list)  # what will run, for people
    kept: dict[str, Kept] = field(default_factory=dict)  # by stage: what is kept between micro batches


def main(arguments: list[str]) -> int:
    """Check a recipe; 2 if anything is wrong."""
    recipe = read_options(arguments)
    accelerator = launch.make_accelerator(recipe.train, recipe.model.dtype)
    if not accelerator.is_main_process:
        return 0  # without waiting for the main process, which may take long
    raise_descriptor_limit()
    launched = "WORLD_SIZE" in os.environ
    with ExitStack() as lock:
        problems, found = examine(recipe, accelerator, lock, with_launch=launched, decode=recipe.pictures)
    if problems:
        print(_report(problems), file=sys.stderr)  # noqa: T201
    else:
        print("\n".join([*found.summary, "all checks passed"]))  # noqa: T201
    if not launched:
        print("launch not checked; run under `accelerate launch` instead of `python` to check it")  # noqa: T201
    return USER if problems else 0


@contextmanager
def checked(recipe: Recipe, accelerator: Accelerator) -> Iterator[Checked]:
    """Check a run on the main process, and lock its folder inside the block.

    Problems are printed once per machine, and end every process (SystemExit).
    """
    raise_descriptor_limit()
    with ExitStack() as lock:
        problems: list[str] = []
        found = None
        if accelerator.is_main_process:
            problems, found = examine(recipe, accelerator, lock)
            if not problems:
                print("\n".join(found.summary), flush=True)  # noqa: T201
        after_main("checked")  # a large file or a download may take longer than the time-out of a collective
        problems, found = dist.from_main((problems, found))
        if problems:
            if accelerator.is_local_main_process:
                print(_report(problems), file=sys.stderr, flush=True)  # noqa: T201
            raise CoordinatedExit(USER)
        assert found is not None
        yield found


@dataclass
class Wanted:
    """A source of unfinished stages."""

    source: RecordsConfig
    # By `Recipe.prompts_key`: those who read it, each with its own settings of prompts.
    readers: dict[str, PromptedConfig] = field(default_factory=dict)
    oracle: bool = False  # its rationales are needed
    candidates: bool = False  # its targets are needed
    held_out: bool = False  # for validation; then no record may be bad


def examine(
    recipe: Recipe,
    accelerator: Accelerator,
    lock: ExitStack | None = None,
    *,
    with_launch: bool = True,
    decode: bool = False,
) -> tuple[list[str], Checked]:
    """All problems of a run, and the checked run if there are none; then `lock` gets the lock of its folder."""
    run = Preflight(recipe, accelerator)
    if with_launch:
        run.attempt(launch.check_launch, accelerator, recipe.train, recipe.optim.name)
    if run.find_open_stages() and run.check_settings():
        run.open_sources(wanted_sources(recipe, run.found.stages))
        run.decode_pictures(of_training=decode)
        run.check_sources()
        model = run.attempt(_outline, recipe)
        if model is not None:
            run.lay_out_sources(decode=decode)
        run.check_records()
        if model is not None:
            run.check_model(model)
    if lock is not None and not run.problems and run.found.stages:
        run.attempt(_hold, lock, run.out)
    return run.problems, run.found


def _hold(lock: ExitStack, out: Path) -> None:
    try:
        lock.enter_context(held(out))
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}): give another out=") from error


class Preflight:
    """The checks of one run, in the order of `examine`; each adds to `problems` or to what was `found`."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator):
        self.recipe, self.accelerator, self.out = recipe, accelerator, Path(recipe.out)
        self.problems: list[str] = []
        self.found = Checked([])
        self.verdicts = Verdicts()
        self.wanted: dict[str, Wanted] = {}
        self.layouts: dict[str, Layout] = {}  # by `Recipe.prompts_key`
        self.pool: list[Target] = []

    def attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        """Call `action`; a `UserError` becomes a problem, and the result None."""
        try:
            return action(*arguments)
        except (UserError, OSError) as error:
            self.problems.append(str(error))
            return None

    def warn(self, warning: str | None) -> None:
        """Add a warning to the summary, unless it is None."""
        self.found.summary += [warning] if warning else []

    def tell(self, faults: Iterable[str], *, held_out: bool = False) -> None:
        """Report bad records: as problems, or in the summary if they will be skipped."""
        if self.recipe.data.on_bad == "skip" and not held_out:
            self.found.summary += [f"will be left out (data.on_bad=skip): {fault}" for fault in faults]
        else:
            self.problems += faults

    def find_open_stages(self) -> list[str]:
        """Find the unfinished stages; one before a finished stage is over, even if it was deleted."""
        recipe, every = self.recipe, self.recipe.stages()
        done = [bool(self.attempt(resume.finished, self.out / name, recipe, name)) for name in every]
        first_open = max((place for place, is_done in enumerate(done, start=1) if is_done), default=0)
        stages = every[first_open:]
        self.found.stages = stages
        if not stages:
            self.warn(
                f"{self.out} is finished: its checkpoint is {self.out / every[-1] / 'final'}. To train again, give "
                f"another out=, or delete {self.out}"
            )
        return stages

    def check_settings(self) -> bool:
        """Check settings that need no records; False if the stage rl's records cannot be determined."""
        recipe = self.recipe
        self.problems += resume.problems(recipe, self.found.stages, self.accelerator)
        self.problems += logs.problems(recipe.log)
        wrong: list[str] = []
        if "rl" in recipe.stages():
            wrong += rewards.problems(recipe.rl.rewards)
            zero3 = dist.is_zero3(self.accelerator)
            wrong += reference.problems(recipe.rl, recipe.model.lora, zero3=zero3)
        self.problems += wrong
        return not wrong

    def open_sources(self, wanted: Mapping[str, Wanted]) -> None:
        """Open and check sources and their pictures' existence."""
        self.wanted = dict(wanted)
        for key, source in wanted.items():
            if (records := self.attempt(self._open, source)) is not None:
                self.found.records[key] = records

    def _open(self, wanted: Wanted) -> Records:
        recipe = self.recipe
        checks: dict[str, Any] = {
            "need_rationale": wanted.oracle,
            "on_bad": "stop" if wanted.held_out else recipe.data.on_bad,
        }
        if wanted.source.lines is not None:
            records: Records = self.verdicts.open(wanted.source.lines, **checks)
        else:
            records = open_records(
                wanted.source,
                pictures=self.verdicts.pictures,
                progress=True,
                first=recipe.validation.max_records if wanted.held_out else None,
                seed=recipe.train.seed,
                notes=self.out / "streams.jsonl",
                **checks,
            )
        if records.size is not None:  # a stream's records are checked when they are drawn
            for reader in wanted.readers.values():
                check_wording(records[0], records.name, recipe.resolved(reader).profile or "")
        return records

    def decode_pictures(self, *, of_training: bool) -> None:
        """Decode the few pictures of held-out records, which would end the run at its first measurement, and those of training."""
        held_out = {key for key, wanted in self.wanted.items() if wanted.held_out}
        files = self.found.records.items()
        if of_training:
            self.tell(self.verdicts.undecodable([file for key, file in files if key not in held_out]))
        shown = [file for key, file in files if key in held_out]
        faults = self.verdicts.undecodable(shown, first=self.recipe.validation.max_records)
        self.tell(faults, held_out=True)

    def check_sources(self) -> None:
        """Check the sources' records for the open stages, and the machine."""
        recipe, stages, records = self.recipe, self.found.stages, self.found.records
        for name in stages:
            self.attempt(resume.check_records, self.out / name, recipe, name, records)
        if "rl" in stages:
            self.check_pool()
        for name, weight in recipe.loss.terms.items():
            if weight:  # the plugin of a dropped term may no longer exist
                self.attempt(try_out, name, recipe.loss.temperature)
        writing = [name for name in stages if Objective.of(recipe, name).needs_rollout]
        self.problems += collate.problems(recipe, stages, self.accelerator.num_processes)
        self.problems += writer.problems(recipe, writing, self.accelerator)
        self.problems += validation.problems(recipe, records)
        self.problems += machine.problems(recipe.data.num_workers)
        self.found.summary += machine.warnings(self.accelerator)

    def check_pool(self) -> None:
        """Read the pool of the stage rl, if there is one, and look for right answers in it."""
        if (path := self.recipe.rl.pool) is not None:
            self.pool = self.attempt(read_pool, path) or []
        if self.pool:
            self.warn(self.attempt(check_pool, self.recipe.rl, self.found.records, self.pool))

    def lay_out_sources(self, *, decode: bool) -> None:
        """Compute the lengths of all records in the open sources, except streams; look for pictures of the pool's candidates."""
        try:
            builders = collate.PromptBuilders(
                processor_to_train(self.recipe.start, self.recipe.model), self.recipe
            )
            builder = builders()
            builder.check_template()
            for key, file in self.found.records.items():
                if file.size is None:
                    self.warn(f"{file.name} is a stream: its records are measured as they are read")
                    continue
                wanted, told = self.wanted[key], set[str]()
                for of_prompts, reader in wanted.readers.items():
                    laid = self.layouts[of_prompts] = layout.lay_out_once(
                        builders.source(reader, file),
                        self.verdicts,
                        need_oracle=wanted.oracle,
                        need_candidates=wanted.candidates,
                        sample=not decode and not wanted.held_out,
                    )
                    used = self.recipe.validation.max_records if wanted.held_out else len(file)
                    faults = [fault for number, fault in laid.faults.items() if number < used]
                    # Several readers of one file find most of them alike.
                    new = [fault for fault in faults if fault not in told]
                    told.update(new)
                    self.tell(grouped(new, MAX_REPORTED), held_out=wanted.held_out)
            if (path := self.recipe.rl.pool) is not None:
                decoding = dict.fromkeys(map(builders, self.recipe.rl.sources)) if decode else {}
                self.problems += unusable(path, self.pool, self.verdicts.pictures, [*decoding])
        except (UserError, OSError) as error:
            self.problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - training may still succeed
            self.warn(
                f"warning: the lengths of the records could not be measured: {type(error).__name__}: {error}"
            )

    def check_records(self) -> None:
        """Check how many records of each stage are bad, and whether single queries have something to be compared with."""
        recipe = self.recipe
        for name in self.found.stages:
            stage: StageConfig = getattr(recipe, name)
            keys = [source.key for source in stage.sources if source.key]
            files = [self.found.records[key] for key in keys if key in self.found.records]
            laid = [one for _, one in self._laid(stage.sources)]
            if recipe.data.on_bad == "skip" and all(file.size is not None for file in files):
                self._check_share_of_bad(name, files, laid)
            self.problems += _without_scores(recipe, name)
            if Objective.of(recipe, name).alpha_con > 0:
                self.problems += refresh.problems(recipe.data, files)
            if Objective.of(recipe, name).alpha_con > 0 and len(laid) == len(keys):
                self.problems += self._uncompared(name, stage, laid)

    def _uncompared(self, name: str, stage: StageConfig, laid: Sequence[Layout]) -> Iterator[str]:
        """Why the contrastive loss is always 0, if it is; `laid` are all of the stage's sources."""
        if any(each.sample_of is not None for each in laid):
            return  # another record may have a negative
        alone = stage.batch_size == (1 if stage.compare_across else stage.sub_batches)
        if alone and not any(each.column("negatives").any() for each in laid):
            yield (
                f"{name}.batch_size={stage.batch_size}, and no record has a labelled negative, so its contrastive loss is always 0: raise "
                f"{name}.batch_size"
            )
        for where, together in self._in_batches(name):
            if conflicts.compares_nothing(together):
                answer = together[0][0][0].positives[0]
                yield (
                    f"all records of {where} have the same right answers (id or identity {answer.identity or answer.id!r}), and "
                    "none has a labelled negative: no query has a negative, and the contrastive loss is always 0. Give "
                    "different targets different ids"
                )

    def _check_share_of_bad(self, name: str, files: Sequence[Records], laid: Sequence[Layout]) -> None:
        reasons = [f"{record.source}: {record.reason}" for file in files for record in file.bad]
        reasons += [fault for each in laid for fault in each.faults.values()]
        total, most = sum(len(file.bad) + len(file) for file in files), self.recipe.data.max_bad_share
        of_sample = sum(
            len(each.faults) * (each.sample_of / (len(each.numbers_N) + len(each.faults)) - 1)
            for each in laid
            if each.sample_of
        )
        count = len(reasons) + round(of_sample)
        if count > most * total:
            self.problems.append(
                f"{'about ' if of_sample else ''}{count} of {total} records of {name} are bad, more than data.max_bad_share={most}: "
                + "\n".join(grouped(reasons, MAX_REPORTED))
            )

    def check_model(self, model: HubModel) -> None:
        """Check model and disk, and summarise the run if there are no problems."""
        recipe, found = self.recipe, self.found
        sizes = {key: file.size or 0 for key, file in found.records.items()}
        num_steps: dict[str, int] = {}
        for name in found.stages:
            stage: StageConfig = getattr(recipe, name)
            num_steps[name] = stage.num_steps(sum(sizes.get(source.key or "", 0) for source in stage.sources))
        self.attempt(check_sizes, recipe.loss.matryoshka_dims, model)
        needs_head = any(Objective.of(recipe, name).needs_head for name in found.stages)
        self.attempt(_check_weights, recipe, model, needs_head)
        if self.attempt(num_parameters, model, recipe.model) is None:  # model.lora has unknown names
            return
        self.attempt(_check_continued_adapters, recipe, model)
        writes = any(Objective.of(recipe, name).needs_rollout for name in found.stages)
        if recipe.rollout.backend == "vllm" and writes:
            self.attempt(collapsed_ids, model, [])  # an unsupported family
        self.problems += machine.disk_problems(recipe, num_steps, model, self.accelerator)
        plans = self.attempt(Plans, recipe, num_steps, found.records, self.layouts, model, self.accelerator)
        if not self.problems:
            assert plans is not None
            found.kept = {name: plans.kept(name) for name in found.stages}
            found.summary += banner(plans)
            trained = [one for key, one in self.wanted.items() if not one.held_out]
            sources = self._laid(reader for wanted in trained for reader in wanted.readers.values())
            found.summary += layout.summary(sources, recipe) + layout.clashes(sources)
            self._warn_of_conflicts()

    def _laid(self, sources: Iterable[PromptedConfig]) -> list[tuple[Records, Layout]]:
        pairs = ((source.key or "", self.recipe.prompts_key(source)) for source in sources)
        return [(self.found.records[key], self.layouts[laid]) for key, laid in pairs if laid in self.layouts]

    def _in_batches(self, name: str) -> list[tuple[str, list[tuple[Records, Layout]]]]:
        """Sources of a stage whose candidates are compared with each other's queries, with a name for each group of them."""
        stage: StageConfig = getattr(self.recipe, name)
        groups: dict[int, list[SourceConfig]] = {}
        for source, group in zip(stage.sources, stage.groups, strict=True):
            groups.setdefault(0 if stage.compare_across else group, []).append(source)
        found = []
        for sources in groups.values():
            if laid := self._laid(sources):
                own = len(groups) > 1 and len(sources) == 1
                found.append((f"{laid[0][0].name} ({name})" if own else name, laid))
        return found

    def _warn_of_conflicts(self) -> None:
        """Warn of records that train against each other, and of held-out queries that are trained on."""
        stages = self.found.stages
        seen = []
        for name in stages:
            for where, laid in self._in_batches(name) if Objective.of(self.recipe, name).compares else ():
                files = {(file.name, id(each)) for file, each in laid}
                if files not in seen:  # another stage may have the same sources
                    seen.append(files)
                    self.found.summary += conflicts.conflicts(laid, where)
        trained = {
            self.recipe.prompts_key(source): source
            for name in stages
            for source in getattr(self.recipe, name).sources
        }
        most = self.recipe.validation.max_records
        for held_out in self._laid(self.recipe.validation.sources):
            self.warn(conflicts.trained_on(held_out, most, self._laid(trained.values())))


def wanted_sources(recipe: Recipe, stages: Sequence[str]) -> dict[str, Wanted]:
    """Every source that these stages read, by key."""
    found: dict[str, Wanted] = {}

    def want(
        source: RecordsConfig, *, oracle: bool = False, candidates: bool = False, held_out: bool = False
    ) -> None:
        assert source.key is not None
        wanted = found.setdefault(source.key, Wanted(source, held_out=held_out))
        reader = source if isinstance(source, PromptedConfig) else PromptedConfig(**vars(source))
        wanted.readers.setdefault(recipe.prompts_key(reader), reader)
        wanted.oracle |= oracle
        wanted.candidates |= candidates

    # The needs of finished stages count too: a resumed run must skip the same records.
    objectives = {name: Objective.of(recipe, name) for name in recipe.stages()}
    read = {source.key for name in stages for source in getattr(recipe, name).sources}
    for name, objective in objectives.items():
        for source in getattr(recipe, name).sources:
            if source.key in read:
                want(source, oracle=objective.needs_oracle, candidates=objective.needs_candidates)
    for held_out in recipe.validation.sources:
        oracle = any(each.needs_oracle for each in objectives.values())
        candidates = any(each.needs_candidates for each in objectives.values())
        want(held_out, oracle=oracle, candidates=candidates, held_out=True)
    return found


def _without_scores(recipe: Recipe, name: str) -> Iterator[str]:
    """A stage that learns from a judge's scores, if none of the first records that are looked at has any."""
    if not Objective.of(recipe, name).needs_scores:
        return
    sources: Sequence[RecordsConfig] = getattr(recipe, name).sources
    records = (record for source in sources for record in some_records(source, SCORES_READ))
    if all(one.score is None for record in records for one in (*record.positives, *record.negatives)):
        terms = ", ".join(
            term for term, weight in recipe.loss.terms.items() if weight and takes_teacher(term)
        )
        yield (
            f"loss.terms: {terms} learns from a judge's scores, and no target in the records of {name} has a score: `rge data negatives "
            "judge=MODEL` writes them"
        )


def _report(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"error: {brief(problems[0])}"
    indented = [brief(problem).replace("\n", "\n   ") for problem in problems]
    numbered = [f"{number}. {problem}" for number, problem in enumerate(indented, start=1)]
    return "\n".join([f"error: {len(problems)} problems; nothing was started:", *numbered])


def _outline(recipe: Recipe) -> HubModel:
    """The model without weights."""
    start = Path(recipe.start)
    if recipe.init is not None:
        read_config(start)
        if is_adapter_checkpoint(start):
            find_base(start, instead=recipe.model.path, key="model.path")
    else:
        read_config(start, recipe.model.revision)
    return outline(recipe.model, recipe.init)[0]


def _check_weights(recipe: Recipe, model: HubModel, needs_head: bool) -> None:
    """Raise BackboneError if the start's weights are broken, or lack an output matrix that is needed."""
    start = recipe.start
    if not is_adapter_checkpoint(start):
        revision = recipe.model.revision if recipe.init is None else None
        names = stored_names(start, revision)
        if needs_head and lacks_head(names, model.config):
            raise without_head(start)


def _check_continued_adapters(recipe: Recipe, model: HubModel) -> None:
    """Raise AdapterError if training is to continue the adapters of `init`, and they have another form than `model.lora`."""
    if recipe.init is None or recipe.model.lora is None or not recipe.export.adapters_only:
        return
    if is_adapter_checkpoint(start := Path(recipe.start)):
        adapted = skeleton(model.config)
        add_adapters(adapted, recipe.model.lora, emb_id=0)
        check_form(adapted, start)


if __name__ == "__main__":
    start(main)
