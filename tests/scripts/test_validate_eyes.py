"""Validation of a recipe's first stage on a family that its training left out."""

import importlib.util
import json

import pytest
from paths import ROOT

from rge.common.errors import UserError

QUICK = (
    "model.scratch.naming_steps=2",
    "model.scratch.naming_batch_size=4",
    "model.scratch.vocab_size=400",
    "model.scratch.text={hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1, "
    "num_key_value_heads: 1}",
    "model.scratch.vision={depth: 1, hidden_size: 32, intermediate_size: 32, num_heads: 1, patch_size: 21, window_size: 168}",
)


@pytest.fixture(scope="module")
def validate_eyes():
    spec = importlib.util.spec_from_file_location("validate_eyes", ROOT / "scripts" / "validate_eyes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_family_is_left_out_and_its_things_are_asked(validate_eyes, capsys, monkeypatch):
    taught = {}
    teach = validate_eyes.eyes.teach

    def watched(model, accelerator, processor, pictures, labels, names, **settings):
        taught.update(pictures=len(pictures), names=len(names))
        return teach(model, accelerator, processor, pictures, labels, names, **settings)

    monkeypatch.setattr("rge.scratch.pretrain_vision.teach", watched)
    validate_eyes.main(["families=fxemoji,emojione", *QUICK])
    *runs, every = map(json.loads, capsys.readouterr().out.splitlines())
    assert [run["family"] for run in runs] == ["fxemoji", "emojione"]
    assert taught["pictures"] == 1233 - 257
    assert runs[1]["drawings"] == 257
    assert every["drawings"] == sum(run["drawings"] for run in runs)
    for run in (*runs, every):
        share, low, high = run["chosen"]
        assert 0 <= low <= share <= high < 20  # two steps teach nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["families=nobody"], "must have drawings of nobody and of others"),
        (["families=noto", "model.scratch.naming=null"], "model.scratch.naming is not set"),
    ],
)
def test_what_cannot_be_asked_is_refused(validate_eyes, words, message):
    with pytest.raises(UserError, match=message):
        validate_eyes.main(words)
