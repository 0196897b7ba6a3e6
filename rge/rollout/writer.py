"""The source of a step's rationales: generated now, reused from earlier steps, empty (direct), or the oracle's.

Shape suffixes: B = queries of this rank.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from rge.common.errors import RecipeError, UserError
from rge.config import Recipe
from rge.data.collate import Batch
from rge.distributed import collectives as dist
from rge.loss_config import LossConfig
from rge.model.attention import EncodedParts
from rge.model.backbone import vision_parameters
from rge.model.embedding_model import EmbeddingModel, PictureMemory
from rge.optim.config import StageConfig
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import Kept, chunks_of, encode_prompts, has_dropout
from rge.rollout.vllm_writer import VllmWriter, check_possible

Written = list[tuple[tuple[int, ...], bool]]
"""Token ids and forced flag of each of a query's rationales."""

DIRECT, ORACLE, CAP = 0x0D12EC7, 0x02AC1E, 0x0B0D6E7
"""Salts: make the draws of direct and oracle queries, and of caps, independent of other uses of a query's seed."""

DIRECT_STATE = Rationale((), False, None, 0.0, direct=True)
"""Stands for the state directly after a prompt, which the step computes."""


def encodes_once(
    asked: str,
    *,
    queries_a_rank: int,
    micro_batch_size: int,
    sharded: bool,
    has_dropout: bool,
    keep: str,
    micro_batch_tokens: int | None = None,
) -> bool:
    """Whether the prompts of a step are encoded once: `rollout.prompt_pass` (`asked`) with ``auto`` resolved.

    `keep` is `train.keep_activations`, likewise resolved: several chunks' prompts must be kept to be encoded once.

    Raises:
        RecipeError: ``once`` is not possible.
    """
    reasons = []
    if queries_a_rank > micro_batch_size and keep == "none":
        reasons.append(
            f"a process has {queries_a_rank} queries per step, train.micro_batch_size is {micro_batch_size}, and nothing is "
            "kept between them (train.keep_activations)"
        )
    elif micro_batch_tokens is not None and keep == "none":
        reasons.append(
            "train.micro_batch_tokens may cut a step into several passes, and nothing is kept between them "
            "(train.keep_activations)"
        )
    if sharded:
        reasons.append(
            "parameters are sharded, and no rollout is possible between a forward and its backward pass"
        )
    if has_dropout:
        reasons.append("dropout is on, and must not affect the rollout")
    if asked == "once" and reasons:
        raise RecipeError(
            f"rollout.prompt_pass=once is not possible: {'; '.join(reasons)}. Set rollout.prompt_pass=auto"
        ).about("rollout.prompt_pass")
    return asked != "twice" and not reasons


class Rollout(NamedTuple):
    """A step's rationales."""

    rationales: Sequence[Rationale]  # equally many per query, query after query
    # The queries' prompts with gradient, if one encoding serves the whole step; in parts for several chunks.
    encoded: EncodedParts | None = None
    easy_share: float = 0.0  # maximum share of queries trained to be answered without a rationale
    num_beside: int = 0  # of the rationales, those that stand for direct states, one after each query's own

    def after_update(self) -> "Rollout":
        """The same for the next update: without states and encoding, which belong to the old weights."""
        rationales = [replace(rationale, state_D=None) for rationale in self.rationales]
        return self._replace(rationales=rationales, encoded=None)


