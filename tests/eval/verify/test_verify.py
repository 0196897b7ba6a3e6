"""`rge verify` on the shipped checkpoint: every route agrees, and each planted cause is named.

What is planted is made by stock transformers: its processor, its chat template, its forward.
"""

import base64
import io
import json
import shutil
import threading
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from clips import clip
from eval_fakes import FakeEncoder, write_set
from pdfs import GREEN, RED, page, pdf
from PIL import Image
from served import running
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.verify.__main__ import Verdict, VerifyOptions, compare, main, reference, sample, table, verify
from eval.verify.causes import OTHER_WEIGHTS
from eval.verify.plain import PlainModel
from eval.verify.routes import Found, Route, RouteError
from rge.checkpoints.description import model_card
from rge.checkpoints.settings import read_settings
from rge.common.errors import UserError
from rge.common.files import DEMO_CHECKPOINT
from rge.common.images import load_image
from rge.common.parts import content_of, with_text
from rge.common.schema import Item
from rge.embedder import Embedder
from rge.serving.options import ServeOptions
from rge.serving.process import load

FEW = VerifyOptions(checkpoint="demo", limit=3, candidates=4)
PADDED = 61
"""Tokens of the longest query of the sample."""
INSTRUCTION = "Answer with a picture."


class Stock:
    """The checkpoint by transformers alone, with one thing done wrongly."""

    def __init__(self):
        self.processor = AutoProcessor.from_pretrained(DEMO_CHECKPOINT)
        self.model = AutoModelForImageTextToText.from_pretrained(DEMO_CHECKPOINT).eval()
        self.emb_id = self.processor.tokenizer.convert_tokens_to_ids("<emb>")

    @torch.no_grad()
    def embed(self, item, side, wrong=""):
        images = [load_image(image) for image in item.pictures]
        text, instruction = item.text or "", item.instruction if side == "query" else None
        if wrong == "instruction missing":
            instruction = None
        if wrong == "instruction doubled":
            instruction = f"{instruction} {instruction}"
        if wrong == "candidate worded as a query":
            instruction = INSTRUCTION
        if wrong == "channel order":
            images = [Image.fromarray(np.asarray(image)[..., ::-1].copy()) for image in images]
        text = " ".join(filter(None, (instruction, text)))
        content = [{"type": "image"} for _ in images]
        content.append({"type": "text", "text": f"\n{text}\n" if images else f"{text}\n"})
        if wrong == "text before the pictures":
            content = [{"type": "text", "text": f"{text}\n"}, *content[:-1]]
        header = wrong != "assistant header missing"
        turn = [{"role": "user", "content": content}]
        row = self.processor.apply_chat_template(turn, add_generation_prompt=header)
        if wrong == "newline after the assistant header missing":
            row = row.removesuffix("\n")
        given = (
            {"size": {"shortest_edge": 42 * 42, "longest_edge": 42 * 42}}
            if wrong == "resolution limits"
            else {}
        )
        inputs = self.processor(text=[row], images=images or None, return_tensors="pt", **given)
        ids = inputs["input_ids"][0].tolist()
        if wrong == "truncation":
            ids = ids[:63]
        if wrong != "<emb> missing":
            ids.append(self.emb_id)
        if wrong == "<emb> not at the end":
            ids.append(self.processor.tokenizer.eos_token_id)
        if wrong == "padding side":
            ids = [self.model.config.get_text_config().pad_token_id] * (PADDED - len(ids)) + ids
        input_ids = torch.tensor([ids])
        model = self.model.to(torch.bfloat16 if wrong == "dtype" else torch.float32)
        more = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
        if images:
            more["mm_token_type_ids"] = (input_ids == model.config.image_token_id).long()
            more["pixel_values"] = more["pixel_values"].to(model.dtype)
        seen = []
        hook = model.model.language_model.norm.register_forward_pre_hook(
            lambda _, given: seen.append(given[0])
        )
        out = model.model(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **more
        )
        hook.remove()
        hidden = seen[0] if wrong == "state before the final norm" else out.last_hidden_state
        if wrong == "dtype":
            self.model = AutoModelForImageTextToText.from_pretrained(DEMO_CHECKPOINT).eval()
        state = hidden[0, -1].float()
        return (state if wrong == "not normalised" else state / state.norm()).numpy()


@pytest.fixture(scope="module")
def stock():
    return Stock()


@dataclass
class World:
    embedder: Embedder
    plain: PlainModel
    views: list
    references: dict

    def rows(self, route):
        verdict = Verdict("demo", self.embedder.checkpoint_hash)
        compare(verdict, self.embedder, self.plain, route, self.views, self.references)
        return {row.view: row for row in verdict.rows}


