"""Flickr30K and COCO in Karpathy's split: captions find their picture, and pictures one of their five captions.

Layout: ``dataset_flickr30k.json`` and ``dataset_coco.json`` (Karpathy and Fei-Fei, "Deep visual-semantic alignments"), whose
``images`` have ``split``, ``imgid``, ``filename``, COCO's also ``filepath``, and ``sentences`` with ``sentid`` and ``raw``; and the
pictures. The split ``test`` is used: 1,000 and 5,000 pictures.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks.registry import Benchmark, register_benchmark
from eval.benchmarks.release_files import PictureOptions, Pictures, ReleaseError, chosen, existing
from eval.scoring.protocol import Protocol
from eval.sets.write_set import Candidate, Query
from rge.common.mmeb_prompts import RGE_QUERY

DATASETS = ("flickr30k", "coco")
INSTRUCTIONS = {
    "t2i": RGE_QUERY["MSCOCO_t2i"][1].strip(),
    "i2t": RGE_QUERY["MSCOCO_i2t"][1].strip(),
}
"""Direction -> instruction of the released RGE evaluation for MMEB's set of the same kind; the paper names none."""


@dataclass
class KarpathyOptions(PictureOptions):
    """Make a suite of text-to-image and image-to-text retrieval from Flickr30K and COCO."""

    sets: tuple[str, ...] = ("all",)
    """flickr30k, coco, or both, the default."""
    images: Path | None = None
    """Folder that the pictures' paths are relative to; null: src/images, src/flickr30k-images, src."""


def import_karpathy(options: KarpathyOptions) -> list[str]:
    """Read the test splits and write a suite of two sets each; returns their names."""
    names = chosen("sets", options.sets, DATASETS)
    pictures = Pictures(
        options.images, options.src / "images", options.src / "flickr30k-images", options.src,
        hint="pass images=DIR, the folder of the pictures",
    )  # fmt: skip
    images = {name: _test_images(options.src / f"dataset_{name}.json") for name in names}
    members = {f"{name}_{way}": {"direction": way} for name in names for way in INSTRUCTIONS}
    return options.write_members(
        members,
        lambda member: _import_one(member, images[member.rpartition("_")[0]], pictures, options),
        name="Flickr30K and COCO" if len(names) == len(DATASETS) else names[0],
        benchmark="karpathy",
        column="set",
    )


def _test_images(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(
            existing(path, "Karpathy's splits, with their JSON files").read_text(encoding="utf-8")
        )
        images = [image for image in content["images"] if image["split"] == "test"]
        for image in images:
            image["path"] = str(Path(image.get("filepath") or "", image["filename"]))
            image["captions"] = {f"t{one['sentid']}": str(one["raw"]).strip() for one in image["sentences"]}
            image["id"] = f"i{image['imgid']}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(f"it is not Karpathy's JSON: {type(error).__name__}: {error}", path) from None
    if not images:
        raise ReleaseError("it has no image of the split test", path)
    return images


def _import_one(
    member: str, images: Sequence[dict[str, Any]], pictures: Pictures, options: KarpathyOptions
) -> None:
    name, _, way = member.rpartition("_")

    def picture(image: dict[str, Any]) -> bytes | Path:
        return pictures.find(image["path"], (name, f"image {image['imgid']}"))

    pairs = [(image["id"], caption) for image in images for caption in image["captions"]]
    texts = {caption: text for image in images for caption, text in image["captions"].items()}
    instruction = INSTRUCTIONS[way]
    if way == "t2i":
        queries = [Query(one, texts[one], group=image, instruction=instruction) for image, one in pairs]
        corpus = (Candidate(image["id"], image=picture(image)) for image in images)
        qrels = [(caption, image, 1) for image, caption in pairs]
    else:
        queries = [Query(one["id"], images=(picture(one),), instruction=instruction) for one in images]
        corpus = (Candidate(caption, text) for caption, text in texts.items())
        qrels = [(image, caption, 1) for image, caption in pairs]
    options.write(
        member,
        meta={
            "name": member,
            "benchmark": "karpathy",
            "source": f"{name}, Karpathy's split test, imported by eval.benchmarks.releases.karpathy",
        },
        queries=queries,
        corpus=corpus,
        qrels=qrels,
    )


PROTOCOLS = (
    Protocol("karpathy", "clean", ("hit@1", "hit@5", "hit@10"), (
        "hit@k: whether a right answer is among the first k, called R@k in the literature",
    )),
    Protocol("karpathy", "official", ("hit@1", "hit@5", "hit@10"), (
        "hit@k: whether a right answer is among the first k, called R@k in the literature; the paper names no other rule",
    )),
)  # fmt: skip
register_benchmark(Benchmark("karpathy", import_karpathy, PROTOCOLS, Path(__file__).with_name("published")))
