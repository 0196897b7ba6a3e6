"""A library that changes after the seed stage read it: what changed is said."""

import csv
import json
import tarfile

import numpy as np
import pytest
from PIL import Image
from small_runs import config_of

from data_prep.rmir.main import run_stages
from data_prep.rmir.pictures.encoders import PixelEncoder
from data_prep.rmir.run import Run, fingerprints
from rge.common.errors import UserError

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


def begun(tmp_path, library):
    config = config_of(tmp_path / "out", library)
    config.seed.clusters, config.seed.per_cluster = 4, 2
    return Run(config, progress=False)


def seeded(tmp_path, library):
    """Run the seed stage; its images, by id."""
    run = begun(tmp_path, library)
    try:
        run_stages(run, ["seed"])
        vectors = np.load(run.path("seed", "images.npy"))
        images = run.rows("seed", "images")
        assert len(images) == len(vectors)
        return {image["id"]: image for image in images}
    finally:
        run.close()


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


def test_a_change_is_an_error_that_says_what_changed(tmp_path, photos):
    seeded(tmp_path, photos)
    for number in (20, 21, 22, 23):
        paint(photos / f"n{number}.png", number)
    paint(photos / "p03.png", 33)
    (photos / "p05.png").unlink()
    message = r"4 added \('n20', 'n21', 'n22', \.\.\.\); 1 removed \('p05'\); 1 changed \('p03'\)\. Undo that, or start over"
    with pytest.raises(UserError, match=message):
        seeded(tmp_path, photos)


def test_a_run_that_an_earlier_version_extended_goes_on(tmp_path, photos):
    """It had compared the library itself; what later stages made of the extended seed set stays valid."""
    before = seeded(tmp_path, photos)
    run = begun(tmp_path, photos)
    plain = fingerprints(run.config)
    run.close()
    notes = tmp_path / "out" / "seed" / "library.json"
    old = {
        "gone": [3],
        "captions": {},
        "in_order": True,
        "extensions": [{"start": 12, "added": 1, "removed": 1}],
    }
    notes.write_text(json.dumps(json.loads(notes.read_text()) | old))
    (photos / "p03.png").unlink()
    paint(photos / "a20.png", 20)
    assert seeded(tmp_path, photos) == before
    found = fingerprints(run.config)
    assert found["seed"] == plain["seed"]
    assert found["generate"] != plain["generate"], "as that version computed it"


def test_a_table_that_grew_and_a_caption_that_changed(tmp_path, photos):
    def table(numbers, caption="a hat"):
        with (tmp_path / "list.csv").open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["id", "image", "caption"])
            rows.writerows([f"p{n:02}", f"photos/p{n:02}.png", caption] for n in numbers)

    table(range(2, 8))
    seeded(tmp_path, tmp_path / "list.csv")
    table(range(12), "a cap")
    with pytest.raises(UserError, match=r"6 added \('p00', .*6 given another caption \('p02'"):
        seeded(tmp_path, tmp_path / "list.csv")


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
