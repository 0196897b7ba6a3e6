"""Embedding with a finished checkpoint: the same row whatever it is batched with."""

import base64
import functools
import http.server
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from faults import error_about
from forwards import counted_forwards
from hub import hub
from huggingface_hub.errors import HfHubHTTPError
from paths import ROOT
from recorded import settings_of

from rge.checkpoints.export import export
from rge.checkpoints.settings import CheckpointError
from rge.common.errors import UserError
from rge.common.images import ImageError
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.distributed.cpu_threads import limit_threads
from rge.embedder import Embedder, _items
from rge.embedders.registry import ModelOptions
from rge.model.backbone import BackboneError
from rge.model.packing import Branch


@pytest.fixture
def encoder(lively, tmp_path):
    settings = settings_of(
        emb_id=lively.emb_id, profile="rge", max_prompt_tokens=2048, min_pixels=784, max_pixels=7056, max_new_tokens=12,
        reasons="query", stage="joint", step=7,
    )  # fmt: skip
    export(lively, tmp_path / "final", settings)
    return Embedder.from_pretrained(tmp_path / "final")


@pytest.fixture
def items(make_items, picture, tmp_path):
    """21 items, so that windows and batches end unevenly."""
    found = []
    for number, item in enumerate(make_items(21)):
        paths = []
        for place in range(number % 3):
            paths.append(str(tmp_path / f"{number}_{place}.png"))
            picture(30 + 7 * number, 100 - 3 * number, number).save(paths[-1])
        found.append(
            Item(item.id, content_of(item.text, tuple(paths)), instruction="find it" if number % 2 else None)
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "reasoning"])
@pytest.mark.parametrize("side", ["query", "candidate"])
def test_batch_one_equals_batch_n(encoder, items, mode, side):
    settings = {"side": side, "mode": mode}
    alone = encoder.encode(items, batch_size=1, **settings)
    for batch_size in (2, 5, 64):
        found = encoder.encode(items, batch_size=batch_size, **settings)
        np.testing.assert_allclose(found.embeddings, alone.embeddings, atol=1e-5)
        assert found.rationales == alone.rationales
        assert found.stop_reasons == alone.stop_reasons
        assert np.array_equal(found.num_rationale_tokens, alone.num_rationale_tokens)
    backwards = encoder.encode(items[::-1], batch_size=5, **settings)
    np.testing.assert_allclose(backwards.embeddings[::-1], alone.embeddings, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "reasoning"])
def test_a_limit_of_tokens_cuts_batches_and_windows(encoder, items, mode, monkeypatch):
    settings = {"side": "query", "mode": mode, "batch_size": 64}
    expected = encoder.encode(items, **settings)
    longest = max(len(encoder.prompt(item, "query")) for item in items)
    limit, held = 3 * longest, []
    limited, embed = encoder.with_(batch_tokens=limit), encoder._inference.embed
    monkeypatch.setattr(
        encoder._inference,
        "embed",
        lambda prompts, *rest, **options: (
            held.append(sum(map(len, prompts))) or embed(prompts, *rest, **options)
        ),
    )
    with counted_forwards() as forwards:
        found = limited.with_(profile="rge").encode(items, **settings)
    assert forwards.within(limit)
    assert max(map(len, forwards.lengths)) > 2  # short ones share a forward
    # A window is as many tokens as fill its four batches, and the prompt that fills it.
    assert len(held) > 1
    assert max(held) < 4 * limit + longest
    np.testing.assert_allclose(found.embeddings, expected.embeddings, atol=1e-6)
    assert found.rationales == expected.rationales
    with counted_forwards() as forwards:
        alone = encoder.with_(batch_tokens=1).encode(items, **settings)
    assert [len(rows) for rows in forwards.lengths if len(rows) > 1] == []
    np.testing.assert_allclose(alone.embeddings, expected.embeddings, atol=1e-6)
    with pytest.raises(UserError):
        encoder.with_(batch_tokens=0)


@pytest.mark.slow
def test_direct_mode_is_the_state_at_a_prefilled_emb(encoder, items):
    found = encoder.encode(items, side="candidate", mode="direct", batch_size=4)
    embedder = encoder.model
    prompts = [encoder.builder.build(item, "candidate") for item in items]
    with torch.no_grad():
        states = torch.cat(
            [
                embedder(embedder.pack([p], [[Branch([embedder.emb_id], read_state=True)]]))[0].state_ND
                for p in prompts
            ]
        )
    np.testing.assert_allclose(found.embeddings, states.numpy(), atol=1e-5)
    assert found.rationales == [""] * 21
    assert found.stop_reasons == ["prefilled"] * 21
    assert not found.num_rationale_tokens.any()
    assert not found.generate_ms.any()
    assert (found.embed_ms > 0).all()


