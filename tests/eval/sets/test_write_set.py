"""Writing a retrieval set."""

import pyarrow.parquet as pq
from eval_fakes import picture

from eval.sets.write_set import WRITE_ROWS, Candidate, Query, write_set


def test_few_pictures_are_in_memory_at_a_time(tmp_path):
    """Texts that come first do not make the batches of pictures larger."""
    image, num = picture(1), 3 * WRITE_ROWS
    corpus = [
        Candidate(f"{number:04d}", "x", image if number >= WRITE_ROWS else None) for number in range(num)
    ]
    write_set(
        tmp_path / "set",
        meta={"name": "one"},
        queries=[Query("q", "x", (), group="q")],
        corpus=corpus,
        qrels=[("q", "0000", 1)],
    )
    table = pq.ParquetFile(tmp_path / "set" / "corpus.parquet")
    groups = [table.read_row_group(group)["image"] for group in range(table.num_row_groups)]
    assert max(len(images) - images.null_count for images in groups) == WRITE_ROWS
    assert table.metadata.num_rows == num
