"""A training step in our form and as passes of stock transformers, on the same inputs.

    three passes  transformers' `generate`; LM forward on [prompt][oracle]; contrastive forward on [prompt][own, <emb>]
    ours          `rge.rollout.micro_batches.encode_prompts` runs the prompts, with gradient; `rge.rollout.generate` continues from
                  their keys and values; so do [own, <emb>] and [oracle, <emb>] in `rge.step.training_step.TrainingStep`

Candidates are encoded by the same call in both. The three-pass form gets what costs nothing to write: logits at labelled
positions only, and rows padded to the longest of their own pass.

Random weights never write ``<emb>``. `StoppingHead` raises its logit at a length drawn for each row and lowers it before that, by
the same code in both forms, so both write the same tokens; transformers keeps finished rows until the last one ends.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from benches.harness import Rows, count_flops, in_turns, make_batch, medians, random_backbone, random_picture
from rge.common.errors import UserError
from rge.common.options import one_of
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.config import load_recipe
from rge.data.collate import Batch, Source, StepBatches
from rge.data.mixture import Mixture
from rge.data.readers import open_records
from rge.losses import info_nce, rationale_nll
from rge.model.attention import EncodedParts
from rge.model.backbone import load_backbone
from rge.model.embedding_model import EmbeddingModel, Readout, eval_mode, normalise
from rge.model.packing import Branch
from rge.model.prompts import Prompt, PromptBuilder
from rge.objective import Objective
from rge.plan.known_models import TABLE
from rge.rollout.generate import Rationale, generate
from rge.rollout.micro_batches import chunks_of, encode_prompts
from rge.rollout.writer import Rollout
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep

Ids = Sequence[Sequence[int]]
"""Tokens after each prompt."""

TOLERANCE = 1e-6
"""Largest relative difference of losses and gradients with float64 weights; transformers' norms round to float32."""


@dataclass
class Sizes:
    """Sizes of the setting ``long``."""

    prompt_tokens: int = 1024
    rationale_tokens: int = 128
    batch: int = 4
    hidden: int = 256
    layers: int = 8
    candidate_side_px: int = 448


@dataclass
class Setting:
    """A random model, and the batch and losses of a step."""

    embedder: EmbeddingModel  # float32
    batch: Batch
    objective: Objective
    stop_B: list[int]  # tokens of each own rationale, without ``<emb>``; empty: as many as the model writes
    max_new_tokens: int  # cap, ``<emb>`` included

    @property
    def own_tokens(self) -> int:
        """Tokens of all own rationales, ``<emb>`` included."""
        return sum(self.stop_B) + len(self.stop_B)

    @property
    def note(self) -> str:
        """Size of the model and lengths of the batch, in one line."""

        def span(values: Iterable[int]) -> str:
            lengths = list(values)
            return f"{min(lengths)} to {max(lengths)}"

        batch, size = self.batch, sum(parameter.numel() for parameter in self.embedder.parameters()) / 1e6
        return (
            f"{size:.1f} M parameters, {len(batch.queries)} queries with prompts of {span(map(len, batch.queries))} tokens, "
            f"own rationales {span(self.stop_B)} ({self.own_tokens} in all), "
            f"oracles {span(len(ids) - 1 for ids in batch.oracle_ids)}; "
            f"{len(batch.candidates)} candidates of {span(map(len, batch.candidates))} tokens"
        )


def demo_setting() -> Setting:
    """The demo recipe: its architecture, objective and the batch of its first joint step."""
    recipe = load_recipe(["recipe=demo"])
    stage = recipe.joint
    embedder = EmbeddingModel(
        load_backbone(
            recipe.start, add_emb=True, min_pixels=recipe.model.min_pixels, max_pixels=recipe.model.max_pixels
        )
    ).eval()
    files = [open_records(source, need_rationale=True) for source in stage.sources]
    builder = PromptBuilder(embedder.processor, recipe.data.profile, recipe.data.max_prompt_tokens)
    sizes = [len(file) for file in files]
    mixture = Mixture(sizes, stage.weights(sizes), stage.batch_size, seed=0)
    sources = [Source(file, builder, recipe.data) for file in files]
    batch = StepBatches(sources, mixture, rank=0, world_size=1)[0]
    cap = recipe.rollout.max_new_tokens
    # Own rationales as long as other records' oracles: the lengths that a trained model writes.
    lengths = [min(len(ids) - 1, cap - 1) for ids in batch.oracle_ids]
    return Setting(embedder, batch, Objective.of(recipe, "joint"), lengths[1:] + lengths[:1], cap)


