"""Our training step against the three-pass form: FLOPs, wall time, memory, in one run.

    python scripts/bench_step.py [settings=demo,long] [prompt_tokens=1024] [rationale_tokens=128] [batch=4] [repeats=3]

Both forms compute the same step on the same weights, prompts, own rationales and candidates:

    three passes  transformers' `generate`; LM forward on [prompt][oracle]; contrastive forward on [prompt][own, <emb>]
    ours          `rge.model.embedding_model.encode_prompts` runs the prompts, with gradient; `rge.rollout.generate` goes on from their
                  keys and values; so do [own, <emb>] and [oracle, <emb>] in `rge.step.TrainingStep`

``demo`` is the demo recipe's model and one of its real batches; ``long`` is a random Qwen2.5-VL with a picture and text
of `prompt_tokens`, rationales of 40 tokens to `rationale_tokens` (lognormal), and a picture of 256 placeholders as each
query's candidate. A query's picture runs through the vision tower three times a step there (rollout, LM, contrastive)
and once here. Candidates are encoded by the same call in both. ``rollout`` is generation by itself, prompts included, and
``in a step`` generation as our step runs it, from prompts that are encoded already; ``forward and backward`` the step
after it, prompts included; ``both`` the whole step, in which ours encodes them once. The three-pass form is given what
costs nothing to write: logits at labelled positions only, the rows padded to the longest of their own pass, and for
memory also a variant that goes backward after each pass (`peak_memory_ratio_two_backwards`).

Random weights never write ``<emb>``. `StoppingHead` raises its logit at a length drawn for each row and lowers it
before, by the same code in both forms, so both write the same tokens; transformers keeps finished rows in the batch
until the last one ends, and so does the form measured here.

``rationales=8`` measures a step of the stage rl instead, with so many rationales a query, against its plain form:

    plain         `generate` from k copies of each prompt; a forward over each [prompt][rationale, <emb>] without gradient
                  for the rewards; one with gradient for the log probabilities; one for the states of InfoNCE; the LM forward
    leaner        the same, but prompts encoded once for generating, and log probabilities and states read from one forward
    ours          prompts encoded once; k branches and the oracle's in `rge.step.TrainingStep`, which is all there is

``settings=3b`` counts such a step at the shape of Qwen2.5-VL-3B, one query with a prompt of `prompt_tokens`. Of the layers, which
are all alike, a few are built; a further one of each kind (text, windowed and global vision) says what one costs, and the rest
is added. Products are counted and not computed: a matrix product or an attention gives zeros of the right shape. That the
forms compute the same step is compared by the other settings.

Before anything is timed, tokens, losses and all gradients of the two forms are compared in float64; a difference is an
error. Repetitions alternate, medians count; CPU time stands beside wall time, since on a busy machine only the former
repeats. FLOPs: `torch.utils.flop_counter`, attention counted dense, as it does for CUDA kernels. Memory: each form in a
process of its own, peak resident set above what model and batch occupy. Ratios are three-pass over ours, except
the ratios of tokens per second and of memory, which are ours over three-pass. The last line is one JSON object;
its top level repeats the figures of the last setting. Threads: OMP_NUM_THREADS.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from rge.common.commands import start
from rge.common.errors import UserError
from rge.common.options import one_of, parse_options
from rge.common.schema import Item
from rge.config import LossConfig, Recipe, RLConfig, RolloutConfig, load_recipe
from rge.data.collate import Batch, StepBatches
from rge.data.readers import open_records
from rge.data.sources import Mixture
from rge.losses import info_nce, rationale_log_probs, rationale_nll
from rge.model.attention import EncodedPrompts
from rge.model.backbone import load_backbone, text_model
from rge.model.embedding_model import EmbeddingModel, Readout, encode_prompts, normalise
from rge.model.families import normalised
from rge.model.packing import Branch
from rge.model.prompts import Prompt, PromptBuilder
from rge.objective import Objective
from rge.plan.known_models import TABLE
from rge.rl.credit import Reinforcement
from rge.rl.policy import advantages
from rge.rollout.generate import Rationale, generate
from rge.rollout.writer import Rollout
from rge.scratch import build as scratch
from rge.step import TrainingStep, candidate_masks

FORMS = ("ours", "three_pass", "three_pass_two_backwards")
TOLERANCE = 1e-6
"""Largest relative difference of losses and gradients with float64 weights; transformers' norms round to float32."""


@dataclass
class Options:
    """What is measured; the sizes are those of ``long``."""

    settings: tuple[str, ...] = ("demo", "long")
    prompt_tokens: int = 1024
    rationale_tokens: int = 128
    batch: int = 4
    repeats: int = 3
    hidden: int = 256
    layers: int = 8
    candidate_side_px: int = 448
    memory: bool = True
    """Whether memory is measured, which takes three more processes a setting."""
    rationales: int = 1
    """Rationales a query; above 1 the step is one of the stage rl, of which memory is not measured. ``settings=3b``, which is not timed, needs it."""
    memory_of: str | None = None
    """Set in the processes that measure memory: one of `FORMS`."""


