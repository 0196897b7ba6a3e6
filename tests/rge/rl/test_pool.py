"""A fixed pool to rank against: what is in it, whom it answers, when it is embedded anew, what of it is saved, what is refused."""

import base64
import copy
import json
import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from faults import error_about

from rge.common.errors import UserError
from rge.common.images import picture_bytes
from rge.common.schema import Target
from rge.config import Recipe
from rge.data.collate import target_item
from rge.data.config import SourceConfig
from rge.data.sources import RecordFile, Records, identity
from rge.distributed.config import TrainConfig
from rge.loss_config import LossConfig
from rge.model.embedding_model import PictureMemory
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.rl.config import RLConfig
from rge.rl.credit import Reinforcement
from rge.rl.pool import check_pool, read_pool
from rge.rollout.config import RolloutConfig
from rge.rollout.generate import Rationale
from rge.rollout.writer import Rollout
from rge.step.training_step import TrainingStep

TEMPERATURE = 0.1


@pytest.fixture
def corpus(tmp_path):
    """A folder as retrieval sets have it, whose entries the queries of `make_batch` ask for."""
    folder = tmp_path / "a pool"
    folder.mkdir()
    ids = ["a", "other a", "b", "n0", "c", *(f"x{number}" for number in range(4))]
    table = {"id": ids, "text": [f"{name} key" for name in ids]}
    table["identity"] = ["a" if name == "other a" else None for name in ids]
    pq.write_table(pa.table(table), folder / "corpus.parquet")
    return folder


def recipe_of(path, **changes) -> Recipe:
    return Recipe(
        recipe="tiny",
        stage="rl",
        loss=LossConfig(alpha_lm=0.5, alpha_con=0.5, temperature=TEMPERATURE),
        rollout=RolloutConfig(max_new_tokens=9),
        rl=RLConfig(**{"alpha_con": 0.5, "num_rationales": 2, "candidates": f"pool:{path}"} | changes),
        train=TrainConfig(micro_batch_size=4),
    )


def two_each(batch) -> list[Rationale]:
    return [Rationale((5 + number, 6), False, None, 0.0) for _ in batch.queries for number in range(2)]


def take(embedder, batch, stage, recipe):
    credit = stage.begin(batch, two_each(batch), False)
    report = TrainingStep(embedder, embedder, Objective.of(recipe, "rl"), 100)(batch, Rollout(credit.rationales), credit)  # fmt: skip
    embedder.zero_grad()
    return report


def states(embedder, items, side="candidate", tail=(), profile="rge"):
    prompts = [PromptBuilder(embedder.processor, profile, 2048).build(item, side) for item in items]
    branches = [[Branch([*tail, embedder.emb_id], read_state=True)]] * len(prompts)
    return embedder(embedder.pack(prompts, branches))[0].state_ND


def test_rewards_rank_the_pool_and_everything_in_it_that_answers_is_right(
    lively64, make_batch, corpus, tmp_path
):
    recipe = recipe_of(corpus)
    batch = make_batch(PromptBuilder(lively64.processor))
    stage = Reinforcement(recipe, lively64, None, tmp_path)
    report = take(lively64, batch, stage, recipe)
    with torch.no_grad():
        pool = states(lively64, [target_item(target) for target in read_pool(corpus)])
        rewards = []
        for row in range(4):  # d, the answer of the last query, is not in the pool
            wanted = set(batch.right_answers[row])
            right = [identity(target) in wanted for target in read_pool(corpus)]
            for first in (5, 6):
                branch = [[Branch([first, 6, lively64.emb_id], read_state=True)]]
                state = lively64(lively64.pack([batch.queries[row]], branch))[0].state_ND[0]
                share = [math.exp(float(score) / TEMPERATURE) for score in pool @ state]
                good = sum(value for value, is_right in zip(share, right, strict=True) if is_right)
                rewards.append(math.log(good / sum(share)))
    assert report["reward_margin"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-9)
    assert report["unscored_groups"] == pytest.approx(1 / 5)
    right_BP, labelled_BP = stage.pool.masks(batch)
    assert right_BP[0].nonzero().flatten().tolist() == right_BP[2].nonzero().flatten().tolist() == [0, 1]
    assert labelled_BP[0].nonzero().flatten().tolist() == [2, 3]  # b and n0 are its labelled negatives
    assert not labelled_BP[1].any()


def test_the_pool_is_embedded_anew_every_so_many_steps_and_a_resumed_run_has_the_same(
    lively, make_batch, corpus, tmp_path
):
    recipe, embedder = recipe_of(corpus, pool_every=2), copy.deepcopy(lively)
    batch = make_batch(PromptBuilder(embedder.processor))
    stage = Reinforcement(recipe, embedder, None, tmp_path)
    seen, saved = [], []
    for _ in range(4):
        stage.begin(batch, two_each(batch), False)
        seen.append(stage.pool.state_VPD.clone())
        saved.append(copy.deepcopy(stage.state_dict()))
        with torch.no_grad():
            for parameter in embedder.parameters():
                parameter.mul_(1.05)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert (seen[1] - seen[2]).abs().max() > 1e-3
    resumed = Reinforcement(recipe, embedder, None, tmp_path)
    resumed.load_state_dict(saved[0])
    resumed.begin(batch, two_each(batch), False)
    assert torch.equal(resumed.pool.state_VPD, seen[0])  # although the weights have moved on
    resumed.begin(batch, two_each(batch), False)
    assert not torch.equal(resumed.pool.state_VPD, seen[0])
    saved[0]["pool"]["state_VPD"] = saved[0]["pool"]["state_VPD"][:, 1:]
    with error_about(UserError, "rl.candidates"):
        resumed.load_state_dict(saved[0])


