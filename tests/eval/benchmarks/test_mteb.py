"""MTEB with our model, and our sets as MTEB's tasks: the same figures as `eval run`'s, to the last digit MTEB gives."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from clips import clip
from eval_fakes import tables as small_tables
from eval_fakes import write_tables
from paths import ROOT
from recorded import settings_of

from eval.commands.export import ExportOptions, export
from eval.commands.run import RunOptions, run
from eval.sets.retrieval_set import load_set
from eval.sets.write_set import Candidate, Query, write_set
from rge.checkpoints.export import export as export_checkpoint
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import TextPart, VideoPart
from rge.embedder import Embedder

mteb = pytest.importorskip("mteb")

from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper  # noqa: E402
from mteb.results import TaskResult  # noqa: E402
from mteb.types import PromptType  # noqa: E402

from eval.benchmarks.mteb_tasks import tasks  # noqa: E402
from rge.integrations.mteb import register  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def data_sets_in(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def checkpoint(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=512, min_pixels=784, max_pixels=7056, max_new_tokens=8,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip
    known = {"default": "find it", "known": ["find it"], "by_task": {}}
    settings = settings.but(instructions=known)
    export_checkpoint(lively, tmp_path / "mine" / "final", settings)
    return tmp_path / "mine" / "final"


def ours(checkpoint, path, out, **options):
    """Our figures of a set, under MTEB's names."""
    run(RunOptions(checkpoint=checkpoint, set=path, out=out, report=False, train=(), **options))
    export(ExportOptions("mteb", out, out / "mteb.json", main="ndcg@10"))
    loaded = TaskResult.from_disk(out / "mteb.json")
    return loaded.scores["test"][0]


def theirs(meta, task):
    result = mteb.evaluate(meta, task, cache=None, encode_kwargs={"batch_size": 4}, show_progress_bar=False)
    return result.task_results[0].scores["test"][0]


def assert_same(theirs, ours, least):
    shared = {name for name in theirs if name in ours and "_at_" in name}
    assert len(shared) >= least
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}
    assert len({theirs[name] for name in shared}) > 2, "figures that are all alike prove nothing"


def composed(path, **more):
    """Twelve queries of a picture and words, 30 candidates."""
    return write_tables(path, {**small_tables(num_queries=12, num_candidates=30), **more})


def test_a_task_of_mteb_gives_our_figures(checkpoint, tmp_path):
    """Composed retrieval by MTEB's own task, its data replaced by a small set; instruction and all."""
    task = mteb.get_task("CIRRIT2IRetrieval")
    content = small_tables(num_queries=12, num_candidates=30)
    content["queries"]["instruction"] = [task.metadata.prompt["query"]] * 12
    path = write_tables(tmp_path / "set", content)
    (same,) = tasks(path)
    same.load_data()
    task.dataset = same.dataset
    task.data_loaded = True
    found = theirs(register(checkpoint), task)
    assert_same(found, ours(checkpoint, path, tmp_path / "eval"), least=11)
    assert found["main_score"] == found["ndcg_at_10"] > 0


def test_candidates_exclusions_and_missing_positives(checkpoint, tmp_path):
    content = small_tables(num_queries=12, num_candidates=30)
    del content["negatives"]
    content["queries"] |= {
        "instruction": ["name it" if n % 2 else None for n in range(12)],
        "num_missing_positives": [n % 3 for n in range(12)],
        "text": [None if n % 4 == 3 else f"question {n}" for n in range(12)],
    }
    content["queries"]["image"][0] = content["queries"]["image"][1] + content["queries"]["image"][5]
    content["queries"]["image"][2] = []
    right = set(zip(content["qrels"]["query-id"], content["qrels"]["corpus-id"], strict=True))
    pairs = [(q, c) for n, q in enumerate(content["queries"]["id"]) for c in content["corpus"]["id"][n:]]
    content["candidates"] = dict(
        zip(("query-id", "corpus-id"), zip(*{*pairs, *right}, strict=True), strict=True)
    )
    out = [pair for pair in pairs[::7] if pair not in right]
    content["excluded"] = dict(zip(("query-id", "corpus-id"), zip(*out, strict=True), strict=True))
    path = write_tables(tmp_path / "set", {k: {a: list(b) for a, b in v.items()} for k, v in content.items()})
    (task,) = tasks(path)
    assert task.metadata.category == "it2i"
    assert_same(theirs(register(checkpoint), task), ours(checkpoint, path, tmp_path / "eval"), least=11)