@dataclass
class Setting:
    """Everything a form needs.

    Attributes:
        name: of the setting.
        embedder: random weights, float32.
        batch: prompts of queries and candidates, oracle rationales.
        objective: losses and weights.
        stop_B: tokens each query's own rationale has, ``<emb>`` not counted.
        max_new_tokens: cap, ``<emb>`` counted.
        note: one line that says what it is.
    """

    name: str
    embedder: EmbeddingModel
    batch: Batch
    objective: Objective
    stop_B: list[int]
    max_new_tokens: int
    note: str


def demo_setting(options: Options) -> Setting:
    """The demo recipe: its architecture, objective and the batch of its first joint step."""
    recipe = load_recipe(["recipe=demo"])
    config, stage = recipe.model.scratch, recipe.joint
    assert config is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backbone"
        texts = list(dict.fromkeys(text for one in stage.sources for text in open_records(one).texts()))
        pixels = {"min_pixels": recipe.model.min_pixels, "max_pixels": recipe.model.max_pixels}
        sizes = {"vocab_size": config.vocab_size, "text": config.text, "vision": config.vision}
        scratch.build(path, texts, seed=0, **sizes, **pixels)
        embedder = EmbeddingModel(load_backbone(path, add_emb=True, **pixels)).eval()
    files = [open_records(source, need_rationale=True) for source in stage.sources]
    weights = [source.weight for source in stage.sources]
    loss = recipe.loss
    objective = Objective(
        loss.alpha_lm, loss.alpha_con, loss.temperature, lm_on_candidates=loss.lm_on_candidates
    )
    builder = PromptBuilder(embedder.processor, recipe.data.profile, recipe.data.max_prompt_tokens)
    mixture = Mixture([len(file) for file in files], weights, stage.batch_size, seed=0)
    batch = StepBatches(files, mixture, builder, recipe.data, rank=0, world_size=1)[0]
    cap = recipe.rollout.max_new_tokens
    # Own rationales as long as other records' oracles: the lengths that a trained model writes.
    lengths = [min(len(ids) - 1, cap - 1) for ids in batch.oracle_ids]
    stop_B = lengths[1:] + lengths[:1]
    return Setting("demo", embedder, batch, objective, stop_B, cap, _note(embedder, batch, stop_B))


