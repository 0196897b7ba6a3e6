"""Time and memory of `data_prep rmir`, stage by stage, on made-up pictures with a made-up model.

    python scripts/bench.py data_prep pictures=10000 out=runs/bench_data_prep/10000
    python scripts/bench.py data_prep table=runs/bench_data_prep paper=1000000

The library is Parquet files of small pictures with captions. The model is a local server in its own process that reads off each
picture what it shows and answers in a millisecond, so that the pipeline is what is measured. An interrupted run continues;
interrupted stages are marked. The second command prints the runs as tables.
"""

import asyncio
import base64
import binascii
import io
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benches.harness import Rows, reset_peak, resident, show
from data_prep.rmir import prompts
from data_prep.rmir.config import CATEGORIES, EncoderConfig, GenerateConfig, LibraryConfig, RmirConfig
from data_prep.rmir.run import Run, stages_of
from data_prep.rmir.stages import WORK
from data_prep.rmir.wording import wording
from rge.calls.local_server import Answer, LocalServer, chat
from rge.calls.model_config import ModelConfig
from rge.common.errors import UserError
from rge.common.files import read_json, replacing, write_json

PICTURES_A_FILE, A_CONCEPT, SIDE_PX = 10_000, 10, 48
A_CLUSTER, DRAWN, A_QUESTION = 100, 10, 400
"""Pictures of the library to a cluster, drawn of each, and to an input that is asked about."""
BAD = 3
"""Of ten questions."""
MEASURED = "measured.json"
TOTAL = {"seconds": "sum", "cpu_s": "sum", "calls": "sum", "peak_mb": "max"}


@dataclass
class Options:
    """Run the pipeline over made-up pictures, or show what such runs took."""

    pictures: int = 1000
    """Pictures of the library; a cluster for every 100, an input for every 400."""
    out: str = "runs/bench_data_prep/1000"
    """Folder of the run, named by its size; finished stages are skipped."""
    concurrency: int = 64
    """Concurrent calls to each of the two models."""
    table: str | None = None
    """Show the runs in this folder instead."""
    paper: int = 1_000_000
    """With ``table``: size to extrapolate to."""