@pytest.mark.slow
def test_clips_give_our_figures(checkpoint, tmp_path):
    def films(num, first=0):
        return [VideoPart(clip(range(0, 400, 40), size=(56, 56), first=first + 9 * n)) for n in range(num)]

    queries = [
        Query(f"q{n}", content=(*([one] if n % 2 else []), TextPart(f"film {n}")))
        for n, one in enumerate(films(6, 70))
    ]
    corpus = [Candidate(f"c{n}", content=(one,)) for n, one in enumerate(films(12))]
    write_set(
        tmp_path / "set", meta={"name": "films"}, queries=queries, corpus=corpus,
        qrels=[(query.id, f"c{2 * n}", 1) for n, query in enumerate(queries)],
    )  # fmt: skip
    (task,) = tasks(tmp_path / "set")
    assert (task.metadata.category, task.metadata.modalities) == ("vt2v", ["text", "video"])
    assert_same(
        theirs(register(checkpoint), task), ours(checkpoint, tmp_path / "set", tmp_path / "eval"), least=11
    )
    moved = Query("q0", content=(TextPart("now"), corpus[0].content[0]))
    write_set(
        tmp_path / "other", meta={"name": "films"}, queries=[moved], corpus=corpus, qrels=[("q0", "c0", 1)],
    )  # fmt: skip
    with pytest.raises(UserError):
        tasks(tmp_path / "other")


def test_a_model_of_mteb_reasons_for_queries_alone(checkpoint, tmp_path):
    path = composed(tmp_path / "set")
    (task,) = tasks(path)
    task.load_data()
    meta = register(checkpoint, "me/mine", mode="reasoning")
    model = mteb.get_model("me/mine")
    assert (
        model.mteb_model_meta.revision
        == meta.revision
        == Embedder.from_pretrained(checkpoint).checkpoint_hash
    )
    assert meta.n_parameters == sum(p.numel() for p in model.embedder.model.parameters())
    data = task.dataset["default"]["test"]["queries"]
    batch = {"text": [f"{t} and more" for t in data["text"]], "query": data["text"], "image": data["image"]}
    batch["instruction"] = ["Find the picture."] * 6 + [""] * 6
    about = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default"}
    wanted = load_set(path)
    images = [[load_image(ref) for ref in query.pictures] for query in wanted.queries]
    texts = [query.text for query in wanted.queries]
    embedder = Embedder.from_pretrained(checkpoint)

    found = model.encode([batch], prompt_type=PromptType.query, **about)
    expected = embedder.encode_query(texts[:6], images[:6], instruction="Find the picture.")
    np.testing.assert_allclose(found[:6], expected, atol=1e-6)
    np.testing.assert_allclose(
        found[6:], embedder.encode_query(texts[6:], images[6:], instruction=""), atol=1e-6
    )
    del batch["instruction"]
    about["task_metadata"] = task.metadata.model_copy(update={"prompt": None})
    asked = model.encode([batch], prompt_type=PromptType.query, **about)
    np.testing.assert_allclose(asked, embedder.encode_query(texts, images), atol=1e-6)
    documents = model.encode([batch], prompt_type=PromptType.document, **about)
    np.testing.assert_allclose(
        documents, embedder.encode_document([f"{t} and more" for t in texts], images), atol=1e-6
    )
    assert np.array_equal(model.encode([batch], prompt_type=None, **about), documents)

    direct = mteb.get_model("me/mine", mode="direct", instruction="name it")
    np.testing.assert_allclose(
        direct.encode([batch], prompt_type=PromptType.query, **about),
        embedder.encode_query(texts, images, mode="direct", instruction="name it"),
        atol=1e-6,
    )
    assert np.abs(found - direct.encode([batch], prompt_type=PromptType.query, **about)).max() > 1e-3