def long_setting(options: Options, sizes: dict | None = None) -> Setting:
    """A picture and text of `prompt_tokens`, long rationales, a language model large enough to dominate.

    Args:
        options: sizes of the step, and of the model.
        sizes: of another model: vocab_size, text and vision, as `rge.scratch.build.build` takes them.
    """
    vision = {
        **{"depth": 4, "hidden_size": options.hidden // 2, "intermediate_size": options.hidden * 3 // 2},
        **{"num_heads": 4, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3]},
    }
    text = {
        **{"hidden_size": options.hidden, "intermediate_size": options.hidden * 4},
        **{"num_hidden_layers": options.layers, "num_attention_heads": 8, "num_key_value_heads": 2},
    }
    rng = np.random.default_rng(0)
    words = ["key", "lock", "door", "open", "close"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backbone"
        pixels = {"min_pixels": 28 * 28, "max_pixels": 4096 * 4096}
        texts = [" ".join(rng.choice(words, 20)) for _ in range(50)]
        sizes = sizes or {"vocab_size": 2048, "text": text, "vision": vision}
        scratch.build(path, texts, seed=0, **sizes, **pixels)
        embedder = EmbeddingModel(load_backbone(path, add_emb=True, **pixels)).eval()
    builder = PromptBuilder(embedder.processor, "plain", max_tokens=10**6)

    def picture(side_px: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 255, (side_px, side_px, 3), dtype=np.uint8))

    side_px = 28 * math.isqrt(max(1, int(0.94 * (options.prompt_tokens - 64))))  # the template takes about 60
    queries, candidates = [], []
    for row in range(options.batch):
        image = picture(side_px)
        base = len(builder.build(Item(f"q{row}", " key", ()), "query", [image]))
        # Ragged, as real prompts are: the longest has `prompt_tokens`, the others up to 4 % less.
        wanted = options.prompt_tokens - (row % 4) * options.prompt_tokens // 100
        if wanted < base:
            raise UserError(
                f"prompt_tokens={options.prompt_tokens} is too few: picture and template take {base}"
            )
        text_ = " key" * (wanted - base + 1)
        queries.append(builder.build(Item(f"q{row}", text_, ()), "query", [image]))
        candidates.append(
            builder.build(Item(f"c{row}", None, ()), "candidate", [picture(options.candidate_side_px)])
        )

    def lengths() -> list[int]:
        drawn = np.exp(rng.normal(np.log(0.6 * options.rationale_tokens), 0.35, options.batch))
        low = min(40, options.rationale_tokens // 2)
        return np.clip(drawn.astype(int), low, options.rationale_tokens - 1).tolist()

    high = min(embedder.suppressed_ids)
    batch = Batch(
        record_ids=[prompt.id for prompt in queries],
        queries=queries,
        oracle_ids=[[*rng.integers(0, high, length).tolist(), embedder.emb_id] for length in lengths()],
        candidates=candidates,
        candidate_identity=list(range(options.batch)),
        positive=list(range(options.batch)),
        negatives=[[] for _ in queries],
        right_answers=[[row] for row in range(options.batch)],
        seeds=[0] * options.batch,
    )
    stop_B = lengths()
    objective = Objective(1 / 11, 10 / 11)
    return Setting(
        "long", embedder, batch, objective, stop_B, options.rationale_tokens, _note(embedder, batch, stop_B)
    )


SETTINGS: dict[str, Callable[[Options], Setting]] = {"demo": demo_setting, "long": long_setting}


def _note(embedder: EmbeddingModel, batch: Batch, stop_B: Sequence[int]) -> str:
    size = sum(parameter.numel() for parameter in embedder.parameters()) / 1e6

    def span(values: Sequence[int]) -> str:
        return f"{min(values)} to {max(values)}"

    return (
        f"{size:.1f} M parameters, {len(batch.queries)} queries with prompts of {span([len(p) for p in batch.queries])} "
        f"tokens, own rationales {span(stop_B)}, oracles {span([len(ids) - 1 for ids in batch.oracle_ids])}; "
        f"{len(batch.candidates)} candidates of {span([len(p) for p in batch.candidates])} tokens"
    )


class StoppingHead(nn.Module):
    """An output head that ends row r's rationale after ``stop_B[r]`` tokens, and not before.

    Called once a generated token, with (rows, D) by our rollout and (rows, 1, D) by transformers. Where the batch
    shrinks, finished rows have been dropped; the others keep their order.
    """

    def __init__(self, head: nn.Module, emb_id: int, stop_B: Sequence[int]):
        super().__init__()
        self.head, self.emb_id = head, emb_id
        self.stop_R, self.step = list(stop_B), 0

    @property
    def weight(self) -> Tensor:
        """The wrapped head's."""
        return self.head.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the wrapped head, those of ``<emb>`` overwritten."""
        logits = self.head(hidden)
        if logits.shape[0] != len(self.stop_R):
            self.stop_R = [stop for stop in self.stop_R if stop >= self.step]
        if logits.shape[0] != len(self.stop_R):
            raise RuntimeError(f"{logits.shape[0]} rows are being written, {len(self.stop_R)} are unfinished")
        last = logits if logits.ndim == 2 else logits[:, -1]
        ends = torch.tensor([stop == self.step for stop in self.stop_R])
        last[:, self.emb_id] = torch.where(ends, 1e4, -1e4).to(last.dtype)
        self.step += 1
        return logits


@contextmanager
def stopping(embedder: EmbeddingModel, stop_B: Sequence[int]) -> Iterator[None]:
    """Let the model's rows stop after so many tokens."""
    head = embedder.model.lm_head
    embedder.model.lm_head = StoppingHead(head, embedder.emb_id, stop_B)
    try:
        yield
    finally:
        embedder.model.lm_head = head


def our_rollout(setting: Setting, encoded: EncodedPrompts | None = None) -> list[Rationale]:
    """Own rationales, by rge."""
    prompts = setting.batch.queries
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # the order rows are written in
    with stopping(setting.embedder, [setting.stop_B[row] for row in order]):
        return generate(
            setting.embedder,
            prompts,
            max_new_tokens=setting.max_new_tokens,
            batch_size=len(prompts),
            encoded=encoded,
        )


@torch.no_grad()
def their_rollout(setting: Setting) -> list[list[int]]:
    """Own rationales, by transformers' `generate`; ids without ``<emb>``."""
    embedder, prompts = setting.embedder, setting.batch.queries
    inputs = stock_inputs(embedder, prompts, [[] for _ in prompts], padding_side="left")
    config = GenerationConfig(
        max_new_tokens=setting.max_new_tokens,
        do_sample=False,
        eos_token_id=embedder.emb_id,
        pad_token_id=embedder.pad_id,
        suppress_tokens=embedder.suppressed_ids,
    )
    with stopping(embedder, setting.stop_B):
        written = embedder.model.generate(**inputs, generation_config=config)
    written = written[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(embedder.emb_id)] for row in written]


def stock_inputs(
    embedder: EmbeddingModel, prompts: Sequence[Prompt], suffixes: Sequence[Sequence[int]], padding_side: str
) -> dict[str, Tensor]:
    """A padded batch as transformers takes it; positions and masks are made inside the model."""
    ids, types = [], []
    for prompt, suffix in zip(prompts, suffixes, strict=True):
        tail = torch.tensor(list(suffix), dtype=torch.long)
        ids.append(torch.cat([prompt.input_ids, tail]))
        types.append(torch.cat([prompt.type_ids, torch.zeros_like(tail)]))

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=padding_side)

    inputs = {
        "input_ids": padded(ids, embedder.pad_id),
        "attention_mask": padded([torch.ones_like(row) for row in ids], 0),
        "mm_token_type_ids": padded(types, 0),
    }
    pictures = [prompt for prompt in prompts if prompt.pixels is not None]
    if pictures:
        pixels = torch.cat([prompt.pixels for prompt in pictures])  # type: ignore[misc]
        inputs["pixel_values"] = normalised(embedder.processor.image_processor, pixels)
        inputs["image_grid_thw"] = torch.cat([prompt.image_grid for prompt in pictures])  # type: ignore[misc]
    return {name: value.to(embedder.device) for name, value in inputs.items()}


def our_full_step(setting: Setting) -> dict[str, float]:
    """Own rationales and gradients of one step, prompts encoded once, by rge."""
    encoded = encode_prompts(setting.embedder, setting.embedder, setting.batch.queries)
    return our_step(setting, our_rollout(setting, encoded), encoded)


