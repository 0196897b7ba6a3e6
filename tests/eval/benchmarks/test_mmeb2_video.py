"""MMEB-V2's video sets: texts, frames, candidates and right answers, as the released code makes them; what is missing is named."""

import json
from itertools import count, groupby
from pathlib import Path

import pandas as pd
import pytest
from clips import clip
from eval_fakes import picture
from faults import error_about
from PIL import Image

from eval.benchmarks.release_files import ReleaseError
from eval.benchmarks.releases.mmeb2 import Mmeb2Options, import_mmeb2
from eval.benchmarks.releases.mmeb2_video import LABELS, MEMBERS, MVBENCH
from eval.commands.score import ScoreOptions, score
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.parts import VideoPart

RECORDED = [json.loads(line) for line in Path(__file__).with_name("mmeb2_video.jsonl").open(encoding="utf-8")]
"""Rows, and what `data_prepare` of TIGER-AI-Lab/VLM2Vec at 6e1e1d4 made of them for Qwen2-VL."""
BY_SET = {name: list(rows) for name, rows in groupby(RECORDED, lambda one: one["set"])}
SPLITS = {
    "NExTQA": "MC/test-0",
    "EgoSchema": "Subset/test-0",
    "MSR-VTT": "msrvtt_test_1k",
    "YouCook2": "data/val-0",
}