def picture(number: int, concept: int) -> bytes:
    """A picture whose first pixel names its concept, and whose others are its own."""
    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    pixels = small.repeat(SIDE_PX // 6, axis=0).repeat(SIDE_PX // 6, axis=1)
    pixels[0, 0] = list(concept.to_bytes(3, "big"))
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def caption(concept: int) -> str:
    """A unique set of words."""
    mixed = concept * 2654435761 % 2**32  # so that neighbours share no words
    digits = [mixed >> shift & 15 for shift in range(0, 32, 4)]
    return " ".join(
        f"{'bcdfghklmnprstvz'[digit]}{'aeiou'[digit % 5]}{place}x" for place, digit in enumerate(digits)
    )


def answer_to(concept: int, kind: int, num_concepts: int) -> int:
    """The concept that answers a question of a kind about a concept."""
    return (concept * 7 + 13 * kind + 5) % num_concepts


def write_library(folder: Path, num: int) -> None:
    """Parquet files of `PICTURES_A_FILE` pictures each."""
    concepts = max(1, num // A_CONCEPT)
    for first in range(0, num, PICTURES_A_FILE):
        path, numbers = (
            folder / f"{first // PICTURES_A_FILE:05d}.parquet",
            range(first, num)[:PICTURES_A_FILE],
        )
        if path.is_file():
            continue
        pictures = [picture(number, number % concepts) for number in numbers]
        columns = {
            "id": [f"picture {number}" for number in numbers],
            "image": pa.array(pictures, pa.binary()),
            "caption": [caption(number % concepts) for number in numbers],
        }
        with replacing(path) as waiting:
            pq.write_table(pa.table(columns), waiting, compression="none")


class World:
    """An OpenAI-compatible model that knows everything."""

    def __init__(self, num_concepts: int):
        self.num = num_concepts

    async def __call__(self, path: str, body: dict) -> Answer:
        """Answer a chat request."""
        parts = body["messages"][-1]["content"]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        shown = [self._concept(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        await asyncio.sleep(0.001)
        if text.startswith(prompts.GENERATE_TASK):
            return chat(self._generate(shown[0], parts[-1]["image_url"]["url"]))
        right = answer_to(shown[0], int(_last(text, "query").split()[2]), self.num)
        if text.startswith(prompts.FILTER_TASK):
            valid = "yes" if _last(text, "target_desc") == caption(right) else "no"
            return chat(
                f"<input_desc>{shown[0]}</input_desc>\n<reasoning>r</reasoning>\n<is_valid>{valid}</is_valid>"
            )
        return chat(
            f"<target_desc>t</target_desc>\n<reasoning>r</reasoning>\n<consistent>{shown[1] == right}</consistent>"
        )

    def _generate(self, concept: int, url: str) -> str:
        number = binascii.crc32(url.encode())
        blocks = ["<input_desc>a picture</input_desc>"]
        for kind, code in enumerate(wording().codes[name] for name in CATEGORIES):
            target = answer_to(concept, kind if (number + kind) % 10 >= BAD else kind + 1, self.num)
            blocks.append(
                f"<Example_{code}_1>\n<query>What of {kind} follows?</query>\n<target_desc>{caption(target)}</target_desc>\n"
                f"<reasoning>it follows</reasoning>\n</Example_{code}_1>"
            )
        return "\n".join(blocks)

    def _concept(self, url: str) -> int:
        data = base64.b64decode(url.partition("base64,")[2])
        red, green, blue = Image.open(io.BytesIO(data)).getpixel((0, 0))  # type: ignore[misc]
        return (red << 16) + (green << 8) + blue


def _last(text: str, name: str) -> str:
    return text.rpartition(f"<{name}>")[2].partition(f"</{name}>")[0]


def _serve(num_concepts: int, ready: Connection) -> None:
    with LocalServer(World(num_concepts)) as server:
        ready.send(server.url)
        ready.poll(None)


@contextmanager
def served(num_concepts: int) -> Iterator[str]:
    """Address of the model, in a process that ends with ours."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(num_concepts, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def measure(options: Options) -> dict:
    """Run all stages in this process, recording time and peak memory of each; or show such runs."""
    if options.table is not None:
        return show(table(Path(options.table), options.paper))
    out = Path(options.out)
    write_library(out / "library", options.pictures)
    with served(max(1, options.pictures // A_CONCEPT)) as url:
        models = {
            name: ModelConfig(name=name, base_url=url, concurrency=options.concurrency)
            for name in ("writer", "judge")
        }
        config = RmirConfig(
            out=str(out / "run"),
            library=LibraryConfig(path=str(out / "library")),
            image_encoder=EncoderConfig("pixels", None),
            caption_encoder=EncoderConfig("hashing", None),
            models=models,
            generate=GenerateConfig(max_inputs=max(1, options.pictures // A_QUESTION)),
        )
        config.seed.clusters, config.seed.per_cluster = max(1, options.pictures // A_CLUSTER), DRAWN
        run = Run(config)
        found = read_json(out / MEASURED) or {"pictures": options.pictures, "stages": {}}
        for stage in stages_of(config):
            if run.done(stage) is not None and stage in found["stages"]:
                continue
            resumed = any(run.path(stage).rglob("part-*"))
            reset_peak()
            before = time.process_time()
            report = run.run(stage, WORK[stage])
            found["stages"][stage] = {
                "seconds": report["seconds"],
                "cpu_s": time.process_time() - before,
                "calls": report["calls"],
                "peak_mb": resident("VmHWM") / 2**20,
                "resumed": resumed,
                "counts": {key: value for key, value in report["counts"].items() if isinstance(value, int)},
            }
            write_json(out / MEASURED, found)
            print(stage, json.dumps(found["stages"][stage]), flush=True)
        run.close()
    return found


def table(folder: Path, paper: int) -> Rows:
    """The runs below a folder, smallest first, extrapolated from the last two.

    CPU time of a stage is assumed to grow by the power between its last two runs, at least linearly; memory linearly.
    """
    runs: list[Any] = sorted(map(read_json, folder.glob(f"*/{MEASURED}")), key=lambda run: run["pictures"])
    stages = stages_of(RmirConfig())
    runs = [run for run in runs if set(run["stages"]) == set(stages)]
    if len(runs) < 2:
        raise UserError(
            f"two finished runs are needed to tell how time grows; there are {len(runs)}", folder, key="table"
        )
    frames = []
    for run in runs:
        frame = pd.DataFrame(run["stages"]).T
        print(
            f"{run['pictures']:,} pictures; resumed: {', '.join(frame.index[frame['resumed'].astype(bool)]) or 'none'}"
        )
        frame = frame.loc[list(stages), list(TOTAL)].astype(float)
        frames.append(pd.concat([frame, frame.agg(TOTAL).to_frame("all").T]))
    sizes, (before, last) = [run["pictures"] for run in runs], frames[-2:]
    # Below a hundredth of a second, growth means nothing.
    growth = last.clip(lower=0.01) / before.clip(lower=0.01)
    power = (np.log(growth["cpu_s"]) / math.log(sizes[-1] / sizes[-2])).clip(lower=1)
    slope = ((last["peak_mb"] - before["peak_mb"]) / (sizes[-1] - sizes[-2])).clip(lower=0)
    hours = last["cpu_s"] * (paper / sizes[-1]) ** power / 3600
    memory_gb = (last["peak_mb"] + slope * (paper - sizes[-1])) / 1024
    computed = pd.DataFrame({"CPU h": hours, "GB": memory_gb})
    computed.loc["all"] = computed.drop("all").agg({"CPU h": "sum", "GB": "max"})
    measured = {f"{size:,}: ": frame for size, frame in zip(sizes, frames, strict=True)}
    parts = measured | {"growth: ": growth[["seconds", "cpu_s"]], f"{paper:,}: ": computed}
    return pd.concat([part.add_prefix(name) for name, part in parts.items()], axis=1).to_dict(orient="index")
