"""A small run of `data_prep rmir`: one drawing of each concept of the shipped library, thumbnails and hashing as encoders."""

from pathlib import Path

from data_prep.rmir import oracle
from data_prep.rmir.config import EncoderConfig, GenerateConfig, LibraryConfig, RetrieveConfig, RmirConfig
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
    """A library of one drawing a concept, so that few pictures hold many answers."""
    oracle.write_library(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line for line in lines if line.startswith("noto/"))]) + "\n")
