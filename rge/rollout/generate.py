"""Generate rationales in batches: whether to write one (``mode=auto``), sampling, CUDA graphs, and the state at ``<emb>``.

Nothing is inherited from the model's generation settings: only the arguments here affect generation. Rationales
are carried as token ids; decoding and tokenising them again may give other ids, and with them another state.

A step runs every layer once; positions, masks and buffers are prepared before the first. Finished rows leave the batch. On a
GPU a step consists of thousands of small kernels that take longer to launch than to run, so they are captured as one CUDA graph
per number of rows and buffer length, and kept for the whole run (`_Captured`).

Shape suffixes: B = rows still being written, R = all rows, L = steps, V = vocabulary, D = hidden size.
"""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rge.distributed.transfer import moved
from rge.model.attention import Cache, EncodedParts, RunningCache, bucket, fresh
from rge.model.embedding_model import EmbeddingModel, eval_mode, normalise
from rge.model.families import Rotations, family_of
from rge.model.hub_model import HubModel
from rge.model.packing import by_length
from rge.model.prompts import Prompt
from rge.model.varlen import KernelError
from rge.rollout.micro_batches import encode_prompts

_log = logging.getLogger(__name__)


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function without running it; each call of the result replays it."""


def _cuda_graphs() -> Capture:
    """Captures CUDA graphs that share one memory pool for temporaries, since no two run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's thread may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": _cuda_graphs}
"""Capture factory by device type."""

MOST_COPIES_BYTES = 1 << 30
"""Memory that bfloat16 copies of float32 weights may take for the whole run, so that captured steps stay valid under autocast."""

_checked: set[str] = set()
"""Device types on which this process has compared a captured step with a plain one."""


