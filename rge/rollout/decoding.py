"""One batch of rationales while it is written: its tensors, what one step does to them, and the steps as they run on a CPU.

A step runs every layer once over each row's newest token and chooses the next; positions, masks and buffers are prepared before
the first. `rge.rollout.cuda_graphs` runs the same steps as CUDA graphs.

Shape suffixes: B = rows still being written, R = all rows, L = steps, V = vocabulary, D = hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rge.distributed.transfer import moved
from rge.model.attention import Cache, EncodedParts, RunningCache, fresh
from rge.model.embedding_model import EmbeddingModel, normalise
from rge.model.families import Rotations, family_of
from rge.model.hub_model import HubModel

WORTH_DROPPING = 0.75
"""Copying the cache costs about as much as a step with it: done once so many of the rows, at most, are left."""


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen; the fields are arguments of `rge.rollout.generate.generate`."""

    max_new_tokens: int
    temperature: float
    min_new_tokens: int
    direct_above: float | None
    margins: bool

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens < self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at least 0 and below max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.direct_above is not None and not 0 <= self.direct_above <= 1:
            raise ValueError(f"direct_above is a probability, got {self.direct_above}")


@dataclass(frozen=True)
class Rows:
    """The rationales of a batch that are to be written."""

    numbers: Sequence[int]  # as `on_token` of `rge.rollout.generate.generate` counts them
    places: Sequence[int]  # of their prompts among the encoded ones
    seeds: Sequence[int | None] | None  # None: greedy
    caps: Sequence[int] | None  # in tokens; None: `Choice.max_new_tokens` for all