@pytest.fixture(scope="module")
def world():
    embedder = Embedder.from_pretrained("demo", dtype="float32")
    views = sample(FEW, embedder)
    exact = embedder.with_(exact=True)
    return World(embedder, PlainModel(embedder), views, {view.name: reference(exact, view) for view in views})


def planted(stock, wrong, sides=("query", "candidate")):
    def embed(view):
        if view.mode != "direct":
            return None
        at = wrong if view.side in sides else ""
        return Found(np.stack([stock.embed(item, view.side, at) for item in view.items]))

    return Route("planted", embed)


@pytest.mark.slow
def test_stock_transformers_agrees(world, stock):
    rows = world.rows(planted(stock, ""))
    assert set(rows) == {"queries, direct", "candidates"}
    assert all(row.same and row.difference < 1e-5 for row in rows.values())
    assert rows["queries, direct"].overlap == 1


ANYWHERE = (
    "state before the final norm", "assistant header missing", "newline after the assistant header missing", "<emb> missing",
    "<emb> not at the end", "resolution limits", "channel order", "padding side", "not normalised", "dtype",
)  # fmt: skip
OF_QUERIES = ("instruction missing", "instruction doubled", "text before the pictures")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*ANYWHERE, *OF_QUERIES, "candidate worded as a query"])
def test_each_planted_cause_is_named(world, stock, wrong):
    side = "candidate" if wrong == "candidate worded as a query" else "query"
    rows = world.rows(planted(stock, wrong, sides=(side,)))
    right, found = rows["candidates"], rows["queries, direct"]
    if side == "candidate":
        right, found = found, right
    assert right.same
    assert not found.same
    assert found.cause.startswith(wrong)


@pytest.mark.slow
def test_a_cut_prompt_is_named(world, stock):
    long = tuple(
        replace(item, content=with_text(item.content, f"{item.text} {'and why ' * (9 + n)}"))
        for n, item in enumerate(world.views[0].items)
    )
    view = replace(world.views[0], items=long)
    exact = world.embedder.with_(exact=True)
    other = replace(world, views=[view], references={view.name: reference(exact, view)})
    (row,) = other.rows(planted(stock, "truncation")).values()
    assert row.cause.startswith("truncation: to 64 tokens")


@pytest.mark.slow
def test_other_weights_are_what_no_cause_explains(world, stock):
    other = Stock()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    rows = world.rows(planted(other, ""))
    assert all(row.cause.startswith(OTHER_WEIGHTS) for row in rows.values())


class Server(ThreadingHTTPServer):
    """OpenAI's form with vLLM's messages; ours, if it tells a hash."""

    def __init__(self, embed, checkpoint_hash=None):
        self.embed, self.hash = embed, checkpoint_hash
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def route(self):
        return f"server:http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        owner = "rge" if self.server.hash else "someone"
        self.answer({"data": [{"id": "m", "owned_by": owner}], "checkpoint_hash": self.server.hash})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"data": [{"embedding": self.server.embed(body).tolist(), "rationale": ""}]})


def serving(world, stock, wrong="", **more):
    """A server that words what it gets by itself, or embeds it as it comes."""
    by_text = {item.text: item for view in world.views for item in view.items if view.side == "query"}

    def embed(body):
        parts = body["messages"][0]["content"]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        pictures = [
            base64.b64decode(part["image_url"]["url"].partition(",")[2])
            for part in parts
            if part["type"] == "image_url"
        ]
        assert all(Image.open(io.BytesIO(picture)).mode == "RGB" for picture in pictures)
        item = Item(world.views[0].items[0].id, content_of(None, pictures))
        if not texts:
            return stock.embed(item, "candidate")
        known = by_text[texts[0].removeprefix(f"{INSTRUCTION} ")]
        return stock.embed(replace(known, content=content_of(known.text, pictures)), "query", wrong)

    return Server(embed, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "told", "cause"),
    [
        ("", None, ""),
        ("instruction missing", None, "instruction missing"),
        ("resolution limits", None, "resolution limits: 1 tokens a picture instead of 4"),
        ("", "f" * 64, ""),
        ("state before the final norm", "f" * 64, OTHER_WEIGHTS),
    ],
)
def test_servers_are_compared_and_recognised(world, stock, capsys, tmp_path, wrong, told, cause):
    server = serving(world, stock, wrong, checkpoint_hash=told)
    words = ["demo", "limit=3", "candidates=4", f"against={server.route}", f"out={tmp_path / 'v.json'}"]
    code = main(words)
    written = json.loads((tmp_path / "v.json").read_text())
    rows = {row["view"]: row for row in written["rows"]}
    assert code == (1 if cause or told else 0)  # a server of ours that writes no rationales differs too
    assert rows["queries, direct"]["cause"].startswith(cause)
    assert rows["queries, direct"]["same"] == (not cause)
    assert written["same"] == (code == 0)
    assert ("differs:" in capsys.readouterr().out) == bool(code)
    server.shutdown()


