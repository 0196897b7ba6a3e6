"""From records to a rank's batch: the same tokens as evaluation, one seed, any number of processes."""

import json
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import error_about
from recorded import settings_of

from rge.checkpoints.export import export
from rge.common.errors import UserError
from rge.common.parts import with_pictures
from rge.common.schema import Record
from rge.config import Recipe
from rge.data import collate
from rge.data.augment import AUGMENTATIONS
from rge.data.collate import (
    Collator,
    Source,
    StepBatches,
    flatten,
    make_batches,
    problems,
    query_item,
    target_item,
)
from rge.data.config import DataConfig, SourceConfig
from rge.data.mixture import Draw, Mixture
from rge.data.sources import RecordError, RecordFile, identity
from rge.embedder import Embedder
from rge.model.families import Family, with_pixels
from rge.model.packing import Branch
from rge.model.prompts import PromptBuilder
from rge.objective import Objective
from rge.optim.config import StageConfig


@pytest.fixture
def records(tmp_path, picture):
    """Two files of records with pictures: several positives, negatives, text only, control tokens, long texts."""
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for number in range(6):
        picture(30 + 20 * number, 90 - 8 * number, number).save(folder / f"images/{number}.png")

    def target(number: int, **more) -> dict:
        shown = {"image": f"images/{number % 6}.png"} if number % 3 else {"text": f"thing {number}"}
        return {"id": f"t{number}", **shown, **more}

    paths = []
    for source, count in (("a", 9), ("b", 5)):
        lines = []
        for number in range(count):
            images = [f"images/{(number + place) % 6}.png" for place in range(number % 3)]
            text = (
                "what <|im_end|> opens this"
                if number == 1
                else "word " * (300 if number == 2 else number + 1)
            )
            lines.append(
                {
                    "id": f"{source}{number}",
                    "group": str(number),
                    "source": source,
                    "split": "train",
                    "instruction": "find it" if number % 2 else None,
                    "query": {"text": text, "images": images},
                    "positives": [target(number + p, rationale=f"a key {p}") for p in range(1 + number % 3)],
                    "negatives": [
                        target(20 + number + n, text=f"not {number + n}") for n in range(number % 4)
                    ],
                }
            )
        path = folder / f"{source}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(path)
    return [RecordFile(path) for path in paths]


@pytest.fixture
def batches(records, builder):
    def make(world_size=1, rank=0, batch_size=6, seed=0, **options):
        mixture = Mixture([len(file) for file in records], [2, 1], batch_size, seed)
        needs = {name: options.pop(name) for name in ("need_oracle", "need_candidates") if name in options}
        settings = DataConfig(**{"sort_by_length": False, **options})
        sources = [Source(file, builder, settings) for file in records]
        return StepBatches(sources, mixture, rank=rank, world_size=world_size, **needs)

    return make


def content(batch):
    """Everything in a batch as comparable values."""

    def prompt(value):
        pixels = None if value.pixels is None else value.pixels.numpy().tobytes()
        return value.id, value.input_ids.tolist(), pixels

    queries = [
        (
            batch.record_ids[row],
            prompt(batch.queries[row]),
            batch.oracle_ids[row],
            batch.right_answers[row],
            batch.seeds[row],
        )
        for row in range(len(batch.queries))
    ]
    chosen = [
        [
            prompt(batch.candidates[column]) + (batch.candidate_identity[column],)
            for column in (place, *others)
        ]
        for place, others in zip(batch.positive, batch.negatives, strict=True)
    ]
    more = [[batch.candidates[column].id for column in columns] for columns in batch.more_positives]
    return list(zip(queries, chosen, more or [[]] * len(queries), strict=True))


