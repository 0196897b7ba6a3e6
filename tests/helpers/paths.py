"""Where the repository and the programs that tests launch lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "rge" / "workers"
