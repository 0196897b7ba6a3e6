"""Small releases of the real layouts, written by the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
