"""A library that changes after the seed stage read it: what changed is said, and what is kept stays kept."""

import csv
import shutil
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from faults import error_about
from PIL import Image
from small_runs import config_of, made, one_family

from data_prep.rmir import oracle
from data_prep.rmir.main import run_stages
from data_prep.rmir.pictures.encoders import PixelEncoder
from data_prep.rmir.run import STAGES, Run
from data_prep.rmir.stages import WORK
from rge.calls.local_server import LocalServer
from rge.common.errors import UserError
from rge.content.near_duplicates import phash

SIZE = 40


def paint(path, number):
    pixels = np.random.default_rng(number).integers(0, 255, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.NEAREST).save(path)


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures in a folder, in four clusters of at most two."""
    (tmp_path / "photos").mkdir()
    for number in range(12):
        paint(tmp_path / "photos" / f"p{number:02}.png", number)
    return tmp_path / "photos"


def begun(tmp_path, library, changed="stop"):
    config = config_of(tmp_path / "out", library)
    config.seed.clusters, config.seed.per_cluster = 4, 2
    config.library.changed = changed
    return Run(config, progress=False)


def seeded(tmp_path, library, changed="stop"):
    """Run the seed stage; its images, by id, with their vectors."""
    run = begun(tmp_path, library, changed)
    try:
        run_stages(run, ["seed"])
        vectors = np.load(run.path("seed", "images.npy"))
        images = run.rows("seed", "images")
        assert len(images) == len(vectors)
        return {image["id"]: (image, vector) for image, vector in zip(images, vectors, strict=True)}
    finally:
        run.close()


@pytest.fixture
def chain(tmp_path):
    """Three pictures: b nearly repeats a and c, which do not nearly repeat each other; and two others."""
    (tmp_path / "chain").mkdir()
    for name, number in (("y", 1), ("z", 2)):
        paint(tmp_path / "chain" / f"{name}.png", number)
    base = np.random.default_rng(3).integers(0, 255, (SIZE, SIZE, 3)).astype(float)
    other = np.random.default_rng(4).integers(0, 255, (SIZE, SIZE, 3)).astype(float)
    hashes = {}
    for share in np.linspace(0, 1, 101):
        picture = Image.fromarray(((1 - share) * base + share * other).astype(np.uint8))
        hashes[share] = int(phash(picture), 16), picture
    first, picture = hashes[0.0]
    picture.save(tmp_path / "chain" / "a.png")
    near = [share for share, (bits, _) in hashes.items() if 0 < (first ^ bits).bit_count() <= 4]
    middle, picture = hashes[near[-1]]
    picture.save(tmp_path / "chain" / "b.png")
    ends = [
        picture
        for bits, picture in hashes.values()
        if 0 < (middle ^ bits).bit_count() <= 4 < (first ^ bits).bit_count()
    ]
    ends[0].save(tmp_path / "chain" / "c.png")
    return tmp_path / "chain"


def near_duplicates_left_out(tmp_path, library, clusters, changed="stop"):
    """The seed set without near-duplicates, and these with what they repeat."""
    config = config_of(tmp_path / "out", library)
    config.seed.clusters, config.seed.per_cluster = clusters, 9
    config.library.changed, config.library.near_duplicates = changed, 4
    run = Run(config, progress=False)
    try:
        run_stages(run, ["seed"])
        images = {row["id"] for row in run.rows("seed", "images")}
        rejected = {row["id"]: row["detail"] for row in run.rows("seed", "rejected")}
        assert not images & rejected.keys()
        return images, rejected
    finally:
        run.close()


def test_a_near_duplicate_of_a_removed_picture_takes_its_place(tmp_path, chain):
    (chain / "c.png").unlink()
    assert near_duplicates_left_out(tmp_path, chain, 3) == ({"a", "y", "z"}, {"b": "repeats a"})
    (chain / "a.png").unlink()
    assert near_duplicates_left_out(tmp_path, chain, 3, "extend") == ({"b", "y", "z"}, {})


def test_a_seed_picture_stays_if_the_picture_before_it_is_freed(tmp_path, chain):
    """Without a, b is no near-duplicate of it any more; but c is in the seed set, and b nearly repeats it."""
    assert near_duplicates_left_out(tmp_path, chain, 4) == ({"a", "c", "y", "z"}, {"b": "repeats a"})
    (chain / "a.png").unlink()
    assert near_duplicates_left_out(tmp_path, chain, 4, "extend") == ({"c", "y", "z"}, {"b": "repeats c"})


def test_an_unchanged_library_is_not_opened_again(tmp_path, photos, monkeypatch):
    first = seeded(tmp_path, photos)
    for path in photos.iterdir():
        path.touch()  # another time, the same picture
    monkeypatch.setattr(PixelEncoder, "pictures", lambda *_: pytest.fail("embedded again"))
    assert seeded(tmp_path, photos).keys() == first.keys()
    monkeypatch.setattr(
        "data_prep.rmir.pictures.changes.picture_bytes", lambda *_: pytest.fail("opened again")
    )
    assert seeded(tmp_path, photos).keys() == first.keys()


def test_pictures_are_found_from_another_folder(tmp_path, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = seeded(Path(), "photos")
    monkeypatch.chdir("/")
    run = begun(tmp_path, photos)
    images = run.by("id", "seed", "images")
    run.close()
    assert images.keys() == before.keys()
    assert all(Path(image["ref"]).is_file() for image in images.values())


def test_a_change_is_an_error_that_says_what_changed(tmp_path, photos):
    seeded(tmp_path, photos)
    for number in (20, 21, 22, 23):
        paint(photos / f"n{number}.png", number)
    paint(photos / "p03.png", 33)
    (photos / "p05.png").unlink()
    with error_about(UserError, photos, "library.changed") as caught:
        seeded(tmp_path, photos)
    assert all(name in caught.value.reason for name in ("n20", "p05", "p03"))


def test_extending_keeps_what_stays_and_embeds_only_what_is_new(tmp_path, photos, monkeypatch):
    before = seeded(tmp_path, photos)
    embedded = []
    original = PixelEncoder.pictures
    monkeypatch.setattr(
        PixelEncoder, "pictures", lambda self, refs: embedded.extend(refs) or original(self, refs)
    )
    gone, other = sorted(before)[:2]
    (photos / f"{gone}.png").unlink()
    paint(photos / f"{other}.png", 99)
    for number in range(20, 26):
        paint(photos / f"a{number}.png", number)
    after = seeded(tmp_path, photos, "extend")
    assert sorted(embedded) == sorted(
        [str(photos / f"{other}.png"), *(str(photos / f"a{number}.png") for number in range(20, 26))]
    )
    stayed = before.keys() - {gone, other}
    for name in stayed:
        assert after[name][0] == before[name][0]
        assert np.array_equal(after[name][1], before[name][1])
    assert gone not in after
    assert other not in after or after[other][0]["sha256"] != before[other][0]["sha256"]
    assert after.keys() - before.keys() <= {f"a{number}" for number in range(20, 26)}
    assert after.keys() - before.keys()
    for image, vector in after.values():
        assert np.array_equal(vector, original(PixelEncoder(), [image["ref"]])[0]), (
            "each beside its own vector"
        )
    embedded.clear()
    assert seeded(tmp_path, photos).keys() == after.keys(), "settled: nothing has changed since"
    assert not embedded


@pytest.mark.parametrize("moment", ["settled", "embedding"])
def test_an_extension_that_was_killed_goes_on(tmp_path, photos, monkeypatch, moment):
    before = seeded(tmp_path, photos)
    for number in range(20, 26):
        paint(photos / f"a{number}.png", number)
    shutil.copytree(tmp_path / "out", tmp_path / "whole" / "out")
    expected = seeded(tmp_path / "whole", photos, "extend")
    with monkeypatch.context() as killed:
        place = (
            ("data_prep.rmir.seed_set.scan_library")
            if moment == "settled"
            else "data_prep.rmir.pictures.encoders.PixelEncoder.pictures"
        )

        def stop(*_, **__):
            raise KeyboardInterrupt

        killed.setattr(place, stop)
        with pytest.raises(KeyboardInterrupt):
            seeded(tmp_path, photos, "extend")
    after = seeded(tmp_path, photos)  # it was settled before
    assert after.keys() == expected.keys() > before.keys()


def test_a_table_that_grew_and_a_caption_that_changed(tmp_path, photos):
    def table(numbers, caption="a hat"):
        with (tmp_path / "list.csv").open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["id", "image", "caption"])
            rows.writerows([f"p{n:02}", f"photos/p{n:02}.png", caption] for n in numbers)

    table(range(2, 8))
    first = seeded(tmp_path, tmp_path / "list.csv")
    table(range(12), "a cap")
    with error_about(UserError, "list.csv", "library.changed") as caught:
        seeded(tmp_path, tmp_path / "list.csv")
    assert all(name in caught.value.reason for name in ("p00", "p02"))
    after = seeded(tmp_path, tmp_path / "list.csv", "extend")
    assert first.keys() < after.keys()
    assert {image["caption"] for image, _ in after.values()} == {"a cap"}


def test_a_tar_that_grew_while_the_seed_stage_was_stopped(tmp_path, photos, monkeypatch):
    """Pictures put before those that were read are not read as those, nor lost."""

    def pack(names):
        with tarfile.open(tmp_path / "all.tar", "w") as tar:
            for name in names:
                tar.add(photos / f"{name}.png", f"{name}.png")

    names = [path.stem for path in sorted(photos.iterdir())]
    pack(names[4:])
    original = PixelEncoder.pictures
    calls = []

    def stop_at_second(self, refs):
        calls.append(len(refs))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, refs)

    run = begun(tmp_path, tmp_path / "all.tar")
    run.config.library.shard_size = 3
    monkeypatch.setattr(PixelEncoder, "pictures", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        run_stages(run, ["seed"])
    pack(names)
    run_stages(run, ["seed"])
    assert run.done("seed")["counts"]["listed"] == 12
    run.close()


@pytest.mark.parametrize("stage", ["generate", "retrieve", "judge"])
def test_a_change_is_an_error_in_every_stage_that_looks_at_pictures(tmp_path, photos, stage):
    seeded(tmp_path, photos)
    paint(photos / "p03.png", 33)
    run = begun(tmp_path, photos)
    with closing(run), error_about(UserError, photos, "library.changed") as caught:
        run_stages(run, [stage])
    assert "p03" in caught.value.reason


def test_a_picture_that_has_changed_is_not_exported_as_the_one_before(tmp_path):
    """The panel judged the other one."""
    with closing(made(tmp_path)) as run:
        for stage in ("keep", "pool"):
            WORK[stage](run)
        Image.new("RGB", (40, 40), "green").save(tmp_path / "a.png")
        with error_about(UserError, "a.png"):
            WORK["split"](run)
        assert not run.path("dataset").exists()


@pytest.mark.slow
def test_a_finished_run_is_extended_and_asks_only_about_what_is_new(tmp_path):
    """All stages: every answer that was paid for is used again, and the new pictures are asked about."""
    one_family(tmp_path / "all.csv")
    lines = (tmp_path / "all.csv").read_text().splitlines()
    library = tmp_path / "library.csv"
    library.write_text("\n".join(lines[:1] + lines[1::2]) + "\n")
    answers = oracle.Oracle(transient=0, malformed=0)
    asked = []

    async def answer(path, body):
        asked.append(str(body))
        return await answers(path, body)

    with LocalServer(answer) as server:
        config = config_of(tmp_path / "out", library, server.url)
        config.generate.max_inputs = None
        config.seed.clusters = 6
        config.seed.per_cluster = 3
        run = Run(config, progress=False)
        run_stages(run, STAGES)
        before = {row["query_id"] for row in run.rows("generate", "queries")}
        images = {row["id"] for row in run.rows("seed", "images")}
        first = set(asked)
        library.write_text("\n".join(lines) + "\n")
        with error_about(UserError, "library.changed"):
            run_stages(run, STAGES)
        config.library.changed = "extend"
        asked.clear()
        run_stages(run, STAGES)
        after = {row["query_id"] for row in run.rows("generate", "queries")}
        more = {row["id"] for row in run.rows("seed", "images")} - images
        extensions = run.done("seed")["counts"]["extensions"]
        run.close()
    assert more
    assert before <= after
    assert asked
    assert not first & set(asked), "nothing is asked twice"
    assert len(extensions) == 1
