"""Parts as records and requests write them: one type, every spelling, errors that name the part."""

import json

import pdfs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import error_about

from rge.common.images import PictureIndex
from rge.common.parts import (
    ImagePart,
    PdfPart,
    TextPart,
    VideoPart,
    content_of,
    is_short,
    parts_from_json,
    parts_to_json,
    with_text,
)
from rge.common.schema import Item, Record
from rge.content import pdf
from rge.data.collate import query_items, target_item
from rge.data.config import RecordsConfig
from rge.data.layout import COLUMNS, _measured
from rge.data.readers import open_records
from rge.data.sources import RecordError, RecordFile, files_of, json_line, parsed_line
from rge.model.prompts import PromptBuilder
from rge.serving.protocols import EmbeddingsAsked

PARTS = [
    {"text": "Before"},
    {"image": "a.png"},
    {"video": "clip.mp4", "start": 1, "end": 2.5, "fps": 2.0, "max_frames": 8},
    {"video": ["1.png", "2.png"], "fps": 4.0},
    {"pdf": "paper.pdf", "pages": [2, 3], "dpi": 100},
    {"text": "after."},
]
CONTENT = (
    TextPart("Before"),
    ImagePart("a.png"),
    VideoPart("clip.mp4", 1, 2.5, 2.0, 8),
    VideoPart(("1.png", "2.png"), fps=4.0),
    PdfPart("paper.pdf", (2, 3), 100),
    TextPart("after."),
)


def test_parts_are_read_and_written_in_their_order():
    assert parts_from_json(PARTS) == CONTENT
    assert parts_from_json(parts_to_json(CONTENT)) == CONTENT
    assert json.loads(json.dumps(parts_to_json(CONTENT))) == PARTS
    item = Item("x", CONTENT)
    assert (item.text, item.pictures, item.is_visual) == ("Before\nafter.", ("a.png",), True)


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ({"type": "text", "text": "a"}, TextPart("a")),
        ({"type": "input_text", "text": "a"}, TextPart("a")),
        ({"type": "input_text", "input_text": "a"}, TextPart("a")),
        ({"type": "image", "image": "a.png"}, ImagePart("a.png")),
        ({"type": "image", "url": "a.png"}, ImagePart("a.png")),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, ImagePart("a.png")),
        ({"image_url": "a.png", "text": None}, ImagePart("a.png")),
        ({"type": "video", "path": "a.mp4"}, VideoPart("a.mp4")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}, "fps": 1}, VideoPart("a.mp4", fps=1)),
        ({"type": "pdf", "pdf": b"%PDF"}, PdfPart(b"%PDF")),
        ({"pdf": "data:application/pdf;base64,JVBERg=="}, PdfPart(b"%PDF")),
    ],
)
def test_other_spellings_are_the_same_part(written, part):
    assert parts_from_json([written]) == (part,)


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ({"picture": "a.png"}, "content.1"),
        ({"text": "a", "image": "a.png"}, "content.1"),
        ("a text", "content.1"),
        ({"image": 3.5}, "content.1.image"),
        ({"image": "https://example.org/a.png"}, "content.1.image"),
        ({"image": "a.png", "dpi": 3}, "content.1.image.dpi"),
        ({"pdf": "a.pdf", "pages": [1, 0]}, "content.1.pdf.pages.1"),
        ({"pdf": "a.pdf", "pages": []}, "content.1.pdf.pages"),
        ({"video": "a.mp4", "start": 3, "end": 3}, "content.1.video"),
        ({"video": "a.mp4", "fps": 0}, "content.1.video.fps"),
        ({"video": "a.mp4", "fps": 1, "num_frames": 3}, "content.1.video"),
        ({"video": []}, "content.1.video"),
    ],
)
def test_a_fault_names_the_part(written, place):
    with pytest.raises(ValueError) as caught:
        parts_from_json([{"text": "fine"}, written])
    assert str(caught.value).partition(": ")[0] == place


def test_live_content_may_be_decoded_or_on_the_web(picture):
    image = picture(8, 8)
    assert parts_from_json([{"image": image}], live=True)[0].image is image
    assert parts_from_json([{"image": "https://example.org/a.png"}], live=True)


def test_the_short_form_is_an_order():
    assert content_of("a", ["1.png", "2.png"]) == (ImagePart("1.png"), ImagePart("2.png"), TextPart("a"))
    assert all(map(is_short, [content_of("a", ["1.png"]), content_of("a"), content_of(None, ["1.png"]), ()]))
    assert not any(map(is_short, [CONTENT, (TextPart("a"), ImagePart("1.png")), (PdfPart("a.pdf"),)]))
    assert with_text(content_of("a", ["1.png"]), "b") == content_of("b", ["1.png"])
    assert with_text(CONTENT, None) == CONTENT[1:-1]


LINE = {
    "id": "a", "group": "a", "source": "s", "split": "train",
    "query": {"content": PARTS},
    "positives": [{"id": "p", "content": [{"text": "Look:"}, {"image": "b.png"}]}],
    "negatives": [{"id": "n", "image": "c.png"}],
}  # fmt: skip