@pytest.mark.slow
def test_reasoning_mode_reports_what_was_written(encoder, items):
    found = encoder.encode(items, side="query", mode="reasoning", batch_size=4)
    direct = encoder.encode(items, side="query", mode="direct", batch_size=4)
    assert set(found.stop_reasons) == {"emb", "forced"}
    for row in range(21):
        assert (found.stop_reasons[row] == "forced") == (found.num_rationale_tokens[row] == 12)
        assert "<emb>" not in found.rationales[row]
    assert (found.generate_ms > 0).all()
    # A rationale changes the embedding, unless it is empty.
    moved = np.linalg.norm(found.embeddings - direct.embeddings, axis=1) > 1e-3
    assert np.array_equal(moved, found.num_rationale_tokens > 0)


def test_embeddings_are_float32_of_unit_norm(encoder, items):
    for mode in ("direct", "reasoning"):
        found = encoder.encode(items, side="query", mode=mode)
        assert found.embeddings.dtype == np.float32
        assert found.embeddings.shape == (21, 32)
        np.testing.assert_allclose(np.linalg.norm(found.embeddings, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("mode", ["direct", "reasoning"])
def test_nothing_to_embed(encoder, mode):
    found = encoder.encode([], side="query", mode=mode)
    assert found.embeddings.shape == (0, 32)
    assert found.embeddings.dtype == np.float32
    assert (found.rationales, found.stop_reasons) == ([], [])
    assert len(found.num_rationale_tokens) == len(found.generate_ms) == len(found.embed_ms) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "reasoning"])
def test_progress_adds_up(encoder, items, mode):
    seen = []
    encoder.encode(items, side="query", mode=mode, batch_size=2, on_progress=seen.append)
    assert sum(seen) == 21
    assert max(seen) == 2


def test_overrides_of_the_checkpoints_prompts(encoder, picture):
    """An item too long for the checkpoint names the keys that make room for it; what is not given stays as it was."""
    pictures = [picture(200, 200, seed) for seed in range(9)]
    prompt = encoder.prompt(Item("0", content_of(None, tuple(pictures))), "candidate")
    load = partial(Embedder.from_pretrained, encoder.checkpoint, max_prompt_tokens=120)
    with error_about(UserError, "item '0'", "max_prompt_tokens"):
        load().encode_document(images=[pictures])
    smaller = load(max_pixels=784)
    scaled = smaller.prompt(Item("0", content_of(None, tuple(pictures))), "candidate")
    assert (len(scaled), int(scaled.type_ids.sum())) == (len(prompt) - 72, 9)
    before, after = encoder.settings.content(), smaller.settings.content()
    changed = {"max_prompt_tokens": 120, "pixels": {"min": 784, "max": 784}}
    assert {key: value for key, value in after.items() if before[key] != value} == changed
    for given in ({"max_pixels": 500}, {"min_pixels": 8000}):
        with error_about(UserError, "min_pixels", "max_pixels"):
            Embedder.from_pretrained(encoder.checkpoint, **given)


