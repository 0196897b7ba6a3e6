"""Encoders: a checkpoint of this project, and the hub's architectures with tiny random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from faults import error_about
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

from data_prep.rmir import stages
from data_prep.rmir.config import EncoderConfig, load_config
from data_prep.rmir.frames import SCHEMAS, write_rows
from data_prep.rmir.pictures import hub_encoders as hub
from data_prep.rmir.pictures.encoders import load_encoder
from data_prep.rmir.run import Run
from rge.checkpoints.export import export
from rge.checkpoints.settings import read_settings
from rge.common.errors import UserError

WORDS = "[PAD] [UNK] a an apple the red on instruct given description of picture find captions query".split()
TEXTS = ["a red apple", "an apple", "a red apple on the apple on the apple", "the picture"]


@pytest.fixture
def pictures(tmp_path, picture):
    paths = []
    for number, size in enumerate([(40, 40), (64, 32), (90, 90)]):
        paths.append(str(tmp_path / f"{number}.png"))
        picture(*size, seed=number).save(paths[-1])
    return paths


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )


def check_unit(found: np.ndarray, rows: int) -> None:
    assert found.shape[0] == rows
    assert found.dtype == np.float32
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(rows), abs=1e-5)
    assert np.ptp(found @ found.T) > 1e-4, "different things must not fall together"


@pytest.fixture
def siglip(tmp_path):
    """SigLIP 2 of fixed resolution has SigLIP's architecture: the same classes, other weights and tokens."""
    torch.manual_seed(0)
    common = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**common, "vocab_size": len(WORDS), "max_position_embeddings": 64, "projection_size": 16,
                     "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
        vision_config={**common, "image_size": 32, "patch_size": 8},
    )  # fmt: skip
    SiglipModel(config).save_pretrained(tmp_path / "siglip")
    processor = SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), tokenizer())
    processor.save_pretrained(tmp_path / "siglip")
    return str(tmp_path / "siglip")


def test_siglip(siglip, pictures):
    encoder = load_encoder(EncoderConfig("siglip", siglip, batch_size=2))
    assert encoder.name == siglip
    found = encoder.pictures(pictures)
    check_unit(found, 3)
    check_unit(encoder.texts(TEXTS), 4)
    single = load_encoder(EncoderConfig("siglip", siglip, batch_size=1))
    assert single.pictures(pictures) == pytest.approx(found, abs=1e-5), "the batch makes no difference"
    assert single.texts(TEXTS) == pytest.approx(encoder.texts(TEXTS), abs=1e-5)
    assert encoder.texts(["A RED apple"]) == pytest.approx(encoder.texts(["a red apple"])), (
        "it reads lower case"
    )
    assert encoder.pictures(pictures).shape[1] == encoder.texts(TEXTS).shape[1]


def test_an_encoder_whose_vectors_are_not_finite_is_refused(siglip, pictures, checkpoint, monkeypatch):
    """Half precision overflows: FAISS gives place -1 for such a vector, which Python reads as the last picture."""
    encoder = load_encoder(EncoderConfig("siglip", siglip, batch_size=2))
    forward = encoder.model.get_text_features
    monkeypatch.setattr(
        encoder.model, "get_text_features", lambda **given: forward(**given).pooler_output * np.nan
    )
    check_unit(encoder.pictures(pictures), 3)
    with error_about(UserError, "item 0", "finite"):
        encoder.texts(TEXTS)
    ours = load_encoder(EncoderConfig("checkpoint", checkpoint, batch_size=2))
    encode = ours.encoder.encode

    def broken(items, **how):
        found = encode(items, **how)
        found.embeddings[1] = np.nan
        return found

    monkeypatch.setattr(ours.encoder, "encode", broken)
    with error_about(UserError, "item 1", "finite"):
        ours.texts(TEXTS)