def test_a_record_has_content_on_either_side(tmp_path):
    record, problems = parsed_line(json.dumps(LINE).encode(), "s", 0, tmp_path)
    assert not problems
    (query,) = query_items(record)
    assert [type(part) for part in query.content] == [type(part) for part in CONTENT]
    found = dict(files_of(record))
    assert {name: str(path).removeprefix(f"{tmp_path}/") for name, path in found.items()} == {
        "query.content.1": "a.png",
        "query.content.2": "clip.mp4",
        "query.content.3": "2.png",
        "query.content.4": "paper.pdf",
        "positives.0.content.1": "b.png",
        "negatives.0.image": "c.png",
    }
    assert target_item(record.positives[0]).text == "Look:"
    assert Record.model_validate_json(json_line(record)).query.parts == record.query.parts


@pytest.mark.parametrize(
    "change",
    [
        {"query": {"content": PARTS, "text": "twice"}},
        {"query": {"content": [{"text": " "}]}},
        {"query": {"content": PARTS, "paraphrases": ["which of the two texts?"]}},
        {"positives": [{"id": "p", "content": PARTS, "image": "b.png"}]},
    ],
)
def test_contradictions_are_refused(tmp_path, change):
    (tmp_path / "a.jsonl").write_text(json.dumps(LINE | change))
    with error_about(RecordError, "a.jsonl", 1):
        RecordFile(tmp_path / "a.jsonl")


def test_a_paraphrase_takes_the_place_of_the_text():
    query = {"content": [{"text": "What?"}, {"image": "a.png"}], "paraphrases": ["Which?"]}
    record = Record(**LINE | {"query": query})
    assert [item.content[0] for item in query_items(record)] == [TextPart("What?"), TextPart("Which?")]


def test_a_request_keeps_the_order_of_its_parts():
    parts = [
        {"type": "text", "text": "Is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "it?"},
    ]
    (raw,) = EmbeddingsAsked(messages=[{"role": "user", "content": parts}]).inputs()
    assert [type(part) for part in raw.content] == [TextPart, ImagePart, TextPart]


@pytest.mark.parametrize("asked", ["pages", "frames"])
def test_a_record_is_laid_out_by_headers_alone(tmp_path, embedder, picture, monkeypatch, asked):
    """Pages and frames are counted and sized as they will be shown, and no page is rendered for it."""
    (tmp_path / "paper.pdf").write_bytes(pdfs.pdf([pdfs.page("words", size=(200, 300))] * 3))
    for number in range(5):
        picture(112, 56, number).save(tmp_path / f"{number}.png")
    shown = {
        "pages": ({"pdf": "paper.pdf", "pages": [1, 3]}, 2),
        "frames": ({"video": [f"{number}.png" for number in range(5)], "fps": 1.0}, 4),
    }
    part, count = shown[asked]
    line = LINE | {"query": {"content": [part, {"text": "what?"}]}, "negatives": []}
    line["positives"] = [{"id": "p", "text": "this"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    record = RecordFile(tmp_path / "a.jsonl")[0]
    builder = PromptBuilder(embedder.processor, max_tokens=4096)
    prompt = builder.build(query_items(record)[0], "query")
    with monkeypatch.context() as patch:
        patch.setattr(pdf, "render", None)
        found = dict(zip(COLUMNS, _measured(record, builder, False, True), strict=False))
    assert (found["query"], found["pictures"]) == (len(prompt), count)
    assert found["query_pictures"] == int((prompt.type_ids > 0).sum())


def test_a_missing_document_or_clip_is_reported_before_training(tmp_path):
    for number, part in enumerate([{"pdf": "gone.pdf"}, {"video": "gone.mp4"}]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(LINE | {"query": {"content": [part]}, "negatives": []}))
        with error_about(RecordError, "query.content.0"):
            RecordFile(path, pictures=PictureIndex())


def test_columns_of_a_data_set_hold_content(tmp_path, picture):
    """As structs, to which Arrow adds every field, or as JSON in a text; one content a row, or one a target."""
    picture(20, 20).save(tmp_path / "a.png")
    asked = [[{"text": "Is"}, {"image": "a.png"}, {"text": "it?"}]] * 2
    right = [json.dumps([{"image": "a.png"}, {"text": "this"}]), json.dumps([{"text": "that"}])]
    pq.write_table(pa.table({"asked": asked, "right": right}), tmp_path / "rows.parquet")
    columns = {"query.content": "asked", "positives.content": "right"}
    records = open_records(RecordsConfig(path=str(tmp_path / "rows.parquet"), columns=columns))
    first, second = records[0], records[1]
    assert [type(part) for part in first.query.parts] == [TextPart, ImagePart, TextPart]
    assert first.positives[0].parts == (ImagePart(str(tmp_path / "a.png")), TextPart("this"))
    assert first.positives[0].id != second.positives[0].id