def their_full_step(setting: Setting, two_backwards: bool = False) -> dict[str, float]:
    """Own rationales and gradients of one step, in three passes and a rollout."""
    return three_pass_step(setting, their_rollout(setting), two_backwards)


def our_step(
    setting: Setting, rationales: Sequence[Rationale], encoded: EncodedPrompts | None = None
) -> dict[str, float]:
    """Gradients of one step, by rge."""
    return TrainingStep(setting.embedder, setting.embedder, setting.objective, len(setting.batch.queries))(
        setting.batch, Rollout(rationales, encoded)
    )


def three_pass_step(
    setting: Setting, own_ids: Sequence[Sequence[int]], two_backwards: bool = False
) -> dict[str, float]:
    """Gradients of one step, in three passes: LM, contrastive, candidates."""
    embedder, batch, objective = setting.embedder, setting.batch, setting.objective
    model, emb_id = embedder.model, embedder.emb_id

    def states(suffixes: Sequence[Sequence[int]]) -> Tensor:
        inputs = stock_inputs(embedder, batch.queries, suffixes, padding_side="right")
        return text_model(model)(**inputs, use_cache=False).last_hidden_state

    labelled = objective.lm_on_candidates and objective.alpha_lm > 0
    num_tokens = sum(map(len, batch.oracle_ids)) + (len(batch.candidates) if labelled else 0)
    hidden_BTD = states(batch.oracle_ids)
    rows, columns, labels = [], [], []
    for row, (prompt, ids) in enumerate(zip(batch.queries, batch.oracle_ids, strict=True)):
        rows += [row] * len(ids)
        columns += range(len(prompt) - 1, len(prompt) - 1 + len(ids))
        labels += ids
    label_N = torch.tensor(labels).to(embedder.device)
    nll = rationale_nll(hidden_BTD[rows, columns], model.get_output_embeddings(), label_N)
    lm = float(nll.detach())
    total = objective.alpha_lm * nll / num_tokens
    if two_backwards:
        total.backward()
        total = 0.0
        del hidden_BTD, nll

    hidden_BTD = states([[*ids, emb_id] for ids in own_ids])
    ends = [len(prompt) + len(ids) for prompt, ids in zip(batch.queries, own_ids, strict=True)]
    q_BD = normalise(hidden_BTD[range(len(ends)), ends])
    branch = Branch([emb_id], read_state=True, predict=labelled)
    candidates = embedder(embedder.pack(batch.candidates, [[branch]] * len(batch.candidates)))[0]
    positive_BC, ignored_BC, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)
    con = info_nce(q_BD, candidates.state_ND, positive_BC, ignored_BC, temperature=objective.temperature)
    con = con / len(batch.queries)
    total = total + objective.alpha_lm * candidates.nll / num_tokens + objective.alpha_con * con
    total.backward()  # type: ignore[union-attr]
    lm = (lm + float(candidates.nll.detach())) / num_tokens
    con_value = float(con.detach())
    return {
        "loss_lm": lm,
        "loss_contrastive": con_value,
        "loss": objective.alpha_lm * lm + objective.alpha_con * con_value,
    }


def rl_recipe(setting: Setting, options: Options) -> Recipe:
    """The stage rl as recipes have it by default."""
    objective = setting.objective
    return Recipe(
        recipe="bench",
        stage="rl",
        loss=LossConfig(
            alpha_lm=0.5,
            alpha_con=0.5,
            temperature=objective.temperature,
            lm_on_candidates=objective.lm_on_candidates,
        ),
        rollout=RolloutConfig(max_new_tokens=setting.max_new_tokens),
        rl=RLConfig(num_rationales=options.rationales, std_floor=0.1),
    )


def groups_of(setting: Setting, count: int) -> Setting:
    """The setting with `count` rationales a query, of lengths that the setting's rationales have."""
    drawn = np.random.default_rng(1).choice(setting.stop_B, (len(setting.stop_B), count))
    return replace(setting, stop_B=drawn.flatten().tolist())


def our_groups(setting: Setting, count: int, encoded: EncodedPrompts | None = None) -> list[Rationale]:
    """`count` rationales a query, by rge; greedy ones that end at different places, for the plain form to write them too."""
    prompts = setting.batch.queries
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    stops = [setting.stop_B[row * count + number] for row in order for number in range(count)]
    with stopping(setting.embedder, stops):
        return generate(
            setting.embedder,
            prompts,
            max_new_tokens=setting.max_new_tokens,
            batch_size=len(stops),
            num_each=count,
            encoded=encoded,
        )


def our_rl_step(
    setting: Setting, recipe: Recipe, rationales: Sequence[Rationale], encoded: EncodedPrompts | None = None
) -> dict[str, float]:
    """Gradients of one step of the stage rl, by rge."""
    credit = Reinforcement(recipe, setting.embedder, None, Path()).begin(setting.batch, rationales, False)
    return TrainingStep(
        setting.embedder, setting.embedder, Objective.of(recipe, "rl"), len(setting.batch.queries)
    )(setting.batch, Rollout(rationales, encoded), credit)


def our_full_rl_step(setting: Setting, recipe: Recipe) -> dict[str, float]:
    """Rationales and gradients, prompts encoded once, by rge."""
    encoded = encode_prompts(setting.embedder, setting.embedder, setting.batch.queries)
    return our_rl_step(setting, recipe, our_groups(setting, recipe.rl.num_rationales, encoded), encoded)


