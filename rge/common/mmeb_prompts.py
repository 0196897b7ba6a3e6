"""MMEB's data sets, and their wordings in the released RGE evaluation.

The training and evaluation files of MMEB-V1 name the same sets and use the same wordings, so data preparation and evaluation share
this file.
"""

import re

CLASSIFICATION, VQA, RETRIEVAL, GROUNDING = "classification", "VQA", "retrieval", "grounding"
_TASKS = {
    CLASSIFICATION: (
        "ImageNet-1K N24News HatefulMemes VOC2007 SUN397",
        "Place365 ImageNet-A ImageNet-R ObjectNet Country211",
    ),
    VQA: ("OK-VQA A-OKVQA DocVQA InfographicsVQA ChartQA Visual7W", "ScienceQA VizWiz GQA TextVQA"),
    RETRIEVAL: (
        "VisDial CIRR VisualNews_t2i VisualNews_i2t MSCOCO_t2i MSCOCO_i2t NIGHTS WebQA",
        "FashionIQ Wiki-SS-NQ OVEN EDIS",
    ),
    GROUNDING: ("MSCOCO", "RefCOCO RefCOCO-Matching Visual7W-Pointing"),
}
SETS: dict[str, dict[str, str]] = {
    name: {"meta_task": task, "distribution": distribution}
    for task, halves in _TASKS.items()
    for distribution, names in zip(("IND", "OOD"), halves, strict=True)
    for name in names.split()
}
"""The 36 sets with their meta-task, and whether MMEB-train holds their training split (IND) or not (OOD)."""
TRAINING_TASKS: dict[str, str] = {
    name: task
    for task, names in {
        "classification": _TASKS[CLASSIFICATION][0],
        "vqa": _TASKS[VQA][0],
        "text_to_image": "VisDial VisualNews_t2i MSCOCO_t2i WebQA",
        "image_to_text": "VisualNews_i2t MSCOCO_i2t",
        "image_to_image": "NIGHTS",
        "composed_retrieval": "CIRR",
        "grounding": _TASKS[GROUNDING][0],
    }.items()
    for name in names.split()
}
"""Tasks of the 20 sets with a training split, which determine the rationale's prompt; see `data_prep.rationales.prompts`."""
SOURCE = "mmeb/"
"""Prefix of the set's name in the ``source`` of training records."""
PLACEHOLDER = "<|image_1|>"
"""Marks the picture's place in MMEB's texts."""

