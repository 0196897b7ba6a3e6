"""Tests of `data_prep.rationales.pairs`."""

from pathlib import Path
from types import SimpleNamespace

from data_prep.rationales.pairs import Source
from rge.common.schema import Target


def test_captions_are_found_by_absolute_path(tmp_path: Path) -> None:
    picture = str(tmp_path / "elsewhere" / "a.png")
    records = SimpleNamespace(path=tmp_path / "records" / "train.jsonl")
    source = Source(records, tmp_path / "out.jsonl", captions={picture: "a red car"})  # type: ignore[arg-type]
    assert source.caption(Target(id="t", image=picture)) == "a red car"