@pytest.mark.slow
def test_overrides_of_the_checkpoints_generation(encoder, items):
    short = Embedder.from_pretrained(encoder.checkpoint, max_new_tokens=2)
    assert short.encode(items, side="query", mode="reasoning").num_rationale_tokens.max() == 2
    sampling = Embedder.from_pretrained(encoder.checkpoint, temperature=1.5)
    with pytest.raises(ValueError):
        sampling.encode(items, side="query", mode="reasoning")
    runs = [
        sampling.encode(items, side="query", mode="reasoning", batch_size=size, seeds=range(21)).rationales
        for size in (1, 8)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != encoder.encode(items, side="query", mode="reasoning").rationales
    assert short.settings.generation.max_new_tokens == 2
    assert short.settings.dtype == "float32"


@pytest.mark.slow
def test_a_caller_says_how_much_is_written(encoder, items):
    """Row by row, as an embedder loaded with that cap; 0 is direct mode."""
    caps = [(0, 1, 3, 12)[row % 4] for row in range(21)]
    asked = {"side": "query", "mode": "reasoning"}
    for embedder in (encoder, encoder.with_(exact=True)):
        found = embedder.encode(items, max_rationale_tokens=caps, batch_size=2, **asked)
        for cap in (1, 3, 12):
            alone = Embedder.from_pretrained(encoder.checkpoint, max_new_tokens=cap)
            rows = [row for row in range(21) if caps[row] == cap]
            expected = alone.encode([items[row] for row in rows], **asked)
            assert [found.rationales[row] for row in rows] == expected.rationales
            assert [found.stop_reasons[row] for row in rows] == expected.stop_reasons
            np.testing.assert_allclose(found.embeddings[rows], expected.embeddings, atol=1e-5)
        direct, rows = encoder.encode(items, side="query", mode="direct"), np.flatnonzero(np.equal(caps, 0))
        np.testing.assert_allclose(found.embeddings[rows], direct.embeddings[rows], atol=1e-5)
        assert {found.stop_reasons[row] for row in rows} == {"prefilled"}
    short = encoder.with_(max_rationale_tokens=1)  # of all its calls, unless one says otherwise
    assert short.encode(items, **asked).num_rationale_tokens.max() == 1
    assert short.encode(items, max_rationale_tokens=3, **asked).num_rationale_tokens.max() == 3
    one = encoder.encode_query("a", max_rationale_tokens=np.int64(0))
    assert np.array_equal(one, encoder.encode_query("a", mode="direct"))
    for wrong in (-1, 13, True, 1.5):
        with error_about(UserError, ("range", "max_rationale_tokens")):
            encoder.encode_query("a", max_rationale_tokens=wrong)
    with pytest.raises(ValueError):
        encoder.encode_query("a", max_rationale_tokens=[1, 2])


def test_bfloat16_embeds_about_the_same(encoder, items):
    exact = encoder.encode(items[:4], side="query", mode="direct")
    coarse = Embedder.from_pretrained(encoder.checkpoint, dtype="bfloat16").encode(
        items[:4], side="query", mode="direct"
    )
    assert coarse.embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(coarse.embeddings, axis=1), 1, atol=1e-6)
    assert ((exact.embeddings * coarse.embeddings).sum(axis=1) > 0.98).all()


@pytest.fixture
def with_tasks(encoder):
    """A checkpoint with a task of other wording, smaller pictures and shorter prompts."""
    path = encoder.checkpoint / "rge.json"
    own = {"profile": "plain", "pixels": {"min": 784, "max": 784}, "max_prompt_tokens": 150}
    known = {"default": None, "known": ["name it"], "by_task": {"naming": "name it", "rest": None}}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"instructions": known, "tasks": {"naming": own}})
    )
    return Embedder.from_pretrained(encoder.checkpoint)


def test_a_task_has_its_own_prompts(with_tasks, picture):
    shown = picture(120, 80)

    def of(embedder, **how):
        candidate = embedder.encode_document("an egg", [shown], **how)
        return np.stack([embedder.encode_query("what", [shown], mode="direct", **how), candidate])

    plain = with_tasks.with_(profile="plain")
    small = Embedder.from_pretrained(with_tasks.checkpoint, max_pixels=784).with_(profile="plain")
    named = of(with_tasks, task="naming")
    expected = [
        small.encode_query("what", [shown], mode="direct", instruction="name it"),
        small.encode_document("an egg", [shown]),
    ]
    np.testing.assert_allclose(named, expected, atol=1e-6)
    assert np.abs(of(plain) - named).max() > 1e-3
    assert np.array_equal(of(with_tasks, task="rest"), of(with_tasks))
    # The checkpoint's own processor, by which the model normalises pictures, is as it was.
    assert with_tasks.builder.processor.image_processor.size["longest_edge"] == 7056
    item = Item("a", content_of("word " * 200))
    with pytest.warns(UserWarning, match="more than 150 tokens"):
        with_tasks.for_task("naming").encode([item], side="query", mode="direct")
    with pytest.raises(ValueError):
        with_tasks.for_task("other")
    evaluated = ModelOptions(checkpoint=with_tasks.checkpoint, task="naming").load()
    assert evaluated.settings.profile == "plain"
    assert evaluated.settings.pixels.max == 784
    # What is asked on loading holds for every task.
    large = Embedder.from_pretrained(with_tasks.checkpoint, max_prompt_tokens=300, max_pixels=7056)
    settings = large.for_task("naming").settings
    assert (settings.profile, settings.max_prompt_tokens, settings.pixels.max) == ("plain", 300, 7056)
    assert with_tasks.with_(profile="rge").for_task("naming").settings.profile == "rge"


