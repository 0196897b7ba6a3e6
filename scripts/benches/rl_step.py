"""A step of the stage rl against its plain form: FLOPs and time. `python scripts/bench.py rl_step settings=demo rationales=4`.

    plain         `generate` from k copies of each prompt; a forward over each [prompt][rationale, <emb>] without gradient
                  for the rewards; one with gradient for the log probabilities; one for the states of InfoNCE; the LM forward
    leaner        the same, but prompts encoded once for generation, and log probabilities and states from one forward
    ours          prompts encoded once; k branches and the oracle's in `rge.step.training_step.TrainingStep`

Losses and gradients are first compared in float64. ``settings=3b`` counts the step at the shape of Qwen2.5-VL-3B, for prompts of
`prompt_tokens`, without computing it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from benches import forms
from benches.forms import Setting, Sizes, Work, our_rollout
from benches.harness import Rows, show
from rge.config import Recipe
from rge.loss_config import LossConfig
from rge.losses import rationale_log_probs
from rge.model.embedding_model import normalise
from rge.objective import Objective
from rge.rl.config import RLConfig
from rge.rl.credit import Reinforcement
from rge.rl.policy import advantages
from rge.rollout.config import RolloutConfig
from rge.rollout.micro_batches import encode_prompts
from rge.rollout.writer import Rollout
from rge.step.comparison import candidate_masks
from rge.step.training_step import TrainingStep


@dataclass
class Options(Sizes):
    """What is measured; the sizes are those of ``long`` and ``3b``."""

    settings: tuple[str, ...] = ("demo",)
    """demo, long and/or 3b."""
    rationales: Annotated[int, Field(ge=2)] = 4
    """Rationales per query."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """Turns of timing."""


def measure(options: Options) -> dict[str, Rows]:
    """Measure every setting."""

    def grouped(setting: Setting) -> Setting:
        """With several rationales per query, of lengths drawn from the setting's."""
        drawn = np.random.default_rng(1).choice(setting.stop_B, (len(setting.stop_B), options.rationales))
        return replace(setting, stop_B=drawn.flatten().tolist())

    found = forms.measure_settings(
        options, lambda setting: _work(setting, options.rationales), prepare=grouped, repeats=options.repeats
    )
    tables = {}
    for name, kinds in found.items():
        rows: Rows = {}
        for kind in filter(kinds.get, ("GFLOP", "s", "CPU s")):
            cost = kinds[kind]
            plain = cost["generate, k copies"] + cost["score, log probabilities, embed, LM"]
            lean = cost["generate, prompts once"] + cost["score, one forward for both, LM"]
            for form, value in (cost | {"plain, all": plain, "leaner, all": lean}).items():
                rows.setdefault(form, {})[kind] = value
        print(f"\n{name}")
        tables[name] = show(rows, over="ours")
    return tables


def _work(setting: Setting, count: int) -> Work:
    """A step of the stage rl: ours, and the parts of its plain forms."""
    recipe = _recipe(setting, count)
    own_ids = [rationale.ids for rationale in our_rollout(setting, num_each=count)]
    queries = [prompt for prompt in setting.batch.queries for _ in range(count)]
    repeated = replace(setting, batch=replace(setting.batch, queries=queries))
    return {
        "ours": lambda: our_rl_step(setting, recipe),
        "generate, k copies": lambda: forms.their_rollout(repeated),
        "generate, prompts once": lambda: our_rollout(setting, num_each=count),
        "score, log probabilities, embed, LM": lambda: plain_rl_step(setting, recipe, own_ids),
        "score, one forward for both, LM": lambda: plain_rl_step(setting, recipe, own_ids, lean=True),
    }


def _recipe(setting: Setting, count: int) -> Recipe:
    """The stage rl with all three losses."""
    objective = setting.objective
    same: Any = {"temperature": objective.temperature, "lm_on_candidates": objective.lm_on_candidates}
    return Recipe(
        recipe="bench",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, **same),
        rollout=RolloutConfig(max_new_tokens=setting.max_new_tokens),
        rl=RLConfig(alpha_con=0.5, num_rationales=count, std_floor=0.1),
    )


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
        total, written = torch.zeros(()), forms.stock_states(embedder, repeated, suffixes)
    ends = [len(prompt) + len(ids) for prompt, ids in zip(repeated, own_ids, strict=True)]
    found = forms.candidate_readout(setting, batch.candidates)
    con = forms.contrastive(setting, normalise(written[range(len(ends)), ends]), found.state_ND)
    lm = (forms.stock_nll(embedder, batch.queries, batch.oracle_ids) + found.nll) / forms.num_labels(setting)
    total = total + rl.alpha_con * con + rl.alpha_lm * lm
    total.backward()
    parts = {"loss_rl": policy, "loss_contrastive": con, "loss_lm": lm}
    return {name: float(value.detach()) for name, value in parts.items()}