def plain_rl_step(
    setting: Setting, recipe: Recipe, own_ids: Sequence[Sequence[int]], lean: bool = False
) -> dict[str, float]:
    """Gradients of one step of the stage rl, in passes: rewards, log probabilities, states, LM, candidates.

    Args:
        setting: model and batch.
        recipe: of the stage.
        own_ids: rationales, equally many a query.
        lean: log probabilities and states are read from one forward.
    """
    embedder, batch, rl = setting.embedder, setting.batch, recipe.rl
    model, emb_id, K = embedder.model, embedder.emb_id, rl.num_rationales
    head = model.get_output_embeddings()
    repeated = [prompt for prompt in batch.queries for _ in range(K)]
    suffixes = [[*ids, emb_id] for ids in own_ids]
    ends = [len(prompt) + len(ids) - 1 for prompt, ids in zip(repeated, suffixes, strict=True)]

    def hidden(prompts: Sequence[Prompt], continuations: Sequence[Sequence[int]]) -> Tensor:
        inputs = stock_inputs(embedder, prompts, continuations, padding_side="right")
        return text_model(model)(**inputs, use_cache=False).last_hidden_state

    def predicting(
        prompts: Sequence[Prompt], continuations: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        rows = [row for row, ids in enumerate(continuations) for _ in ids]
        columns = [
            len(prompts[row]) - 1 + place
            for row, ids in enumerate(continuations)
            for place in range(len(ids))
        ]
        return rows, columns

    def candidates() -> Readout:
        labelled = recipe.loss.lm_on_candidates
        branch = Branch([emb_id], read_state=True, predict=labelled)
        return embedder(embedder.pack(batch.candidates, [[branch]] * len(batch.candidates)))[0]

    positive_BC, ignored_BC, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)
    with torch.no_grad():
        state_ND = normalise(hidden(repeated, suffixes)[range(len(ends)), ends])
        logit = state_ND.view(-1, K, state_ND.shape[1]) @ candidates().state_ND.T / recipe.loss.temperature
        right = (positive_BC | ignored_BC)[:, None].expand_as(logit)
        reward_BK = logit.masked_fill(~right, float("-inf")).logsumexp(2) - logit.logsumexp(2)
        advantage_BK = advantages(reward_BK, scale="group", std_floor=rl.std_floor)
    written = hidden(repeated, suffixes)
    labels = torch.tensor([token for ids in suffixes for token in ids])
    log_prob_L, _ = rationale_log_probs(
        written[predicting(repeated, suffixes)],
        head,
        labels,
        barred_ids=embedder.suppressed_ids,
        temperature=1.0,
    )
    owner_L = torch.arange(len(suffixes)).repeat_interleave(torch.tensor([len(ids) for ids in suffixes]))
    policy = -(advantage_BK.flatten()[owner_L] * (log_prob_L - log_prob_L.detach()).exp()).mean()
    total = rl.alpha_rl * policy
    if not lean:
        total.backward()
        total, written = 0.0, hidden(repeated, suffixes)
    q_ND, found = normalise(written[range(len(ends)), ends]), candidates()
    masks = (mask.repeat_interleave(K, dim=0) for mask in (positive_BC, ignored_BC))
    con = info_nce(q_ND, found.state_ND, *masks, temperature=recipe.loss.temperature) / len(suffixes)
    oracle = hidden(batch.queries, batch.oracle_ids)[predicting(batch.queries, batch.oracle_ids)]
    label_N = torch.tensor([token for ids in batch.oracle_ids for token in ids])
    lm = (rationale_nll(oracle, head, label_N) + found.nll) / (len(label_N) + found.num_tokens)
    total = total + rl.alpha_con * con + rl.alpha_lm * lm
    total.backward()  # type: ignore[union-attr]
    parts = {"loss_rl": policy, "loss_contrastive": con, "loss_lm": lm}
    return {name: float(value.detach()) for name, value in parts.items()}


def measure_rl(setting: Setting, options: Options) -> dict[str, float]:
    """FLOPs and medians of timings of a step of the stage rl against its plain form; losses and gradients are compared first, in float64.

    Raises:
        RuntimeError: they differ by more than `TOLERANCE`.
    """
    count = options.rationales
    setting, recipe = groups_of(setting, count), rl_recipe(setting, options)
    embedder = setting.embedder.double()
    rationales = our_groups(setting, count)
    own_ids = [rationale.ids for rationale in rationales]
    reports, gradients = [], []
    for step in (
        lambda: our_full_rl_step(setting, recipe),
        lambda: plain_rl_step(setting, recipe, own_ids),
        lambda: plain_rl_step(setting, recipe, own_ids, lean=True),
    ):
        embedder.zero_grad(set_to_none=True)
        reports.append(step())
        gradients.append(torch.cat([p.grad.flatten() for p in embedder.parameters() if p.grad is not None]))
    embedder.zero_grad(set_to_none=True)
    worst = 0.0
    for report, gradient in zip(reports[1:], gradients[1:], strict=True):
        worst = max(worst, float((gradient - gradients[0]).norm() / gradient.norm()))
        worst = max(
            worst, *(abs(value - reports[0][name]) / max(abs(value), 1e-3) for name, value in report.items())
        )
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"{setting.name}: losses or gradients differ by {worst:.1e} (relative), > {TOLERANCE}"
        )
    print(
        f"{setting.name}, {count} rationales: losses and gradients equal to {worst:.0e} (float64, relative)",
        flush=True,
    )
    del gradients
    embedder.float()
    work = rl_work(setting, recipe, own_ids)
    wall, cpu = medians(embedder, work, options.repeats)
    return (
        rl_ratios(flops_of(embedder, work), "flops", "GFLOP", 1e9)
        | rl_ratios(wall, "time", "s")
        | rl_ratios(cpu, "cpu_time", "CPU s")
        | {"rationale_tokens": sum(len(ids) + 1 for ids in own_ids)}
    )


