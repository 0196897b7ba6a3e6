"""Labels of queries by a model that answers, refuses, answers nothing or nonsense; and figures by label."""

import json

import pytest
from eval_fakes import FakeEncoder, loader, picture, tables, write_tables

from eval.benchmarks.suite import write_suite
from eval.commands.run import RunOptions, run
from eval.judging.label import LabelOptions, label
from eval.sets.contents import with_content
from eval.sets.retrieval_set import load_set
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError


@pytest.fixture
def content():
    found = tables(num_queries=6, num_candidates=60)
    found["corpus"]["text"] = [f"document {name}" for name in found["corpus"]["id"]]
    found["queries"]["image"] = [[], *([picture(n)] for n in range(1, 5)), [picture(5), picture(4)]]
    return found


class Model:
    def __init__(self):
        self.asked, self.down = [], True

    async def __call__(self, path, body):
        text = json.dumps(body["messages"])
        self.asked.append(text)
        if "What kind of picture" in text:
            return chat("It shows people. <image_type>photo</image_type>")
        if "readability" in text:
            marks = {"readability": 5, "clarity": 4, "evidence_usefulness": 3, "evidence_sufficiency": 3}
            return chat("".join(f"<{name}>{value}</{name}>" for name, value in marks.items()))
        if "question 1" in text:
            return Answer({"error": {"code": "content_filter", "message": "the content filter"}}, 400)
        if "question 2" in text:
            return chat("<essentiality>decisive</essentiality>")
        if "question 3" in text and self.down:
            return Answer({"error": {"message": "overloaded"}}, 500)
        return chat(f"So. <essentiality>{'Essential' if 'question 4' in text else 'helpful'}</essentiality>")


@pytest.fixture
def model():
    found = Model()
    with LocalServer(found) as server:
        found.config = ModelConfig("labeller", server.url, max_retries=0)
        yield found


@pytest.mark.slow
def test_labels_become_slices_of_every_evaluation(content, model, tmp_path):
    data = write_tables(tmp_path / "set", content)
    before = with_content(load_set(data))
    options = LabelOptions(set=data, model=model.config)
    with pytest.raises(UserError):  # an open call; the rest is stored
        label(options)
    assert load_set(data).report_by == ()
    model.down, num = False, len(model.asked)
    numbers = label(options)
    repeated = [text for text in model.asked[num:] if "How much do the pictures" in text]
    assert len(repeated) == 1
    assert dict(numbers["essentiality"]) == {"no picture": 1, "unlabelled": 2, "helpful": 2, "essential": 1}
    assert dict(numbers["image_type"]) == {"no picture": 1, "photo": 5}
    assert dict(numbers["clarity"]) == {"4": 6}
    found = with_content(load_set(data))
    assert found.content == before.content  # rankings of the set stay valid
    assert found.columns["essentiality"] == [
        "no picture", "unlabelled", "unlabelled", "helpful", "essential", "helpful",
    ]  # fmt: skip
    num = len(model.asked)
    label(options)
    assert len(model.asked) == num
    (quality,) = [text for text in model.asked if "readability" in text and "question 2" in text]
    assert quality.count("Document ") == len(found.positives[2][0])
    (done,) = run(
        RunOptions(checkpoint="fake", set=data, out=tmp_path / "eval", report=False), loader(FakeEncoder())
    )
    results = json.loads((done / "results.json").read_text())
    assert results["by_essentiality"].keys() == {"no picture", "unlabelled", "helpful", "essential"}
    assert {"by_image_type", "by_readability", "by_evidence_sufficiency"} <= results.keys()


def test_labels_of_another_origin_are_not_replaced(content, model, tmp_path):
    model.down = False
    content["queries"]["essentiality"] = ["mine"] * 6
    data = write_tables(tmp_path / "set", content)
    with pytest.raises(UserError):
        label(LabelOptions(set=data, model=model.config))
    assert model.asked == []
    del content["queries"]["essentiality"]
    data = write_tables(tmp_path / "set", content)
    label(LabelOptions(set=data, model=model.config, kinds=("image_type",)))
    other = ModelConfig("other", model.config.base_url)
    with pytest.raises(UserError):
        label(LabelOptions(set=data, model=other, kinds=("image_type",)))
    label(LabelOptions(set=data, model=other, kinds=("image_type",), overwrite=True))
    assert load_set(data).meta["labels"] == {"image_type": "other"}


def test_every_member_of_a_suite_is_labelled(content, model, tmp_path):
    for name in ("a", "b"):
        write_tables(tmp_path / name, content)
    write_suite(tmp_path, name="two", benchmark="generic", column="domain", members={"a": {}, "b": {}})
    numbers = label(LabelOptions(set=tmp_path, model=model.config, kinds=("image_type",)))
    assert dict(numbers["image_type"]) == {"no picture": 2, "photo": 10}
    assert len(model.asked) == 5  # equal pictures once
    assert load_set(tmp_path / "b").report_by == ("image_type",)
