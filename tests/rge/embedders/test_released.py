"""``as=release``: prompts, pixels, generation and reading of the released RGE evaluation, on tiny weights."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import error_about
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from eval.__main__ import main
from eval.sets.retrieval_set import load_set
from rge.common.errors import UserError
from rge.common.mmeb_prompts import PLACEHOLDER, SETS
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedders.registry import load_model
from rge.embedders.rge import PICTURE, opened, small_sides

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def png(size, seed=0, mode="RGB"):
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noise, "RGBA").convert(mode).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def path(lively_path):
    """The tiny checkpoint with Qwen's repetition penalty among its generation settings."""
    file = lively_path / "generation_config.json"
    before = file.read_text()
    changed = json.loads(before) | {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.3}
    file.write_text(json.dumps(changed))
    yield lively_path
    file.write_text(before)


@pytest.fixture(scope="module")
def released(path):
    encoder = load_model(path, adapter="rge-release", as_released=True, device="cpu", max_new_tokens=12)
    encoder.reword("verbatim")
    return encoder


@pytest.mark.slow
def test_all_prompts_of_all_sets_are_those_of_the_released_code(released, tmp_path):
    """From files of MMEB-eval's layout to prompts, against what the release's own code made of the same texts.

    ``rge_prompts.jsonl`` holds the user turns of `NewPromptsEvalDataset` and `AREvalCollator.construct_prompt` of MCG-NJU/RGE at
    60744447, with its two evaluation YAML files: a query and one or two candidates of each of the 36 sets.
    """
    recorded = [
        json.loads(line) for line in Path(__file__).with_name("rge_prompts.jsonl").open(encoding="utf-8")
    ]
    src = tmp_path / "mmeb"
    (src / "images").mkdir(parents=True)
    for side in ("query", "candidate"):
        (src / "images" / f"{side}.png").write_bytes(png((56, 56), len(side)))
    for name in SETS:
        rows = [one for one in recorded if one["set"] == name]
        (query,), targets = ([one for one in rows if one["side"] == side] for side in ("query", "candidate"))
        line = {
            "qry_text": query["text"],
            "qry_img_path": "query.png" if query["picture"] else "",
            "tgt_text": [one["text"] for one in targets],
            "tgt_img_path": ["candidate.png" if one["picture"] else "" for one in targets],
        }
        (src / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    given = [f"src={src}", f"out={tmp_path / 'sets'}", "instructions=rge", "verbatim=true"]
    assert main(["import", "mmeb", *given]) == 0
    equal = 0
    for name in SETS:
        found = load_set(tmp_path / "sets" / name)
        items = {"query": found.query_items("both"), "candidate": list(found.corpus_items())}
        for side, of_side in items.items():
            prompts = sorted(released.prompt(item, side) for item in of_side)
            turns = sorted(one["turn"] for one in recorded if (one["set"], one["side"]) == (name, side))
            assert prompts == [
                f"{SYSTEM}<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" for turn in turns
            ]
            equal += len(turns)
    assert equal == len(recorded) == 73


def test_pictures_are_scaled_by_pil_and_short_sides_first(released, path):
    by_pil = AutoImageProcessor.from_pretrained(path, backend="pil")
    by_pil.size = {"shortest_edge": 256 * 28 * 28, "longest_edge": 1024 * 28 * 28}
    for size, then in (((10, 40), (28, 40)), ((300, 20), (300, 28)), ((64, 48), (64, 48))):
        image = Image.open(io.BytesIO(png(size)))
        assert small_sides(image).size == then
        item = Item("q", content_of(f"{PLACEHOLDER}\nwhat", (png(size),)))
        found = released.inputs(item, "query", "reasoning")
        wanted = by_pil(images=[image.resize(then) if then != size else image], return_tensors="pt")
        assert torch.equal(found["pixel_values"], wanted["pixel_values"])
        assert 256 <= int(found["image_grid_thw"].prod()) // 4 <= 1024


def reference(path, text, image, cap):
    """The released steps in stock transformers: generate, then feed the last token to the cache that generation left."""
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)
    processor.image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    processor.image_processor.size = {"shortest_edge": 256 * 28 * 28, "longest_edge": 1024 * 28 * 28}
    emb = processor.tokenizer.convert_tokens_to_ids("<emb>")
    turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[image] if image else None, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(
            **inputs, return_dict_in_generate=True, max_new_tokens=cap, eos_token_id=emb, use_cache=True
        )
        last = model(
            input_ids=made.sequences[:, -1:],
            past_key_values=made.past_key_values,
            output_hidden_states=True,
        )
    state = last.hidden_states[-1][0, -1]
    return made.sequences[0, inputs["input_ids"].shape[1] :].tolist(), (state / state.norm()).numpy(), emb