def test_a_query_sees_the_pool_as_its_own_source_prompts_candidates(lively64, make_batch, corpus, tmp_path):
    sources = [SourceConfig(path="a"), SourceConfig(path="b", profile="plain"), SourceConfig(path="c")]
    recipe = recipe_of(corpus, sources=sources)
    batch = replace(make_batch(PromptBuilder(lively64.processor)), sources=[0, 1, 2, 1, 0])
    stage = Reinforcement(recipe, lively64, None, tmp_path)
    credit = stage.begin(batch, two_each(batch), False)
    items = [target_item(target) for target in read_pool(corpus)]
    state_NKD = F.normalize(torch.randn(5, 2, stage.pool.state_VPD.shape[2], dtype=torch.float64), dim=-1)
    shares = []

    def noted(state_ND, *rest, rollouts=credit._rollouts):
        shares.append(rollouts(state_ND, *rest))
        return shares[-1]

    credit._rollouts = noted
    nothing = torch.zeros(5, len(batch.candidates), dtype=torch.bool)
    in_batch = torch.zeros(len(batch.candidates), state_NKD.shape[2], dtype=torch.float64)
    credit._judged(state_NKD.flatten(0, 1), in_batch, nothing, nothing)
    with torch.no_grad():
        seen = [states(lively64, items, profile=profile) for profile in ("rge", "plain")]
    assert len(stage.pool.state_VPD) == 2  # sources with equal settings share one
    assert (seen[0] - seen[1]).abs().max() > 1e-3
    for row, source in enumerate(batch.sources):
        expected = state_NKD[row] @ seen[source % 2].T
        torch.testing.assert_close(shares[0].score_BKC[row], expected, rtol=1e-9, atol=1e-9)


@pytest.fixture
def records(tmp_path, picture):
    """Two records with three distinct targets, and pictures beside them."""
    picture(40, 40, 0).save(tmp_path / "key.png")
    lines = [
        {
            "id": f"r{number}", "group": "g", "source": "s", "split": "train", "query": {"text": "what opens this"},
            "positives": [{"id": "key", "image": "key.png", "rationale": "a key"}],
            "negatives": [{"id": f"n{number}", "text": "an egg"}],
        }
        for number in range(2)
    ]  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_frozen_towers_features_of_the_pool_are_not_kept(lively, make_batch, records, tmp_path):
    """A step keeps those of its own pictures; of a pool they would fill the device."""
    lively.pictures = PictureMemory()
    lively.pictures.open()
    batch = make_batch(PromptBuilder(lively.processor))
    Reinforcement(recipe_of(records), lively, None, tmp_path).begin(batch, two_each(batch), False)
    assert not lively.pictures._known


def test_records_and_corpora_are_pools(records, corpus, tmp_path, picture):
    assert [target.id for target in read_pool(records)] == ["key", "n0", "n1"]
    assert read_pool(records)[0].image == str(tmp_path / "key.png")
    key = (tmp_path / "key.png").read_bytes()
    images = [{"bytes": key, "path": None}, {"bytes": None, "path": "../key.png"}]
    pq.write_table(pa.table({"id": ["one", "two"], "image": images}), corpus / "corpus.parquet")
    first, second = read_pool(corpus)
    assert first == Target(id="one", image=f"{corpus / 'corpus.parquet'}#one")
    assert (corpus / "corpus.parquet").is_file()
    assert second.image == str(corpus / "../key.png")
    for cell in (key, list(key), base64.b64encode(key).decode()):
        pq.write_table(pa.table({"id": ["one"], "image": [cell]}), corpus / "corpus.parquet")
        assert read_pool(corpus) == [first]
        assert picture_bytes(first.image) == key
    pq.write_table(pa.table({"id": ["one"], "image": [7.5]}), corpus / "corpus.parquet")
    with error_about(UserError, "corpus.parquet", "one", "rl.candidates"):
        read_pool(corpus)


def test_a_pool_that_cannot_be_is_refused(corpus, records, tmp_path):
    with error_about(UserError, tmp_path / "gone", "missing"):
        read_pool(tmp_path / "gone")
    with error_about(UserError, tmp_path, "rl.candidates"):
        read_pool(tmp_path)
    pq.write_table(pa.table({"name": ["x"]}), corpus / "corpus.parquet")
    with error_about(UserError, "corpus.parquet", "columns"):
        read_pool(corpus)
    pq.write_table(
        pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}),
        corpus / "corpus.parquet",
    )
    with error_about(UserError, corpus, "empty"):
        read_pool(corpus)


def test_a_pool_without_the_right_answers_is_found_before_anything_runs(records, corpus):
    source = SourceConfig(path=str(records))
    opened = {source.key: RecordFile(records)}

    def checked(ids):
        pq.write_table(pa.table({"id": ids, "text": ids}), corpus / "corpus.parquet")
        recipe = recipe_of(corpus)
        recipe.rl.sources = [source]
        return check_pool(recipe.rl, opened, read_pool(corpus))

    assert checked(["key", "x"]) is None
    with error_about(UserError, "rl.candidates"):
        checked(["n0", "x"])
    lines = records.read_text().replace('"r1"', '"r2"').splitlines()
    records.write_text("\n".join([lines[0], lines[1].replace('"id": "key"', '"id": "lock"')]) + "\n")
    opened[source.key] = RecordFile(records)
    assert "1 of 2 queries have no right answer in the pool" in checked(["key"])
    opened[source.key] = Records()  # a stream, whose queries are not known before they are drawn
    assert checked(["x"]) is None
