"""Registries: what is ours, a user's module, an installed package's; and every way in which that goes wrong."""

import json
import sys

import numpy as np
import pytest
from eval_fakes import FakeEncoder, loader, write_set
from faults import error_about

from eval.__main__ import COMMANDS, command_of, main
from eval.benchmarks.registry import BENCHMARKS, Benchmark, protocol_for, register_benchmark
from eval.commands.run import RunOptions, run
from eval.scoring.metrics import (
    METRICS,
    compute,
    judge,
    metric_words,
    names_of,
    random_floor,
    register_metric,
)
from eval.scoring.protocol import Protocol
from rge.common.errors import UserError
from rge.common.options import keys, parse_options
from rge.common.registry import Registry, load_plugins
from rge.diagnose.__main__ import SensitivityOptions
from rge.embedders.registry import EMBEDDERS, adapters, register_embedder
from rge.explore.__main__ import ExploreOptions
from rge.index.options import EmbedOptions, IndexOptions, SearchOptions
from rge.serving.options import ServeOptions


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What a test registers is gone after it."""
    for registry in (METRICS, BENCHMARKS, EMBEDDERS):
        len(list(registry))
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(sys, "path", list(sys.path))


def module(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def test_ours_are_there():
    assert set(BENCHMARKS) == {
        "rmir",
        "mmeb",
        "mmeb2",
        "mmbright",
        "pinpoint",
        "mrmr",
        "karpathy",
        "uvrb",
        "manual",
    }
    assert [one.profile for one in BENCHMARKS["mmeb"].protocols] == ["clean", "official"]
    for one in BENCHMARKS.values():
        schema, function = one.options(), one.importer
        assert schema.__name__.lower() == f"{one.name}options"
        assert function.__name__ == f"import_{one.name}"


def test_a_module_of_the_users_is_found_from_any_folder(tmp_path, monkeypatch, capsys):
    module(
        tmp_path / "a place",
        "plugin_one",
        "from eval.benchmarks.registry import Benchmark, register_benchmark\n"
        "from eval.scoring.protocol import Protocol\n"
        "def bring(options: dict) -> None: ...\n"
        "register_benchmark(Benchmark('mine', bring, (Protocol('mine'),)))\n",
    )
    monkeypatch.chdir(tmp_path / "a place")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    load_plugins(["plugin_one"])
    assert protocol_for("mine", "clean").benchmark == "mine"
    with error_about(UserError, "profile"):
        protocol_for("mine", "official")
    assert main(["import", "min", "plugins=[plugin_one]"]) == 2
    assert "mine" in capsys.readouterr().err


def test_a_plugin_that_is_not_there_and_one_that_lacks_something(tmp_path, monkeypatch, capsys):
    module(tmp_path, "plugin_two", "import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    assert main(["score", "plugins=plugin_tow", "run=x"]) == 2
    assert f"plugins=plugin_tow: no module of that name in {tmp_path}" in capsys.readouterr().err
    with pytest.raises(UserError, match=rf"surely_not_installed.*line 1 of {tmp_path / 'plugin_two.py'}"):
        load_plugins(["plugin_two"])
    module(tmp_path, "plugin_broken", "x = 1\ny = = 2\n")
    with error_about(UserError, "plugins"):
        load_plugins(["plugin_broken"])


def test_an_installed_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    module(tmp_path, "plugin_three", "from plugin_three_home import THINGS\nTHINGS.add('theirs', 3)\n")
    module(
        tmp_path,
        "plugin_three_home",
        "from rge.common.registry import Registry\nTHINGS = Registry('thing', 'rge.test_things')\n",
    )
    info = tmp_path / "plugin_three-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-three\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rge.test_things]\ntheirs = plugin_three\n")
    monkeypatch.syspath_prepend(tmp_path)
    from plugin_three_home import THINGS

    assert THINGS["theirs"] == 3
    (info / "entry_points.txt").write_text("[rge.test_broken]\ntheirs = plugin_three:nothing\n")
    with error_about(
        UserError, "entry point theirs = plugin_three:nothing of rge.test_broken", "entry point"
    ):
        list(Registry("thing", "rge.test_broken"))


def test_names_are_unique_and_the_nearest_is_named():
    things: Registry[int] = Registry("thing", "rge.test_nothing")
    assert things.add("one", 1) == things.add("one", 1)
    with error_about(UserError, "one", "twice"):
        things.add("one", 2)
    with error_about(UserError, ("choice", "thing", ("one",))):
        things["on"]


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: Benchmark("a", print, ()), ("profiles of a",)),
        (lambda: Benchmark("a", print, (Protocol("b"),)), ("a", "protocol")),
        (lambda: Benchmark("a", print, (Protocol("a", "mine"),)), (("choice", "profiles of a"),)),
        (lambda: register_benchmark(Benchmark("generic", print, (Protocol(),))), ("generic", "reserved")),
        (lambda: Benchmark("a", lambda options: None, (Protocol("a"),)).options(), ("a", "importer")),
        (lambda: register_metric("Mine", cutoffs=None, words=""), ("Mine", "name")),
        (lambda: register_metric("mine", cutoffs=(0,), words=""), ("mine", "cutoffs")),
        (lambda: register_metric("ndcg", cutoffs=(1,), words="")(lambda j, k: j.gain_QK), ("ndcg", "twice")),
    ],
)  # fmt: skip
def test_what_cannot_be_registered(make, fields):
    with error_about(UserError, *fields):
        make()


def test_a_metric_is_reported_and_explained_and_its_values_are_looked_at():
    judged = judge(np.array([[0, 1, 2]]), [(np.array([1]), np.ones(1))], None, num_candidates=3)
    before = names_of()
    register_metric("second", cutoffs=(2, 5), words="right at the second of {k}")(
        lambda judged, k: judged.gain_QK[:, 1]
    )
    assert names_of() == (*before, "second@2", "second@5")
    assert metric_words("second@2") == "right at the second of 2"
    assert compute("second@7", judged) == [1.0]
    assert np.isnan(random_floor("second@2", judged, np.array([3]), depth=3)).all()
    register_metric("whole", cutoffs=None, words="")(lambda judged, k: [k])
    assert compute("whole", judged) == [3.0]  # as deep as the ranking
    register_metric("wide", cutoffs=(1,), words="")(lambda judged, k: judged.gain_QK)
    with error_about(UserError, "wide@1", "shape"):
        compute("wide@1", judged)
    register_metric("endless", cutoffs=(1,), words="")(lambda judged, k: np.array([np.inf]))
    with error_about(UserError, "endless@1", "infinite"):
        compute("endless@1", judged)


def test_a_users_embedder_is_asked_before_ours():
    register_embedder("mine", about="mine", matches=lambda facts: True)(lambda facts, **options: facts)
    assert adapters()[0].name == "mine"
    assert adapters()[0].target("facts", device=None) == "facts"
    assert adapters()[-1].name == "sentence-transformers"


@pytest.mark.parametrize(
    "command",  # fetch only downloads: nothing that a module registers takes part
    [*(name for name in COMMANDS if name != "fetch"), "import folder", "import rmir", "import mmeb"],
)
def test_plugins_is_a_key_like_any_other(command, capsys):
    assert "plugins" in [key.name for key in keys(command_of(command)[0])]
    assert main([*command.split(), "plugin=x"]) == 2
    assert "unknown key plugin; did you mean plugins?" in capsys.readouterr().err


METRIC = """
from eval.scoring.metrics import register_metric
from plugin_four.helper import of_first
@register_metric("first", cutoffs=(1,), words="the first one")
def first(judged, k):
    return of_first(judged)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a metric, whose arithmetic is in a second module, imported anew whenever it is asked for."""

    def write(factor):
        module(tmp_path / "plugin_four", "__init__", METRIC)
        module(
            tmp_path / "plugin_four",
            "helper",
            f"def of_first(judged):\n    return judged.gain_QK[:, 0] * {factor}\n",
        )
        for name in ("plugin_four", "plugin_four.helper"):
            sys.modules.pop(name, None)
        METRICS._entries.pop("first", None)

    monkeypatch.chdir(tmp_path)
    yield write
    for name in ("plugin_four", "plugin_four.helper"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_figure_of_a_plugin_says_so_and_compare_says_what_differs(tmp_path, package, capsys, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or a second version within a second is not read
    data = write_set(tmp_path / "set", num_queries=6, num_candidates=20)
    run(RunOptions(checkpoint="fake", set=data, out=tmp_path / "run", report=False), loader(FakeEncoder()))

    def scored(name, *plugins):
        assert (
            main(
                [
                    "score",
                    f"run={tmp_path / 'run/run.trec'}",
                    f"set={data}",
                    f"out={tmp_path / name}",
                    *plugins,
                ]
            )
            == 0
        )
        return json.loads((tmp_path / name / "results.json").read_text())

    plain = scored("plain")
    package(0.5)
    half = scored("half", "plugins=plugin_four")
    package(0.25)
    quarter = scored("quarter", "plugins=plugin_four")
    assert plain["plugins"] == {}
    assert half["plugins"]["plugin_four"]["gives"] == ["metric first"]
    assert half["micro"]["first@1"]["value"] == 2 * quarter["micro"]["first@1"]["value"]
    assert len({one["identity"]["key"] for one in (plain, half, quarter)}) == 3
    codes = [one["plugins"]["plugin_four"]["code"] for one in (half, quarter)]
    assert main(["compare", f"a={tmp_path / 'plain'}", f"b={tmp_path / 'half'}"]) == 0
    shown = capsys.readouterr()
    assert "a and b differ in plugins: plugin_four." in shown.out
    assert "settings that are not being compared" not in shown.err
    assert main(["compare", f"a={tmp_path / 'half'}", f"b={tmp_path / 'quarter'}"]) == 0
    assert f'plugins: plugin_four.code "{codes[0]}" and "{codes[1]}"' in capsys.readouterr().err


def test_an_embedder_of_a_plugin_is_named_in_what_it_makes(tmp_path, monkeypatch):
    module(
        tmp_path,
        "plugin_five",
        "from eval_fakes import FakeEncoder\n"
        "from rge.embedders.registry import register_embedder\n"
        "@register_embedder('mine', about='mine', matches=lambda facts: True)\n"
        "def load(facts, **options):\n    return FakeEncoder('mine')\n",
    )
    monkeypatch.chdir(tmp_path)
    load_plugins(["plugin_five"])
    (tmp_path / "model").mkdir()
    data = write_set(tmp_path / "set", num_queries=6, num_candidates=20)
    run(RunOptions(model=str(tmp_path / "model"), set=data, out=tmp_path / "run", report=False))
    made = json.loads((tmp_path / "run/results.json").read_text())
    assert made["plugins"] == made["identity"]["plugins"]
    assert made["plugins"]["plugin_five"]["gives"] == ["adapter mine"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (EmbedOptions, ["checkpoint=x", "src=x", "out=x.parquet"]),
        (IndexOptions, ["src=x", "out=x"]),
        (SearchOptions, ["index=x", "question=why?"]),
        (ServeOptions, ["checkpoint=x"]),
        (ExploreOptions, []),
        (SensitivityOptions, ["checkpoint=x", "data=x"]),
    ],
)
def test_every_command_that_loads_a_checkpoint_takes_plugins(schema, words, tmp_path, monkeypatch):
    name = f"plugin_for_{schema.__name__}"
    module(tmp_path, name, "")
    monkeypatch.chdir(tmp_path)
    assert parse_options(schema, [*words, f"plugins={name}"]).plugins == (name,)
    assert name in sys.modules
    with error_about(UserError, "plugins"):
        parse_options(schema, [*words, "plugins=plugin_tow"])
