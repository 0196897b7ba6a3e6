"""Prompts as files: the shipped ones, and those of a user."""

import re
from pathlib import Path

import numpy as np
import pytest
from faults import error_about
from paths import ROOT
from PIL import Image

from data_prep.rmir.config import (
    CaptionConfig,
    EncoderConfig,
    GenerateConfig,
    JudgeConfig,
    JudgeSpec,
    LibraryConfig,
    RetrieveConfig,
    RmirConfig,
    check,
)
from data_prep.rmir.main import run_stages
from data_prep.rmir.results import report
from data_prep.rmir.run import STAGES, Run, fingerprints, identities
from data_prep.rmir.wording import SHIPPED, wording
from rge.calls.local_server import LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError

PAGE = ROOT / "docs" / "data_prep.md"


def config_of(folder: Path, url: str, **more) -> RmirConfig:
    return RmirConfig(
        out=str(folder / "out"),
        library=LibraryConfig(path=str(folder / "library")),
        image_encoder=EncoderConfig("pixels", None),
        caption_encoder=EncoderConfig("hashing", None),
        models={"writer": ModelConfig(name="m", base_url=url)},
        judge=JudgeConfig([JudgeSpec("writer", 1)]),
        retrieve=RetrieveConfig(by_image=2, by_caption=2),
        **more,
    )


def test_the_kind_of_reasoning_of_the_docs_is_asked_for(tmp_path):
    block = re.search(
        r"`my_prompts/kinds.md`:\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S
    )[1]
    (tmp_path / "my prompts").mkdir()
    (tmp_path / "my prompts" / "kinds.md").write_text(block, encoding="utf-8-sig")
    (tmp_path / "library").mkdir()
    rows = ["id,image,caption"]
    for number in range(6):
        noise = np.random.default_rng(number).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "library" / f"{number}.png")
        rows.append(f"{number},{number}.png,wool {number}")
    (tmp_path / "library" / "library.csv").write_text("\n".join(rows))
    seen = set()

    async def answer(path, body):
        text = body["messages"][-1]["content"][0]["text"]
        task = text.partition("\n")[0]
        assert "a sheep on a meadow" in text
        assert "FUNC" not in text
        seen.add(task)
        if "write questions" in task:
            assert "one block for each of MATE:" in text
            return chat(
                "<input_desc>i</input_desc><Example_MATE_1><query>What is knitted from this?</query>"
                "<target_desc>wool</target_desc><reasoning>r</reasoning></Example_MATE_1>"
            )
        if "check" in task:
            return chat("<is_valid>yes</is_valid>")
        return chat("<consistent>True</consistent>")

    with LocalServer(answer) as server:
        config = config_of(
            tmp_path,
            server.url,
            prompts=str(tmp_path / "my prompts"),
            generate=GenerateConfig(categories=["material"]),
        )
        config.library.path = str(tmp_path / "library" / "library.csv")
        config.seed.clusters = 3
        check(config)
        run = Run(config, progress=False)
        run_stages(run, STAGES)
        queries = run.rows("generate", "queries")
        report.write(run)
        run.close()
    card = (tmp_path / "out" / "dataset" / "README.md").read_text()
    assert "except for those that this run replaced: kinds.md.\n" in card
    assert not any(setting in card for setting in ("memory_mb", "shard_size", str(tmp_path)))
    assert len(seen) == 3
    assert [query["query_id"] for query in queries] == [f"{number}-MATE-1" for number in range(6)]
    assert {query["category"] for query in queries} == {"material"}


@pytest.mark.parametrize(
    ("name", "redone"),
    [
        ("kinds.md", "generate filter retrieve judge"),
        ("filter.md", "filter retrieve judge"),
        ("judge.md", "judge"),
        ("caption.md", "caption retrieve judge"),
        ("content_policy.md", "generate filter retrieve judge"),
    ],
)
def test_another_wording_redoes_the_stages_that_say_it(tmp_path, name, redone):
    config = config_of(tmp_path, "http://host/v1", caption=CaptionConfig("writer"))
    before = fingerprints(config, identities(config))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / name).write_text(
        (SHIPPED / name).read_text().replace("picture", "photo") + "\nMind this.\n"
    )
    config.prompts = str(tmp_path / "prompts")
    changed = [stage for stage in STAGES if fingerprints(config, identities(config))[stage] != before[stage]]
    assert changed == [*redone.split(), "keep", "pool", "split", "audit"]


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({}, ("prompts",)),
        ({"kind.md": "x"}, ("kind.md", "unknown")),
        ({"judge.md": "Answer in exactly this format:"}, ("judge.md", "lacking")),
        ({"kinds.md": "no line of that kind"}, ("kinds.md", "empty")),
        ({"kinds.md": "MADE (material): x\nMADE (method): y"}, ("kinds.md", "MADE")),
        ({"kinds.md": "MADE (made): x\nHOW (made): y"}, ("kinds.md", "made")),
        ({"constraints.md": b"\xff\xfe\xff"}, ("constraints.md", "unreadable")),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, files, fields):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with error_about(UserError, *fields):
        wording(str(tmp_path))
    with error_about(UserError, "prompts", "nowhere"):
        wording(str(tmp_path / "nowhere"))


def test_a_kind_that_no_file_names_is_refused(tmp_path):
    config = config_of(tmp_path, "http://host/v1", generate=GenerateConfig(categories=["material"]))
    with error_about(UserError, ("choice", "generate.categories")):
        check(config)


def test_braces_of_a_users_file_are_left_alone(tmp_path):
    (tmp_path / "constraints.md").write_text("Mind {this} and {0}.")
    found = wording(str(tmp_path))
    assert "Mind {this} and {0}." in found.asked(["causal"], content_policy=False)
    assert "Mind {this} and {0}." in found.filter
