"""Write four small data sets in the file layouts of the benchmarks' releases, and one of one's own, from the shipped pictures.

    python tests/helpers/small_releases.py [out=runs/small] [num=24]

``rmir``, ``pinpoint``, ``mmeb`` and ``mmbright`` below ``out`` are what `rge eval import` reads; docs/evaluation.md
continues from there. ``own`` has photos and a workbook with five accidents, see docs/own_data.md. The questions are the demo's test
questions, so figures on these sets say nothing about a benchmark: they are for trying the commands, and for seeing a file layout
before fetching the real one.
"""

import datetime
import hashlib
import io
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
from PIL import Image

from eval.sets.retrieval_set import load_set
from rge.common.commands import start
from rge.common.images import picture_bytes
from rge.common.options import parse_options

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data_prep" / "demo" / "data" / "test"
CATEGORIES = ("functional", "temporal", "causal")
NAMES = ("concept", "name", "label", "title")
"""Columns of the demo's corpus that may say what a picture shows."""
ASKED = "Represent the given image with the following question:"


@dataclass
class Options:
    """Where, and how much."""

    out: Path = Path("runs/small")
    """Folder of the data sets."""
    num: int = 24
    """Questions of each."""


@dataclass
class Demo:
    """The demo's test set: pictures as JPEG bytes by a 16-digit id, and questions with their right and wrong answers."""

    pictures: dict[str, bytes]
    names: dict[str, str]
    questions: list[dict[str, Any]]


def main(words: list[str]) -> None:
    """Write them all and say where."""
    options = parse_options(Options, words, "python tests/helpers/small_releases.py")
    demo = read(options.num)
    for write in (rmir, pinpoint, mmeb, mmbright, own):
        write(demo, options.out / write.__name__)
        print(options.out / write.__name__)  # noqa: T201


def read(num: int) -> Demo:
    """The first ``num`` questions that have a wrong answer judged, and every candidate."""
    wanted = load_set(DATA)
    key = {name: hashlib.sha256(name.encode()).hexdigest()[:16] for name in wanted.corpus_ids}
    pictures = {key[item.id]: jpeg(picture_bytes(item.pictures[0])) for item in wanted.corpus_items()}
    about = pd.read_parquet(DATA / "corpus.parquet").set_index("id")
    shown = next((about[name] for name in NAMES if name in about), about.index.to_series())
    names = {key[name]: str(text).replace("_", " ") for name, text in shown.items()}
    questions: list[dict[str, Any]] = []
    for row, item in enumerate(wanted.queries):
        right = [wanted.corpus_ids[one] for one in wanted.positives[row][0]]
        wrong = [wanted.corpus_ids[one] for one in wanted.negatives[row]] if wanted.negatives else []
        wrong = [name for name in wrong if name not in right]
        if not wrong or len(questions) == num:
            continue
        data = picture_bytes(item.pictures[0])
        own = hashlib.sha256(data).hexdigest()[:16]
        pictures.setdefault(own, jpeg(data))
        category = wanted.columns["category"][row]
        questions.append(
            {
                "id": f"q{len(questions):03d}",
                "text": item.text,
                "picture": own,
                "category": category if category in CATEGORIES else CATEGORIES[len(questions) % 3],
                "right": [key[name] for name in right],
                "wrong": [key[name] for name in wrong],
            }
        )
    return Demo(pictures, names, questions)


def jpeg(data: bytes) -> bytes:
    """The picture on white, as the releases have photographs."""
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    out = io.BytesIO()
    ground.convert("RGB").save(out, "JPEG", quality=90)
    return out.getvalue()


def rmir(demo: Demo, out: Path) -> None:
    """One row a query with a list of targets; pictures by their Open Images id."""
    folder = out / "images" / "open_images" / "test"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in demo.pictures.items():
        (folder / f"{name}.jpg").write_bytes(data)
    rows = [
        {"query_id": one["id"], "input_image": one["picture"], "query": one["text"], "type": one["category"],
         "target_images": one["right"]}
        for one in demo.questions
    ]  # fmt: skip
    lines(out / "test.jsonl", rows)
    lines(out / "corpus.jsonl", [{"id": name} for name in demo.pictures])