class Steps(Protocol):
    """How the steps of a batch run, and where its tensors are: `PlainSteps`, or `rge.rollout.cuda_graphs.CapturedSteps`."""

    barred_V: Tensor | None
    """0, and -inf for tokens that are never chosen; made by the first step."""

    def padded(self, number: int) -> int:
        """Number of rows of a batch that has to write so many; the others are finished from the start."""

    def cache(
        self, encoded: EncodedParts, places: Sequence[int], num_new_tokens: int
    ) -> Cache | RunningCache:
        """Room for the rows' keys and values, which begin with their prompts'."""

    def put(self, name: str, value: Tensor) -> Tensor:
        """A tensor of the batch, where the steps will find it under this name."""

    def kept(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """These rows of a tensor that was `put`."""

    def write(self, batch: "Decoding") -> None:
        """Run steps until every row has ended with ``<emb>`` and its state is known."""


class PlainSteps:
    """Steps whose kernels are launched one by one; finished rows leave between reading and choosing."""

    barred_V: Tensor | None = None

    def padded(self, number: int) -> int:
        """No more rows than are written."""
        return number

    def cache(
        self, encoded: EncodedParts, places: Sequence[int], num_new_tokens: int
    ) -> Cache | RunningCache:
        """New memory for every batch."""
        if not encoded.is_flat:
            return Cache(encoded, places, num_new_tokens)
        longest = max(encoded.lengths[place] for place in places)
        return RunningCache(encoded, places, longest + num_new_tokens, fresh)

    def put(self, name: str, value: Tensor) -> Tensor:
        """The tensor itself."""
        return value

    def kept(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """A copy."""
        return tensor[rows]

    def write(self, batch: "Decoding") -> None:
        """See `Steps`."""
        # Reading from a GPU synchronises, and keeping a finished row in the batch costs little: check rarely there.
        look_every = 1 if batch.row_B.device.type == "cpu" else 8
        for step in range(batch.num_steps):
            batch.read()
            if step == batch.num_steps - 1:
                return
            if batch.looks(step, look_every):
                num_alive = batch.num_alive()
                if num_alive == 0:
                    return
                if num_alive <= WORTH_DROPPING * len(batch.row_B):
                    batch.hidden_BD = batch.hidden_BD[batch.keep(num_alive)]
            batch.choose(step < batch.choice.max_new_tokens)
            batch.tell()


class Decoding:
    """A batch during generation; steps update all tensors in place."""

    hidden_BD: Tensor

    @torch.no_grad()
    def __init__(
        self,
        embedder: EmbeddingModel,
        encoded: EncodedParts,
        rows: Rows,
        choice: Choice,
        steps: Steps,
        on_token: Callable[[int, int], object] | None = None,
    ):
        self.embedder, self.choice, self.steps, self.on_token = embedder, choice, steps, on_token
        self.numbers, max_new_tokens = rows.numbers, choice.max_new_tokens
        model, device = embedder.model, embedder.device
        self.words, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.num_rows, R = len(rows.places), steps.padded(len(rows.places))
        places = [*rows.places, *[rows.places[0]] * (R - self.num_rows)]
        # Step 0 reads the prompt's last token, step n the n-th token of the rationale, and one more a forced `<emb>`.
        self.num_steps = max_new_tokens + 2
        self.cache = steps.cache(encoded, places, self.num_steps)
        self.caps = rows.caps or [max_new_tokens] * self.num_rows
        place_R, uniform_RL, cap_R, self.barred = moved(
            (
                torch.tensor(places),
                None if rows.seeds is None else _uniform(rows.seeds, R, max_new_tokens),
                None if rows.caps is None else torch.tensor([*rows.caps, *[0] * (R - self.num_rows)]),
                torch.tensor(embedder.suppressed_ids, dtype=torch.long),
            ),
            device,
        )
        put = steps.put
        self.uniform_RL = None if uniform_RL is None else put("uniform", uniform_RL)
        self.cap_R = None if cap_R is None else put("cap", cap_R)
        self.rotations = {
            kind: (put(f"cosines {kind}", cos_BLd), put(f"sines {kind}", sin_BLd))
            for kind, (cos_BLd, sin_BLd) in _rotations(
                model, encoded.last_position_3B[:, place_R], encoded.after_B[place_R], self.num_steps
            ).items()
        }
        # What a step writes; `hidden_BD` and the logits are its own.
        row_R = torch.arange(R, device=device)
        self.row_B = put("row", row_R)
        self.done_B = put("done", row_R >= self.num_rows)
        self.token_B = put("token", encoded.last_id_B[place_R])
        self.step_1 = put("step", torch.zeros(1, dtype=torch.long, device=device))
        self.written_RL = put("written", torch.full((R, max_new_tokens + 1), embedder.emb_id, device=device))
        self.margin_R = (
            put("margin", torch.full((R,), float("inf"), device=device)) if choice.margins else None
        )
        words, hidden = self.words.weight, family_of(model).decoder(model).config.hidden_size
        state_dtype = torch.promote_types(words.dtype, torch.float32)
        self.state_RD = put("state", torch.zeros(R, hidden, dtype=state_dtype, device=device))

    @torch.no_grad()
    def run(self) -> list[tuple[tuple[int, ...], bool, Tensor, float]]:
        """Generate: each row's ids, whether ``<emb>`` was forced, the state there, and the smallest margin."""
        self.steps.write(self)
        results, real = [], slice(self.num_rows)
        least = [float("inf")] * self.num_rows if self.margin_R is None else self.margin_R[real].tolist()
        # The next rollout may reuse this memory.
        state_RD = self.state_RD[real].clone()
        for ids, cap, state_D, margin in zip(
            self.written_RL[real].tolist(), self.caps, state_RD, least, strict=True
        ):
            length = ids.index(self.embedder.emb_id)
            results.append((tuple(ids[:length]), length == cap, state_D, margin))
        return results

    def read(self) -> None:
        """Run the layers over each row's newest token, and store the states of rows that end with it."""
        hidden_BTD = self.words(self.token_B[None])
        now = {
            kind: (
                cos_BLd.index_select(1, self.step_1).transpose(0, 1),
                sin_BLd.index_select(1, self.step_1).transpose(0, 1),
            )
            for kind, (cos_BLd, sin_BLd) in self.rotations.items()
        }
        model = self.embedder.model
        self.hidden_BD = family_of(model).run_layers(model, hidden_BTD, now, self.cache)[0]
        state_BD = normalise(self.hidden_BD)
        ends_B = (self.token_B == self.embedder.emb_id) & ~self.done_B & (self.step_1 > 0)
        # Without branching on values on the device: rows that do not end write back their old state.
        kept_BD = torch.where(ends_B[:, None], state_BD, self.state_RD[self.row_B])
        self.state_RD.index_put_((self.row_B,), kept_BD)
        self.done_B |= ends_B

    def choose(self, freely: bool = True) -> None:
        """Choose each row's next token, ``<emb>`` at its cap; not `freely`: ``<emb>`` for all."""
        emb_id = self.embedder.emb_id
        if not freely:
            self.token_B.fill_(emb_id)
        else:
            logit_BV, lead_B = self._logits()
            uniform_B = None if self.uniform_RL is None else self.uniform_RL[self.row_B, self.step_1]
            token_B = _choose(logit_BV, self.choice.temperature, uniform_B)
            if lead_B is not None:
                token_B = token_B.masked_fill(lead_B >= 0, emb_id)
            ends_B = self.done_B
            if self.cap_R is not None:
                ends_B = ends_B | (self.step_1 >= self.cap_R[self.row_B])
            if self.margin_R is not None:
                margin_B = _margin(logit_BV, self.choice.temperature, uniform_B, token_B)
                if lead_B is not None:
                    margin_B = margin_B.masked_fill(lead_B >= 0, float("inf")).minimum(lead_B.abs())
                margin_B = torch.where(ends_B, float("inf"), margin_B).minimum(self.margin_R[self.row_B])
                self.margin_R.index_put_((self.row_B,), margin_B)
            self.token_B.copy_(token_B.masked_fill(ends_B, emb_id))
            self.written_RL.index_put_((self.row_B, self.step_1), self.token_B)
        self.step_1 += 1

    def _logits(self) -> tuple[Tensor, Tensor | None]:
        """Logits of the next tokens, -inf where suppressed, and by how much ``<emb>`` exceeds `Choice.direct_above`.

        The latter is -inf after the first token; a row where it is not below 0 is answered directly.
        """
        emb_id, choice = self.embedder.emb_id, self.choice
        logit_BV = self.head(self.hidden_BD).float()
        if self.steps.barred_V is None:
            barred_V = torch.zeros_like(logit_BV[0]).index_fill_(0, self.barred, float("-inf"))
            self.steps.barred_V = barred_V
        logit_BV = logit_BV + self.steps.barred_V
        if choice.min_new_tokens:
            early_1 = self.step_1 < choice.min_new_tokens
            logit_BV[:, emb_id] = torch.where(early_1, float("-inf"), logit_BV[:, emb_id])
        if choice.direct_above is None:
            return logit_BV, None
        first_1, likely_B = self.step_1 == 0, logit_BV.softmax(dim=-1)[:, emb_id]
        logit_BV[:, emb_id] = torch.where(first_1, float("-inf"), logit_BV[:, emb_id])
        return logit_BV, torch.where(first_1, likely_B - choice.direct_above, float("-inf"))

    def tell(self) -> None:
        """Report the tokens just chosen in unfinished rows."""
        if self.on_token is not None:
            for row, token in torch.stack([self.row_B, self.token_B], dim=1)[~self.done_B].tolist():
                self.on_token(self.numbers[row], token)

    def looks(self, step: int, every: int) -> bool:
        """Whether to look for finished rows in this step, which waits for the device."""
        return (step > 0 and step % every == 0) or step == self.choice.max_new_tokens

    def num_alive(self) -> int:
        """Number of rows that have not ended."""
        return len(self.row_B) - int(self.done_B.sum())

    def keep(self, number: int) -> Tensor:
        """Drop all but so many rows, finished ones first; returns the indices of the kept."""
        rows = self.done_B.to(torch.uint8).argsort(stable=True)[:number]
        kept = self.steps.kept
        self.cache.keep_rows(rows)
        self.row_B, self.done_B, self.token_B = (
            kept(tensor, rows) for tensor in (self.row_B, self.done_B, self.token_B)
        )
        self.rotations = {
            kind: (kept(cos, rows), kept(sin, rows)) for kind, (cos, sin) in self.rotations.items()
        }
        return rows


def _uniform(seeds: Sequence[int | None], R: int, L: int) -> Tensor:
    """(R, L) float64 random numbers of each row, from its own seed."""
    uniform_RL = torch.zeros(R, L, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        if seed is not None:
            uniform_RL[row] = torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).random(L))
    return uniform_RL


def _rotations(model: HubModel, last_position_3B: Tensor, after_B: Tensor, num_steps: int) -> Rotations:
    """Cosines and sines (B, L, head size) of every step's token: the prompt's last, then what follows the prompt."""
    follow_BL = after_B[:, None] + torch.arange(num_steps - 1, device=after_B.device)
    position_3BL = torch.cat([last_position_3B[..., None], follow_BL.expand(3, -1, -1)], dim=2)
    words = model.get_input_embeddings().weight
    found = family_of(model).rotations(model, words, position_3BL.flatten(1)[:, None])
    shape = position_3BL.shape[1:]
    return {
        kind: (cos[0].unflatten(0, shape), sin[0].unflatten(0, shape)) for kind, (cos, sin) in found.items()
    }


def _choose(logit_BV: Tensor, temperature: float, uniform_B: Tensor | None) -> Tensor:
    if uniform_B is None:
        return logit_BV.argmax(dim=-1)
    token_B = torch.searchsorted(*_drawn(logit_BV, temperature, uniform_B), right=True).flatten()
    # No token is drawn where logits are not numbers. The first stands for it, as for argmax: the loss, also not a number, explains.
    return token_B.masked_fill(token_B >= logit_BV.shape[1], 0)


def _drawn(logit_BV: Tensor, temperature: float, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The cumulative distribution (B, V), and the random number (B, 1) whose inverse is the token."""
    # One random number per row and token, independent of other rows.
    cumulative_BV = torch.softmax(logit_BV.double() / temperature, dim=-1).cumsum(dim=-1)
    return cumulative_BV, uniform_B.to(logit_BV.device)[:, None] * cumulative_BV[:, -1:]


def _margin(logit_BV: Tensor, temperature: float, uniform_B: Tensor | None, token_B: Tensor) -> Tensor:
    """Decision margin of each row's token, (B,) float32, see `Rationale.margin`."""
    if uniform_B is None:
        best_B2 = logit_BV.topk(2, dim=-1).values
        return best_B2[:, 0] - best_B2[:, 1]
    cumulative_BV, threshold_B1 = _drawn(logit_BV, temperature, uniform_B)
    bound_BV = F.pad(cumulative_BV, (1, 0))  # a token's range ends where the next begins
    token_B1 = token_B[:, None]
    below_B1, above_B1 = bound_BV.gather(1, token_B1), bound_BV.gather(1, token_B1 + 1)
    return torch.minimum(above_B1 - threshold_B1, threshold_B1 - below_B1)[:, 0].float()