def test_qwen3_embedding(tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3Model(config).eval()
    model.save_pretrained(tmp_path / "qwen")
    tokenizer().save_pretrained(tmp_path / "qwen")
    encoder = load_encoder(EncoderConfig("text", str(tmp_path / "qwen"), batch_size=4))
    found = encoder.texts(TEXTS, query=False)
    check_unit(found, 4)
    ids = tokenizer()(TEXTS[1], return_tensors="pt").input_ids
    with torch.no_grad():
        last = model(input_ids=ids).last_hidden_state[0, -1]
    assert found[1] == pytest.approx((last / last.norm()).numpy(), abs=1e-5), (
        "the last token, whatever the padding"
    )
    asked = encoder.texts(TEXTS, query=True)
    assert np.abs(asked - found).max() > 1e-3, "a query is read after its task"
    with torch.no_grad():
        ids = tokenizer()(f"{hub.TASK}{TEXTS[1]}", return_tensors="pt").input_ids
        last = model(input_ids=ids).last_hidden_state[0, -1]
    assert asked[1] == pytest.approx((last / last.norm()).numpy(), abs=1e-5)


def test_a_checkpoint_in_direct_mode(checkpoint, pictures):
    encoder = load_encoder(EncoderConfig("checkpoint", checkpoint, batch_size=2))
    assert encoder.name.startswith("checkpoint ")
    assert encoder.name.endswith("in direct mode")
    found = encoder.pictures(pictures)
    check_unit(found, 3)
    again = load_encoder(EncoderConfig("checkpoint", checkpoint, batch_size=64)).pictures(pictures[::-1])
    assert again[::-1] == pytest.approx(found, abs=1e-5)
    texts = encoder.texts(TEXTS)
    check_unit(texts, 4)
    assert texts.shape[1] == found.shape[1]
    captions = load_encoder(EncoderConfig("checkpoint", checkpoint))
    assert captions.texts(TEXTS, query=True) == pytest.approx(texts, abs=1e-5)


def test_a_checkpoint_that_is_missing_is_an_error(tmp_path):
    with error_about(UserError, tmp_path, "foreign"):
        load_encoder(EncoderConfig("checkpoint", str(tmp_path)))
    for kind in ("siglip", "text"):
        with error_about(UserError, tmp_path):
            load_encoder(EncoderConfig(kind, str(tmp_path)))


def library_run(tmp_path, pictures, *words: str) -> Run:
    """A run on a folder of pictures, none of which has a caption."""
    given = [f"out={tmp_path / 'out'}", f"library.path={Path(pictures[0]).parent}", "seed.clusters=1"]
    return Run(
        load_config(["config=demo", *given, "caption_encoder={kind: hashing}", *words]), progress=False
    )


def test_weights_trained_anew_at_the_same_path_restart_the_seed_stage(
    checkpoint, lively, pictures, tmp_path, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("trained") / "final"
    export(lively, folder, read_settings(Path(checkpoint)))
    words = f"image_encoder={{kind: checkpoint, path: {folder}}}", "seed.per_cluster=9"
    run = library_run(tmp_path, pictures, *words)
    run.run("seed", stages.seed)
    first = np.load(run.path("seed", "images.npy"))
    with torch.no_grad():
        lively.model.get_input_embeddings().weight.mul_(-1)
    export(lively, folder, read_settings(Path(checkpoint)))
    assert run.done("seed"), "a run holds to the weights that it began with"
    run.close()
    run = library_run(tmp_path, pictures, *words)
    assert run.done("seed") is None
    run.run("seed", stages.seed)
    assert np.abs(np.load(run.path("seed", "images.npy")) - first).max() > 1e-3
    assert run.done("seed")
    run.close()


def asked_about(run: Run) -> None:
    """One question about the first picture, as the stages before retrieval write it."""
    name = run.rows("seed", "images")[0]["id"]
    query = {"query_id": "q", "image_id": name, "category": "causal", "query": "?", "target_desc": "an apple"}
    for stage, table in (("generate", "queries"), ("filter", "valid")):
        row = {key: query.get(key) for key in SCHEMAS[table].names}
        write_rows(run.path(stage, table) / "part-00000.parquet", [row])


def test_without_captions_the_image_index_alone_finds_candidates(checkpoint, pictures, tmp_path):
    run = library_run(tmp_path, pictures, f"image_encoder={{kind: checkpoint, path: {checkpoint}}}")
    assert stages.seed(run)["with_caption"] == 0
    asked_about(run)
    assert stages.retrieve(run)["triplets"] == 2
    assert {tuple(row["found_by"]) for row in run.rows("retrieve", "triplets")} == {("image",)}
    run.close()


def test_thumbnails_without_captions_are_refused_by_name(pictures, tmp_path):
    """Before questions are paid for, too."""
    run = library_run(tmp_path, pictures, "image_encoder={kind: pixels}")
    stages.seed(run)
    for stage in (stages.generate, stages.retrieve):
        with error_about(UserError, "captions"):
            stage(run)
        asked_about(run)
    run.close()
