"""``rge plan recipe=NAME [key=value ...]``; see `rge.plan.report`."""

from rge.common.commands import start
from rge.plan.options import read_options


def main(words: list[str]) -> int:
    """Print the plan; 1 if it does not fit."""
    options = read_options(words)
    from rge.plan.report import show  # after --help, which needs no torch

    return show(options)


if __name__ == "__main__":
    start(main)