def rl_work(
    setting: Setting, recipe: Recipe, own_ids: Sequence[Sequence[int]]
) -> dict[str, Callable[[], object]]:
    """A step of the stage rl: ours, and the parts of its plain forms."""
    count = recipe.rl.num_rationales
    return {
        "ours": lambda: our_full_rl_step(setting, recipe),
        "generate, k copies": lambda: their_rollout(repeated_prompts(setting, count)),
        "generate, prompts once": lambda: our_groups(setting, count),
        "score, log probabilities, embed, LM": lambda: plain_rl_step(setting, recipe, own_ids),
        "score, one forward for both, LM": lambda: plain_rl_step(setting, recipe, own_ids, lean=True),
    }


def rl_ratios(found: dict[str, float], what: str, unit: str, scale: float = 1.0) -> dict[str, float]:
    """Print a figure of `rl_work` as a table, and give its ratios.

    Args:
        found: the figure of each part.
        what: name of the figure in the ratios.
        unit: for the table.
        scale: what a unit is worth in `found`.
    """
    plain = found["generate, k copies"] + found["score, log probabilities, embed, LM"]
    lean = found["generate, prompts once"] + found["score, one forward for both, LM"]
    for name, value in [*found.items(), ("plain, all", plain), ("leaner, all", lean)]:
        print(f"{f'{name}, {unit}':48s}{value / scale:12.2f}{value / found['ours']:8.2f}", flush=True)
    return {
        f"rl_step_{what}_ratio": plain / found["ours"],
        f"rl_step_{what}_ratio_lean": lean / found["ours"],
        f"ours_rl_step_{unit.lower().replace(' ', '_')}": found["ours"] / scale,
    }


class Uncomputed(TorchDispatchMode):
    """Products give zeros of the right shape; everything else is computed, so that lengths are what they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Stands in for one operation."""
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default):
            left, right = args
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        if func in (aten.addmm.default, aten.baddbmm.default):
            _, left, right = args
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, _, value = args[:3]
            batch, heads, length, _ = query.shape
            out = query.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
            return out, query.new_zeros(batch, length, heads).transpose(1, 2)
        if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return tuple(torch.zeros_like(tensor) for tensor in args[1:4])
        return func(*args, **(kwargs or {}))


def measure_3b(options: Options) -> dict[str, float]:
    """FLOPs of a step of the stage rl at the shape of Qwen2.5-VL-3B, from models of a few layers."""
    shape = TABLE["Qwen/Qwen2.5-VL-3B-Instruct"]
    text, vision = shape["text_config"], shape["vision_config"]
    num_global = len(vision["fullatt_block_indexes"])
    # Text layers, windowed and global vision layers: one of each, then one more of each.
    wanted = (text["num_hidden_layers"], vision["depth"] - num_global, num_global)
    found = []
    for layers in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        sizes = {
            "vocab_size": 2048,
            "text": {
                **{key: value for key, value in text.items() if key != "vocab_size"},
                "num_hidden_layers": layers[0],
            },
            "vision": {
                **{key: value for key, value in vision.items() if key != "out_hidden_size"},
                "depth": layers[1] + layers[2],
                "fullatt_block_indexes": list(range(layers[1], layers[1] + layers[2])),
            },
        }
        setting = groups_of(long_setting(replace(options, batch=1), sizes), options.rationales)
        # A tokenizer of that size cannot be learned here; the head's and the embeddings' rows decide what they cost.
        setting.embedder.model.resize_token_embeddings(text["vocab_size"], mean_resizing=False)
        setting.embedder.to(torch.bfloat16)  # half the memory; the counts do not depend on it
        recipe = rl_recipe(setting, options)
        with Uncomputed():
            own_ids = [rationale.ids for rationale in our_groups(setting, options.rationales)]
            found.append(flops_of(setting.embedder, rl_work(setting, recipe, own_ids)))
        print(
            f"{layers[0]} text, {layers[1]} windowed and {layers[2]} global vision layers: counted",
            flush=True,
        )
    whole = {
        name: found[0][name]
        + sum(
            (number - 1) * (more[name] - found[0][name])
            for number, more in zip(wanted, found[1:], strict=True)
        )
        for name in found[0]
    }
    tokens = sum(len(ids) + 1 for ids in own_ids)
    prompt = len(setting.batch.queries[0])
    print(
        f"3b: one query of {prompt} tokens, {options.rationales} rationales of {tokens} tokens in all",
        flush=True,
    )
    return rl_ratios(whole, "flops", "GFLOP", 1e9) | {"rationale_tokens": tokens, "prompt_tokens": prompt}


