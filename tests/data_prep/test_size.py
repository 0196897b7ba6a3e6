"""What lets the pipeline grow: shards that do not wait for each other, blocks of bounded memory, libraries of any kind."""

import asyncio
from pathlib import Path

import pytest

from data_prep.rmir import oracle, prompts
from data_prep.rmir.config import (
    EncoderConfig,
    GenerateConfig,
    LibraryConfig,
    OracleConfig,
    RetrieveConfig,
    RmirConfig,
)
from data_prep.rmir.main import run_stages
from data_prep.rmir.run import STAGES, Run, fingerprint
from rge.calls.local_server import LocalServer
from rge.calls.model_config import ModelConfig


def config_of(out: Path, library: Path | str, url: str = "http://host/v1") -> RmirConfig:
    models = {name: ModelConfig(name=name, base_url=url, concurrency=8) for name in ("writer", "judge")}
    config = RmirConfig(
        out=str(out),
        library=LibraryConfig(path=str(library)),
        image_encoder=EncoderConfig("pixels", None),
        caption_encoder=EncoderConfig("hashing", None),
        models=models,
        generate=GenerateConfig(max_inputs=6),
        retrieve=RetrieveConfig(by_image=4, by_caption=3),
    )
    config.seed.clusters, config.seed.per_cluster = 12, 30
    return config


def one_family(path: Path) -> None:
    oracle.write_library(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line for line in lines if line.startswith("noto/"))]) + "\n")


# ------------------------------------------------------------------------------------------------- shards and fingerprints


def test_no_shard_waits_for_the_one_before(tmp_path):
    """The first question's answer comes only when every later shard is written."""
    one_family(tmp_path / "library.csv")
    answers = oracle.Oracle(OracleConfig(transient=0, malformed=0))
    first: list[str] = []
    written_before: list[str] = []
    folder = tmp_path / "out" / "generate" / "queries"

    async def answer(path, body):
        if not first:
            first.append(str(body))
            for _ in range(500):
                written_before[:] = sorted(part.name for part in folder.glob("part-*.parquet"))
                if len(written_before) == 2:
                    break
                await asyncio.sleep(0.01)
        return await answers(path, body)

    with LocalServer(answer) as server:
        config = config_of(tmp_path / "out", tmp_path / "library.csv", server.url)
        config.queries_per_shard = 2
        config.models["writer"].concurrency = 2
        run = Run(config, progress=False)
        run_stages(run, ("seed", "generate"))
        run.close()
    assert written_before == ["part-00001.parquet", "part-00002.parquet"]
    assert len(list(folder.glob("part-*.parquet"))) == 3


@pytest.mark.parametrize("stage", ["generate", "filter", "judge"])
def test_another_wording_redoes_its_stage_and_what_follows(tmp_path, monkeypatch, stage):
    config = config_of(tmp_path, tmp_path)
    before = {name: fingerprint(config, name) for name in STAGES}
    monkeypatch.setitem(prompts.WORDING, stage, [*prompts.WORDING[stage], "Think twice."])
    redone = [name for name in STAGES if fingerprint(config, name) != before[name]]
    assert redone == list(STAGES[STAGES.index(stage) :])