@pytest.mark.slow
def test_all_routes_that_are_installed_agree_on_the_shipped_checkpoint():
    verdict = verify(FEW)
    assert verdict.same, table(verdict)
    routes = {row.route for row in verdict.rows}
    assert {"batches of 4", "in the opposite order", "bfloat16", "transformers, eager, padded left"} <= routes
    for row in verdict.rows:
        assert row.difference < (2e-2 if row.route == "bfloat16" else 1e-5)
        assert row.overlap in (None, 1.0)


@pytest.mark.slow
def test_pages_clips_and_texts_between_pictures_are_the_same_over_every_route(tmp_path):
    (tmp_path / "m.pdf").write_bytes(pdf([page("a key", RED), page("a nail", GREEN)]))
    (tmp_path / "c.mp4").write_bytes(clip([*range(0, 4000, 500)], size=(64, 48)))
    for name in ("red", "blue"):
        Image.new("RGB", (40, 50), name).save(tmp_path / f"{name}.png")
    manual, moves = {"pdf": "m.pdf", "pages": [2, 1]}, {"video": "c.mp4", "start": 1.0}
    between = [{"text": "this"}, {"image": "red.png"}, {"text": "or that"}, {"image": "blue.png"}]
    records = [
        {
            "id": str(number),
            "instruction": INSTRUCTION,
            "query": {"content": content},
            "positives": [
                {"id": f"t{number}", "content": [*other, {"text": "shown"}], "rationale": "It is shown."}
            ],
        }
        for number, (content, other) in enumerate(
            (([*between, moves], [manual]), ([manual, {"text": "which?"}], [moves]), ([moves], between))
        )
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    options = replace(FEW, items=file)
    with running(load(ServeOptions(checkpoint="demo"))) as url:
        verdict = verify(
            replace(options, against=("batches", "transformers", "st", f"server:{url}", "reversed"))
        )
    assert verdict.same, table(verdict)
    assert {row.view for row in verdict.rows} == {"queries, direct", "queries, reasoning", "candidates"}


@pytest.mark.slow
def test_an_embedding_that_depends_on_its_batch_differs(monkeypatch):
    true = Embedder.encode

    def depends(self, items, *, batch_size=64, **settings):
        found = true(self, items, batch_size=batch_size, **settings)
        if batch_size == 32 and settings["side"] == "candidate":
            found.embeddings[0, 0] += 1e-3
        return found

    monkeypatch.setattr(Embedder, "encode", depends)
    verdict = verify(replace(FEW, against=("batches",)))
    assert [(row.route, row.view) for row in verdict.rows if not row.same] == [
        ("batches of 32", "candidates")
    ]


@pytest.mark.slow
def test_what_was_verified_stands_in_the_model_card(tmp_path, capsys):
    shutil.copytree(DEMO_CHECKPOINT, tmp_path / "mine")
    card = tmp_path / "mine/README.md"
    settings = read_settings(DEMO_CHECKPOINT)
    card.write_text(model_card(settings, "mine"))
    assert main([str(tmp_path / "mine"), "limit=2", "candidates=2", "against=reversed", "card=true"]) == 0
    assert "\nVerified with rge " in card.read_text()
    assert "in the opposite order" in card.read_text()
    assert "Not verified" not in card.read_text()
    assert main([str(tmp_path / "mine"), "limit=2", "candidates=2", "against=reversed", "card=true"]) == 0
    assert card.read_text().count("Verified with") == 1


@pytest.mark.slow
def test_a_stranger_s_model_is_compared_between_batches(tmp_path, monkeypatch):
    encoder = FakeEncoder("x", model="x", profile="plain")
    monkeypatch.setattr("rge.embedders.registry.load_model", lambda *_, **__: encoder)
    (tmp_path / "theirs").mkdir()
    there = replace(FEW, checkpoint=str(tmp_path / "theirs"), items=Path(write_set(tmp_path / "set")))
    verdict = verify(there)
    assert verdict.same
    assert {row.route for row in verdict.rows} == {"batches of 4", "batches of 32", "in the opposite order"}
    with pytest.raises(UserError):
        verify(replace(there, against=("bf16",)))


@pytest.mark.parametrize("route", ["adapters", "vllm", "nothing", "server:http://127.0.0.1:9/v1"])
def test_a_route_that_cannot_be_used_is_named(route):
    with pytest.raises(RouteError) as refused:
        verify(replace(FEW, limit=1, candidates=1, against=(route,)))
    assert refused.value.key == route