def repeated_prompts(setting: Setting, count: int) -> Setting:
    """The setting with `count` copies of each query, as a rollout without shared prompts has them."""
    queries = [prompt for prompt in setting.batch.queries for _ in range(count)]
    return replace(setting, batch=replace(setting.batch, queries=queries))


def candidates_alone(setting: Setting) -> None:
    """Forward and backward of the candidates, which both forms share."""
    embedder, prompts = setting.embedder, setting.batch.candidates
    branch = Branch([embedder.emb_id], read_state=True, predict=setting.objective.lm_on_candidates)
    readout = embedder(embedder.pack(prompts, [[branch]] * len(prompts)))[0]
    (readout.state_ND.sum() + readout.nll).backward()


def check_equal(setting: Setting) -> None:
    """Compare tokens, losses and gradients of the two forms in float64.

    Raises:
        RuntimeError: they differ by more than `TOLERANCE`.
    """
    embedder = setting.embedder.double()
    try:
        rationales = our_rollout(setting)
        if [list(rationale.ids) for rationale in rationales] != their_rollout(setting):
            raise RuntimeError(f"{setting.name}: the two rollouts wrote different tokens")
        own_ids = [rationale.ids for rationale in rationales]
        reports, gradients = [], []
        for step in (
            lambda: our_step(setting, rationales),
            lambda: our_full_step(setting),
            lambda: three_pass_step(setting, own_ids),
            lambda: three_pass_step(setting, own_ids, two_backwards=True),
        ):
            embedder.zero_grad(set_to_none=True)
            reports.append(step())
            gradients.append({name: p.grad for name, p in embedder.named_parameters() if p.grad is not None})
        embedder.zero_grad(set_to_none=True)
        worst = 0.0
        for report, gradient in zip(reports[1:], gradients[1:], strict=True):
            for name in ("loss_lm", "loss_contrastive", "loss"):
                worst = max(worst, abs(report[name] - reports[0][name]) / abs(report[name]))
            if gradient.keys() != gradients[0].keys():
                raise RuntimeError(f"{setting.name}: the two forms reach different parameters")
            norm = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
            apart = (
                sum(float((value - gradients[0][name]).square().sum()) for name, value in gradient.items())
                ** 0.5
            )
            worst = max(worst, apart / norm)
        if not worst <= TOLERANCE:
            raise RuntimeError(
                f"{setting.name}: losses or gradients differ by {worst:.1e} (relative), > {TOLERANCE}"
            )
        print(
            f"{setting.name}: same tokens; losses and gradients equal to {worst:.0e} (float64, relative)",
            flush=True,
        )
    finally:
        embedder.float()


def count_flops(work: Callable[[], object]) -> float:
    """FLOPs of a call; torch's counter does not know the CPU's fused attention, so it is told."""
    aten = torch.ops.aten

    def forward(query, key, value, *args, **kwargs):
        return flop_counter.sdpa_flop_count(query, key, value)

    def backward(grad, query, key, value, *args, **kwargs):
        return flop_counter.sdpa_backward_flop_count(grad, query, key, value)

    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return counter.get_total_flops()


