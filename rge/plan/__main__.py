"""``python -m rge.plan recipe=NAME [key=value ...]``; see `rge.plan.report`."""

import sys

from rge.errors import USER_ERRORS
from rge.plan.report import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except USER_ERRORS as problem:
        sys.exit(f"error: {problem}")