class _Captured:
    """Captured steps of one embedder, by size, and their memory; both are kept for the whole run.

    There is one buffer per name, as large as the largest request so far. Rows are the first dimension of every tensor, so the
    rows of a small rollout have the same addresses as the first rows of a large one, and steps captured on one run on the other.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.in_use = threading.Lock()
        self.weights: tuple = ()
        self.copies: list[Tensor] = []
        self.memory: dict[str, Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Drop all captured steps. A memory pool ends with its last graph, so the next ones get a new pool."""
        self.steps: dict[tuple, Callable[[], None]] = {}
        self.capture = CAPTURES[self.device.type]()

    @contextmanager
    def rollout(self, embedder: EmbeddingModel) -> Iterator[None]:
        """Drop captured steps if the weights have moved since the last rollout, and keep them where they are during this one.

        Optimizers update weights in place, but loading and gathering (ZeRO-3, FSDP2) move them. So does autocast, with a temporary
        copy of each float32 weight: linear layers, those of adapters included, get copies that stay where they are instead. If
        these are too large, steps are captured in every rollout.
        """
        kinds = [kind for kind in (self.device.type, "cpu") if torch.is_autocast_enabled(kind)]
        dtype = torch.get_autocast_dtype(kinds[0]) if kinds else None
        tensors = [*embedder.parameters(), *embedder.buffers()]
        cast = _linear_weights(embedder) if kinds else []
        now = (dtype, *(tensor.data_ptr() for tensor in tensors))
        lasting = sum(2 * weight.numel() for _, _, weight in cast) <= MOST_COPIES_BYTES
        if now != self.weights or not lasting:
            self.forget()
            self.copies = [torch.empty_like(weight, dtype=dtype) for _, _, weight in cast] if lasting else []
        self.weights = now
        if not kinds or not lasting:
            yield
            return
        if cast:
            torch._foreach_copy_(self.copies, [weight.detach() for _, _, weight in cast])
        try:
            for (module, name, _), copy in zip(cast, self.copies, strict=True):
                module._parameters[name] = nn.Parameter(copy, requires_grad=False)
            # Without autocast's own cache, whatever else it casts is cast again by each replay.
            with torch.autocast(kinds[0], dtype=dtype, cache_enabled=False):
                yield
        finally:
            for module, name, weight in cast:
                module._parameters[name] = weight

    def room(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros in the buffer of that name, at the same address as before if the buffer is large enough."""
        size, known = math.prod(shape), self.memory.get(name)
        if known is None or known.dtype != like.dtype or len(known) < size:
            self.forget()  # captured steps read the buffer that is freed here
            del known
            self.memory.pop(name, None)
            self.memory[name] = like.new_empty(size)
        return self.memory[name][:size].view(shape).zero_()


def _linear_weights(embedder: EmbeddingModel) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Float32 parameters of linear layers, which autocast copies: the layer, their name in it, and themselves."""
    return [
        (module, name, parameter)
        for module in embedder.modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype == torch.float32
    ]


_CAPTURED: "weakref.WeakKeyDictionary[EmbeddingModel, _Captured]" = weakref.WeakKeyDictionary()


@contextmanager
def _capturing(embedder: EmbeddingModel) -> Iterator[_Captured | None]:
    """Captured steps of an embedder; None if capturing is off or another rollout is using them."""
    device, captured = embedder.device, None
    if device.type in CAPTURES and embedder.cuda_graphs:
        captured = _CAPTURED.get(embedder)
        if captured is None or captured.device != device:
            captured = _CAPTURED[embedder] = _Captured(device)
    if captured is None or not captured.in_use.acquire(blocking=False):
        yield None
        return
    try:
        with captured.rollout(embedder):
            yield captured
    finally:
        captured.in_use.release()


@dataclass(frozen=True, slots=True)
class Rationale:
    """What the model wrote for one prompt."""

    ids: tuple[int, ...]  # without ``<emb>``; empty if the model directly wrote ``<emb>``
    forced: bool  # its cap, above 0, was reached and ``<emb>`` was appended
    # Unit-norm state at ``<emb>``, float32, without gradient; None unless computed with the current weights.
    state_D: Tensor | None = field(repr=False)
    seconds: float  # wall time of its batch divided by the batch's rows
    age: int = 0  # steps since generation
    direct: bool = False  # deliberately empty: ``<emb>`` directly follows the prompt
    capped: bool = False  # ended by a cap that training drew for its query, see `rge.rollout.writer`
    oracle: bool = False  # not generated: the ids are the oracle's rationale
    given: bool = False  # not generated: the ids were passed in, for an additional state of the query
    # Smallest decision margin over its tokens: the lead of the best logit over the second, or the distance of a drawn number to
    # the nearest one that would have drawn another token; with `direct_above`, at most the distance of ``<emb>``'s probability from
    # it; infinite unless requested.
    margin: float = float("inf")
    # Of its tokens, and of ``<emb>`` if the model wrote it, as an external sampler reported them; None: our forward computes them.
    log_probs: tuple[float, ...] | None = None


def generate(
    embedder: EmbeddingModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_progress: Callable[[int], object] | None = None,
    num_each: int = 1,
    encoded: EncodedParts | None = None,
    places: Sequence[int] | None = None,
    margins: bool = False,
    on_token: Callable[[int, int], object] | None = None,
    min_new_tokens: int = 0,
    given: Sequence[Sequence[int]] = (),
    direct_above: float | None = None,
    caps: Sequence[int] | None = None,
) -> list[Rationale]:
    """Write rationales for every prompt.

    The result of a row does not depend on the other rows: greedy decoding has no randomness, and sampling takes its
    random numbers from the row's own seed.

    Args:
        embedder: the model, unwrapped.
        prompts: of any length.
        max_new_tokens: cap on generated tokens, ``<emb>`` included, as `max_new_tokens` of transformers' generate.
        batch_size: rationales per batch. Prompts are sorted by length to minimise padding.
        temperature: 0 is greedy; otherwise logits are divided by it and sampled from, without any truncation.
        seeds: one per rationale, required for sampling.
        on_progress: receives the number of prompts just finished, after each batch.
        num_each: rationales per prompt, all from one encoding of it.
        encoded: precomputed keys and values of the prompts; read without gradient.
        places: index of each prompt in `encoded`; None: same prompts, same order.
        margins: compute `Rationale.margin`.
        on_token: receives a rationale's index in the result and each new token, ``<emb>`` included; exceptions end generation.
        min_new_tokens: ``<emb>`` is suppressed before this many tokens; 0 allows empty rationales.
        given: token ids to read instead of generating, for additional states; ``()`` gives the direct one. Applied to every
            prompt, from the same encoding.
        direct_above: write nothing if the probability of ``<emb>`` as first token is at least this, otherwise something; None:
            ``<emb>`` is an ordinary token.
        caps: of each prompt's rationales, in tokens, from 0 (the direct state) to `max_new_tokens`; ``<emb>`` follows a
            rationale that reaches its cap, as if all had been written with this one. They precede `min_new_tokens` and
            `direct_above`. None: `max_new_tokens` for all.

    Returns:
        For each prompt in order, its `num_each` rationales followed by the `given` ones.

    Raises:
        ValueError: sampling without seeds, or limits that contradict each other.
    """
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts) * num_each):
        raise ValueError("sampling (temperature > 0) needs one seed per rationale")
    if any(len(ids) >= max_new_tokens for ids in given):
        raise ValueError(f"given ids and <emb> must fit into max_new_tokens={max_new_tokens}")
    choice = _Choice(max_new_tokens, temperature, min_new_tokens, direct_above, margins)
    num_rows = num_each + len(given)
    cap_of_row = None if caps is None else _caps_of_rows(caps, prompts, choice, num_each, len(given))
    results: dict[int, Rationale] = {}
    with eval_mode(embedder), _capturing(embedder) as captured:
        for chosen in by_length([*map(len, prompts)], max(1, batch_size // num_each)):
            rows = [index * num_rows + number for index in chosen for number in range(num_rows)]
            own_seeds: list[int | None] | None = None
            if seeds is not None and temperature > 0:
                of_prompt = [seeds[index * num_each : (index + 1) * num_each] for index in chosen]
                own_seeds = [seed for own in of_prompt for seed in (*own, *[None] * len(given))]
            read = [*[None] * num_each, *given] * len(chosen) if given else None
            began = time.perf_counter()
            known, known_at = encoded, [index if places is None else places[index] for index in chosen]
            if known is None:
                with torch.no_grad():
                    known = encode_prompts(embedder, embedder, [prompts[index] for index in chosen])
                known_at = [*range(len(chosen))]
            capped = None if cap_of_row is None else [cap_of_row[row] for row in rows]
            writing = _Writing(
                embedder,
                known,
                np.repeat(known_at, num_rows).tolist(),
                choice,
                own_seeds,
                read,
                capped,
                captured,
            )
            if on_token is not None:
                writing.on_token = lambda place, token, rows=rows: on_token(rows[place], token)
            written = writing.run()
            seconds = (time.perf_counter() - began) / len(rows)
            for row, (ids, forced, state_D, margin) in zip(rows, written, strict=True):
                added = row % num_rows >= num_each
                # No decision of the model's: nothing was to be written.
                silent = not ids and (added or forced)
                results[row] = Rationale(
                    ids, forced and not silent, state_D, seconds, direct=silent, given=added, margin=margin
                )
            del writing  # free its memory before the next batch allocates
            if on_progress is not None:
                on_progress(len(chosen))
    return [results[row] for row in range(len(results))]


def _caps_of_rows(
    caps: Sequence[int], prompts: Sequence[Prompt], choice: "_Choice", num_each: int, num_given: int
) -> list[int]:
    """The cap of every row of a result: what is given is read whole."""
    most = choice.max_new_tokens
    if len(caps) != len(prompts):
        raise ValueError(f"{len(caps)} caps for {len(prompts)} prompts: give one per prompt")
    if wrong := [cap for cap in caps if not 0 <= cap <= most]:
        raise ValueError(f"a cap must be 0 to max_new_tokens={most}, got {wrong[0]}")
    return [cap for one in caps for cap in (*[one] * num_each, *[most] * num_given)]


@dataclass(frozen=True)
class _Choice:
    """How `generate` chooses tokens."""

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


class _Writing:
    """A batch during generation; steps update all tensors in place.

    For captured steps, addresses are the same in every rollout, and the batch is padded with already finished rows to a size
    for which steps are captured.
    """

    on_token: Callable[[int, int], object] | None = None
    hidden_BD: Tensor

    @torch.no_grad()
    def __init__(
        self,
        embedder: EmbeddingModel,
        encoded: EncodedParts,
        places: Sequence[int],
        choice: _Choice,
        seeds: Sequence[int | None] | None,
        given: Sequence[Sequence[int] | None] | None,
        caps: Sequence[int] | None,
        captured: _Captured | None,
    ):
        self.embedder, self.choice = embedder, choice
        max_new_tokens = choice.max_new_tokens
        model, device = embedder.model, embedder.device
        self.words, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.captured = captured = captured if encoded.is_flat else None
        room_of = fresh if captured is None else captured.room
        self.num_rows = len(places)
        if captured is not None:
            places = [*places, *[places[0]] * (bucket(len(places)) - len(places))]
        R = len(places)
        # Step 0 reads the prompt's last token, step n the n-th token of the rationale, and one more a forced `<emb>`.
        self.num_steps = max_new_tokens + 2
        self.cache: Cache | RunningCache
        self.capacity = max(encoded.lengths[place] for place in places) + self.num_steps
        if encoded.is_flat:
            self.capacity = self.capacity if captured is None else bucket(self.capacity)
            self.cache = RunningCache(encoded, places, self.capacity, room_of)
        else:
            self.cache = Cache(encoded, places, self.num_steps)
        uniform_RL = None if seeds is None else _uniform(seeds, R, max_new_tokens)
        given_RL = None if given is None else _given_ids(given, embedder.emb_id, R, max_new_tokens)
        barred = torch.tensor(embedder.suppressed_ids, dtype=torch.long)
        self.caps = caps or [max_new_tokens] * self.num_rows
        cap_R = None if caps is None else torch.tensor([*caps, *[0] * (R - self.num_rows)])
        rows, uniform_RL, given_RL, cap_R, self.barred = moved(
            (torch.tensor(places), uniform_RL, given_RL, cap_R, barred), device
        )

        def put(name: str, value: Tensor) -> Tensor:
            return value if captured is None else room_of(name, tuple(value.shape), value).copy_(value)

        self.uniform_RL = None if uniform_RL is None else put("uniform", uniform_RL)
        self.given_RL = None if given_RL is None else put("given", given_RL)
        self.cap_R = None if cap_R is None else put("cap", cap_R)
        self.rotations = {
            kind: (put(f"cosines {kind}", cos_BLd), put(f"sines {kind}", sin_BLd))
            for kind, (cos_BLd, sin_BLd) in _rotations(
                model, encoded.last_position_3B[:, rows], encoded.after_B[rows], self.num_steps
            ).items()
        }
        # What a step writes; `hidden_BD` and, on a plain step's way, the logits are its own.
        row_R = torch.arange(R, device=device)
        self.row_B = put("row", row_R)
        self.done_B = put("done", row_R >= self.num_rows)
        self.token_B = put("token", encoded.last_id_B[rows])
        self.step_1 = put("step", torch.zeros(1, dtype=torch.long, device=device))
        self.written_RL = put("written", torch.full((R, max_new_tokens + 1), embedder.emb_id, device=device))
        self.margin_R = (
            put("margin", torch.full((R,), float("inf"), device=device)) if choice.margins else None
        )
        words, hidden = self.words.weight, family_of(model).decoder(model).config.hidden_size
        state_dtype = torch.promote_types(words.dtype, torch.float32)
        self.state_RD = put("state", torch.zeros(R, hidden, dtype=state_dtype, device=device))
        self.barred_V = None if captured is None else captured.memory.get("barred")
        self.replay: Callable[[], None] | None = None

    @torch.no_grad()
    def run(self) -> list[tuple[tuple[int, ...], bool, Tensor, float]]:
        """Generate: each row's ids, whether ``<emb>`` was forced, the state there, and the smallest margin."""
        self._write()
        results, real = [], slice(self.num_rows)
        least = [float("inf")] * self.num_rows if self.margin_R is None else self.margin_R[real].tolist()
        # The next rollout reuses this memory.
        state_RD = self.state_RD if self.captured is None else self.state_RD[real].clone()
        for ids, cap, state_D, margin in zip(
            self.written_RL[real].tolist(), self.caps, state_RD, least, strict=True
        ):
            length = ids.index(self.embedder.emb_id)
            results.append((tuple(ids[:length]), length == cap, state_D, margin))
        return results

    def _write(self) -> None:
        # Reading from a GPU synchronises, and keeping a finished row in the batch costs little: check rarely there.
        look_every = 1 if self.row_B.device.type == "cpu" and self.captured is None else 8
        warm = False
        for step in range(self.num_steps):
            chooses = step < self.choice.max_new_tokens
            # The first step of a size runs plainly: libraries choose their kernels then.
            captured = chooses and self.captured is not None and (warm or self._size() in self.captured.steps)
            if captured:
                self._run_captured()
            else:
                self._read()
            if step == self.num_steps - 1:
                return
            warm = True
            if (step and step % look_every == 0) or step == self.choice.max_new_tokens:
                num_rows = len(self.row_B)
                num_alive = num_rows - int(self.done_B.sum())
                if num_alive == 0:
                    return
                # Copying the cache costs about as much as a step with it; worth it once a quarter of the rows is done.
                num_kept = num_alive if self.captured is None else bucket(num_alive)
                if num_kept <= 0.75 * num_rows:
                    kept = self.done_B.to(torch.uint8).argsort(stable=True)[:num_kept]
                    self._keep(kept)
                    warm = False
                    if not captured:
                        self.hidden_BD = self.hidden_BD[kept]
            if not captured:
                self._choose(chooses)
            self._tell()

    def _read(self) -> None:
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

    def _choose(self, chooses: bool = True) -> None:
        emb_id = self.embedder.emb_id
        if not chooses:
            self.token_B.fill_(emb_id)
        else:
            logit_BV, lead_B = self._logits()
            uniform_B = None if self.uniform_RL is None else self.uniform_RL[self.row_B, self.step_1]
            token_B = _choose(logit_BV, self.choice.temperature, uniform_B)
            if lead_B is not None:
                token_B = token_B.masked_fill(lead_B >= 0, emb_id)
            if self.given_RL is not None:
                given_B = self.given_RL[self.row_B, self.step_1]
                token_B = torch.where(given_B >= 0, given_B, token_B)
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
        """Logits of the next tokens, -inf where suppressed, and by how much ``<emb>`` exceeds `_Choice.direct_above`.

        The latter is -inf after the first token; a row where it is not below 0 is answered directly.
        """
        emb_id, choice = self.embedder.emb_id, self.choice
        logit_BV = self.head(self.hidden_BD).float()
        if self.barred_V is None:
            self.barred_V = torch.zeros_like(logit_BV[0]).index_fill_(0, self.barred, float("-inf"))
            if self.captured is not None:
                self.captured.memory["barred"] = self.barred_V
        logit_BV = logit_BV + self.barred_V
        if choice.min_new_tokens:
            early_1 = self.step_1 < choice.min_new_tokens
            logit_BV[:, emb_id] = torch.where(early_1, float("-inf"), logit_BV[:, emb_id])
        if choice.direct_above is None:
            return logit_BV, None
        first_1, likely_B = self.step_1 == 0, logit_BV.softmax(dim=-1)[:, emb_id]
        logit_BV[:, emb_id] = torch.where(first_1, float("-inf"), logit_BV[:, emb_id])
        return logit_BV, torch.where(first_1, likely_B - choice.direct_above, float("-inf"))

    def _tell(self) -> None:
        """Report the tokens just chosen in unfinished rows."""
        if self.on_token is not None:
            for row, token in torch.stack([self.row_B, self.token_B], dim=1)[~self.done_B].tolist():
                self.on_token(row, token)

    def _whole_step(self) -> None:
        self._read()
        self._choose()

    def _keep(self, rows: Tensor) -> None:
        def kept(tensor: Tensor) -> Tensor:
            return tensor[rows] if self.captured is None else tensor[: len(rows)].copy_(tensor[rows])

        self.cache.keep_rows(rows)
        self.row_B, self.done_B, self.token_B = kept(self.row_B), kept(self.done_B), kept(self.token_B)
        self.rotations = {kind: (kept(cos), kept(sin)) for kind, (cos, sin) in self.rotations.items()}
        self.replay = None

    def _size(self) -> tuple:
        """Everything but memory that a captured step depends on."""
        absent = [of_rows is None for of_rows in (self.uniform_RL, self.given_RL, self.cap_R)]
        return len(self.row_B), self.capacity, self.choice, *absent

    def _run_captured(self) -> None:
        assert self.captured is not None
        if self.replay is None:
            self.replay = self.captured.steps.get(self._size())
        if self.replay is None:
            self.replay = self.captured.steps[self._size()] = self.captured.capture(self._whole_step)
            if (kind := self.row_B.device.type) not in _checked:
                self._check()
                _checked.add(kind)
                return
        self.replay()

    def _check(self) -> None:
        """Compare a plain and a captured step from the same state; KernelError if they differ."""
        changed = [self.token_B, self.done_B, self.step_1, self.written_RL, self.state_RD]
        changed.append(self.cache.length_B)  # type: ignore[union-attr]
        before = [tensor.clone() for tensor in changed]
        self._whole_step()
        expected = [tensor.clone() for tensor in changed]
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        self.replay()  # type: ignore[misc]
        tokens = int((expected[0] != changed[0]).sum())
        apart = float((expected[4] - changed[4]).abs().max())
        equal = all(torch.equal(expected[place], changed[place]) for place in (1, 2, 5))
        if tokens or not equal or apart > 1e-3:
            raise KernelError(
                f"a step of the rollout as a CUDA graph differs from the plain step: {tokens} of {len(self.token_B)} tokens differ, "
                f"states by {apart:.1e}; set model.cuda_graphs=false, and please report it with the output of "
                "scripts/gpu_check.py"
            )
        _log.warning(
            "model.cuda_graphs: a captured step checked against the plain one: tokens equal, states to %.1e",
            apart,
        )


def _uniform(seeds: Sequence[int | None], R: int, L: int) -> Tensor:
    """(R, L) float64 random numbers of each row, from its own seed."""
    uniform_RL = torch.zeros(R, L, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        if seed is not None:
            uniform_RL[row] = torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).random(L))
    return uniform_RL


def _given_ids(given: Sequence[Sequence[int] | None], emb_id: int, R: int, L: int) -> Tensor:
    """(R, L) the tokens to read instead of generating, `emb_id` last; -1 elsewhere."""
    given_RL = torch.full((R, L), -1)
    for row, ids in enumerate(given):
        if ids is not None:
            given_RL[row, : len(ids) + 1] = torch.tensor([*ids, emb_id])
    return given_RL


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
