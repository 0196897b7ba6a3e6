"""scripts/bench.py: every bench has options and says what it is; the step's figures; memory that was freed again is seen."""

import base64
import http.server
import importlib
import json
import re
import sys
import threading
import time

import forked
import numpy as np
import pytest
from faults import error_about
from paths import ROOT

from rge import train
from rge.common.errors import UserError
from rge.common.options import parse_options

STEP = [
    "prompt_tokens=170",
    "rationale_tokens=12",
    "batch=3",
    "hidden=64",
    "layers=2",
    "candidate_side_px=56",
]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench")


def test_every_bench_has_options_and_measures(bench, capsys):
    given = {"serving": ["checkpoint=demo"]}
    for name in bench.BENCHES:
        module = importlib.import_module(f"benches.{name}")
        assert callable(module.measure)
        parse_options(module.Options, given.get(name, []))
    with error_about(UserError, "serve"):
        bench.main(["serve"])
    with error_about(UserError, "stage"):
        bench.main(["flops", "recipe=demo"])
    with pytest.raises(SystemExit):
        bench.main([])
    assert re.search(r"\n  data_prep +Time and memory", capsys.readouterr().out)


def test_flops_of_a_step_are_without_those_of_validation(bench, monkeypatch):
    from benches import flops

    made = []
    monkeypatch.setattr(train, "main", lambda words: made.append((train.make_validation(), words)))
    words = ["recipe=demo", "stage=joint", "init=demo", "validation.sources=[{path: held_out.jsonl}]"]
    assert flops.measure(flops.Options(steps=2), words) == {"flops_per_step": 0.0, "steps": 2}
    ((validation, given),) = made
    assert validation is None
    assert {*words, "joint.steps=2"} <= set(given)
    with pytest.raises(TypeError):  # the real one again
        train.make_validation()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_the_step_of_sentence_transformers_has_our_loss_and_gradients(bench):
    from benches import peers

    small = {"batch": 4, "micro_batch": 2, "tokens": 32, "hidden": 64, "layers": 2, "repeats": 1}
    found = peers.compared(True, peers.Options(**small))
    kept, twice, theirs = (
        found[name] for name in ("ours, kept", "ours, computed twice", "sentence-transformers")
    )
    assert kept["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert twice["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert 0 < max(kept["gradients apart"], twice["gradients apart"]) < 1e-5


def test_peak_growth_sees_what_was_freed_again(bench):
    from benches import harness

    assert 60e6 < harness.peak_growth(lambda: bytearray(b"x" * 64_000_000)[0]) < 200e6
    assert harness.peak_growth(lambda: None) < 20e6


def test_turns_go_back_and_forth(bench):
    from benches import harness

    said = []
    wall, cpu = harness.in_turns({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, 3)
    assert "".join(said) == "abbaab"
    assert {len(times) for times in (*wall.values(), *cpu.values())} == {3}


def test_a_pause_too_short_for_the_digits_shown_still_has_a_ratio(bench, monkeypatch):
    from benches import save

    found = {"waited_gap_s": 0.0123, "background_gap_s": 0.0004, "state_mb": 12.0}
    monkeypatch.setattr(save, "_save", lambda *_: found)
    rows = save.measure(save.Options(millions=(1.0,)))
    assert rows["1"] == {"waited_gap_s": 0.012, "background_gap_s": 0.0, "state_mb": 12.0, "gap_ratio": 30.75}


def test_one_client_and_the_loop_take_turns_and_cosines_near_one_differ(bench, capsys):
    from benches import harness, serving

    near = np.array([1.0, 0.0], "<f4"), np.array([0.99998, 0.0], "<f4")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            encoded = base64.b64encode(near[1].tobytes()).decode()
            body = json.dumps({"data": [{"embedding": encoded}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rows = serving._in_turns(lambda row: near[0], [b"{}"], server.server_port, time.process_time)
        server.shutdown()
    assert len(rows) == 2
    harness.show(rows)
    assert capsys.readouterr().out.count("e-05") == 2


def test_figures_may_be_numpy_s(bench, monkeypatch, capsys):
    from benches import serving

    monkeypatch.setattr(serving, "measure", lambda options: {"own": {"cosine": np.float32(0.5)}})
    bench.main(["serving", "checkpoint=demo"])
    assert json.loads(capsys.readouterr().out) == {"own": {"cosine": 0.5}}


def test_large_figures_are_printed_in_full(bench, capsys):
    from benches import harness

    harness.show({"own": {"gflop": 58492.3, "ratio": 1.23456}})
    assert capsys.readouterr().out.split()[-2:] == ["58,492", "1.235"]


@pytest.mark.slow
def test_the_main_runs_forms_are_the_same_step(bench, capsys):
    """Which the bench compares itself; then it counts."""
    from benches import step

    options = parse_options(step.Options, ["settings=long", "form=recipe", *STEP])
    found = step.measure(options)["long"]
    assert "losses and gradients equal to" in capsys.readouterr().out
    flops = {form: figures["TFLOP of a query, with its candidates"] for form, figures in found.items()}
    assert flops["gradient caching"] > flops["three passes"] > 1.2 * flops["ours, twice"]
    assert 1.1 < flops["ours, twice"] / flops["ours, once and kept"] < 1.4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "theirs", "ours"),
    [
        (["step"], ("both, GFLOP", "theirs"), ("both, GFLOP", "ours")),
        (["rl_step", "rationales=3"], ("leaner, all", "GFLOP"), ("ours", "GFLOP")),
    ],
    ids=["step", "rl_step"],
)
def test_a_step_is_measured_and_its_json_comes_last(words, theirs, ours):
    done = forked.run("scripts/bench.py", *words, "settings=long", "repeats=1", *STEP, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"long"}
    assert all(value > 0 for row in found["long"].values() for value in row.values())
    assert found["long"][theirs[0]][theirs[1]] > 1.2 * found["long"][ours[0]][ours[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["memory", "batches=2", "micro_batch=2", "repeats=1", "whole=[]"],
        ["save", "millions=2", "repeats=1", "folder={folder}"],
        ["index", "rows=1000", "dimensions=16"],
        ["search", "candidates=2000", "queries=50", "dim=32", "depth=100", "others=true", "repeats=1"],
        ["kernels", "layers=1", "batch=2"],
        ["data_prep", "pictures=400", "out={folder}/400"],
        ["modes", "limit=4", "repeats=1"],
    ],
    ids=lambda words: words[0],
)
def test_it_runs_at_a_small_size(words, tmp_path):
    words = [word.format(folder=tmp_path) for word in words]
    done = forked.run("scripts/bench.py", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])
