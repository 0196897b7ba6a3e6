"""``rge plan recipe=NAME [key=value ...]``; see `rge.plan.report`."""

from rge.common.commands import start
from rge.config import load_options
from rge.plan.options import PlanCommand


def main(words: list[str]) -> int:
    """Print the plan; 1 if it does not fit."""
    options = load_options(PlanCommand, words, command="rge plan recipe=NAME")
    from rge.plan.report import show  # after --help, which needs no torch

    return show(options)


if __name__ == "__main__":
    start(main)
