"""Tests of `data_prep.rationales.pairs`."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about

from data_prep.rationales.pairs import Source, read_captions
from rge.common.errors import UserError
from rge.common.schema import Target


def test_captions_are_found_by_absolute_path(tmp_path: Path) -> None:
    picture = str(tmp_path / "elsewhere" / "a.png")
    records = SimpleNamespace(path=tmp_path / "records" / "train.jsonl")
    source = Source(records, tmp_path / "out.jsonl", captions={picture: "a red car"})  # type: ignore[arg-type]
    assert source.caption(Target(id="t", image=picture)) == "a red car"


@pytest.mark.parametrize("name", ["pics/a.png", "./pics/a.png", "pics//a.png", "pics/../a.png", "../a.png"])
def test_captions_are_found_by_path_as_in_the_records(tmp_path: Path, name: str) -> None:
    records = SimpleNamespace(path=tmp_path / "train.jsonl")
    pq.write_table(pa.table({"id": [name], "caption": ["a red car"]}), tmp_path / "captions.parquet")
    captions = read_captions(records.path, tmp_path / "captions.parquet")
    source = Source(records, tmp_path / "out.jsonl", captions)  # type: ignore[arg-type]
    assert source.caption(Target(id="t", image=str(tmp_path / name))) == "a red car"


def test_a_caption_by_exact_name_comes_first(tmp_path: Path) -> None:
    names = {"id": ["a/b", "./a/b"], "caption": ["exact", "other"]}
    pq.write_table(pa.table(names), tmp_path / "captions.parquet")
    assert read_captions(tmp_path / "train.jsonl", tmp_path / "captions.parquet")["a/b"] == "exact"


def test_a_picture_library_beside_the_records_may_have_no_captions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "image": [b"x"]}), tmp_path / "pictures.parquet")
    assert read_captions(tmp_path / "train.jsonl", None) == {}
    with error_about(UserError, "captions", "pictures.parquet"):
        read_captions(tmp_path / "train.jsonl", tmp_path / "pictures.parquet")
    pq.write_table(pa.table({"id": ["a"], "caption": ["a hat"]}), tmp_path / "pictures.parquet")
    assert read_captions(tmp_path / "train.jsonl", None) == {"a": "a hat"}
