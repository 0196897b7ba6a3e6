"""``as=release`` of VLM2Vec and UME-R1: prompts, pixels, what is written and where it is read, against their steps restated.

The restatements follow TIGER-AI-Lab/VLM2Vec at 6e1e1d4 and XMUDeepLIT/UME-R1 at 08891de and 55e5512. Their own code, run once with
transformers 4.52.3 on the same tiny weights and eight items (small, long, grey, transparent and no picture), gave the same tokens and
pixels and, to 7e-7, the same embeddings as ours.
"""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from eval.__main__ import main
from eval.models.registry import load_model
from eval.models.released_ume import INSTRUCTION
from rge.common.errors import UserError
from rge.common.mmeb_prompts import PLACEHOLDER
from rge.common.schema import Item

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def png(size, seed=0, mode="RGB"):
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noise, "RGBA").convert(mode).save(sink, "PNG")
    return sink.getvalue()


def pixels_of(path, pictures, smallest, largest):
    """Pixels and grid by PIL's scaling."""
    by_pil = AutoImageProcessor.from_pretrained(path, backend="pil")
    by_pil.size = {"shortest_edge": smallest, "longest_edge": largest}
    return by_pil(images=pictures, return_tensors="pt")


def unit(state):
    return (state / state.norm()).numpy()


@pytest.fixture(scope="module")
def named(qwen2_path, tmp_path_factory):
    """The tiny Qwen2-VL under the names of the two releases of VLM2Vec."""
    root = tmp_path_factory.mktemp("vlm2vec")
    return {name: shutil.copytree(qwen2_path, root / name) for name in ("VLM2Vec-V2.0", "VLM2Vec-Qwen2VL-2B")}


@pytest.mark.parametrize(
    ("size", "mode", "then"),
    [
        ((84, 56), "RGB", (84, 56)),
        ((20, 90), "RGB", (56, 56)),  # a short side: a square of 56, whatever the other one
        ((60, 70), "RGBA", (60, 70)),  # transparency is dropped, not laid on white
        ((60, 70), "L", (60, 70)),
        ((28, 5800), "RGB", (980, 980)),  # longer than 200 to 1: a square, as large as may be
    ],
)  # fmt: skip
def test_vlm2vec_is_read_at_the_last_token_of_the_bare_text(named, size, mode, then):
    path, data = named["VLM2Vec-V2.0"], png(size, 1, mode)
    encoder = load_model(path, adapter="vlm2vec", as_released=True, device="cpu")
    encoder.reword("verbatim")
    text = "<|image_1|>\nRepresent the given image with the following question: what  opens this\n"
    item = Item("q", text, (data,))
    picture = Image.open(io.BytesIO(data))
    picture = (picture if picture.size == then else picture.convert("RGB").resize(then)).convert("RGB")
    wanted = pixels_of(path, [picture], 4 * 28 * 28, 1280 * 28 * 28)
    found = encoder.inputs(item, "query", "direct")
    assert torch.equal(found["pixel_values"], wanted["pixel_values"])
    processor = AutoProcessor.from_pretrained(path)
    count = int(wanted["image_grid_thw"].prod()) // 4
    ids = processor.tokenizer([text.replace(PLACEHOLDER, processor.image_token * count)])["input_ids"]
    assert found["input_ids"].tolist() == ids
    if then == (980, 980):
        return
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    flat = torch.arange(len(ids[0])).expand(3, 1, -1)
    with torch.no_grad():
        state = model(
            input_ids=torch.tensor(ids), position_ids=flat, pixel_values=wanted["pixel_values"],
            image_grid_thw=wanted["image_grid_thw"], output_hidden_states=True,
        ).hidden_states[-1][0, -1]  # fmt: skip
    embedding = encoder.encode([item], side="query", mode="direct").embeddings[0]
    np.testing.assert_allclose(embedding, unit(state), atol=2e-6)


def test_states_are_read_after_the_final_norm_whatever_hidden_states_hold(named, monkeypatch):
    """From transformers 4.56 on, the last of ``hidden_states`` is before the norm in some families."""
    encoder = load_model(named["VLM2Vec-V2.0"], adapter="vlm2vec", as_released=True, device="cpu")
    item = Item("q", "an egg")
    found = encoder.encode([item], side="query", mode="direct").embeddings
    stock = encoder.model.forward

    def before_the_norm(*args, **options):
        output = stock(*args, **options)
        if output.hidden_states is not None:
            output.hidden_states = (*output.hidden_states[:-1], output.hidden_states[-1].flip(-1))
        return output

    monkeypatch.setattr(encoder.model, "forward", before_the_norm)
    np.testing.assert_array_equal(encoder.encode([item], side="query", mode="direct").embeddings, found)
    assert encoder.settings.release_code == "TIGER-AI-Lab/VLM2Vec 6e1e1d4"


def test_a_text_that_names_a_picture_it_has_not_keeps_the_token(named):
    """Queries of WebQA: the token is embedded like any word."""
    path = named["VLM2Vec-V2.0"]
    encoder = load_model(path, adapter="vlm2vec", as_released=True, device="cpu")
    encoder.reword("verbatim")
    texts = ["<|image_1|>\nFind a Wikipedia image that answers this question: who\n", "an egg"]
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    for text in texts:
        ids = processor.tokenizer([text.replace(PLACEHOLDER, processor.image_token)], return_tensors="pt")
        with torch.no_grad():
            embedded = model.get_input_embeddings()(ids["input_ids"])
            states = model.model.language_model(inputs_embeds=embedded).last_hidden_state
        found = encoder.encode([Item("q", text)], side="query", mode="direct").embeddings[0]
        np.testing.assert_allclose(found, unit(states[0, -1]), atol=2e-6)
    with pytest.raises(ValueError, match="has 1 pictures and 0 places"):
        encoder.encode([Item("q", "an egg", (png((56, 56)),))], side="query", mode="direct")
    with pytest.raises(UserError, match="writes no rationale"):
        encoder.encode([Item("q", "an egg")], side="query", mode="reasoning")


def test_the_first_release_of_vlm2vec_scales_every_picture_twice(named, qwen2_path, tmp_path):
    path, data = named["VLM2Vec-Qwen2VL-2B"], png((50, 120), 2)
    encoder = load_model(path, adapter="vlm2vec", as_released=True, device="cpu")
    encoder.reword("verbatim")
    square = Image.open(io.BytesIO(data)).resize((1344, 1344))
    found = encoder.inputs(
        Item("c", f"{PLACEHOLDER}\nRepresent the given image\n", (data,)), "candidate", "direct"
    )
    assert torch.equal(
        found["pixel_values"],
        pixels_of(path, [square], 4 * 28 * 28, 1280 * 28 * 28)["pixel_values"],
    )
    assert found["image_grid_thw"].tolist() == [[1, 70, 70]]
    assert encoder.settings.pixels["first"] == [1344, 1344]
    other = shutil.copytree(qwen2_path, tmp_path / "vlm2vec_mine")
    with pytest.raises(UserError, match="does not say which release of VLM2Vec it is"):
        load_model(other, adapter="vlm2vec", as_released=True, device="cpu")


@pytest.fixture(scope="module")
def released_ume(ume_path, tmp_path_factory):
    """The tiny UME-R1 with the generation settings that Qwen2-VL has."""
    path = shutil.copytree(ume_path, tmp_path_factory.mktemp("ume") / "UME-R1-2B")
    tokenizer = AutoProcessor.from_pretrained(path).tokenizer
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    given = json.loads((path / "generation_config.json").read_text())
    given |= {"eos_token_id": ends, "do_sample": True, "top_k": 50, "top_p": 0.001, "temperature": 0.01}
    (path / "generation_config.json").write_text(json.dumps(given | {"repetition_penalty": 1.05}))
    return path


def theirs(path, text, picture, cap):
    """The released steps in stock transformers: states as generate() returns them, one for each token but the last."""
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor = AutoProcessor.from_pretrained(path)
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    width, height = picture.size
    scaled = picture.resize((width, height))
    pixels = pixels_of(path, [scaled], 784, 2_359_296)
    count = int(pixels["image_grid_thw"].prod()) // 4
    ids = processor.tokenizer(
        [prompt.replace(processor.image_token, processor.image_token * count)], return_tensors="pt"
    )
    ids["mm_token_type_ids"] = (ids["input_ids"] == model.config.image_token_id).long()
    inputs = {**ids, **pixels}
    with torch.no_grad():
        made = model.generate(
            **inputs, max_new_tokens=cap, output_hidden_states=True, return_dict_in_generate=True
        )
        prefill = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    written = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    gen, disc = processor.tokenizer.convert_tokens_to_ids(["<gen_emb>", "<disc_emb>"])
    step = -1
    if gen in written:
        last = len(written) - 1 - written[::-1].index(gen)
        step = last + 1 if last + 1 < len(written) - 1 else -1
    marked = (inputs["input_ids"][0] == disc).nonzero()[-1, 0]
    return written, unit(made.hidden_states[step][-1][0, -1]), unit(prefill[marked]), inputs


@pytest.mark.parametrize("cap", [4, 40])
def test_ume_r1_writes_to_the_end_of_the_turn_and_is_read_at_its_last_gen_emb(released_ume, cap):
    encoder = load_model(released_ume, adapter="ume-r1", as_released=True, device="cpu", max_new_tokens=cap)
    encoder.reword("verbatim")
    gen = encoder.gen_id
    kinds = set()
    for seed, question in enumerate(("what opens this", "an egg", "Find the picture.", "")):
        data = png((56, 84), seed)
        item = Item("q", f"{PLACEHOLDER}\n{question} \n", (data,))
        told = f"{question}\n<disc_emb>\n{INSTRUCTION}"
        assert "<think> </think> tags and then summarize" in told
        written, generative, discriminative, inputs = theirs(
            released_ume, told, Image.open(io.BytesIO(data)), cap
        )
        asked = encoder.inputs(item, "query", "reasoning")
        assert torch.equal(asked["input_ids"], inputs["input_ids"])
        assert torch.equal(asked["pixel_values"], inputs["pixel_values"])
        assert encoder.write(asked) == written
        found = encoder.encode([item], side="query", mode="reasoning")
        np.testing.assert_allclose(found.embeddings[0], generative, atol=2e-5)
        assert found.stop_reasons == ["emb" if gen in written else "forced"]
        found = encoder.encode([item], side="candidate", mode="direct")
        np.testing.assert_allclose(found.embeddings[0], discriminative, atol=2e-5)
        places = [place for place, token in enumerate(written) if token == gen]
        kinds.add("none" if not places else "last" if places[-1] >= len(written) - 2 else "inside")
    assert "none" in kinds if cap == 4 else {"last", "inside"} & kinds
    assert encoder.settings.generation.repetition_penalty == 1.05


def test_where_the_state_of_gen_emb_is_taken(released_ume):
    """By the place of the last one; the very last token written has no state of its own."""
    encoder = load_model(released_ume, adapter="ume-r1", as_released=True, device="cpu")
    gen, prompt = encoder.gen_id, [7, encoder.disc_id, 7]
    for written, place in (
        ([1, gen, 2, 3], 4),  # inside
        ([1, gen, 2], 4),  # before the end of the turn
        ([1, 2, gen], 4),  # at the cap: the token before it
        ([gen, 1, gen, 2, 3], 5),  # the last of several
        ([1, 2, 3], 4),  # none
    ):
        assert encoder.read_at(prompt + written, 3) == place
    assert encoder.read_at(prompt, 3) == 1


def test_a_text_alone_shows_ume_r1_a_white_picture(released_ume):
    encoder = load_model(released_ume, adapter="ume-r1", as_released=True, device="cpu")
    encoder.reword("verbatim")
    found = encoder.inputs(Item("q", f"{PLACEHOLDER}\nwho?\n"), "query", "direct")
    white = Image.new("RGB", (56, 56), (255, 255, 255))
    assert torch.equal(
        found["pixel_values"], pixels_of(released_ume, [white], 784, 2_359_296)["pixel_values"]
    )
    text = encoder.prompt(Item("q", f"{PLACEHOLDER}\nwho?\n"), "query")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == (
        f"{SYSTEM}<|im_start|>user\n{picture}who?\n<disc_emb>\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    given = json.loads((released_ume / "generation_config.json").read_text())
    (released_ume / "generation_config.json").write_text(
        json.dumps(given | {"top_p": 0.9, "temperature": 1.0})
    )
    with pytest.raises(UserError, match="draws at temperature 1.0"):
        load_model(released_ume, adapter="ume-r1", as_released=True, device="cpu")
    (released_ume / "generation_config.json").write_text(json.dumps(given))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["VLM2Vec-V2.0", "UME-R1-2B"])
def test_results_say_that_a_run_was_asked_as_released(which, named, released_ume, tmp_path, capsys):
    path, adapter = (named[which], "vlm2vec") if which in named else (released_ume, "ume-r1")
    src = tmp_path / "mmeb"
    (src / "images").mkdir(parents=True)
    (src / "ImageNet-1K").mkdir()
    lines = []
    for number in range(2):
        (src / "images" / f"{number}.png").write_bytes(png((40, 30), number))
        lines.append({"qry_text": f"{PLACEHOLDER}\nRepresent the given image for classification\n",
                      "qry_img_path": f"{number}.png", "tgt_text": ["cat", "dog"], "tgt_img_path": [""] * 2})  # fmt: skip
    (src / "ImageNet-1K" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in ("vlm2vec", "rge"):
        given = [f"src={src}", "sets=ImageNet-1K", "verbatim=true", f"instructions={words}"]
        assert main(["import", "mmeb", *given, f"out={tmp_path / words}"]) == 0
    run = ["run", f"model={path}", f"adapter={adapter}", "as=release", "benchmark=mmeb", "query_mode=direct", "device=cpu",
           "report=false"]  # fmt: skip
    assert main([*run, f"set={tmp_path / 'vlm2vec'}", f"out={tmp_path / 'out'}"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["asked_as_released"] is True
    assert results["settings"]["as"] == "release"
    capsys.readouterr()
    assert main([*run, f"set={tmp_path / 'rge'}", f"out={tmp_path / 'no'}"]) == 2
    assert "imported with instructions=rge; as=release needs instructions=vlm2vec" in capsys.readouterr().err