def wrapped(checkpoint, monkeypatch, **options):
    """MTEB's description of the export as a repository of the hub, by MTEB's own code; its files come from the folder."""

    def on_hub(name, file, *_):
        path = checkpoint / file
        return path if path.exists() else None

    monkeypatch.setattr("mteb._hf_integration.hf_hub_utils._get_file_on_hub", on_hub)
    name = "/".join(checkpoint.parts[-2:])
    loader, kind, modalities = ModelMeta._detect_model_type_and_loader(name)
    assert (loader, kind) == (SentenceTransformerEncoderWrapper, "dense")
    monkeypatch.chdir(checkpoint.parents[1])  # where the name is a folder
    about = {"loader": loader, "name": name, "revision": "main", "modalities": modalities}
    kwargs = {"trust_remote_code": True, "device": "cpu"} | options
    return ModelMeta.create_empty(about | {"loader_kwargs": kwargs})


@pytest.mark.parametrize("instruction", ["find it", None])
def test_mteb_s_own_wrapper_of_an_export_gives_our_figures(checkpoint, tmp_path, monkeypatch, instruction):
    """What `mteb.get_model("owner/name", trust_remote_code=True)` loads: pictures are seen, a missing text is none."""
    content = small_tables(num_queries=12, num_candidates=30)
    content["queries"] |= {
        "instruction": [instruction] * 12,
        "text": [None if row % 4 == 3 else f"question {row}" for row in range(12)],
    }
    content["queries"]["image"][0] = content["queries"]["image"][1] + content["queries"]["image"][5]
    content["queries"]["image"][2] = []
    (task,) = tasks(write_tables(tmp_path / "set", content))
    assert task.metadata.prompt == {"query": instruction or ""}
    prompts = {} if instruction else {"model_prompts": {"query": "", "document": ""}}
    meta = wrapped(checkpoint, monkeypatch, **prompts)
    assert set(meta.modalities) == {"text", "image"}
    mine = ours(checkpoint, tmp_path / "set", tmp_path / "eval")
    assert_same(theirs(meta, task), mine, least=11)
    assert_same(theirs(register(checkpoint), task), mine, least=11)


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """The four benchmarks' file layouts, written from the shipped pictures."""
    spec = importlib.util.spec_from_file_location(
        "small_releases", ROOT / "tests" / "helpers" / "small_releases.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path_factory.mktemp("releases")
    module.main([f"out={root}", "num=24"])
    return root


@pytest.mark.parametrize(
    ("benchmark", "about", "main_score"),
    [
        ("mrmr", {"task": "theorem"}, "ndcg_at_10"),
        ("mrmr", {"task": "negation"}, "recall_at_1"),
        ("mmeb2", {"part": "image"}, "hit_rate_at_1"),
        ("mmeb2", {"part": "visdoc"}, "ndcg_at_5"),
    ],
)
def test_a_set_of_a_benchmark_with_several_main_scores_has_its_own(tmp_path, benchmark, about, main_score):
    write_tables(tmp_path, small_tables(), {"name": "one", "benchmark": benchmark} | about)
    (task,) = tasks(tmp_path, benchmark=benchmark)
    assert task.metadata.main_score == main_score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "more", "profile", "least"),
    [
        ("rmir", ("images=images", "counts=false"), "clean", 11),
        ("mmeb", ("sets=OK-VQA,CIRR,ImageNet-1K",), "clean", 11),
        ("mmbright", (), "official", 20),
        ("pinpoint", ("images=images",), "clean", 11),
    ],
)
def test_the_main_benchmarks_run_in_mteb(checkpoint, releases, tmp_path, benchmark, more, profile, least):
    from eval.__main__ import main

    out = tmp_path / "set"
    src = releases / benchmark
    words = [word.replace("images=", f"images={src}/") for word in more]
    assert main(["import", benchmark, f"src={src}", f"out={out}", *words]) == 0
    found = tasks(out, benchmark=benchmark, profile=profile)
    for task in found:
        path = Path(task.metadata.dataset["path"])
        meta = register(checkpoint, mode="direct", prompts=load_set(path).meta.get("prompts"))
        options = {"benchmark": benchmark, "profile": profile, "query_mode": ("direct",)}
        mine = ours(checkpoint, path, tmp_path / "eval" / task.metadata.name, **options)
        assert_same(theirs(meta, task), mine, least=least)