def write_release(src, names=tuple(BY_SET)):
    """The rows of these sets, and their clips, every frame another picture."""
    numbers = count()
    for name in names:
        for one in BY_SET[name]:
            for folder, number in one["dirs"].items():
                frames = src / "video-tasks" / "frames" / one["folder"] / folder
                frames.mkdir(parents=True)
                for frame in range(1, number + 1):
                    path = frames / f"frame_{frame}.jpg"
                    path.write_bytes(picture(next(numbers)))
        rows = [one["row"] for one in BY_SET[name]]
        tables = {SPLITS.get(name, "test"): rows}
        if name == "MVBench":
            tables = {
                f"json/{subset}": [row for row in rows if row["subset"] == subset] for subset in MVBENCH
            }
        if name == "MomentSeeker":
            asked = src / "video-tasks/frames/video_mret/MomentSeeker/query_img/1.jpg"
            asked.parent.mkdir()
            asked.write_bytes(picture(1))
        for table, content in tables.items():
            path = (src / name / table).with_suffix(".json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
    return src


def shown(part, root):
    """Bytes of what a part shows, in order."""
    refs = part.video if isinstance(part, VideoPart) else (part.image,)
    return [Path(root, ref).read_bytes() for ref in refs]


@pytest.mark.slow
def test_all_sets_are_those_of_the_released_code(tmp_path):
    src = write_release(tmp_path / "src")
    assert import_mmeb2(Mmeb2Options(src, tmp_path / "out", part="video")) == list(MEMBERS)
    frames = src / "video-tasks" / "frames"

    def content_of(content, root):
        *before, words = content
        return words.text, [shown(part, root) for part in before]

    def released(text, paths):
        text = text.removeprefix("<|video_pad|> ").removeprefix("<|image_pad|> ").strip()
        return text, [] if paths is None else [[(frames / path).read_bytes() for path in paths]]

    for name in MEMBERS:
        found = load_set(tmp_path / "out" / name)
        candidates = [content_of(item.content, found.path) for item in found.corpus_items()]
        for place, (one, query) in enumerate(zip(BY_SET[name], found.queries, strict=True)):
            assert content_of(query.content, found.path) == released(one["query"], one["shown"])
            is_clip = [isinstance(part, VideoPart) for part in query.content[:-1]]
            assert is_clip == ["<|video_pad|>" in one["query"]] * (one["shown"] is not None)
            known = {each["name"]: released(each["text"], each["frames"]) for each in one["candidates"]}
            right = [candidates[row] for row in found.positives[place][0]]
            assert sorted(right) == sorted(known[answer] for answer in one["right"])
            if found.candidates is not None:
                own = [candidates[row] for row in found.candidates[place]]
                assert sorted(own) == sorted(known.values())
        if name in LABELS:
            assert sorted(text for text, _ in candidates) == sorted(LABELS[name])
        assert (found.candidates is None) == (name in LABELS or MEMBERS[name].meta_task == "RET")
        assert found.meta["meta_task"] == MEMBERS[name].meta_task
        assert found.meta["prompts"] == "plain"


def test_frames_of_a_video_are_those_that_the_release_saves(tmp_path):
    """Up to 64 are saved, of 100 those at i * 100 / 64, or every one for answers to questions; eight of them are shown."""
    src = tmp_path / "src"
    for name, folder, row in (
        ("VATEX", "video_ret/VATEX", {"videoID": "v", "enCap": ["a cat"]}),
        ("ActivityNetQA", "video_qa/ActivityNetQA", {"video_name": "v", "question": "q", "answer": "no"}),
    ):
        (src / name).mkdir(parents=True)
        (src / name / "test.json").write_text(json.dumps([row]))
        videos = src / "video-tasks" / "videos" / folder
        videos.mkdir(parents=True)
        for file in ("v.mp4", "v_v.mp4"):
            (videos / file).write_bytes(clip(range(0, 4000, 40), key_every=1))
    import_mmeb2(Mmeb2Options(src, tmp_path / "out", part="video", sets=("VATEX", "ActivityNetQA")))
    (item,) = load_set(tmp_path / "out" / "VATEX").corpus_items()
    query = load_set(tmp_path / "out" / "ActivityNetQA").queries[0]
    numbers = [[int(Path(ref).stem.split("_")[-1]) for ref in one.content[0].video] for one in (item, query)]
    # Computed with the released rules: linspace over what `save_frames` and OpenCV's loop keep of 100 frames.
    assert numbers == [[0, 14, 28, 42, 56, 70, 84, 98], [0, 9, 18, 27, 36, 45, 54, 63]]
    assert Image.open(Path(load_set(tmp_path / "out" / "VATEX").path, item.content[0].video[0])).size == (
        64,
        32,
    )


def test_a_right_candidate_first_is_a_hit(tmp_path):
    src = write_release(tmp_path / "src", ("HMDB51", "MomentSeeker"))
    names = ("HMDB51", "MomentSeeker")
    import_mmeb2(Mmeb2Options(src, tmp_path / "sets", part="video", sets=names))
    (tmp_path / "runs").mkdir()
    for name in names:
        found = load_set(tmp_path / "sets" / name)
        with (tmp_path / "runs" / f"{name}.trec").open("w") as file:
            for place, query in enumerate(found.queries):
                right = {found.corpus_ids[row] for row in found.positives[place][0]}
                rows = range(len(found.corpus_ids)) if found.candidates is None else found.candidates[place]
                known = {found.corpus_ids[row] for row in rows}
                order = sorted(right) + sorted(known - right)
                order = order if place == 0 else order[::-1]  # the first query alone is right
                for rank, one in enumerate(order, 1):
                    file.write(f"{query.id} Q0 {one} {rank} {-rank} x\n")
    score(ScoreOptions(run=tmp_path / "runs", set=tmp_path / "sets", out=tmp_path / "out", benchmark="mmeb2"))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["main_score"]["metric"] == "hit@1"
    assert results["macro"]["hit@1"]["value"] == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_what_does_not_fit_is_named(tmp_path):
    src = write_release(tmp_path / "src", ("HMDB51", "NExTQA", "Charades-STA", "MVBench"))

    def refused(name, **more):
        with pytest.raises(ReleaseError) as error:
            import_mmeb2(Mmeb2Options(src, tmp_path / "out", **{"part": "video", "sets": (name,)} | more))
        return error.value.key

    with error_about(UserError, ("choice", "sets")):
        import_mmeb2(Mmeb2Options(src, tmp_path / "out", part="video", sets=("K600",)))
    assert refused("all") == "sets"
    assert "frames" == refused("HMDB51", part="visdoc", frames=src)
    assert "images" == refused("HMDB51", images=src)
    (src / "MVBench/json/moving_count.json").unlink()
    assert "moving_count" == refused("MVBench")
    frames = src / "video-tasks" / "frames"
    (frames / "video_mret/Charades_STA/b1/positive_clip").rename(tmp_path / "elsewhere")
    assert refused("Charades-STA") == ""
    (frames / "video_cls/HMDB51/c").rename(tmp_path / "c")
    assert refused("HMDB51").endswith("video_cls/HMDB51/c")
    pd.DataFrame([{"video": 1}]).to_parquet(src / "NExTQA" / "MC.parquet")
    refused("NExTQA")