def pinpoint(demo: Demo, out: Path) -> None:
    """The repository's table, index and pictures; every second question is a paraphrase of the one before."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    for name, data in demo.pictures.items():
        (out / "images" / f"{name}.jpg").write_bytes(data)
    (out / "index_signatures.txt").write_text("\n".join(demo.pictures) + "\n")
    rows = []
    for number, one in enumerate(demo.questions):
        asked = demo.questions[number - number % 2]
        rows.append(
            {
                "query_id": f"{number + 1:05d}",
                "instruction": one["text"] if asked is one else f"Please show me: {asked['text']}",
                "query_image_signature": asked["picture"],
                "query_image_signature2": "None",
                "positive_candidates": asked["right"],
                "negative_candidates": [*asked["wrong"], "None"],
                "is_single": True,
            }
        )
    pd.DataFrame(rows).to_parquet(out / "pinpoint_licensed.parquet")


def mmeb(demo: Demo, out: Path) -> None:
    """Three of the 36 sets: the answer as a word, the answer as a picture, the picture's own name."""
    sets: dict[str, list[dict[str, Any]]] = {"OK-VQA": [], "CIRR": [], "ImageNet-1K": []}
    for one in demo.questions:
        order = [one["right"][0], *one["wrong"]]
        shown = {"qry_img_path": f"{one['picture']}.jpg"}
        words = list(dict.fromkeys(demo.names[name] for name in order))
        sets["OK-VQA"].append(
            {
                "qry_text": f"<|image_1|>\n{ASKED} {one['text']}\n",
                **shown,
                "tgt_text": words,
                "tgt_img_path": [""] * len(words),
            }
        )
        sets["CIRR"].append(
            {"qry_text": f"<|image_1|>\nGiven an image, find a similar everyday image with the described changes: {one['text']}\n",
             **shown, "tgt_text": ["<|image_1|>\nRepresent the given image.\n"] * len(order),
             "tgt_img_path": [f"{name}.jpg" for name in order]}
        )  # fmt: skip
    labels = list(dict.fromkeys(demo.names[one["right"][0]] for one in demo.questions))
    for one in demo.questions:
        name = one["right"][0]
        words = [demo.names[name], *(label for label in labels if label != demo.names[name])]
        sets["ImageNet-1K"].append(
            {"qry_text": "<|image_1|>\nRepresent the given image for classification\n", "qry_img_path": f"{name}.jpg",
             "tgt_text": words, "tgt_img_path": [""] * len(words)}
        )  # fmt: skip
    (out / "images").mkdir(parents=True, exist_ok=True)
    for name, data in demo.pictures.items():
        (out / "images" / f"{name}.jpg").write_bytes(data)
    for name, rows in sets.items():
        (out / name).mkdir(exist_ok=True)
        pd.DataFrame(rows).to_parquet(out / name / "test-00000-of-00001.parquet")


def mmbright(demo: Demo, out: Path) -> None:
    """Two domains; a document says what its page's picture shows."""
    domains = ("biology", "law")
    for place, domain in enumerate(domains):
        asked = demo.questions[place :: len(domains)]
        used = list(dict.fromkeys(name for one in asked for name in [*one["right"], *one["wrong"]]))
        doc = {name: f"{domain}/{name[:8]}_{number}.txt" for number, name in enumerate(used)}
        page = {name: f"{domain}/{domain}_{name[:8]}_0001/image_1.jpg" for name in used}
        table(
            out,
            "documents",
            domain,
            [{"id": doc[n], "content": f"This page is about: {demo.names[n]}."} for n in used],
        )
        rows = [
            {"id": one["id"], "query": one["text"], "gold_ids": [doc[n] for n in one["right"]],
             "negative_ids": [doc[n] for n in one["wrong"]],
             "image_paths": [f"{one['id']}.jpg"]}
            for one in asked
        ]  # fmt: skip
        table(out, "examples", domain, rows)
        judged = [
            {"positive_images": [{"image_path": page[n]} for n in one["right"]],
             "negative_images": [{"image_path": page[n]} for n in one["wrong"]]}
            for one in asked
        ]  # fmt: skip
        table(
            out, "examples_multimodal", domain, [row | more for row, more in zip(rows, judged, strict=True)]
        )
        table(out, "document_images", domain, [{"path": page[n], "bytes": demo.pictures[n]} for n in used])
        shown = [{"path": f"{one['id']}.jpg", "bytes": demo.pictures[one["picture"]]} for one in asked]
        table(out, "examples_images", domain, shown)


def own(demo: Demo, out: Path) -> None:
    """Photos under names that people give; queries.xlsx with five accidents; corrected.xlsx with the two corrected that only its owner can.

    They are an empty column, a name in other case, an accent that the file system has in two parts (a Mac's), a date that was made of
    a name, and a name that is not there. Beside the photos lies a file that is none.
    """
    used = dict.fromkeys(
        key for one in demo.questions for key in (one["picture"], *one["right"], *one["wrong"])
    )
    names = {key: f"{demo.names.get(key, 'thing')} {number}.jpg" for number, key in enumerate(used, 1)}
    accent, dated = list(dict.fromkeys(one["right"][0] for one in demo.questions))[:2]
    names[accent], names[dated] = "Schl\u00fcssel.jpg", "3-4.jpg"
    (out / "photos").mkdir(parents=True, exist_ok=True)
    for key, name in names.items():
        (out / "photos" / unicodedata.normalize("NFD", name)).write_bytes(demo.pictures[key])
    (out / "photos" / "notes.jpg").write_text("not a picture")
    for name in ("queries", "corrected"):
        book, spoilt = openpyxl.Workbook(), name == "queries"
        book.active.append(["Question", None, "Picture", "Right answers"])
        asked = next(number for number, one in enumerate(demo.questions) if one["right"][0] == dated)
        for number, one in enumerate(demo.questions):
            shown, right = names[one["picture"]], " | ".join(names[key] for key in one["right"])
            shown = shown.upper() if number == 0 else shown
            book.active.append(
                [
                    one["text"],
                    None,
                    "padlok.jpg" if spoilt and number == len(demo.questions) - 1 else shown,
                    datetime.date(2024, 4, 3) if spoilt and number == asked else right,
                ]
            )
        book.save(out / f"{name}.xlsx")


def table(out: Path, config: str, domain: str, rows: list[dict[str, Any]]) -> None:
    """One Parquet file of a configuration."""
    (out / config).mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(out / config / f"{domain}.parquet")


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    start(main)