def test_errors(encoder, items, tmp_path):
    with pytest.raises(ValueError):
        encoder.encode(items, side="query", mode="fast")
    with pytest.raises(ValueError):
        encoder.encode(items, side="doc", mode="direct")
    with error_about(ImageError, "gone.png"):
        encoder.encode(
            [Item("x", content_of("egg", (str(tmp_path / "gone.png"),)))], side="query", mode="direct"
        )
    with pytest.raises(ValueError):
        encoder.encode([Item("x", content_of(" "))], side="query", mode="direct")


INSTRUCTIONS = {"default": "find it", "known": ["find it", "name it"], "by_task": {"naming": "name it"}}


@pytest.fixture
def described(encoder):
    """A checkpoint that says what it was trained with."""
    path = encoder.checkpoint / "rge.json"
    settings = json.loads(path.read_text()) | {"instructions": INSTRUCTIONS, "dimensions": [8, 16]}
    path.write_text(json.dumps(settings))
    return Embedder.from_pretrained(encoder.checkpoint)


def test_a_query_is_asked_as_in_training(described):
    def rows(instruction):
        return described.encode(
            [Item("0", content_of("a"), instruction=instruction)], side="query", mode="reasoning"
        ).embeddings[0]

    assert np.array_equal(described.encode_query("a"), rows("find it"))
    assert np.array_equal(described.encode_query("a", task="naming"), rows("name it"))
    assert np.array_equal(described.encode_query("a", instruction="name it"), rows("name it"))
    assert np.array_equal(described.encode_query("a", instruction=""), rows(None))
    assert not np.allclose(rows("find it"), rows(None), atol=1e-3)
    with pytest.warns(
        UserWarning, match="not trained with the instruction 'other'; known are 'find it'; 'name it'"
    ):
        found = described.encode_query("a", instruction="other")
    assert np.array_equal(found, rows("other"))
    with pytest.raises(ValueError):
        described.encode_query("a", task="nameing")


def test_pictures_in_every_form_are_one_picture(described, picture, tmp_path):
    image = picture(60, 40)
    path = tmp_path / "a picture.png"
    image.save(path)
    data = path.read_bytes()
    expected = described.encode_document(images=str(path))
    for form in (path, data, image, "data:image/png;base64," + base64.b64encode(data).decode()):
        assert np.array_equal(described.encode_document(images=form), expected)
    many = described.encode_document([None, "words", "both"], [path, None, [image, image]])
    assert many.shape == (3, 32)
    np.testing.assert_allclose(many[0], expected, atol=1e-5)
    assert np.array_equal(described.encode_document(images=[image])[0], expected)
    assert np.array_equal(described.encode_document(images=iter([image]))[0], expected)
    reference = described.encode(
        [Item("0", content_of("both", (str(path), str(path))))], side="candidate", mode="direct"
    ).embeddings[0]
    np.testing.assert_allclose(many[2], reference, atol=1e-5)


