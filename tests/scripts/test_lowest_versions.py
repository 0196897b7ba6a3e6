"""The lowest versions that pyproject.toml allows."""

import importlib
import shutil

import pytest
from faults import error_about
from paths import ROOT

from rge.common.errors import UserError


@pytest.fixture
def lowest(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("lowest_versions")


@pytest.mark.net
@pytest.mark.slow
def test_the_lowest_versions_train_resume_and_evaluate(lowest, tmp_path):
    if shutil.which("uv") is None:
        pytest.skip("pip install uv")
    lowest.main([f"dir={tmp_path}"])


def test_a_missing_installer_is_named(lowest, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with error_about(UserError, "uv", "package"):
        lowest.main([f"dir={tmp_path}"])