def problems(recipe: Recipe, stages: Sequence[str], accelerator: Accelerator) -> Iterator[str]:
    """Reasons why the stages cannot generate rationales as configured."""
    sharded, lora = dist.shards_parameters(accelerator), recipe.model.lora
    keep = recipe.train.keep_activations
    for name in stages:
        try:
            if recipe.rollout.backend == "vllm":
                check_possible("rollout.backend", recipe.rollout.vllm_sleep, accelerator.device)
                continue
            encodes_once(
                recipe.rollout.prompt_pass,
                queries_a_rank=-(-getattr(recipe, name).batch_size // accelerator.num_processes),
                micro_batch_size=recipe.train.micro_batch_size,
                micro_batch_tokens=recipe.train.micro_batch_tokens,
                sharded=sharded,
                has_dropout=lora is not None and lora.dropout > 0,
                keep=keep,
            )
        except UserError as error:
            yield f"{name}: {error}"


@dataclass
class Store:
    """Rationales of the last `max_age` steps by query, the same on every process."""

    max_age: int
    entries: dict[str, tuple[int, Written]] = field(default_factory=dict)

    def find(self, key: str, step: int) -> tuple[int, Written] | None:
        """Age and rationales of a query, if they may be reused."""
        if key not in self.entries or step - self.entries[key][0] > self.max_age:
            return None
        written_at, rationales = self.entries[key]
        return step - written_at, rationales

    def add(self, step: int, written: Sequence[tuple[str, Written]]) -> None:
        """Add the rationales of all processes from this step, and drop those too old for the next."""
        for of_one_process in dist.gather_objects(list(written)):
            self.entries |= {key: (step, rationales) for key, rationales in of_one_process}
        self.entries = {
            key: entry for key, entry in self.entries.items() if step + 1 - entry[0] <= self.max_age
        }

    def state_dict(self) -> dict[str, Any]:
        """For a resumable checkpoint."""
        return {"entries": dict(self.entries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a resumable checkpoint."""
        self.entries = dict(state["entries"])


@dataclass
class Writer:
    """Provides the rationales of every step; ``store`` has the reusable ones, and is restored on resume."""

    model: nn.Module  # the wrapped embedder
    embedder: EmbeddingModel  # the same, unwrapped
    settings: RolloutConfig
    once: bool  # see `encodes_once`
    vllm: VllmWriter | None  # for `rollout.backend=vllm`; None: the model itself writes
    loss: LossConfig  # decides whose rationale a query gets
    micro_batch_size: int  # queries per forward of the step, if its chunks' prompts are kept
    keep: str  # see `rge.rollout.micro_batches.keeping`; ``none``: the step has one chunk
    # Of a forward of the step, see `rge.rollout.micro_batches.chunks_of`.
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        self.with_direct = self.loss.direct > 0
        self.store = Store(self.settings.reuse_steps) if self.settings.reuse_steps else None

    def __call__(self, step: int, batch: Batch) -> Rollout:
        """`num_rationales` per query of this rank's batch; step and batch decide everything random here."""
        if self.embedder.pictures is not None:
            self.embedder.pictures.open()
        encoded = self._encode(batch) if self.once else None
        # The checksum tells queries of equal id apart, which different sources may have; their words may be equal, too, and
        # pictures as large.
        keys = [
            f"{name}:{zlib.crc32(prompt.input_ids.numpy().tobytes() + repr(answers).encode()):08x}"
            for name, prompt, answers in zip(
                batch.record_ids, batch.queries, batch.right_answers, strict=True
            )
        ]
        known = [self._unwritten(step, batch, row, key) for row, key in enumerate(keys)]
        rows = [row for row, group in enumerate(known) if group is None]
        caps = [drawn_cap(seed, self.loss.budget, self.settings.max_new_tokens) for seed in batch.seeds]
        written = self._write(batch, rows, encoded, caps)
        if self.store is not None:
            num_each = self.settings.num_rationales
            new = [[(one.ids, one.forced) for one in group[:num_each]] for group in written]
            self.store.add(step, [(keys[row], group) for row, group in zip(rows, new, strict=True)])
        groups = iter(written)
        rationales = []
        for group, cap in zip(known, caps, strict=True):
            group = next(groups) if group is None else group
            rationales += self._whole(group if cap is None else [_ended(one, cap) for one in group])
        return Rollout(rationales, encoded, num_beside=len(caps) * self.with_direct)

    def _unwritten(self, step: int, batch: Batch, row: int, key: str) -> list[Rationale] | None:
        """A query's rationales if none are generated for it in this step."""
        num_each, seed = self.settings.num_rationales, batch.seeds[row]
        if is_drawn(seed, DIRECT, self.settings.direct_share):
            return [DIRECT_STATE] * num_each
        if is_drawn(seed, ORACLE, oracle_share(self.loss, step)):
            oracle = tuple(batch.oracle_ids[row][:-1])  # without <emb>
            return [Rationale(oracle, False, None, 0.0, oracle=True)] * num_each
        known = None if self.store is None else self.store.find(key, step)
        return known and [Rationale(ids, forced, None, 0.0, known[0]) for ids, forced in known[1]]

    def _write(
        self,
        batch: Batch,
        rows: Sequence[int],
        encoded: EncodedParts | None,
        caps: Sequence[int | None],
    ) -> list[list[Rationale]]:
        num_each, prompts = self.settings.num_rationales, [batch.queries[row] for row in rows]
        draw: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "seeds": [seed for row in rows for seed in sample_seeds(batch.seeds[row], num_each)],
            "num_each": num_each,
        }
        if any(cap is not None for cap in caps) and self.store is None:  # it keeps them whole, for other caps
            most = self.settings.max_new_tokens
            of_rows = [caps[row] for row in rows]
            draw["caps"] = [most if cap is None else cap for cap in of_rows]
        if self.vllm is not None:
            new = self.vllm.generate(prompts, **draw)
        else:
            new = generate(
                self.embedder,
                prompts,
                max_new_tokens=self.settings.max_new_tokens,
                batch_size=self.settings.batch_size,
                batch_tokens=self.settings.batch_tokens,
                encoded=encoded,
                places=rows,
                with_direct=self.with_direct,
                **draw,
            )
        num_new = len(new) // max(len(rows), 1)
        return [new[number * num_new : (number + 1) * num_new] for number in range(len(rows))]

    def _whole(self, group: Sequence[Rationale]) -> list[Rationale]:
        """A query's rationales and its direct state; the step computes the latter unless generation has."""
        missing = self.with_direct and len(group) == self.settings.num_rationales
        return [*group, *[DIRECT_STATE] * missing]

    def _encode(self, batch: Batch) -> EncodedParts:
        if self.keep != "none":
            shares = dist.gather_sizes(len(batch.queries), self.embedder.device)
            size, tokens = self.micro_batch_size, self.micro_batch_tokens
            chunks = chunks_of(batch, shares, size, tokens, self.embedder.device)
            if len(chunks) > 1:
                parts = [rows for rows, _ in chunks]
                return encode_prompts(self.embedder, self.embedder, batch.queries, parts, self.keep)
        return encode_prompts(self.model, self.embedder, batch.queries)


def make_writer(
    model: nn.Module,
    embedder: EmbeddingModel,
    recipe: Recipe,
    stage: StageConfig,
    accelerator: Accelerator,
    kept: Kept,
) -> Writer:
    """A stage's writer; its store is saved and loaded with the accelerator's state.

    `kept` is what the stage's micro batches keep.

    Raises:
        RecipeError: `rollout.prompt_pass=once` is not possible.
        BackboneError: `rollout.backend=vllm` is not possible.
    """
    settings = recipe.rollout_of(stage)
    sharded = dist.shards_parameters(accelerator)
    if not sharded and not any(parameter.requires_grad for parameter in vision_parameters(embedder.model)):
        # With sharded parameters, all processes must run the tower equally often.
        embedder.pictures = PictureMemory()
    vllm = None
    if settings.backend == "vllm":
        vllm = VllmWriter.in_training(
            embedder,
            accelerator,
            max_prompt_tokens=recipe.largest(stage).data.max_prompt_tokens,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            memory=settings.vllm_memory,
            sleep=settings.vllm_sleep,
        )
    once = vllm is None and encodes_once(
        kept.prompt_pass,
        queries_a_rank=-(-stage.batch_size // dist.world_size()),
        micro_batch_size=recipe.train.micro_batch_size,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        sharded=sharded,
        has_dropout=has_dropout(embedder),
        keep=kept.where,
    )
    writer = Writer(
        model,
        embedder,
        settings,
        once=once,
        vllm=vllm,
        loss=recipe.loss,
        micro_batch_size=recipe.train.micro_batch_size,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        keep=kept.where,
    )
    if writer.store is not None:
        accelerator.register_for_checkpointing(writer.store)
    return writer


def is_drawn(seed: int, purpose: int, share: float) -> bool:
    """Whether a query with this seed gets no rationale (`DIRECT`), or the oracle's (`ORACLE`)."""
    return share > 0 and float(np.random.default_rng([seed, purpose]).random()) < share


def drawn_cap(seed: int, share: float, most: int) -> int | None:
    """The number of tokens, from 0 and below `most`, after which the rationale of a query with this seed ends; None: no such end."""
    if not share:
        return None
    draw = np.random.default_rng([seed, CAP])
    return int(draw.integers(most)) if draw.random() < share else None


def _ended(one: Rationale, cap: int) -> Rationale:
    """A rationale that ends after `cap` tokens; what the model did not write in this step is left whole."""
    if one.direct or one.oracle or len(one.ids) < cap:
        return one
    return replace(
        one,
        ids=one.ids[:cap],
        state_D=one.state_D if len(one.ids) == cap else None,
        log_probs=one.log_probs and one.log_probs[:cap],
        forced=False,
        direct=not cap,
        capped=cap > 0,
    )


def oracle_share(loss: LossConfig, step: int) -> float:
    """Share of a step's queries that get the oracle's rationale; 0 unless ``anchor=mix``."""
    if loss.anchor != "mix":
        return 0.0
    if loss.oracle_decay_steps is None:
        return loss.oracle_share
    return loss.oracle_share * max(0.0, 1 - step / loss.oracle_decay_steps)


def easy_share(loss: LossConfig, step: int) -> float:
    """Maximum share of a step's queries whose LM target is ``<emb>`` alone; rises linearly during the warm-up."""
    adaptive = loss.adaptive
    return adaptive.share * min(1.0, step / adaptive.warmup_steps if adaptive.warmup_steps else 1.0)


def sample_seeds(seed: int, count: int) -> list[int]:
    """Seeds of a query's rationales: its own, and further ones drawn from it."""
    if count == 1:
        return [seed]
    return [seed, *map(int, np.random.SeedSequence([seed]).generate_state(count - 1, np.uint64))]


def rollout_report(rollout: Rollout, seconds: float, device: torch.device) -> dict[str, float]:
    """Share of forced stops (and, if there are any, of drawn ends), mean length and speed of a step's rationales over all ranks.

    Lengths are of what the step was trained with, reused and oracle rationales included; forced stops and ages are of what the
    model wrote, speed is of what it wrote in this step.
    """
    if not (rationales := rollout.rationales):  # the objective needs none
        return {}
    reasoned = [rationale for rationale in rationales if not rationale.direct]
    own = [rationale for rationale in reasoned if not rationale.oracle]
    local = [
        len(rationales),
        len(reasoned),
        len(own),
        sum(len(rationale.ids) for rationale in reasoned),
        sum(rationale.forced for rationale in own),
        sum(rationale.age for rationale in own),
        sum(len(rationale.ids) for rationale in own if not rationale.age),
        sum(rationale.oracle for rationale in rationales),
        sum(rationale.direct for rationale in rationales),
        len(rationales) - rollout.num_beside,
        sum(rationale.capped for rationale in own),
    ]
    sums = dist.sum_over_ranks(local, device)
    count, num_reasoned, num_own, tokens, forced, age, new_tokens, oracle, direct, anchors, capped = sums
    of_caps = {"capped_rate": capped / num_own} if capped else {}
    return {
        "forced_rate": forced / max(num_own, 1),
        "rationale_tokens_mean": tokens / max(num_reasoned, 1),
        "rationale_age_mean": age / max(num_own, 1),
        "direct_rate": direct / count,
        "oracle_rate": oracle / anchors,
        "tokens_per_s": new_tokens / max(seconds, 1e-9),
        **of_caps,
    }