@pytest.mark.slow
@pytest.mark.parametrize("cap", [3, 12])
def test_a_query_is_written_and_read_as_the_released_code_does(path, cap):
    encoder = load_model(path, adapter="rge-release", as_released=True, device="cpu", max_new_tokens=cap)
    encoder.reword("verbatim")
    stops = set()
    for seed, question in enumerate(("what opens this", "an egg", "Find the picture.")):
        data = png((56, 84), seed)
        item = Item("q", content_of(f"{PLACEHOLDER}\n{question}", (data,)))
        ids, state, emb = reference(path, f"{PICTURE}\n{question}\n", Image.open(io.BytesIO(data)), cap)
        found = encoder.encode([item], side="query", mode="reasoning")
        assert found.num_rationale_tokens[0] == len(ids) - (ids[-1] == emb)
        assert found.stop_reasons == ["emb" if ids[-1] == emb else "forced"]
        np.testing.assert_allclose(found.embeddings[0], state, atol=2e-5)
        stops.add(found.stop_reasons[0])
    if cap == 3:
        assert "forced" in stops  # then it is read at an ordinary token, and no <emb> is appended
    assert encoder.settings.generation.repetition_penalty == 1.3


def test_what_the_release_never_asks_is_refused(released, path, tmp_path):
    item = Item("q", content_of("what"))
    for side, mode in (("query", "direct"), ("candidate", "reasoning")):
        with error_about(UserError, "as"):
            released.encode([item], side=side, mode=mode)
    with error_about(UserError, "prompts"):
        released.reword("plain")
    with pytest.raises(ValueError):
        released.encode([Item("q", content_of("what", (png((56, 56)),)))], side="query", mode="reasoning")
    with error_about(UserError, "as", ("choice", "adapter", ("rge-release",))):
        load_model(path, adapter="qwen-vl", as_released=True, device="cpu")


@pytest.mark.slow
def test_from_the_release_s_files_to_a_row_that_says_so(path, tmp_path, capsys):
    src = tmp_path / "mmeb"
    (src / "images").mkdir(parents=True)
    (src / "ImageNet-1K").mkdir()
    labels = ["cat", "dog", "owl"]
    lines = []
    for number in range(3):
        (src / "images" / f"{number}.png").write_bytes(png((40, 20), number))
        names = labels[number:] + labels[:number]
        lines.append({"qry_text": "<|image_1|>\nRepresent the given image for classification\n",
                      "qry_img_path": f"{number}.png", "tgt_text": names, "tgt_img_path": [""] * 3})  # fmt: skip
    (src / "ImageNet-1K" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = {name: tmp_path / name for name in ("verbatim", "plain", "vlm2vec")}
    words = ["import", "mmeb", f"src={src}", "sets=ImageNet-1K"]
    assert main([*words, f"out={sets['verbatim']}", "instructions=rge", "verbatim=true"]) == 0
    assert main([*words, f"out={sets['plain']}", "instructions=rge"]) == 0
    assert main([*words, f"out={sets['vlm2vec']}", "verbatim=true"]) == 0
    run = [
        "run",
        f"model={path}",
        "adapter=rge-release",
        "benchmark=mmeb",
        "max_new_tokens=4",
        "device=cpu",
        "report=false",
    ]
    assert main([*run, "as=release", f"set={sets['verbatim']}", f"out={tmp_path / 'as'}"]) == 0
    results = json.loads((tmp_path / "as/results.json").read_text())
    assert results["asked_as_released"] is True
    assert results["set"]["made_with"] == {"instructions": "rge", "verbatim": True}
    assert results["settings"]["as"] == "release"
    assert main([*run, f"set={sets['plain']}", f"out={tmp_path / 'ours'}"]) == 0
    results = json.loads((tmp_path / "ours/results.json").read_text())
    assert results["asked_as_released"] is False
    capsys.readouterr()
    for given, wrong in (
        ([f"set={sets['verbatim']}"], "which only as=release supports"),
        ([f"set={sets['plain']}", "as=release"], "import MMEB for it with verbatim=true"),
        (
            [f"set={sets['vlm2vec']}", "as=release"],
            "imported with instructions=vlm2vec; as=release needs instructions=rge",
        ),
        ([f"set={sets['plain']}", "as=paper"], "as must be one of release, got 'paper'"),
    ):
        assert main([*run, *given, f"out={tmp_path / 'no'}"]) == 2
        assert wrong in capsys.readouterr().err


def test_a_checkpoint_without_some_of_its_weights_is_refused(path, tmp_path):
    """transformers would start them at random, and the figures would look like those of a bad model."""
    folder = shutil.copytree(path, tmp_path / "part")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with error_about(UserError, folder):
        load_model(folder, adapter="rge-release", as_released=True, device="cpu")


def test_a_heic_is_opened_in_a_process_that_has_read_none(monkeypatch):
    pillow_heif = pytest.importorskip("pillow_heif")
    held = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (40, 30), "red")).save(held)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    assert opened(held.getvalue()).size == (40, 30)