def flops_of(embedder: EmbeddingModel, work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """FLOPs of each piece of work."""
    flops = {}
    for name, call in work.items():
        embedder.zero_grad(set_to_none=True)
        flops[name] = count_flops(call)
    embedder.zero_grad(set_to_none=True)
    return flops


def medians(
    embedder: EmbeddingModel, work: Mapping[str, Callable[[], object]], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each piece of work, by the clock and by the processor; repetitions go through them forth and back."""
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats):
        for name in list(work) if repeat % 2 == 0 else reversed(list(work)):
            embedder.zero_grad(set_to_none=True)
            began, cpu_began = time.perf_counter(), time.process_time()
            work[name]()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - cpu_began)
    embedder.zero_grad(set_to_none=True)
    return (
        {name: statistics.median(values) for name, values in wall.items()},
        {name: statistics.median(values) for name, values in cpu.items()},
    )


def measure(setting: Setting, options: Options) -> dict[str, float]:
    """FLOPs and medians of alternating timings."""
    embedder = setting.embedder
    rationales = our_rollout(setting)
    own_ids = [rationale.ids for rationale in rationales]
    with torch.no_grad():
        encoded = encode_prompts(embedder, embedder, setting.batch.queries)
    work: dict[str, Callable[[], object]] = {
        "ours writing": lambda: our_rollout(setting, encoded),
        "ours rollout": lambda: our_rollout(setting),
        "theirs rollout": lambda: their_rollout(setting),
        "ours step": lambda: our_step(setting, rationales),
        "theirs step": lambda: three_pass_step(setting, own_ids),
        "ours full": lambda: our_full_step(setting),
        "theirs full": lambda: their_full_step(setting),
    }

    flops = flops_of(embedder, work | {"candidates": lambda: candidates_alone(setting)})
    median, cpu = medians(embedder, work, options.repeats)
    num_tokens = sum(len(ids) + 1 for ids in own_ids)
    print(f"{'':28s}{'three-pass':>12s}{'ours':>12s}{'ratio':>8s}")
    for kind, unit, values in (("GFLOP", 1e9, flops), ("s", 1.0, median)):
        for part in ("rollout", "step", "full"):
            theirs, ours = values[f"theirs {part}"] / unit, values[f"ours {part}"] / unit
            label = {"rollout": "rollout", "step": "forward and backward", "full": "both"}[part]
            print(f"{label + ', ' + kind:28s}{theirs:12.2f}{ours:12.2f}{theirs / ours:8.2f}")
    theirs = num_tokens / median["theirs rollout"]
    speed = {part: num_tokens / median[f"ours {part}"] for part in ("rollout", "writing")}
    cpu_ratio = {part: cpu[f"theirs {part}"] / cpu[f"ours {part}"] for part in ("rollout", "step", "full")}
    for part, label in (
        ("rollout", "rollout, CPU s"),
        ("step", "forward and backward, CPU s"),
        ("full", "both, CPU s"),
    ):
        print(f"{label:28s}{cpu[f'theirs {part}']:12.2f}{cpu[f'ours {part}']:12.2f}{cpu_ratio[part]:8.2f}")
    for part, label in (("rollout", "rollout, tokens/s"), ("writing", "  in a step, tokens/s")):
        print(f"{label:28s}{theirs:12.1f}{speed[part]:12.1f}{speed[part] / theirs:8.2f}", flush=True)
    return {
        "step_flops_ratio": flops["theirs step"] / flops["ours step"],
        "step_time_ratio": median["theirs step"] / median["ours step"],
        "full_step_flops_ratio": flops["theirs full"] / flops["ours full"],
        "full_step_time_ratio": median["theirs full"] / median["ours full"],
        "rollout_tokens_per_s_ratio": speed["rollout"] / theirs,
        "rollout_in_step_tokens_per_s_ratio": speed["writing"] / theirs,
        "rollout_in_step_cpu_time_ratio": cpu["theirs rollout"] / cpu["ours writing"],
        "step_cpu_time_ratio": cpu_ratio["step"],
        "rollout_cpu_time_ratio": cpu_ratio["rollout"],
        "full_step_cpu_time_ratio": cpu_ratio["full"],
        "query_side_step_flops_ratio": (flops["theirs step"] - flops["candidates"])
        / (flops["ours step"] - flops["candidates"]),
        "ours_step_gflop": flops["ours step"] / 1e9,
        "ours_full_step_gflop": flops["ours full"] / 1e9,
        "ours_step_s": median["ours step"],
        "ours_full_step_s": median["ours full"],
        "ours_rollout_s": median["ours rollout"],
        "ours_rollout_tokens_per_s": speed["rollout"],
    }


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which the resident set grows at most while `work` runs (Linux)."""
    status = Path("/proc/self/status")

    def field(name: str) -> int:
        return next(
            int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(name)
        )

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = field("VmRSS")
    work()
    return field("VmHWM") - before


def memory_of(setting: Setting, form: str) -> int:
    """Peak growth of one full step, rollout included, in this process."""
    if form == "ours":
        return peak_growth(lambda: our_full_step(setting))
    return peak_growth(lambda: their_full_step(setting, two_backwards=form == FORMS[2]))


def measure_memory(name: str, options: Options) -> dict[str, float]:
    """Memory of each form, each in a fresh process whose allocator gives freed tensors back at once."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    peak = {}
    for form in FORMS:
        given = asdict(options) | {"settings": name, "memory_of": form}
        words = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in given.items()
        ]
        done = subprocess.run(
            [sys.executable, __file__, *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the memory of {form} could not be measured:\n{done.stderr}")
        peak[form] = int(done.stdout.split()[-1])
    for label, form in (("peak memory, MB", FORMS[1]), ("  of two backwards, MB", FORMS[2])):
        theirs, ours = peak[form] / 1e6, peak["ours"] / 1e6
        print(f"{label:28s}{theirs:12.1f}{ours:12.1f}{theirs / ours:8.2f}", flush=True)
    return {
        "peak_memory_ratio": peak["ours"] / peak[FORMS[1]],
        "peak_memory_ratio_two_backwards": peak["ours"] / peak[FORMS[2]],
        "ours_peak_mb": peak["ours"] / 1e6,
    }


def main(argv: list[str]) -> None:
    """Measure every setting, print the tables and the JSON line."""
    options = parse_options(Options, argv)
    one_of("settings", options.settings, [*SETTINGS, "3b"])
    if "3b" in options.settings and options.rationales < 2:
        raise UserError("settings=3b counts a step of the stage rl: give rationales=8")
    torch.manual_seed(0)
    if options.memory_of is not None:
        print(memory_of(SETTINGS[options.settings[0]](options), options.memory_of))
        return
    results: dict[str, dict[str, float]] = {}
    for name in options.settings:
        if name == "3b":
            results[name] = measure_3b(options)
            continue
        setting = SETTINGS[name](options)
        print(f"\n{name}: {setting.note}", flush=True)
        if options.rationales > 1:
            results[name] = measure_rl(setting, options)
            continue
        check_equal(setting)
        results[name] = measure(setting, options)
        del setting
        if options.memory and sys.platform == "linux":
            results[name] |= measure_memory(name, options)
    last = results[options.settings[-1]]
    print(
        json.dumps(
            last
            | {"settings": results, "options": asdict(options), "threads": torch.get_num_threads()}
            | {"torch": torch.__version__}
        )
    )


if __name__ == "__main__":
    start(main)
