"""The protocol of MR²-Bench: the paper's definition, since no scorer could be seen."""

from eval.scoring.protocol import Protocol

PROTOCOLS = tuple(
    Protocol(
        "mr2bench",
        profile,
        ("ndcg@10", "recall@1"),
        "macro",
        (
            "nDCG@10 with linear gains, mean over sub-tasks: the README's average; recall@1 as its text quotes it",
            "official is the same as clean: the released scorer could not be seen",
        ),
    )
    for profile in ("clean", "official")
)