def long_setting(options: Sizes, sizes: dict | None = None) -> Setting:
    """A picture and text of `prompt_tokens`, long rationales, and a language model large enough to dominate.

    ``sizes``, as for `rge.small_models.build.build`, are those of another model than `options` describes.
    """
    hidden = options.hidden
    vision = {
        "depth": 4, "hidden_size": hidden // 2, "intermediate_size": hidden * 3 // 2, "num_heads": 4, "patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [3],
    }  # fmt: skip
    text = {
        "hidden_size": hidden, "intermediate_size": hidden * 4, "num_hidden_layers": options.layers,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    words = ["key", "lock", "door", "open", "close"]
    texts = [" ".join(rng.choice(words, 20)) for _ in range(50)]
    sizes = sizes or {"vocab_size": 2048, "text": text, "vision": vision}
    backbone = random_backbone(texts, sizes, min_pixels=28 * 28, max_pixels=4096 * 4096)
    embedder = EmbeddingModel(backbone).eval()
    builder = PromptBuilder(embedder.processor, "plain", max_tokens=10**6)

    side_px = 28 * math.isqrt(max(1, int(0.94 * (options.prompt_tokens - 64))))  # the template takes about 60
    queries, candidates = [], []
    for row in range(options.batch):
        image = random_picture(rng, side_px)
        base = len(builder.build(Item(f"q{row}", content_of(" key", [image])), "query"))
        # Ragged, as real prompts are: the longest has `prompt_tokens`, the others up to 4 % less.
        wanted = options.prompt_tokens - (row % 4) * options.prompt_tokens // 100
        if wanted < base:
            raise UserError(
                f"{options.prompt_tokens} are too few: picture and template take {base}", key="prompt_tokens"
            )
        queries.append(
            builder.build(Item(f"q{row}", content_of(" key" * (wanted - base + 1), [image])), "query")
        )
        picture = random_picture(rng, options.candidate_side_px)
        candidates.append(builder.build(Item(f"c{row}", content_of(None, [picture])), "candidate"))

    def lengths() -> list[int]:
        drawn = np.exp(rng.normal(np.log(0.6 * options.rationale_tokens), 0.35, options.batch))
        low = min(40, options.rationale_tokens // 2)
        return np.clip(drawn.astype(int), low, options.rationale_tokens - 1).tolist()

    high = min(embedder.suppressed_ids)
    oracle_ids = [[*rng.integers(0, high, length).tolist(), embedder.emb_id] for length in lengths()]
    batch = make_batch(queries, [[candidate] for candidate in candidates], oracle_ids)
    return Setting(embedder, batch, Objective(1 / 11, 10 / 11), lengths(), options.rationale_tokens)


Work = Mapping[str, Callable[[], object]]
"""Pieces of a step by name. Those that report losses are forms of the whole step."""


def measure_settings(
    options: Any,
    work_of: Callable[[Setting], Work],
    *,
    prepare: Callable[[Setting], Setting] = lambda setting: setting,
    repeats: int = 0,
) -> dict[str, Rows]:
    """By setting: GFLOP and, with ``repeats``, ``s``, ``CPU s`` and own ``tokens/s`` of each piece of work.

    ``prepare`` changes a setting before the work is made of it. FLOPs of ``3b`` are only counted; of other settings, losses and
    gradients of all forms are first compared in float64.
    """
    one_of("settings", options.settings, ("demo", "long", "3b"))
    torch.manual_seed(0)
    found = {}
    for name in options.settings:
        print(f"\n{name}", flush=True)
        if name == "3b":
            found[name] = {"GFLOP": _count_3b(options, work_of, prepare)}
        else:
            setting = demo_setting() if name == "demo" else long_setting(options)
            found[name] = _measure(prepare(setting), work_of, repeats)
    return found


def _measure(setting: Setting, work_of: Callable[[Setting], Work], repeats: int) -> Rows:
    print(setting.note, flush=True)
    embedder = setting.embedder.double()
    worst = check_equal(embedder, work_of(setting))
    print(f"losses and gradients equal to {worst:.0e} (float64, relative)", flush=True)
    embedder.float()
    work = work_of(setting)
    found = {"GFLOP": _gflop(embedder, work)}
    if repeats:
        wall, cpu = in_turns(work, repeats, lambda: embedder.zero_grad(set_to_none=True))
        found |= {"s": medians(wall), "CPU s": medians(cpu)}
        found["tokens/s"] = {name: setting.own_tokens / seconds for name, seconds in found["s"].items()}
    return found


class StoppingHead(nn.Module):
    """An output head that ends row r's rationale after exactly ``stop_B[r]`` tokens.

    Called once per generated token, with (rows, D) by our rollout and (rows, 1, D) by transformers. If the batch shrinks,
    finished rows have been dropped; the others keep their order.
    """

    def __init__(self, head: nn.Module, emb_id: int, stop_B: Sequence[int]):
        super().__init__()
        self.head, self.emb_id = head, emb_id
        self.stop_R, self.step = list(stop_B), 0

    @property
    def weight(self) -> Tensor:
        """Weight of the wrapped head."""
        return self.head.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the wrapped head, with those of ``<emb>`` overwritten."""
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
    """Make the model end its rationales after so many tokens; as it likes if there are none."""
    if not stop_B:
        yield
        return
    head = embedder.model.lm_head
    embedder.model.lm_head = StoppingHead(head, embedder.emb_id, stop_B)
    try:
        yield
    finally:
        embedder.model.lm_head = head


def our_rollout(setting: Setting, encoded: EncodedParts | None = None, num_each: int = 1) -> list[Rationale]:
    """`num_each` own rationales per query, by rge; ``stop_B`` then has as many lengths for each query."""
    prompts, stop_BK = setting.batch.queries, np.reshape(setting.stop_B, (-1, num_each))
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # the order rows are written in
    settings: Any = {"max_new_tokens": setting.max_new_tokens, "batch_size": len(prompts) * num_each}
    with stopping(setting.embedder, stop_BK[order].flatten().tolist() if setting.stop_B else []):
        return generate(setting.embedder, prompts, num_each=num_each, encoded=encoded, **settings)


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
    # With gradient checkpointing, transformers would write without a cache.
    with eval_mode(embedder), stopping(embedder, setting.stop_B):
        written = embedder.model.generate(**inputs, generation_config=config)
    written = written[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(embedder.emb_id)] if embedder.emb_id in row else row for row in written]


def stock_inputs(
    embedder: EmbeddingModel, prompts: Sequence[Prompt], suffixes: Ids, padding_side: str
) -> dict[str, Tensor]:
    """A padded batch as transformers takes it; positions and masks are made inside the model."""
    rows = [
        torch.cat([prompt.input_ids, torch.tensor(list(suffix), dtype=torch.long)])
        for prompt, suffix in zip(prompts, suffixes, strict=True)
    ]
    pad = partial(pad_sequence, batch_first=True, padding_side=padding_side)
    ids, mask = pad(rows, padding_value=embedder.pad_id), pad([torch.ones_like(row) for row in rows])
    inputs = embedder.family.plain_inputs(embedder.model, embedder.processor, prompts, ids, mask)
    return {name: value.to(embedder.device) for name, value in inputs.items()}


def our_full_step(setting: Setting) -> dict[str, float]:
    """Own rationales and gradients of one step by rge, with prompts encoded once."""
    encoded = encode_prompts(setting.embedder, setting.embedder, setting.batch.queries)
    return our_step(setting, our_rollout(setting, encoded), encoded)


def our_step(
    setting: Setting, rationales: Sequence[Rationale], encoded: EncodedParts | None = None
) -> dict[str, float]:
    """Gradients of one step, by rge."""
    return TrainingStep(setting.embedder, setting.embedder, setting.objective, len(setting.batch.queries))(
        setting.batch, Rollout(rationales, encoded)
    )


def three_pass_step(setting: Setting, own_ids: Ids) -> dict[str, float]:
    """Gradients of one step, in three passes: LM, contrastive, candidates."""
    embedder, batch, objective = setting.embedder, setting.batch, setting.objective
    nll = stock_nll(embedder, batch.queries, batch.oracle_ids)
    q_BD = stock_embeddings(embedder, batch.queries, own_ids)
    candidates = candidate_readout(setting, batch.candidates)
    con = contrastive(setting, q_BD, candidates.state_ND)
    lm = (nll + candidates.nll) / num_labels(setting)
    (objective.alpha_lm * lm + objective.alpha_con * con).backward()
    return _losses(objective, float(lm.detach()), float(con.detach()))


def _losses(objective: Objective, lm: float, con: float) -> dict[str, float]:
    total = objective.alpha_lm * lm + objective.alpha_con * con
    return {"loss_lm": lm, "loss_contrastive": con, "loss": total}


def _labelled(setting: Setting) -> bool:
    return setting.objective.lm_on_candidates and setting.objective.alpha_lm > 0


def num_labels(setting: Setting) -> int:
    """Tokens that the LM loss is a mean over."""
    batch = setting.batch
    return sum(map(len, batch.oracle_ids)) + len(batch.candidates) * _labelled(setting)


def candidate_readout(setting: Setting, prompts: Sequence[Prompt]) -> Readout:
    """States of candidates, and their part of the LM loss; by rge in both forms."""
    branch = Branch([setting.embedder.emb_id], read_state=True, predict=_labelled(setting))
    return setting.embedder(setting.embedder.pack(prompts, [[branch]] * len(prompts)))[0]


def contrastive(setting: Setting, q_BD: Tensor, c_CD: Tensor) -> Tensor:
    """Mean InfoNCE; several states per query must be adjacent."""
    batch, each = setting.batch, len(q_BD) // len(setting.batch.queries)
    positive_BC, ignored_BC, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)
    masks = (mask.repeat_interleave(each, dim=0) for mask in (positive_BC, ignored_BC))
    return info_nce(q_BD, c_CD, *masks, temperature=setting.objective.temperature) / len(q_BD)


def our_step_in_chunks(setting: Setting, micro_batch_size: int, keep: str) -> dict[str, float]:
    """Own rationales and gradients of one step in micro batches, by rge: `rollout.prompt_pass=twice`, or ``once`` where kept."""
    embedder, batch, encoded = setting.embedder, setting.batch, None
    if keep != "none":
        chunks = chunks_of(batch, [len(batch.queries)], micro_batch_size)
        encoded = encode_prompts(embedder, embedder, batch.queries, [rows for rows, _ in chunks], keep)
    step = TrainingStep(embedder, embedder, setting.objective, micro_batch_size, keep=keep)
    return step(batch, Rollout(our_rollout(setting, encoded), encoded))


def grad_cache_step(setting: Setting, own_ids: Ids, micro_batch_size: int) -> dict[str, float]:
    """The three passes with gradient caching, as VLM2Vec's trainer takes its contrastive loss (arXiv:2410.05160).

    All states without gradient, then micro batch by micro batch with it: contrastive, candidates, LM.
    """
    embedder, batch, objective = setting.embedder, setting.batch, setting.objective
    chunks = chunks_of(batch, [len(batch.queries)], micro_batch_size)
    num_tokens = num_labels(setting)

    def queries(rows: slice) -> Tensor:
        return stock_embeddings(embedder, batch.queries[rows], own_ids[rows])

    with torch.no_grad():
        q_BD = torch.cat([queries(rows) for rows, _ in chunks])
        c_CD = torch.cat([candidate_readout(setting, batch.candidates[rows]).state_ND for _, rows in chunks])
    con = contrastive(setting, q_BD.requires_grad_(), c_CD.requires_grad_())
    (objective.alpha_con * con).backward()
    assert q_BD.grad is not None
    assert c_CD.grad is not None
    lm = 0.0
    for rows, columns in chunks:
        (queries(rows) * q_BD.grad[rows]).sum().backward()
        found = candidate_readout(setting, batch.candidates[columns])
        total = (found.state_ND * c_CD.grad[columns]).sum() + objective.alpha_lm * found.nll / num_tokens
        total.backward()
        nll = stock_nll(embedder, batch.queries[rows], batch.oracle_ids[rows])
        (objective.alpha_lm * nll / num_tokens).backward()
        lm += float((nll + found.nll).detach()) / num_tokens
    return _losses(objective, lm, float(con.detach()))


def stock_states(embedder: EmbeddingModel, prompts: Sequence[Prompt], suffixes: Ids) -> Tensor:
    """Last hidden states of padded rows, (rows, tokens, D)."""
    inputs = stock_inputs(embedder, prompts, suffixes, padding_side="right")
    return embedder.model.model(**inputs, use_cache=False).last_hidden_state


def stock_embeddings(embedder: EmbeddingModel, prompts: Sequence[Prompt], own_ids: Ids) -> Tensor:
    """Embeddings after these rationales, (rows, D)."""
    hidden_BTD = stock_states(embedder, prompts, [[*ids, embedder.emb_id] for ids in own_ids])
    ends = [len(prompt) + len(ids) for prompt, ids in zip(prompts, own_ids, strict=True)]
    return normalise(hidden_BTD[range(len(ends)), ends])


def predicting(prompts: Sequence[Prompt], suffixes: Ids) -> tuple[list[int], list[int], Tensor]:
    """Row and column of the state before each token of the suffixes, and the tokens."""
    rows = [row for row, ids in enumerate(suffixes) for _ in ids]
    columns = [len(prompts[row]) - 1 + place for row, ids in enumerate(suffixes) for place in range(len(ids))]
    return rows, columns, torch.tensor([token for ids in suffixes for token in ids])


def stock_nll(embedder: EmbeddingModel, prompts: Sequence[Prompt], oracle_ids: Sequence[list[int]]) -> Tensor:
    """Negative log likelihood of these rationales, a sum over tokens."""
    rows, columns, label_N = predicting(prompts, oracle_ids)
    hidden_ND = stock_states(embedder, prompts, oracle_ids)[rows, columns]
    return rationale_nll(hidden_ND, embedder.model.get_output_embeddings(), label_N.to(embedder.device))


def check_equal(embedder: EmbeddingModel, work: Work) -> float:
    """Largest relative difference of losses and gradients between the first form of a step and the others; an error if too large."""
    reports, gradients = [], []
    for step in work.values():
        embedder.zero_grad(set_to_none=True)
        if isinstance(report := step(), dict):
            reports.append(report)
            gradients.append({name: p.grad for name, p in embedder.named_parameters() if p.grad is not None})
    embedder.zero_grad(set_to_none=True)
    worst = 0.0
    for report, gradient in zip(reports[1:], gradients[1:], strict=True):
        if gradient.keys() != gradients[0].keys():
            raise RuntimeError("two forms reach different parameters")
        whole = torch.cat([value.flatten() for value in gradient.values()])
        first = torch.cat([value.flatten() for value in gradients[0].values()])
        worst = max(worst, float((whole - first).norm() / whole.norm()))
        for name in report.keys() & {"loss", "loss_lm", "loss_contrastive", "loss_rl"}:
            worst = max(worst, abs(report[name] - reports[0][name]) / max(abs(report[name]), 1e-3))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"losses or gradients differ by {worst:.1e} (relative), > {TOLERANCE}")
    return worst


class Uncomputed(TorchDispatchMode):
    """Matrix products and attention give zeros of the right shape; everything else, such as lengths, is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Replace or call one operation."""
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
            left, right = args[-2:]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, _, value = args[:3]
            batch, heads, length, _ = query.shape
            out = query.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
            return out, query.new_zeros(batch, length, heads).transpose(1, 2)
        if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return tuple(torch.zeros_like(tensor) for tensor in args[1:4])
        return func(*args, **(kwargs or {}))


def _count_3b(
    options: Sizes, work_of: Callable[[Setting], Work], prepare: Callable[[Setting], Setting]
) -> dict[str, float]:
    """GFLOP of each piece of work at the shape of Qwen2.5-VL-3B, from models of a few layers whose products are not computed."""
    shape = TABLE["Qwen/Qwen2.5-VL-3B-Instruct"]
    text, vision = shape["text_config"], shape["vision_config"]
    num_global = len(vision["fullatt_block_indexes"])
    # Text layers, windowed and global vision layers: one of each, then one more of each.
    wanted = (text["num_hidden_layers"], vision["depth"] - num_global, num_global)
    found = []
    whole_model = layer_sizes(shape)
    for num_text, windowed, whole in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        blocks = {"depth": windowed + whole, "fullatt_block_indexes": [*range(windowed, windowed + whole)]}
        layers = whole_model["text"] | {"num_hidden_layers": num_text}, whole_model["vision"] | blocks
        sizes = {"vocab_size": 2048, "text": layers[0], "vision": layers[1]}
        setting = prepare(long_setting(options, sizes))
        # A tokenizer of that size cannot be learned here; only the number of rows affects the cost.
        setting.embedder.model.resize_token_embeddings(text["vocab_size"], mean_resizing=False)
        setting.embedder.to(torch.bfloat16)  # half the memory; the counts do not depend on it
        print(
            f"{num_text} text, {windowed} windowed and {whole} global vision layers: {setting.note}",
            flush=True,
        )
        with Uncomputed():
            found.append(_gflop(setting.embedder, work_of(setting)))
    base, *others = found
    return {
        name: gflop + sum((num - 1) * (more[name] - gflop) for num, more in zip(wanted, others, strict=True))
        for name, gflop in base.items()
    }


def layer_sizes(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sizes of text model and vision tower, as `rge.small_models.build` takes them, of a Qwen2.5-VL of the table of known models."""
    text, vision = dict(known["text_config"]), dict(known["vision_config"])
    del text["vocab_size"], vision["out_hidden_size"]
    return {"text": text | {"tie_word_embeddings": known["tie_word_embeddings"]}, "vision": vision}


def checkpoint_gradients(embedder: EmbeddingModel) -> None:
    """Train with gradient checkpointing, as the recipes of large models do."""
    embedder.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    embedder.train()


def _gflop(embedder: EmbeddingModel, work: Work) -> dict[str, float]:
    found = {}
    for name, call in work.items():
        embedder.zero_grad(set_to_none=True)
        found[name] = count_flops(call) / 1e9
    embedder.zero_grad(set_to_none=True)
    return found
