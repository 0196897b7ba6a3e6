"""A step of the stage rl against its plain form: FLOPs and time. `python scripts/bench.py rl_step settings=demo rationales=4`.

    plain         `generate` from k copies of each prompt; a forward over each [prompt][rationale, <emb>] without gradient
                  for the rewards; one with gradient for the log probabilities; one for the states of InfoNCE; the LM forward
    leaner        the same, but prompts encoded once for generation, and log probabilities and states from one forward
    ours          prompts encoded once; k branches and the oracle's in `rge.step.TrainingStep`

``settings=3b`` counts the step at the shape of Qwen2.5-VL-3B, for one query with a prompt of `prompt_tokens`, as
`benches.forms.count_3b` does. The other settings first compare losses and gradients in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from benches import forms
from benches.forms import SETTINGS, Setting, Sizes, our_rollout
from benches.harness import in_turns, medians, show
from rge.config import LossConfig, Recipe, RLConfig, RolloutConfig
from rge.losses import rationale_log_probs
from rge.model.embedding_model import encode_prompts, normalise
from rge.objective import Objective
from rge.rl.credit import Reinforcement
from rge.rl.policy import advantages
from rge.rollout.writer import Rollout
from rge.step import TrainingStep, candidate_masks


@dataclass
class Options(Sizes):
    """What is measured; the sizes are those of ``long`` and ``3b``."""

    settings: tuple[str, ...] = ("demo",)
    """demo, long and/or 3b."""
    rationales: Annotated[int, Field(ge=2)] = 4
    """Rationales per query."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Turns of timing."""


def measure(options: Options) -> dict:
    """Measure every setting."""

    def measured(name: str) -> dict[str, float]:
        return _count_3b(options) if name == "3b" else _time(SETTINGS[name](options), options)

    return forms.measure_settings(options, [*SETTINGS, "3b"], measured)


def _time(setting: Setting, options: Options) -> dict[str, float]:
    count = options.rationales
    print(f"\n{setting.name}: {setting.note}", flush=True)
    setting, recipe = groups_of(setting, count), rl_recipe(setting, options)
    embedder = setting.embedder.double()
    own_ids = [rationale.ids for rationale in our_rollout(setting, num_each=count)]
    worst = forms.check_equal(
        embedder,
        (
            lambda: our_rl_step(setting, recipe),
            lambda: plain_rl_step(setting, recipe, own_ids),
            lambda: plain_rl_step(setting, recipe, own_ids, lean=True),
        ),
    )
    print(f"{count} rationales: losses and gradients equal to {worst:.0e} (float64, relative)", flush=True)
    embedder.float()
    work = rl_work(setting, recipe, own_ids)
    wall, cpu = in_turns(work, options.repeats, lambda: embedder.zero_grad(set_to_none=True))
    return (
        rl_ratios(forms.flops_of(embedder, work), "flops", "GFLOP", 1e9)
        | rl_ratios(medians(wall), "time", "s")
        | rl_ratios(medians(cpu), "cpu_time", "CPU s")
        | {"rationale_tokens": sum(len(ids) + 1 for ids in own_ids)}
    )


def rl_recipe(setting: Setting, options: Options) -> Recipe:
    """The stage rl with all three losses."""
    objective = setting.objective
    same = {"temperature": objective.temperature, "lm_on_candidates": objective.lm_on_candidates}
    return Recipe(
        recipe="bench",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, **same),
        rollout=RolloutConfig(max_new_tokens=setting.max_new_tokens),
        rl=RLConfig(alpha_con=0.5, num_rationales=options.rationales, std_floor=0.1),
    )


def groups_of(setting: Setting, count: int) -> Setting:
    """The setting with `count` rationales per query, with lengths drawn from the setting's."""
    drawn = np.random.default_rng(1).choice(setting.stop_B, (len(setting.stop_B), count))
    return replace(setting, stop_B=drawn.flatten().tolist())


def our_rl_step(setting: Setting, recipe: Recipe) -> dict[str, float]:
    """Rationales and gradients of one step of the stage rl, prompts encoded once, by rge."""
    embedder, batch = setting.embedder, setting.batch
    encoded = encode_prompts(embedder, embedder, batch.queries)
    # Greedy, with different lengths, so that the plain form can write the same.
    rationales = our_rollout(setting, encoded, recipe.rl.num_rationales)
    credit = Reinforcement(recipe, embedder, None, Path()).begin(batch, rationales, False)
    step = TrainingStep(embedder, embedder, Objective.of(recipe, "rl"), len(batch.queries))
    return step(batch, Rollout(rationales, encoded), credit)


def plain_rl_step(
    setting: Setting, recipe: Recipe, own_ids: Sequence[Sequence[int]], lean: bool = False
) -> dict[str, float]:
    """Gradients of one step of the stage rl, in passes: rewards, log probabilities, states, LM, candidates.

    With ``lean``, log probabilities and states come from one forward. Each query has equally many rationales.
    """
    embedder, batch, rl = setting.embedder, setting.batch, recipe.rl
    K, head = rl.num_rationales, embedder.model.get_output_embeddings()
    repeated = [prompt for prompt in batch.queries for _ in range(K)]
    suffixes = [[*ids, embedder.emb_id] for ids in own_ids]
    positive_BC, ignored_BC, _ = candidate_masks(batch, torch.tensor(batch.candidate_identity), 0)
    with torch.no_grad():
        state_ND = forms.stock_embeddings(embedder, repeated, own_ids)
        found = forms.candidate_readout(setting, batch.candidates)
        logit = state_ND.view(-1, K, state_ND.shape[1]) @ found.state_ND.T / recipe.loss.temperature
        right = (positive_BC | ignored_BC)[:, None].expand_as(logit)
        reward_BK = logit.masked_fill(~right, float("-inf")).logsumexp(2) - logit.logsumexp(2)
        advantage_BK = advantages(reward_BK, scale="group", std_floor=rl.std_floor)
    written = forms.stock_states(embedder, repeated, suffixes)
    rows, columns, label_L = forms.predicting(repeated, suffixes)
    log_prob_L, _ = rationale_log_probs(
        written[rows, columns], head, label_L, barred_ids=embedder.suppressed_ids, temperature=1.0
    )
    owner_L = torch.tensor(rows)
    policy = -(advantage_BK.flatten()[owner_L] * (log_prob_L - log_prob_L.detach()).exp()).mean()
    total = rl.alpha_rl * policy
    if not lean:
        total.backward()
        total, written = 0.0, forms.stock_states(embedder, repeated, suffixes)
    ends = [len(prompt) + len(ids) for prompt, ids in zip(repeated, own_ids, strict=True)]
    found = forms.candidate_readout(setting, batch.candidates)
    con = forms.contrastive(setting, normalise(written[range(len(ends)), ends]), found.state_ND)
    num_tokens = sum(map(len, batch.oracle_ids)) + found.num_tokens
    lm = (forms.stock_nll(embedder, batch.queries, batch.oracle_ids) + found.nll) / num_tokens
    total = total + rl.alpha_con * con + rl.alpha_lm * lm
    total.backward()  # type: ignore[union-attr]
    parts = {"loss_rl": policy, "loss_contrastive": con, "loss_lm": lm}
    return {name: float(value.detach()) for name, value in parts.items()}


def rl_work(
    setting: Setting, recipe: Recipe, own_ids: Sequence[Sequence[int]]
) -> dict[str, Callable[[], object]]:
    """A step of the stage rl: ours, and the parts of its plain forms."""
    count = recipe.rl.num_rationales
    return {
        "ours": lambda: our_rl_step(setting, recipe),
        "generate, k copies": lambda: forms.their_rollout(repeated_prompts(setting, count)),
        "generate, prompts once": lambda: our_rollout(setting, num_each=count),
        "score, log probabilities, embed, LM": lambda: plain_rl_step(setting, recipe, own_ids),
        "score, one forward for both, LM": lambda: plain_rl_step(setting, recipe, own_ids, lean=True),
    }


def rl_ratios(found: dict[str, float], what: str, unit: str, scale: float = 1.0) -> dict[str, float]:
    """Print the figures of `rl_work` in a unit of ``scale``, and return their ratios, named after ``what``."""
    plain = found["generate, k copies"] + found["score, log probabilities, embed, LM"]
    lean = found["generate, prompts once"] + found["score, one forward for both, LM"]
    all_forms = found | {"plain, all": plain, "leaner, all": lean}
    show({name: {unit: value / scale} for name, value in all_forms.items()}, over="ours")
    return {
        f"rl_step_{what}_ratio": plain / found["ours"],
        f"rl_step_{what}_ratio_lean": lean / found["ours"],
        f"ours_rl_step_{unit.lower().replace(' ', '_')}": found["ours"] / scale,
    }


def _count_3b(options: Options) -> dict[str, float]:
    """FLOPs of a step of the stage rl at the shape of Qwen2.5-VL-3B."""
    written: list[int] = []

    def work(setting: Setting) -> dict[str, Callable[[], object]]:
        setting = groups_of(setting, options.rationales)
        own_ids = [rationale.ids for rationale in our_rollout(setting, num_each=options.rationales)]
        written[:] = [sum(len(ids) + 1 for ids in own_ids), len(setting.batch.queries[0])]
        return rl_work(setting, rl_recipe(setting, options), own_ids)

    whole = forms.count_3b(replace(options, batch=1), work)
    tokens, prompt = written
    print(
        f"3b: one query of {prompt} tokens, {options.rationales} rationales of {tokens} tokens in all",
        flush=True,
    )
    return rl_ratios(whole, "flops", "GFLOP", 1e9) | {"rationale_tokens": tokens, "prompt_tokens": prompt}


def repeated_prompts(setting: Setting, count: int) -> Setting:
    """The setting with `count` copies of each query, as for a rollout without shared prompts."""
    queries = [prompt for prompt in setting.batch.queries for _ in range(count)]
    return replace(setting, batch=replace(setting.batch, queries=queries))
