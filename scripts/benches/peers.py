"""A contrastive step in micro batches against sentence-transformers' cached loss. `python scripts/bench.py peers`.

Both get the same text model's weights, the same token ids and candidates, one micro batch size and no dropout; queries are embedded
directly, without a rationale. Losses and gradients are first compared. Texts are of equal length, so that nothing is padded, or of `tokens`
down to a quarter of it, which sentence-transformers pads within a micro batch. Times are in turns, the median of `repeats`; memory is the
largest growth of a step.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from benches.harness import (
    Rows,
    in_new_process,
    in_turns,
    make_batch,
    medians,
    peak_growth,
    random_backbone,
    show,
)
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.data.collate import Batch
from rge.model.embedding_model import EmbeddingModel
from rge.model.families import family_of
from rge.model.prompts import Prompt, PromptBuilder
from rge.objective import Objective
from rge.step.training_step import TrainingStep

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TEMPERATURE = 0.05
TOLERANCE = 1e-4
"""Largest relative difference of losses and gradients in float32."""
WORD = "lock "
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]}  # fmt: skip
SIDE_PX = 56


@dataclass
class Options:
    """Sizes of the step."""

    batch: Annotated[int, Field(ge=2)] = 32
    """Queries, each with a positive and a negative."""
    micro_batch: Annotated[int, Field(ge=1)] = 8
    """Queries of a micro batch."""
    tokens: Annotated[int, Field(ge=32)] = 128
    """Tokens of the longest text."""
    hidden: int = 256
    """Width of the model."""
    layers: int = 4
    """Its layers."""
    repeats: Annotated[int, Field(ge=1)] = 5
    """Turns of timing."""


def measure(options: Options) -> dict[str, Rows]:
    """Both kinds of texts; memory in a process that gives back what is freed, which takes time."""
    found: dict[str, Rows] = {}
    for name, varied in (("equal lengths", False), ("varied lengths", True)):
        found[name] = compared(varied, options)
        grown = in_new_process(compared, varied, replace(options, repeats=1))
        for form, figures in found[name].items():
            figures["MB"] = grown[form]["MB"]
        print(f"\n{name}")
        show(found[name], over="sentence-transformers")
    return found


def compared(varied: bool, options: Options) -> Rows:
    """Seconds and memory of a step in each form, whose losses and gradients are equal."""
    from sentence_transformers.sentence_transformer import losses  # here, since importing it takes seconds

    heads = max(options.hidden // 64, 1)
    text = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": heads, "num_key_value_heads": heads}  # fmt: skip
    sizes = {"vocab_size": 400, "text": text, "vision": VISION}
    backbone = random_backbone([WORD], sizes, min_pixels=SIDE_PX**2, max_pixels=SIDE_PX**2)
    embedder = EmbeddingModel(backbone).train()
    batch = made(embedder, varied, options)
    peer = peer_of(embedder)
    loss = losses.CachedMultipleNegativesRankingLoss(
        peer, 1 / TEMPERATURE, mini_batch_size=options.micro_batch
    )
    columns = [batch.queries, batch.candidates[::2], batch.candidates[1::2]]
    features = [features_of(column, embedder.emb_id) for column in columns]
    no_labels = torch.zeros(options.batch)

    def ours(keep: str) -> Callable[[], float]:
        objective = Objective(0.0, 1.0, TEMPERATURE, "none", lm_on_candidates=False)
        step = TrainingStep(embedder, embedder, objective, options.micro_batch, keep=keep)
        return lambda: step(batch)["loss"]

    def theirs() -> float:
        value = loss([dict(feature) for feature in features], no_labels)
        value.backward()
        return value.item()

    forms = {
        "ours, kept": ours("device"),
        "ours, computed twice": ours("none"),
        "sentence-transformers": theirs,
    }
    text_model, found = family_of(embedder.model).decoder(embedder.model), {}
    for name, work in forms.items():
        embedder.zero_grad(set_to_none=True)
        peer.zero_grad(set_to_none=True)
        value, grown = with_memory(work)
        their_model: Any = peer[0]
        trained = their_model.auto_model if work is theirs else text_model
        gradient = torch.cat([each.grad.flatten() for _, each in sorted(trained.named_parameters())])
        found[name] = {"loss": value, "MB": grown / 1e6}, gradient
    (expected, direction) = found["sentence-transformers"]
    for name, (figures, gradient) in found.items():
        apart = float((gradient - direction).norm() / direction.norm())
        assert abs(figures["loss"] / expected["loss"] - 1) < TOLERANCE, (name, figures, expected)
        assert apart < TOLERANCE, (name, apart)
        figures["gradients apart"] = apart
    wall, cpu = in_turns(forms, options.repeats)
    seconds, cpu_seconds = medians(wall), medians(cpu)
    return {
        name: {"s": seconds[name], "CPU s": cpu_seconds[name], **figures}
        for name, (figures, _) in found.items()
    }


def with_memory(work: Callable[[], float]) -> tuple[float, int]:
    """What the work returns, and the largest growth of memory, in bytes."""
    values: list[float] = []
    grown = peak_growth(lambda: values.append(work()))
    return values[0], grown


def made(embedder: EmbeddingModel, varied: bool, options: Options) -> Batch:
    """Queries with a positive and a negative each, all texts of random tokens."""
    chance = torch.Generator().manual_seed(0)
    builder = PromptBuilder(embedder.processor)
    ordinary = min(embedder.suppressed_ids)

    def prompt(side: str, name: str) -> Prompt:
        length = options.tokens - 1  # and ``<emb>``
        if varied:
            length = int(torch.randint(options.tokens // 4, length + 1, (), generator=chance))
        built = builder.build(Item(name, content_of(WORD * options.tokens, [])), side)
        ids = torch.randint(0, ordinary, (length,), generator=chance)
        return Prompt(name, ids, built.type_ids[:length], built.position_3T[:, :length], None, None)

    rows = range(options.batch)
    queries = [prompt("query", f"q{row}") for row in rows]
    candidates = [[prompt("candidate", f"c{row}.{place}") for place in range(2)] for row in rows]
    return make_batch(queries, candidates, [[embedder.emb_id]] * options.batch)


def peer_of(embedder: EmbeddingModel) -> "SentenceTransformer":
    """Sentence-transformers' model with the embedder's text layers: the last token's state, as ours at ``<emb>``."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    trained = family_of(embedder.model).decoder(embedder.model)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")  # fmt: skip
    # The positions of a text alone are Qwen2's.
    rope = {"rope_type": "default", "rope_theta": trained.config.rope_parameters["rope_theta"]}
    sizes = {name: getattr(trained.config, name) for name in names}
    plain = Qwen2Model(Qwen2Config(**sizes, rope_parameters=rope))
    plain.load_state_dict(trained.state_dict())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain.save_pretrained(folder)
        fast = embedder.processor.tokenizer.backend_tokenizer
        PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)
        words = Transformer(str(folder))
    return SentenceTransformer(
        modules=[words, Pooling(words.get_embedding_dimension(), pooling_mode="lasttoken")], device="cpu"
    ).train()


def features_of(prompts: Sequence[Prompt], emb_id: int) -> dict[str, Tensor]:
    """Token ids and mask of a column, with ``<emb>`` at each end, as sentence-transformers' collator pads them."""
    ids = [torch.cat([prompt.input_ids, torch.tensor([emb_id])]) for prompt in prompts]
    masks = [torch.ones_like(each) for each in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }
