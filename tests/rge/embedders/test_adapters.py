"""Each adapter against a straightforward use of the same weights: one item at a time, no batching, no shared code."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from eval_fakes import write_set
from faults import error_about
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from eval.commands.run import RunOptions, run
from rge.common.errors import UserError
from rge.common.images import load_image
from rge.common.parts import content_of
from rge.common.schema import Item
from rge.embedders.registry import adapters, facts_of, load_model
from rge.embedders.ume import INSTRUCTION
from rge.model.adapters import AdapterError
from rge.model.families import Family


def large(number, width, height):
    """A PNG with structure, larger than one patch."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


ITEMS = [
    Item("1", content_of("What opens this?", (large(1, 40, 60),)), instruction="Find it."),
    Item("2", content_of("an egg")),
    Item("3", content_of("Which of the two?", (large(2, 30, 30), large(3, 60, 40)))),
    Item("4", content_of(None, (large(4, 56, 56),))),
]


def unit(state):
    return torch.nn.functional.normalize(state.float(), dim=-1).numpy()


def hidden(model, fields, **more):
    with torch.no_grad():
        return model(**fields, **more, output_hidden_states=True, use_cache=False).hidden_states[-1][0]


def chat(processor, text, num_images):
    content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
    turns = [{"role": "user", "content": content}]
    return processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def fields_of(processor, text, item):
    images = [Family().scaled(load_image(ref), processor.image_processor) for ref in item.pictures]
    return processor(text=[text], images=images or None, return_tensors="pt")


def name_of(path):
    return next(one.name for one in adapters() if one.matches(facts_of(path)))


def test_the_files_choose_the_adapter(qwen2_path, qwen3_path, ume_path, clip_path, siglip_path, tiny_path):
    assert [name_of(path) for path in (qwen2_path, qwen3_path, tiny_path)] == ["qwen-vl"] * 3
    assert [name_of(path) for path in (ume_path, clip_path, siglip_path)] == ["ume-r1", "clip", "clip"]


@pytest.mark.parametrize("family", ["qwen2_path", "lively_path", "qwen3_path"])
def test_plain_qwen_is_read_at_the_last_token_of_its_chat_template(family, request):
    path = request.getfixturevalue(family)
    encoder = load_model(path, adapter="qwen-vl")
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(path).eval(),
        AutoProcessor.from_pretrained(path),
    )
    texts = ["\nFind it. What opens this?\n", "an egg\n", "\nWhich of the two?\n", "\n\n"]
    expected = [
        unit(hidden(model, fields_of(processor, chat(processor, text, len(item.pictures)), item))[-1])
        for item, text in zip(ITEMS, texts, strict=True)
    ]
    found = encoder.encode(ITEMS, side="query", mode="direct", batch_size=3).embeddings
    np.testing.assert_allclose(found, expected, atol=2e-5)
    text = chat(processor, "\nSummarize the given image in one word.\n", 1)
    wanted = unit(hidden(model, fields_of(processor, text, ITEMS[3]))[-1])
    found = encoder.encode([ITEMS[3]], side="candidate", mode="direct").embeddings[0]
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_vlm2vec_has_no_chat_template_and_flat_positions(qwen2_path):
    encoder = load_model(qwen2_path, adapter="vlm2vec")
    model = AutoModelForImageTextToText.from_pretrained(qwen2_path).eval()
    processor = AutoProcessor.from_pretrained(qwen2_path)
    pad = "<|image_pad|>"
    texts = [f"{pad}\nFind it. What opens this?", "an egg", f"{pad}{pad}\nWhich of the two?", f"{pad}\n"]
    found = encoder.encode(ITEMS, side="query", mode="direct", batch_size=2).embeddings
    for item, text, row in zip(ITEMS, texts, found, strict=True):
        fields = fields_of(processor, text, item)
        flat = torch.arange(fields["input_ids"].shape[1]).expand(3, 1, -1)
        np.testing.assert_allclose(row, unit(hidden(model, fields, position_ids=flat)[-1]), atol=2e-5)
    in_space = unit(hidden(model, fields_of(processor, texts[0], ITEMS[0]))[-1])
    assert found[0] @ in_space < 0.9999  # else the line above could not tell the two apart
    wanted = hidden(
        model,
        fields := fields_of(processor, f"{pad}\nRepresent the given image.", ITEMS[3]),
        position_ids=torch.arange(fields["input_ids"].shape[1]).expand(3, 1, -1),
    )[-1]
    candidate = encoder.encode([ITEMS[3]], side="candidate", mode="direct").embeddings[0]
    np.testing.assert_allclose(candidate, unit(wanted), atol=2e-5)


def lora(path, base, seed=0):
    """A DoRA as VLM2Vec publishes them: of the base's language layers, under their old names; and the merged model."""
    model = AutoModelForImageTextToText.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    adapted = get_peft_model(model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(path)
    weights = load_file(path / "adapter_model.safetensors")
    save_file(
        {k.replace("language_model.", ""): v for k, v in weights.items()}, path / "adapter_model.safetensors"
    )
    config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return adapted.merge_and_unload()


def test_a_lora_is_a_vlm2vec_and_its_base_is_found(qwen2_path, tmp_path):
    merged = lora(tmp_path / "lora", qwen2_path)
    merged.save_pretrained(tmp_path / "merged")
    AutoProcessor.from_pretrained(qwen2_path).save_pretrained(tmp_path / "merged")
    assert name_of(tmp_path / "lora") == "vlm2vec"
    found, expected, base = (
        load_model(path, adapter="vlm2vec").encode(ITEMS, side="query", mode="direct").embeddings
        for path in (tmp_path / "lora", tmp_path / "merged", qwen2_path)
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(found - base).max() > 0.01
    weights = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(AdapterError):
        load_model(tmp_path / "lora")


def test_ume_r1_reads_gen_emb_after_thinking_and_disc_emb_in_the_prompt(ume_path):
    encoder = load_model(ume_path, max_new_tokens=12)
    model = AutoModelForImageTextToText.from_pretrained(ume_path).eval()
    processor = AutoProcessor.from_pretrained(ume_path)
    gen, disc = processor.tokenizer.convert_tokens_to_ids(["<gen_emb>", "<disc_emb>"])
    texts = ["Find it. What opens this?", "an egg", "Which of the two?", ""]
    direct = encoder.encode(ITEMS, side="query", mode="direct", batch_size=3).embeddings
    reasoned = encoder.encode(ITEMS, side="query", mode="reasoning", batch_size=3)
    forced = []
    for row, (item, text) in enumerate(zip(ITEMS, texts, strict=True)):
        fields = fields_of(processor, chat(processor, f"{text}\n<disc_emb>\n", len(item.pictures)), item)
        place = (fields["input_ids"][0] == disc).nonzero().item()
        np.testing.assert_allclose(direct[row], unit(hidden(model, fields)[place]), atol=2e-5)

        prompt = chat(processor, f"{text}\n<disc_emb>\n{INSTRUCTION}", len(item.pictures))
        fields = fields_of(processor, prompt, item)
        length = fields["input_ids"].shape[1]
        written = model.generate(
            **fields, max_new_tokens=12, do_sample=False, eos_token_id=gen,
            suppress_tokens=encoder.by_mode["reasoning"].model.suppressed_ids,
        )[0, length:]  # fmt: skip
        forced.append(gen not in written.tolist())
        if forced[-1]:
            written = torch.cat([written, torch.tensor([gen])])
        fields["input_ids"] = torch.cat([fields["input_ids"], written[None]], dim=1)
        fields["attention_mask"] = torch.ones_like(fields["input_ids"])
        fields["mm_token_type_ids"] = (fields["input_ids"] == model.config.image_token_id).long()
        np.testing.assert_allclose(reasoned.embeddings[row], unit(hidden(model, fields)[-1]), atol=2e-5)
        assert reasoned.num_rationale_tokens[row] == len(written) - 1
    assert [reason == "forced" for reason in reasoned.stop_reasons] == forced
    assert not all(forced)


@pytest.mark.parametrize("family", ["clip_path", "siglip_path"])
def test_two_towers_add_the_text_and_the_mean_of_the_pictures(family, request):
    path = request.getfixturevalue(family)
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    processor = AutoImageProcessor.from_pretrained(path)
    padding = {"padding": "max_length", "max_length": 24} if family == "siglip_path" else {}
    long = Item("5", content_of("padlock " * 40))
    expected = []
    with torch.no_grad():
        for item in [*ITEMS, long]:
            parts = []
            if item.text:
                fields = tokenizer(
                    item.text, return_tensors="pt", truncation=True, **({"max_length": 24} | padding)
                )
                parts.append(model.get_text_features(**fields).pooler_output[0])
            if item.pictures:
                each = [processor(images=load_image(ref), return_tensors="pt") for ref in item.pictures]
                parts.append(
                    sum(model.get_image_features(**one).pooler_output[0] for one in each) / len(each)
                )
            expected.append(unit(sum(parts)))
    found = load_model(path).encode([*ITEMS, long], side="query", mode="direct", batch_size=3).embeddings
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [("qwen2_path", "qwen-vl"), ("qwen2_path", "vlm2vec"), ("qwen3_path", None), ("ume_path", None), ("clip_path", None)],
)  # fmt: skip
def test_an_embedding_does_not_depend_on_the_batch(family, adapter, request):
    encoder = load_model(request.getfixturevalue(family), adapter=adapter)
    seen = []
    one, four = (
        encoder.encode(ITEMS, side="query", mode="direct", batch_size=size, on_progress=seen.append)
        for size in (1, 4)
    )
    np.testing.assert_allclose(one.embeddings, four.embeddings, atol=2e-5)
    assert seen == [1, 1, 1, 1, 4]
    if encoder.settings.adapter == "clip":
        with pytest.raises(UserError):
            encoder.with_(batch_tokens=9)
    else:
        limited = encoder.with_(batch_tokens=1).encode(
            ITEMS, side="query", mode="direct", batch_size=4, on_progress=seen.append
        )
        np.testing.assert_allclose(limited.embeddings, four.embeddings, atol=2e-5)
        assert seen[5:] == [1, 1, 1, 1]
    order = [2, 0, 3, 1]
    shuffled = encoder.encode(
        [ITEMS[row] for row in order], side="query", mode="direct", batch_size=2
    ).embeddings
    np.testing.assert_allclose(shuffled, one.embeddings[order], atol=2e-5)


def test_what_an_adapter_cannot_do_is_said(clip_path, qwen2_path, tmp_path):
    with error_about(UserError, ("choice", "query_mode", ("direct",))):
        load_model(clip_path).encode(ITEMS, side="query", mode="reasoning")
    with error_about(UserError, "temperature"):
        load_model(clip_path, temperature=0.7)
    with error_about(UserError, qwen2_path, "adapter", "metaclip_2", "siglip2"):
        load_model(qwen2_path, adapter="clip")
    with error_about(UserError, clip_path, "adapter", "qwen2_vl"):
        load_model(clip_path, adapter="vlm2vec")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((clip_path / name).read_bytes())
    weights = load_file(clip_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "projection" not in k}, tmp_path / "model.safetensors")
    with error_about(UserError, tmp_path, "text_projection.weight"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with error_about(UserError, tmp_path, "unreadable"):
        load_model(tmp_path)


@pytest.mark.slow
def test_a_run_records_adapter_and_wording(clip_path, tmp_path):
    data = write_set(tmp_path / "set", num_queries=4, num_candidates=8)
    options = {"model": str(clip_path), "set": data, "report": False}
    with error_about(UserError, ("choice", "query_mode", ("direct",))):
        run(RunOptions(**options, out=tmp_path / "out"))
    (out,) = run(RunOptions(**options, out=tmp_path / "out", query_mode=("direct",)))
    results = json.loads((out / "results.json").read_text())
    assert results["model"] == {"name": str(clip_path), "adapter": "clip", "revision": None}
    assert results["settings"]["wording"]["query"] == "{text}"
    (plain,) = run(RunOptions(**options, out=tmp_path / "plain", query_mode=("direct",), prompts="plain"))
    settings = json.loads((plain / "results.json").read_text())["settings"]
    assert (settings["profile"], settings["wording"]["query"]) == ("plain", "{instruction} {text}")


def test_a_lora_is_another_model_when_its_base_is(qwen2_path, tmp_path):
    """A base that is rewritten in place must not be read out of the old one's cache."""
    base = shutil.copytree(qwen2_path, tmp_path / "base")
    lora(tmp_path / "lora", base)
    before = load_model(tmp_path / "lora").checkpoint_hash
    assert load_model(tmp_path / "lora").checkpoint_hash == before
    weights = load_file(base / "model.safetensors")
    name = next(key for key in weights if "embed_tokens" in key)
    weights[name] = weights[name] * 1.5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert load_model(tmp_path / "lora").checkpoint_hash != before
