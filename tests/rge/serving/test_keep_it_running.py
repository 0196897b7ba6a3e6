"""What docs/serving.md and the Dockerfile say of keeping `rge serve` running."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from rge.common.options import parse_options
from rge.serving.options import ServeOptions

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.split("## Keep it running")[1], flags=re.DOTALL)
    return found


def instruction(name: str) -> list[str]:
    (found,) = re.findall(rf"^{name} (.*)$", DOCKERFILE, flags=re.MULTILINE)
    return json.loads(found)


def served(words: list[str]) -> ServeOptions:
    """The options of a command line."""
    at = words.index("serve")
    return parse_options(ServeOptions, words[at + 1 :], "rge serve")


def test_the_image_has_what_a_wheel_is_built_from_and_the_context_holds_nothing_else():
    copied = [
        name
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, flags=re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "rge", "eval", "data_prep", "recipes"} <= {
        *copied
    }
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == {*copied}


def test_the_container_serves_to_the_outside():
    options = served([*instruction("ENTRYPOINT"), *instruction("CMD")])
    assert (options.host, options.checkpoint) == ("0.0.0.0", "demo")
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert options.port == int(exposed)
    run = " ".join(block("sh").replace("\\\n", " ").splitlines()[-1].split())
    image = run.split().index("rge")
    mine = served([*instruction("ENTRYPOINT"), *run.split()[image + 1 :]])
    for folder in (mine.checkpoint, mine.index):
        assert f":{folder}:ro" in run
    assert f"-e {mine.key_env} " in run


@pytest.fixture
def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.optionxform = str  # type: ignore[assignment]
    found.read_string(block("ini"))
    return found


def test_the_unit_waits_for_requests_in_progress_and_restarts_what_may_work_again(unit):
    service = unit["Service"]
    options = served(service["ExecStart"].split())
    assert int(service["TimeoutStopSec"]) > options.drain_s + 2
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(unit, tmp_path):
    text = block("ini").replace("/opt/rge/.venv/bin/rge", sys.executable).replace("User=rge\n", "")
    (tmp_path / "rge.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "rge.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "rge.service" in line]
    assert not said


def test_the_proxy_is_not_stricter_than_the_server():
    options = served(["serve", "checkpoint=demo"])
    (limit,) = re.findall(r"client_max_body_size (\d+)m;", block("nginx"))
    (wait,) = re.findall(r"proxy_read_timeout (\d+)s;", block("nginx"))
    assert int(limit) >= options.max_body_mb
    assert int(wait) > options.timeout_s
    assert block("nginx").count("{") == block("nginx").count("}")


@pytest.mark.net
@pytest.mark.slow
def test_the_image_is_built_and_starts():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("needs Docker")
    index = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
    subprocess.run(
        [docker, "build", "--build-arg", index, "-t", "rge-test", Path(ROOT)], check=True, timeout=3600
    )
    done = subprocess.run(
        [docker, "run", "--rm", "rge-test", "--help"], capture_output=True, text=True, check=True, timeout=300
    )
    assert "max_waiting_mb" in done.stdout
