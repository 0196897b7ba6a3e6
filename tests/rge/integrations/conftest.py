"""The export that other libraries load."""

import pytest
from recorded import exported


@pytest.fixture(scope="module")
def checkpoint(lively_path, tmp_path_factory):
    return exported(lively_path, tmp_path_factory.mktemp("integrations") / "final", max_prompt_tokens=512)