def test_a_picture_from_the_web(described, picture, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    picture(40, 40).save(folder / "a.png")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found = described.encode_document(images=f"{address}/a.png")
        with error_about(ImageError, f"{address}/gone.png", "network"):
            described.encode_document(images=f"{address}/gone.png")
        server.shutdown()
    assert np.array_equal(found, described.encode_document(images=folder / "a.png"))
    with error_about(ImageError, "network"):
        described.encode_document(images=f"{address}/a.png")
    with error_about(ImageError, "data:image/png,abc"):
        described.encode_document(images="data:image/png,abc")


def test_one_gives_one_and_a_list_gives_a_list(described):
    one, text = described.encode_query("a", return_rationales=True)
    many, texts = described.encode_query(["a", "b"], return_rationales=True)
    assert (one.shape, many.shape, texts[0]) == ((32,), (2, 32), text)
    assert isinstance(text, str)
    np.testing.assert_allclose(many[0], one, atol=1e-5)
    tensor = described.encode_query(["a", "b"], as_tensor=True)
    assert torch.equal(tensor, torch.from_numpy(many))
    scores = described.similarity(many, described.encode_document(["x", "y", "z"]))
    assert scores.shape == (2, 3)
    assert described.similarity(one, one) == pytest.approx(1, abs=1e-5)
    assert described.encode_document([]).shape == (0, 32)


def test_the_mode_is_the_one_of_training(described):
    assert np.array_equal(described.encode_query("a"), described.encode_query("a", mode="reasoning"))
    assert not np.allclose(described.encode_query("a"), described.encode_query("a", mode="direct"), atol=1e-3)
    described.settings = described.settings.but(reasons="none")
    assert np.array_equal(described.encode_query("a"), described.encode_query("a", mode="direct"))


def test_embeddings_are_cut_to_sizes_of_training_only(described):
    whole = described.encode_document(["a", "b"])
    cut = described.encode_document(["a", "b"], dimensions=8)
    np.testing.assert_allclose(
        cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6
    )
    assert np.array_equal(described.encode_document(["a", "b"], dimensions=32), whole)
    with pytest.raises(ValueError):
        described.encode_document("a", dimensions=12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((None,)), "give texts, images, or both"),
        # The instruction of training alone is no query.
        ((" ",), "item '0': it has neither text nor images"),
        ((["a", ""],), "item '1': it has neither text nor images"),
        ((["a", "b"], ["x.png"]), "2 texts and 1 images"),
        (([1],), "a text must be a string, got int"),
        ((["a", str(ROOT / "docs" / "gallery.png")],), "names a picture"),
        (("data:image/png;base64,aGVsbG8=",), "names a picture"),
        (("a", [3.0]), "a picture is a path, a web address, bytes or a PIL image, got float"),
        (("a", [{"bytes": b"x"}]), "a picture is a path, a web address, bytes or a PIL image, got dict"),
        ((None, [{"bytes": b"x"}]), "a picture is a path, a web address, bytes or a PIL image, got dict"),
        ((["a"], [3]), "a picture is a path, a web address, bytes or a PIL image, got int"),
        ((["a", "b"], "x.png"), "a list of texts and a single picture: give one entry per text"),
        ((["a", "b"], b"x"), "a list of texts and a single picture"),
        (("half \ud83d",), r"half \\ud83d' contains half a character \(a lone surrogate\)"),
        ((["a", "b"], {"seeds": [1]}), "1 seeds for 2 items"),
        # With -1 the embeddings were uninitialised memory.
        (("a", {"batch_size": -1}), "batch_size must be >= 1, got -1"),
        (("a", {"batch_size": 0}), "batch_size must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(described, arguments, message):
    *given, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):  # its words tell the caller which argument
        described.encode_query(*given, **options)


def test_pictures_as_tables_hold_them(described):
    with pytest.raises(ValueError):  # not two paths, which are its keys
        described.encode_document(None, {"bytes": b"x", "path": "a.png"})
    paths = np.array(["x.png", "y.png"], dtype=object)  # a list in Parquet, read by pandas
    _, [item] = _items(["a"], [paths], None)
    assert item.pictures == ("x.png", "y.png")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "vLLM"}, (("choice", "engine", ("own", "vllm")),)),
        ({"dtype": "fp16"}, ("dtype", "float32", "bfloat16", "float16")),
        ({"dtype": torch.int8}, ("dtype", "float32", "bfloat16", "float16")),
        ({"device": "gpu"}, ("device",)),
        ({"device": "cuda:99"}, ("device",)),
        ({"device": ["gpu", "cpu"]}, ("device",)),
    ],
)
def test_a_choice_that_does_not_exist_is_one_sentence(encoder, options, named):
    with error_about(UserError, *named):
        Embedder.from_pretrained(encoder.checkpoint, **options).encode_document(["a", "b"])


def test_devices_and_dtypes_of_torch_are_taken_too(encoder):
    same = Embedder.from_pretrained(encoder.checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert next(same.model.parameters()).dtype == torch.bfloat16


def test_the_checkpoint_is_hashed_only_for_those_who_ask(encoder, monkeypatch):
    """It means to read all weights once more."""
    hashed = []
    monkeypatch.setattr("rge.checkpoints.export.checkpoint_hash", lambda folder: hashed.append(folder) or "h")
    one = Embedder.from_pretrained(encoder.checkpoint)
    one.encode_query("a")
    assert not hashed
    assert [one.checkpoint_hash, one.checkpoint_hash, one.with_(exact=True).checkpoint_hash] == ["h"] * 3
    assert hashed == [encoder.checkpoint]


def test_a_pickled_embedder_embeds_the_same(described):
    """As for the processes of sentence-transformers, `datasets` and `multiprocessing`."""
    texts = ["a key", "a lock"]
    for one in (described, described.with_(profile="plain")):
        again = pickle.loads(pickle.dumps(one))  # noqa: S301 - our own
        assert np.array_equal(again.encode_query(texts), one.encode_query(texts))
        assert again.builder.measure(Item("0", content_of("a")), "query") == one.builder.measure(
            Item("0", content_of("a")), "query"
        )


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch):
    with error_about(CheckpointError, "somebody/nothing"):
        Embedder.from_pretrained("somebody/nothing")
    with error_about(CheckpointError, "runs/a/b"):
        Embedder.from_pretrained("runs/a/b")


