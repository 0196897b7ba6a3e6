"""``python -m rge.plan recipe=NAME [key=value ...]``; see `rge.plan.report`."""

import sys

from rge.common.errors import UserError
from rge.plan.report import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as problem:
        sys.exit(f"error: {problem}")
