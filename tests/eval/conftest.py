"""Lets the tests of this folder import its helper modules (`eval_fakes`) in pytest's importlib mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
