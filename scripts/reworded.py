"""The demo's records with nine wordings of every question, and its test questions in other words.

    train/      relations.jsonl and text.jsonl with paraphrases, and their pictures
    test/       retrieval set: every question as trained, with a word that is in no record, and in other words that all are in records

``scripts/rewordings.tsv`` has the other words; the column ``category`` says which a query is asked in. Only the first phrasing of each
question is used; pictures, gallery and right answers are those of the demo's test set.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from data_prep.demo.build import OUT, write_paraphrased
from eval.sets.write_set import Candidate, Query, write_set
from rge.common.commands import start
from rge.common.options import parse_options

REWORDINGS = Path(__file__).with_name("rewordings.tsv")
COLUMNS = {"reworded": "question", "in known words": "in_known_words"}
"""Columns of the rewordings by the kind of query."""


@dataclass(frozen=True)
class Options:
    """Where to write records and test."""

    out: Path = Path("runs/reworded")
    """Folder, made anew."""


def main(words: list[str]) -> None:
    """Write both."""
    options = parse_options(Options, words, "python scripts/reworded.py")
    write_paraphrased(options.out)
    write_test(options.out / "test")


def rewordings(kind: str) -> dict[str, str]:
    """The question in other words by relation; empty for questions as trained."""
    table = pd.read_csv(REWORDINGS, sep="\t").set_index("relation")
    return table[COLUMNS[kind]].to_dict() if kind in COLUMNS else {}


def write_test(folder: Path) -> None:
    """Write the retrieval set; a query's id ends in the kind of its words."""
    asked = pd.read_parquet(OUT / "test" / "queries.parquet")
    asked = asked[asked["id"].str.endswith(".0")]
    corpus = [
        Candidate(row["id"], image=row["image"]["bytes"])
        for row in pd.read_parquet(OUT / "test" / "corpus.parquet").to_dict("records")
    ]
    judged = pd.read_parquet(OUT / "test" / "qrels.parquet").groupby("query-id")
    queries, qrels = [], []
    for kind in ("as trained", *COLUMNS):
        words = rewordings(kind)
        for row in asked.to_dict("records"):
            name = f"{row['id']}.{kind.replace(' ', '_')}"
            text = words.get(row["id"].partition(".")[0], row["text"])
            images = tuple(image["bytes"] for image in row["image"])
            about = {"group": row["group"], "instruction": row["instruction"]}
            queries.append(Query(id=name, images=images, text=text, category=kind, **about))
            right = judged.get_group(row["id"])[["corpus-id", "score"]]
            qrels += [(name, target, int(score)) for target, score in right.itertuples(index=False)]
    meta = {"name": "rge-demo-reworded", "source": "the demo's test set"}
    write_set(folder, meta=meta, queries=queries, corpus=corpus, qrels=qrels, overwrite=True)


if __name__ == "__main__":
    start(main)