def test_a_checkpoint_goes_to_the_hub_and_comes_back(described, monkeypatch, tmp_path):
    """By huggingface_hub's own client and protocol, to a hub on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    card = described.checkpoint / "README.md"
    card.write_text(card.read_text() + "\nMine. # final\n")
    before = {path.name: path.read_bytes() for path in described.checkpoint.iterdir()}
    with hub(monkeypatch) as held:
        address = described.push_to_hub("me/mine", private=True, token="hf_test")
        assert address.endswith("/me/mine/commit/" + "1" * 40)
        assert (held.created["name"], held.created["visibility"]) == ("mine", "private")
        uploaded = dict(held.files)
        again = Embedder.from_pretrained("me/mine", revision="main")
        with error_about(HfHubHTTPError, "401"):
            described.push_to_hub("me/mine", token="hf_wrong")
    readme = uploaded.pop("README.md").decode()
    assert readme.splitlines().count("# me/mine") == 1
    assert 'Embedder.from_pretrained("me/mine")' in readme
    assert 'SentenceTransformer("me/mine"' in readme
    assert readme.endswith("Mine. # final\n")
    assert {path.name: path.read_bytes() for path in described.checkpoint.iterdir()} == before
    before.pop("README.md")
    assert uploaded == before
    assert again.checkpoint_hash == described.checkpoint_hash
    assert np.array_equal(again.encode_query("a"), described.encode_query("a"))


def test_the_next_window_is_prepared_while_the_device_works(described, picture, monkeypatch):
    """As every evaluation embeds: a stand-in for a device that works until the next pictures are there, and counts them."""
    monkeypatch.setattr("rge.embedder.WINDOW_BATCHES", 1)
    built, hidden, given = [], [], 0
    inference = described._inference
    make, embed = inference.prompt, inference.embed

    def device(prompts, *rest, **options):
        nonlocal given
        given += len(prompts)
        end = time.monotonic() + 20
        while len(built) < min(given + 2, 5) and time.monotonic() < end:
            time.sleep(0.005)
        hidden.append(len(built) - given)
        return embed(prompts, *rest, **options)

    monkeypatch.setattr(inference, "prompt", lambda item, *rest: built.append(item.id) or make(item, *rest))
    monkeypatch.setattr(inference, "embed", device)
    found = described.encode_document(images=[picture(40, 40, n) for n in range(5)], batch_size=2)
    assert found.shape == (5, 32)
    assert hidden == [2, 1, 0]


def test_rge_gives_the_embedder_away():
    import rge

    assert rge.Embedder is Embedder
    with error_about(AttributeError, "Embeder"):
        rge.Embeder  # noqa: B018


def blocks_of(page):
    root = ROOT
    return re.findall(r"```python\n(.*?)```", (root / page).read_text(encoding="utf-8"), re.DOTALL)


EXAMPLES = [(page, number) for page in ("docs/use.md",) for number in range(len(blocks_of(page)))]


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_the_examples_run_as_they_are_printed(page, number, described, picture, tmp_path, monkeypatch):
    """From the folder of the clone, where `make demo` has left its checkpoint; libraries that are not installed are skipped."""
    block, root = blocks_of(page)[number], ROOT
    for library in ("mteb", "langchain_core", "llama_index", "sentence_transformers"):
        if f"from {library}" in block or f"import {library}" in block or f"integrations.{library}" in block:
            pytest.importorskip(library)
    shutil.copytree(described.checkpoint, tmp_path / "clone/runs/demo/joint/final")
    (tmp_path / "clone/data_prep").symlink_to(root / "data_prep")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.chdir(tmp_path / "clone")
    for seed, name in enumerate(("padlock", "key", "nail")):
        picture(40, 50, seed).save(f"{name}.png")
    names: dict = {}
    exec(block, names)  # our own page
    if "scores" in names:
        assert names["scores"].shape == (2,)
        assert names["query"] @ names["query"] == pytest.approx(1, abs=1e-5)
    if "best" in names:
        assert names["best"] in (0, 1)
        assert isinstance(names["rationale"], str)
    if "queries" in names:
        assert names["documents"].shape == (2, 32)
    if "figures" in names:
        assert 0 < names["figures"]["recall_at_20"] < 1
    if "hits" in names:
        assert names["hits"][0].page_content in ("a key", "a nail")
    if "picture" in names:
        assert [len(names[name]) for name in ("query", "picture")] == [32, 32]
        assert [len(one) for one in names["documents"]] == [32, 32]


@pytest.mark.slow
def test_several_devices_embed_as_one_does(described, items, picture):
    """Two processes on the CPU: bit for bit what one gives, whatever it is asked."""
    both = Embedder.from_pretrained(described.checkpoint, device=["cpu", "cpu"], temperature=1.5)
    one = Embedder.from_pretrained(described.checkpoint, device=["cpu"], temperature=1.5)
    for exact in (False, True):
        one, both = one.with_(exact=exact), both.with_(exact=exact)
        seen = []
        options = {"side": "query", "mode": "reasoning", "batch_size": 1, "seeds": range(21)}
        found, expected = both.encode(items, **options, on_progress=seen.append), one.encode(items, **options)
        assert np.array_equal(found.embeddings, expected.embeddings)
        assert found.rationales == expected.rationales
        assert found.stop_reasons == expected.stop_reasons
        assert np.array_equal(found.num_rationale_tokens, expected.num_rationale_tokens)
        assert sum(seen) == 21
        children = psutil.Process().children()
        assert sum("rge.distributed.workers" in " ".join(one.cmdline()) for one in children) == 2
    plain = both.with_(profile="plain")
    assert np.array_equal(plain.encode_document("a"), one.with_(profile="plain").encode_document("a"))
    assert (both.size, both.settings, both.checkpoint_hash) == (32, one.settings, one.checkpoint_hash)
    images = [picture(40, 30, seed) for seed in range(20)]
    assert np.array_equal(
        both.encode_document(images=images, batch_size=2), one.encode_document(images=images, batch_size=2)
    )
    one, both = one.with_(batch_tokens=60), both.with_(batch_tokens=60)
    assert np.array_equal(both.encode_document(images=images), one.encode_document(images=images))
    with error_about(ImageError, "gone.png"):
        both.encode_document(images=[*images, "gone.png"], batch_size=1)
    assert np.array_equal(both.encode_document("a"), one.encode_document("a"))
    with pytest.raises(AttributeError, match="model"):
        both.model  # noqa: B018 - the workers have it
    both.close()
    with pytest.raises(ValueError):
        Embedder.from_pretrained(described.checkpoint, device=[])


def test_pictures_on_the_web_are_fetched_when_their_turn_comes(described, picture, tmp_path, monkeypatch):
    """A list may be longer than its pictures fit into memory: at most a window of them is held."""
    image, waiting, most = picture(30, 30), [], []

    def fetch(address):
        waiting.append(address)
        most.append(len(waiting))
        return image

    def window(*rest, **options):
        waiting.clear()
        return embed(*rest, **options)

    embed = described._inference.embed
    monkeypatch.setattr("rge.embedder.fetch_picture", fetch)
    monkeypatch.setattr(described._inference, "embed", window)
    found = described.encode_document(
        images=[f"https://example.org/{n}.png" for n in range(40)], batch_size=2
    )
    assert found.shape == (40, 32)
    assert max(most) <= 16


def test_quantization_that_cannot_be_is_refused(described, monkeypatch):
    with error_about(BackboneError, ("choice", "quantization", ("8bit", "4bit"))):
        Embedder.from_pretrained(described.checkpoint, quantization="int8")
    with error_about(BackboneError, "quantization", "device"):
        Embedder.from_pretrained(described.checkpoint, device="cpu", quantization="4bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with error_about(BackboneError, "package"):
        Embedder.from_pretrained(described.checkpoint, quantization="8bit")


def test_eight_bits_hold_the_text_models_matrices(described):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    coarse = Embedder.from_pretrained(described.checkpoint, device="cpu", quantization="8bit")
    kinds = {name: type(one) for name, one in coarse.model.model.named_modules() if name.endswith("_proj")}
    assert {kind for name, kind in kinds.items() if "visual" in name} == {torch.nn.Linear}
    assert {kind for name, kind in kinds.items() if "visual" not in name} == {bitsandbytes.nn.Linear8bitLt}
    assert coarse.settings.quantization == "8bit"
    cosine = (coarse.encode_document(["a", "b"]) * described.encode_document(["a", "b"])).sum(axis=1)
    assert (cosine > 0.99).all()
    assert (cosine < 1 - 1e-7).any()
    assert isinstance(coarse.encode_query("a", return_rationales=True)[1], str)


def test_prompts_that_are_cut_are_counted_aloud(encoder, items):
    encoder.builder.max_tokens = 60
    long = [
        Item("long", content_of("egg " * 90)),
        Item("short", content_of("egg")),
        Item("longer", content_of("egg " * 99)),
    ]
    with pytest.warns(
        UserWarning, match="2 of 3 prompts had more than 60 tokens and lost the end of their text"
    ):
        encoder.encode(long, side="query", mode="direct", batch_size=2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_thread_embeds_embeds_too(described):
    stopped = threading.Event()

    def keep_embedding():
        while not stopped.is_set():
            described.encode_document(["a key"] * 16)

    thread = threading.Thread(target=keep_embedding)
    thread.start()
    try:
        expected = described.encode_document(["a lock"])
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                os._exit(0 if np.allclose(described.encode_document(["a lock"]), expected, atol=1e-5) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stopped.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_threads_that_fork_while_they_compute_do_not_wait_for_each_other(described):
    other = Embedder.from_pretrained(described.checkpoint, device="cpu")
    expected, codes = described.encode_document(["a lock"]), []
    both_compute = threading.Barrier(2, timeout=30)

    def fork_inside(mine, theirs):
        def fork(_):
            both_compute.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                found = [one.encode_document(["a lock"]) for one in (mine, theirs)]
                os._exit(0 if np.allclose(found, expected, atol=1e-5) else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        mine.encode([Item("a", content_of("a key"))], side="candidate", mode="direct", on_progress=fork)

    pairs = ((described, other), (other, described))
    threads = [threading.Thread(target=fork_inside, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "they wait for each other"
    assert codes == [0, 0]


@pytest.mark.slow
def test_threads_get_what_one_thread_gets(described, picture):
    """Queries with and without rationales and documents, of many lengths, all at once."""
    texts = [" ".join(["egg", "key", "lock"][: 1 + row % 3] * (1 + row % 7)) for row in range(24)]
    images = [picture(30 + row, 50, row) if row % 3 == 0 else None for row in range(24)]
    asked = [
        partial(described.encode_query, texts[row], images[row], mode=["reasoning", "direct"][row % 2])
        if row % 4
        else partial(described.encode_document, texts[row : row + 3], images[row : row + 3])
        for row in range(24)
    ]
    plain = described.with_(profile="plain")  # the same model: calls of both take turns
    assert plain._inference._computing is described._inference._computing
    asked += [partial(plain.encode_query, text, mode="direct") for text in texts]
    expected = [one() for one in asked]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            found = list(threads.map(lambda one: one(), asked))
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_model_holds_nothing_of_a_call(described):
    """Two forwards of one model, one in the middle of the other: without `Embedder`, so without its lock."""
    model, builder = described.model, described.builder
    prompts = [
        builder.build(Item(text, content_of(text)), "query")
        for text in ("egg", "a much longer text than an egg")
    ]

    def state(prompt):
        with torch.no_grad():
            return model(model.pack([prompt], [[Branch([model.emb_id], read_state=True)]]))[0].state_ND

    expected = [state(prompt) for prompt in prompts]
    inside = []

    def interrupt(module, args):
        hook.remove()
        with ThreadPoolExecutor(1) as other:
            inside.append(other.submit(state, prompts[1]).result())

    hook = model.family.decoder(model.model).layers[-1].mlp.register_forward_pre_hook(interrupt, prepend=True)
    assert torch.equal(state(prompts[0]), expected[0])
    assert torch.equal(inside[0], expected[1])


def test_importing_the_embedder_imports_no_torch():
    code = "import sys; from rge import Embedder; print(*{'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [("", {}, "PASSIVE"), ("import torch", {}, "None"), ("", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")],
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(before, given, expected):
    code = f"{before}\nimport os, rge; print(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("content", "environment", "expected"),
    [("150000 100000", {}, 2), ("max 100000", {}, 8), ("50000 100000", {}, 1), ("50000 100000", {"OMP_NUM_THREADS": "8"}, 8)],
)  # fmt: skip
def test_a_containers_quota_limits_the_threads(content, environment, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr("rge.distributed.cpu_threads._QUOTA", tmp_path / "cpu.max")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    limit_threads()
    assert threads[-1] == expected


def test_spinning_threads_on_busy_cores_are_warned_of(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    with pytest.warns(UserWarning, match="Import rge first, or set OMP_WAIT_POLICY=PASSIVE"):
        limit_threads()