# The wordings of the released RGE evaluation: (wording in MMEB, wording of RGE) for queries ...
_OBJECT = "Identify the category of the main object in the given image for classification"
_SCENE = (
    "Identify the scene shown in the image",
    "Identify the category of the scene in the given image for classification",
)
_CLASSIFY = ("Represent the given image for classification", _OBJECT)
_SHOWN = ("Identify the object shown in the image", _OBJECT)
_ASKED = "Represent the given image with the following question:"
_REFERRED = (
    "Select the portion of the image that follows the language expressions",
    "Describe and focus on the object in the image that follows the following language expressions",
)
RGE_QUERY: dict[str, tuple[str, str]] = {
    "ImageNet-1K": _CLASSIFY,
    "N24News": (
        "Represent the given news image with the following caption for domain classification",
        "Identify the category of the given news with the following caption for domain classification",
    ),
    "HatefulMemes": (
        "Represent the given image for binary classification to determine whether it constitutes hateful speech or not",
        "Determine whether the given image contains hateful speech or not for binary classification",
    ),
    "VOC2007": _SHOWN,
    "SUN397": _SCENE,
    "Place365": _SCENE,
    "ImageNet-A": _CLASSIFY,
    "ImageNet-R": _CLASSIFY,
    "ObjectNet": _SHOWN,
    "Country211": (
        "Identify the country depicted in the image",
        "Identify the category of the country depicted in the given image for classification",
    ),
    "ChartQA": (_ASKED, "Answer a chart-related question based on the given image:"),
    "DocVQA": (_ASKED, "Answer a document-related question based on the given image:"),
    "InfographicsVQA": (_ASKED, "Answer an infographic-related question based on the given image:"),
    "ScienceQA": (_ASKED, "Answer a science-related question based on the given image:"),
    **dict.fromkeys(
        ("OK-VQA", "A-OKVQA", "Visual7W"), (_ASKED, "Answer the question based on the given image:")
    ),
    **dict.fromkeys(("VizWiz", "GQA", "TextVQA"), (_ASKED, "Answer a question based on the given image:")),
    "VisDial": (
        "Represent the given dialogue about an image, which is used for image retrieval",
        "Describe and represent the following dialogue about an image for image retrieval",
    ),
    "CIRR": (
        "Given an image, find a similar everyday image with the described changes",
        "Describe and represent the above image and the following described changes about the given image for composed "
        "image retrieval",
    ),
    "VisualNews_t2i": (
        "Retrieve an image of this news caption",
        "Describe and represent the following news caption for news photo retrieval",
    ),
    "VisualNews_i2t": (
        "Find a caption for the news in the given photo",
        "Describe and represent the above image for news caption retrieval",
    ),
    "MSCOCO_t2i": (
        "Find me an everyday image that matches the given caption",
        "Describe and represent the following descriptive caption for everyday image retrieval",
    ),
    "MSCOCO_i2t": (
        "Find an image caption describing the given everyday image",
        "Describe and represent the above everyday image for a corresponding description retrieval",
    ),
    "NIGHTS": (
        "Find a day-to-day image that looks similar to the provided image",
        "Describe and represent the above day-to-day image for a similar image retrieval",
    ),
    "WebQA": (
        "Find a Wikipedia image that answers this question",
        "Answer and represent the following question for a Wikipedia image retrieval",
    ),
    "OVEN": (
        "Retrieve a Wikipedia image-description pair that provides evidence for the question of this image",
        "Describe and represent the above image and the following question for a Wikipedia image-description pair "
        "retrieval",
    ),
    "FashionIQ": (
        "Find an image to match the fashion image and style note",
        "Describe and represent the above fashion image and the following described modification on style note for a "
        "fashion image retrieval",
    ),
    "EDIS": (
        "Find a news image that matches the provided caption",
        "Describe and represent the following provided caption for a news image retrieval",
    ),
    "Wiki-SS-NQ": (
        "Find the document image that can answer the given query",
        "Describe and represent the following query for a document image retrieval",
    ),
    "MSCOCO": (
        "Crop the image to to isolate the object labeled as",  # sic, in MMEB and in the released rules
        "Describe and focus on the object in the image labeled as",
    ),
    "Visual7W-Pointing": (
        "Select the portion of the image that answers the question",
        "Describe and focus on the object in the image that answers the following question",
    ),
    "RefCOCO": _REFERRED,
    "RefCOCO-Matching": _REFERRED,
}
# ... and for candidates: a prefix, a replacement, or whole values.
_IMAGE = ("Represent the given image", "Summarize the given image in one word")
_WIKI = (
    "Represent the given Wikipedia image with related text information",
    "Summarize the given Wikipedia image with the following related text information in one word",
)
_CROP = (
    "Represent the given cropped image of the object",
    "Summarize the given cropped image of the object in one word",
)
_WORDS = {
    "object category": "ImageNet-1K VOC2007 ImageNet-A ImageNet-R ObjectNet",
    "news category": "N24News",
    "scene category": "SUN397 Place365",
    "country category": "Country211",
    "answer": " ".join(name for name, about in SETS.items() if about["meta_task"] == VQA),
    "news caption": "VisualNews_i2t",
    "sentence": "MSCOCO_i2t",
}
RGE_PREFIX: dict[str, str] = {
    name: f"Summarize the following {what} in one word: "
    for what, names in _WORDS.items()
    for name in names.split()
}
RGE_CANDIDATE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("VisDial", "CIRR", "VisualNews_t2i", "MSCOCO_t2i", "NIGHTS", "FashionIQ", "Wiki-SS-NQ"), _IMAGE
    ),
    **dict.fromkeys(("WebQA", "OVEN"), _WIKI),
    "EDIS": (
        "Represent the given image with related text information",
        "Summarize the given image with the following related text information in one word",
    ),
    **dict.fromkeys(("MSCOCO", "Visual7W-Pointing", "RefCOCO"), _CROP),
    "RefCOCO-Matching": _REFERRED,
}
RGE_VALUES: dict[str, dict[str, str]] = {
    "HatefulMemes": {
        "Yes": "Summarize the following statement in one word: Yes, it contains hateful speech.",
        "No": "Summarize the following statement in one word: No, it does not contain hateful speech.",
    }
}


def reword(name: str, text: str, side: str) -> str:
    """Reword a text of MMEB for RGE: whole values first, then the replacement, then the prefix."""
    if side == "query":
        old, new = RGE_QUERY[name]
        return text.replace(old, new)
    text = RGE_VALUES.get(name, {}).get(text, text)
    old, new = RGE_CANDIDATE.get(name, ("", ""))
    return RGE_PREFIX.get(name, "") + (text.replace(old, new) if old else text)


def set_of(source: str) -> str | None:
    """The set that training records come from, by their ``source``; None for other records."""
    name = source.removeprefix(SOURCE)
    return name if source.startswith(SOURCE) and name in SETS else None


def content(name: str, text: str | None) -> str | None:
    """A candidate's text without either wording; None if nothing remains."""
    text = text or ""
    for bare, worded in RGE_VALUES.get(name, {}).items():
        if text == worded:
            return bare
    for wording in (RGE_PREFIX.get(name, ""), *RGE_CANDIDATE.get(name, ())):
        if wording and text.startswith(wording):
            text = text[len(wording) :].lstrip(" .:\n")
    return text.strip() or None


def plain(text: str | None) -> str:
    """A text without picture placeholders: our prompts always put pictures first."""
    return re.sub(r"<\|image_\d+\|>\s*", "", text or "").strip()


def canonical(name: str) -> str:
    """The name of a set in the evaluation files; the training files write ``ImageNet_1K`` for ``ImageNet-1K``."""
    return next((known for known in SETS if known.replace("-", "_") == name.replace("-", "_")), name)


def split_instruction(name: str, text: str) -> tuple[str | None, str]:
    """Split a query's text into instruction and rest, so that ``f"{instruction} {rest}"`` is the text again.

    Returns (None, text) unless the text starts with the set's wording, an optional colon or full stop, and a space.
    """
    wording = RGE_QUERY[name][0].removesuffix(":")
    match = re.match(rf"{re.escape(wording)}[:.]?(?= \S|$)", text)
    if match is None:
        return None, text
    return match.group(), text[match.end() + 1 :]