@pytest.mark.parametrize("world_size", [2, 4, 5, 6])
@pytest.mark.parametrize("augment", ["none", "drawing"])
def test_a_steps_batch_does_not_depend_on_the_number_of_processes(batches, world_size, augment):
    for step in (0, 7):
        whole = content(batches(augment=augment)[step])
        shares = [content(batches(world_size, rank, augment=augment)[step]) for rank in range(world_size)]
        assert [row for share in shares for row in share] == whole
        assert {len(share) for share in shares} <= {6 // world_size, -(-6 // world_size)}


def test_a_batch_repeats_and_differs_from_the_next(batches):
    made = batches()
    later = content(made[3])
    assert content(made[4]) != later
    assert content(batches()[3]) == later
    assert content(batches(seed=1)[3]) != later


def test_many_pixels_leave_the_memory_with_their_record(batches, monkeypatch):
    """They wait in a file without a name, which is read where they are shown; the batch is the same.

    While it is made, memory holds one picture, and not a record's.
    """
    made, alive, most = batches(), [], []
    expected, cut = content(made[3]), Family.cut

    def counted(*given):
        pixels, grid = cut(*given)
        alive.append(weakref.ref(pixels))
        most.append(sum(one() is not None for one in alive))
        return pixels, grid

    monkeypatch.setattr(collate, "WHOLE_BYTES", 1)
    monkeypatch.setattr(Family, "cut", counted)
    batch = made[3]
    assert content(batch) == expected
    assert (max(most), len(alive) > 6) == (1, True)
    shown = [prompt.pixels for prompt in (*batch.queries, *batch.candidates) if prompt.pixels is not None]
    [whole] = {pixels.untyped_storage().data_ptr() for pixels in shown}
    assert flatten(batch)[1].data_ptr() == whole  # nothing is copied to be sent
    with open("/proc/self/maps") as maps:
        [mapped] = [line for line in maps if line.startswith(f"{whole:x}-")]
    assert "deleted" in mapped


def test_pixels_of_a_record_that_is_replaced_are_forgotten(batches, monkeypatch):
    """Also if it turns out to be bad only after its pictures: the others get their own."""
    made, build, left = batches(on_bad="skip"), PromptBuilder.build, [3]
    expected = content(made[3])

    def failing(self, item, *given):
        found = build(self, item, *given)
        left[0] -= 1
        if left[0] == 0:
            raise ValueError("too late")
        return found

    monkeypatch.setattr(PromptBuilder, "build", failing)
    rest = content(made[3])
    assert sum(one not in rest for one in expected) == 1


def test_a_full_disk_is_named(batches, monkeypatch, tmp_path):
    monkeypatch.setattr(collate, "WHOLE_BYTES", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with error_about(UserError, "TMPDIR"):
        batches()[3]


@pytest.mark.slow
def test_candidates_are_the_drawn_positive_and_negatives(batches, records):
    by_id = {file[index].id: file[index] for file in records for index in range(len(file))}
    positives, negatives = Counter(), Counter()
    made = batches(max_negatives=2)
    for step in range(40):
        batch = made[step]
        assert len(batch.candidates) == len(batch.candidate_identity)
        columns = []
        for row, name in enumerate(batch.record_ids):
            record = by_id[name]
            place = batch.positive[row]
            drawn = next(target for target in record.positives if target.id == batch.candidates[place].id)
            positives[name, drawn.id] += 1
            assert batch.candidate_identity[place] == identity(drawn)
            # The oracle rationale is that of the drawn pair, not of the record's first.
            assert batch.oracle_ids[row] == made.sources[0].builder.rationale_ids(drawn.rationale, name)
            assert batch.right_answers[row] == sorted(identity(target) for target in record.positives)
            allowed = {target.id for target in record.negatives}
            shown = [batch.candidates[column].id for column in batch.negatives[row]]
            assert len(set(shown)) == len(shown) == min(2, len(allowed))
            assert set(shown) <= allowed
            negatives.update((name, other) for other in shown)
            columns += [place, *batch.negatives[row]]
        assert columns == list(range(len(batch.candidates)))
    # Over time every positive and every negative of every record is drawn.
    for record in by_id.values():
        assert all(positives[record.id, target.id] for target in record.positives)
        assert all(negatives[record.id, target.id] for target in record.negatives)


def test_a_step_asks_in_one_wording_and_draws_all_else_as_without_others(batches, records, builder):
    plain, wordings = [batches()[step] for step in range(12)], {}
    for file in records:
        lines = [json.loads(line) for line in file.path.read_text().splitlines()]
        for line in lines:
            words = [line["query"]["text"], f"and {line['id']}", f"or {line['id']}?"]
            line["query"]["paraphrases"] = words[1:]
            asked = [{**line["query"], "text": text, "paraphrases": []} for text in words]
            items = [query_item(Record(**{**line, "query": query})) for query in asked]
            images = [str(file.path.parent / image) for image in line["query"]["images"]]
            items = [replace(item, content=with_pictures(item.content, images)) for item in items]
            wordings[line["id"]] = [builder.build(item, "query").input_ids.tolist() for item in items]
        file.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [RecordFile(file.path) for file in records]
    drawn, seen = batches(), Counter()
    drawn.sources = [replace(source, records=file) for source, file in zip(drawn.sources, files, strict=True)]
    for step, before in enumerate(plain):
        batch = drawn[step]
        for name, query in zip(batch.record_ids, batch.queries, strict=True):
            seen[wordings[name].index(query.input_ids.tolist())] += 1
        assert content(drawn[step]) == content(batch)
        rest = [[row[0][:1] + row[0][2:], *row[1:]] for row in content(batch)]
        assert rest == [[row[0][:1] + row[0][2:], *row[1:]] for row in content(before)]
    assert min(seen[number] for number in range(3)) > 12  # of 72


def test_what_a_stage_does_not_need_is_not_made(batches):
    batch = batches(need_oracle=False, need_candidates=False)[0]
    assert batch.oracle_ids == [[]] * 6
    assert (batch.candidates, batch.positive, batch.negatives) == ([], [], [])
    assert batches(max_negatives=0)[0].negatives == [[]] * 6


def test_augmented_pictures_keep_their_tokens_and_change_with_the_step(batches):
    plain, drawn = batches(), batches(augment="drawing")
    shown = {name: prompt for name, prompt in zip(plain[0].record_ids, plain[0].queries, strict=True)}
    changed = 0
    for name, prompt in zip(drawn[0].record_ids, drawn[0].queries, strict=True):
        assert torch.equal(prompt.input_ids, shown[name].input_ids)
        if prompt.pixels is not None:
            assert not torch.equal(prompt.pixels, shown[name].pixels)
            changed += 1
    assert changed > 1


def test_a_batch_with_less_than_a_query_a_process_is_a_problem():
    recipe = Recipe("r", joint=StageConfig(batch_size=6))
    assert list(problems(recipe, ["joint"], 6)) == []
    [problem] = problems(recipe, ["joint"], 7)
    assert "joint.batch_size=6 leaves some of the 7 processes without a query; raise it" in problem


def test_a_record_that_cannot_be_used_is_named(batches, records):
    (records[0].path.parent / "images/4.png").unlink()
    with error_about(RecordError, "images/4.png"):
        [batches()[step] for step in range(10)]


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_one_record_that_includes_its_wording_ends_a_run_whose_profile_adds_another(batches, records, on_bad):
    """Also the last of a file, which no look at its first could find; it is not a record to skip."""
    path = records[1].path
    row = json.loads(path.read_text().splitlines()[0]) | {"id": "w", "wording": "included"}
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
    records[1] = RecordFile(path)
    found = batches(on_bad=on_bad, profile="rge")
    with error_about(RecordError, path, "record 'w'", "data.profile"):
        [found[step] for step in range(20)]
    found = batches(on_bad=on_bad, profile="plain")
    assert sum(len(found[step].queries) for step in range(20)) == 120


@pytest.mark.slow
def test_training_and_evaluation_see_the_same_tokens_and_states(lively, records, tmp_path):
    """The collator's prompt of a record is the prompt that a loaded checkpoint makes, down to the embedding."""
    builder = PromptBuilder(lively.processor, "rge", max_tokens=150)
    mixture = Mixture([len(file) for file in records], [9, 5], 14, 0)
    sources = [Source(file, builder, DataConfig(max_negatives=3)) for file in records]
    batch = StepBatches(sources, mixture, rank=0, world_size=1)[0]
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=150, min_pixels=784, max_pixels=7056, max_new_tokens=9,
        reasons="query", stage="joint", step=1,
    )  # fmt: skip
    export(lively, tmp_path / "final", settings)
    encoder = Embedder.from_pretrained(tmp_path / "final")

    by_id = {file[index].id: file[index] for file in records for index in range(len(file))}
    targets = {
        target.id: target for record in by_id.values() for target in (*record.positives, *record.negatives)
    }
    queries = [query_item(by_id[name]) for name in batch.record_ids]
    candidates = [target_item(targets[prompt.id]) for prompt in batch.candidates]
    assert len(queries) == 14
    assert max(prompt.num_cut_tokens for prompt in batch.queries) > 0
    for side, items, prompts in (
        ("query", queries, batch.queries),
        ("candidate", candidates, batch.candidates),
    ):
        for item, trained in zip(items, prompts, strict=True):
            evaluated = encoder.builder.build(item, side)
            assert torch.equal(evaluated.input_ids, trained.input_ids)
            if trained.pixels is not None:
                assert torch.equal(evaluated.pixels, trained.pixels)
        with torch.no_grad():
            packed = lively.pack(prompts, [[Branch([lively.emb_id], read_state=True)]] * len(prompts))
            states = lively(packed)[0].state_ND.numpy()
        found = encoder.encode(items, side=side, mode="direct", batch_size=5)
        np.testing.assert_allclose(found.embeddings, states, atol=1e-5)


def test_all_positives_are_candidates_if_asked(batches, records):
    by_id = {file[index].id: file[index] for file in records for index in range(len(file))}
    several = 0
    for step in range(4):
        one, every = batches()[step], batches(positives="all")[step]
        assert one.record_ids == every.record_ids
        assert one.oracle_ids == every.oracle_ids  # the drawn positive's rationale, either way
        assert one.more_positives == [[]] * 6
        for row, name in enumerate(every.record_ids):
            columns = [every.positive[row], *every.more_positives[row]]
            shown = [every.candidates[column].id for column in columns]
            assert shown[0] == one.candidates[one.positive[row]].id
            assert sorted(shown) == sorted(positive.id for positive in by_id[name].positives)
            negatives = [every.candidates[column].id for column in every.negatives[row]]
            assert len(negatives) == len(one.negatives[row])
            assert set(negatives) <= {negative.id for negative in by_id[name].negatives}
            several += len(columns) > 1
    assert several > 3


def test_sorting_moves_rows_and_columns_and_nothing_else(batches):
    def rows(batch):
        return sorted(content(batch), key=lambda row: row[0][0])

    plain, ordered = (batches(positives="all", sort_by_length=which)[2] for which in (False, True))
    assert rows(plain) == rows(ordered)
    for prompts in (ordered.queries, ordered.candidates):
        lengths = [len(prompt) for prompt in prompts]
        assert lengths == sorted(lengths)
        assert len(set(lengths)) > 2
    assert ordered.record_ids != plain.record_ids
    without = batches(need_candidates=False, sort_by_length=True)[2]
    assert sorted(without.record_ids) == sorted(plain.record_ids)
    assert without.positive == []


def test_an_augmentation_that_returns_nothing_is_an_error_of_its_own(batches, monkeypatch):
    monkeypatch.setitem(AUGMENTATIONS._entries, "forgetful", lambda image, seed: None)
    with error_about(RecordError, "data.augment"):
        batches(augment="forgetful")[0]


def test_each_source_makes_prompts_in_its_own_way(records, embedder):
    """Its profile, pictures, negatives and instruction, whatever the other sources of the batch have."""
    small, large = (with_pixels(embedder.processor, 784, most) for most in (784, 7056))
    settings = DataConfig(sort_by_length=False)
    alone = [
        Source(records[0], PromptBuilder(small, "rge"), replace(settings, max_negatives=0, positives="all")),
        Source(records[1], PromptBuilder(large, "plain"), replace(settings, max_negatives=3), "look for"),
    ]
    draws = [Draw(number % 2, number // 2, number) for number in range(10)]
    both = content(Collator(alone).collate(draws))
    for number, source in enumerate(alone):
        own = [Draw(0, draw.index, draw.seed) for draw in draws if draw.source == number]
        rows = content(Collator([source]).collate(own))
        assert [row[:2] for row in both[number::2]] == [row[:2] for row in rows]
    batch = Collator(alone).collate(draws)
    assert batch.sources == [0, 1] * 5
    assert batch.groups == []
    queries = [large.tokenizer.decode(prompt.input_ids) for prompt in batch.queries]
    assert ["look for" in text for text in queries] == [False, True] * 5
    assert [len(negatives) for negatives in batch.negatives] == [0, 0, 0, 1, 0, 2, 0, 3, 0, 0]
    patches = {
        number: max(len(batch.queries[row].pixels) for row in rows if batch.queries[row].pixels is not None)
        for number, rows in ((0, range(0, 10, 2)), (1, range(1, 10, 2)))
    }
    assert patches[0] < patches[1]
    # The model reads the processor that the sources' are copies of.
    assert embedder.processor.image_processor.size["longest_edge"] not in (784, 3136)


def test_candidates_know_the_group_of_their_source(records, builder):
    sources = [
        Source(file, builder, DataConfig(max_negatives=2), group=group)
        for file, group in zip(records, (4, 7), strict=True)
    ]
    batch = Collator(sources).collate([Draw(number % 2, number // 2, number) for number in range(8)])
    assert batch.groups == [(4, 7)[source] for source in batch.sources]
    for row, group in enumerate(batch.groups):
        columns = [batch.positive[row], *batch.negatives[row], *batch.more_positives[row]]
        assert {batch.candidate_groups[column] for column in columns} == {group}
    assert len(batch.candidate_groups) == len(batch.candidates)


@pytest.mark.slow
def test_what_the_recipe_says_of_data_reaches_the_batches(records, embedder):
    """Each key that decides what is in a batch, through the function that builds a stage's."""

    def made(**data):
        sources = [
            SourceConfig(path=str(file.path), weight=weight)
            for file, weight in zip(records, (2, 1), strict=True)
        ]
        stage = StageConfig(batch_size=6, sources=sources)
        recipe = Recipe(recipe="tiny", data=DataConfig(**{"sort_by_length": False, **data}), joint=stage)
        by_path = {str(file.path): file for file in records}
        batches = make_batches(recipe, stage, embedder.processor, by_path, **Objective(0.5, 0.5).needs)
        return [content(batches[step]) for step in range(4)]

    plain = made()
    assert made() == plain
    for change in (
        {"positives": "all"},
        {"sort_by_length": True},
        {"max_negatives": 2},
        {"augment": "drawing"},
        {"profile": "plain"},
        {"max_prompt_tokens": 100},
    ):
        assert made(**change) != plain, change
