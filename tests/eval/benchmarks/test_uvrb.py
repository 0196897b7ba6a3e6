"""UVRB: parts of queries and videos, the frames that are shown, and the figures of the released scorer."""

import json

import pytest
from clips import clip
from eval_fakes import picture

from eval.benchmarks.release_files import ReleaseError
from eval.benchmarks.releases.uvrb import UvrbOptions, import_uvrb, sampled
from eval.commands.score import ScoreOptions, score
from eval.scoring.output_files import read_results
from eval.sets.retrieval_set import load_set
from rge.common.parts import ImagePart, TextPart, VideoPart


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_release(folder, queries, instances, num_videos=3, num_frames=1):
    lines(folder / "jsonl" / "queries.jsonl", queries)
    lines(folder / "jsonl" / "instances.jsonl", instances)
    lines(
        folder / "jsonl" / "corpus.jsonl", [{"id": f"v{i}", "video": f"{i}.mp4"} for i in range(num_videos)]
    )
    for video in range(num_videos):
        frames = folder / "videos_frames" / str(video)
        frames.mkdir(parents=True)
        for number in range(num_frames):
            (frames / f"{number:03d}.jpg").write_bytes(picture(number))


def test_the_frames_are_those_of_the_released_code():
    # Computed by its `uniform_sample_indices`.
    assert sampled(3, 8) == [0, 1, 2]
    assert sampled(9, 8) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert sampled(20, 8) == [0, 2, 5, 8, 10, 13, 16, 19]
    assert sampled(100, 8) == [0, 14, 28, 42, 56, 70, 84, 99]


def test_queries_of_every_kind(tmp_path):
    folder = tmp_path / "src" / "MS-TI" / "UVRB" / "MS-TI"  # as the archives unpack
    queries = [
        {"id": "q 1", "text": " a dog ", "image": "a.png"},
        {"id": "q2", "text": "a cat", "video": "0.mp4"},
        {"id": "q3", "text": None, "image": "a.png", "video": "0.mp4"},
        {"id": "q4", "text": "words"},
    ]
    write_release(folder, queries, [{"qid": row["id"], "pos": ["v1"]} for row in queries], num_frames=9)
    (folder / "images").mkdir()
    (folder / "images" / "a.png").write_bytes(picture(1))
    (folder / "videos_frames" / "2").rename(tmp_path / "elsewhere")
    (folder / "videos").mkdir()
    (folder / "videos" / "2.mp4").write_bytes(clip(range(0, 2000, 40)))
    assert import_uvrb(UvrbOptions(src=tmp_path / "src", out=tmp_path / "out", sets=("MS-TI",))) == ["MS-TI"]
    found = load_set(tmp_path / "out" / "MS-TI")
    kinds = [[type(part) for part in query.content] for query in found.queries]
    assert kinds == [[ImagePart, TextPart], [TextPart, VideoPart], [ImagePart], [TextPart]]
    assert found.queries[0].id == "q%201"
    assert found.queries[0].text == "a dog"
    assert {query.instruction for query in found.queries} == {
        "Find the video clip that corresponds to the given text and the given image."
    }
    first, _, last = found.corpus_items()
    assert len(first.content[0].video) == 8
    assert (last.content[0].video[-4:], last.content[0].num_frames) == (".mp4", 8)
    import_uvrb(
        UvrbOptions(src=tmp_path / "src", out=tmp_path / "o", sets=("MS-TI",), instructions="official")
    )
    assert {query.instruction for query in load_set(tmp_path / "o" / "MS-TI").queries} == {None}


def test_figures_are_those_of_the_released_scorer(tmp_path):
    """On made-up input: q10's right video is not in the corpus, and q11 has none."""
    instances = [{"qid": f"q{q}", "pos": [f"v{7 * q % 60}"]} for q in range(10)]
    instances += [{"qid": "q3", "pos": ["v50", "v59"]}, {"qid": "q10", "pos": ["nowhere"]}]
    queries = [{"id": f"q{q}", "text": f"query {q}"} for q in range(12)]
    write_release(tmp_path / "src" / "CMRB", queries, instances, num_videos=60)
    options = {"src": tmp_path / "src", "out": tmp_path / "sets", "sets": ("CMRB",)}
    with pytest.raises(ReleaseError):
        import_uvrb(UvrbOptions(**options))
    import_uvrb(UvrbOptions(**options, allow_missing=True))
    run = tmp_path / "runs" / "CMRB.trec"
    run.parent.mkdir()
    with run.open("w") as file:
        for q in range(12):
            scores = {f"v{v}": ((q * 37 + v * 101 + q * v * 13) % 997) / 997 for v in range(60)}
            for rank, name in enumerate(sorted(scores, key=scores.__getitem__, reverse=True), 1):
                file.write(f"q{q} Q0 {name} {rank} {scores[name]} x\n")
    score(
        ScoreOptions(
            run=run.parent, set=tmp_path / "sets", out=tmp_path / "out", benchmark="uvrb", profile="official"
        )
    )
    found = read_results(tmp_path / "out" / "members" / "CMRB")
    # Computed by its `load_qrel_from_instances` and `compute_recall_at_k` on these scores.
    expected = {"Recall@1": 0.0833, "Recall@5": 0.0833, "Recall@10": 0.25, "Recall@50": 0.6667}
    assert found.official == expected


def test_what_is_missing_is_named(tmp_path):
    folder = tmp_path / "src" / "CMRB"
    write_release(folder, [{"id": "q", "text": "a"}], [{"qid": "q", "pos": ["v1"]}])
    options = {"src": tmp_path / "src", "out": tmp_path / "out", "sets": ("CMRB",)}
    for change in (
        lambda: lines(folder / "jsonl" / "queries.jsonl", [{"id": "q", "text": ""}]),
        lambda: lines(folder / "jsonl" / "queries.jsonl", [{"id": "q", "image": "no.png"}]),
        lambda: lines(folder / "jsonl" / "queries.jsonl", [{"id": "q", "video": "9.mp4"}]),
        lambda: lines(folder / "jsonl" / "corpus.jsonl", [{"id": "v1", "video": "9.mp4"}]),
        lambda: (folder / "jsonl" / "instances.jsonl").unlink(),
    ):
        change()
        with pytest.raises(ReleaseError):
            import_uvrb(UvrbOptions(**options))
