"""The seed stage: inspect and embed the library, cluster it, and sample from each cluster."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.rmir import frames
from data_prep.rmir.config import LibraryConfig
from data_prep.rmir.pictures.changes import changes, note_files
from data_prep.rmir.pictures.download import resolve
from data_prep.rmir.pictures.encoders import ImageEncoder, image_encoder, text_encoder
from data_prep.rmir.pictures.indices import embed_captions
from data_prep.rmir.pictures.library import (
    DUPLICATE,
    NEAR_DUPLICATE,
    Library,
    blocks,
    encodable,
    fetched,
    inspect,
)
from data_prep.rmir.pictures.near_duplicates import near_duplicates
from data_prep.rmir.run import REPLIES, Run, extended, reasons
from rge.common.errors import UserError
from rge.common.files import replacing, write_bytes
from rge.common.schema import ImageRef, safe_id

Rows = list[dict[str, Any]]
IMAGE_COLUMNS = ("id", "ref", "caption", "sha256", "width", "height", "phash")


def seed(run: Run) -> dict[str, Any]:
    """Inspect and embed the library, cluster it, and sample pictures of each cluster."""
    config, folder = run.config, run.path("seed")
    library = Library(config.library)
    _check_size(library, config.seed.clusters)
    encoder = image_encoder(config.image_encoder)
    tables, parts = scan_library(run, library, encoder)
    table = pa.concat_tables(tables)
    del tables
    unique, bad = usable(table, config.library.near_duplicates)
    if not len(unique):
        raise UserError(
            f"library.path {config.library.path}: none of the {len(table)} pictures is usable: {reasons(bad)}"
        )
    # Only good pictures have vectors, so a picture's row is the number of good pictures before it.
    vector_of = np.cumsum(pc.is_null(table["reason"]).to_numpy()) - 1
    vectors_ND = gather(parts, vector_of[unique])
    cluster_N = cluster(vectors_ND, config.seed.clusters, config.seed.iterations, config.seed.seed)
    chosen = sample_clusters(cluster_N, config.seed.per_cluster, config.seed.seed)
    rows = table.take(unique[chosen]).select(IMAGE_COLUMNS).to_pylist()
    numbers = cluster_N[chosen].tolist()
    images = [row | {"cluster": number} for row, number in zip(rows, numbers, strict=True)]
    keep_pictures(run, library, images)
    save_vectors(folder / "images.npy", vectors_ND[chosen])
    captions = [image["caption"] for image in images if image["caption"]]
    captioner = text_encoder(config.caption_encoder)
    save_vectors(folder / "captions.npy", embed_captions(captioner, captions))
    frames.write_rows(folder / "rejected.parquet", bad)
    frames.write_rows(folder / "images.parquet", images)
    return {
        "listed": len(table),
        "usable": len(unique),
        "seed": len(images),
        "with_caption": len(captions),
        "rejected": reasons(bad),
        "encoders": {"images": encoder.name, "captions": captioner.name},
    }


def _check_size(library: Library, num_clusters: int) -> None:
    # Before anything is embedded; `cluster` checks again with the usable pictures.
    listed = sum(1 for _ in islice(library.rows(pictures=False), num_clusters))
    if listed < num_clusters:
        raise UserError(
            f"seed.clusters={num_clusters} needs at least as many pictures; {library.config.path} lists {listed:,}. Set "
            f"seed.clusters={max(1, listed // 2)}, or add pictures"
        )


def usable(table: pa.Table, most_bits: int | None) -> tuple[np.ndarray, Rows]:
    """Rows of the usable, distinct pictures; and the others with their reasons."""
    frame = (
        table.select(["id", "reason", "ref", "sha256", "phash"]).to_pandas().rename(columns={"ref": "detail"})
    )
    good = frame[frame["reason"].isna()]
    repeated_N = good.duplicated("sha256")
    frame.loc[good.index[repeated_N], "reason"] = DUPLICATE
    good = good[~repeated_N]
    if most_bits is not None:
        repeats = near_duplicates(good["phash"].tolist(), most_bits)
        rows = good.index[[of is not None for of in repeats]]
        frame.loc[rows, "reason"] = NEAR_DUPLICATE
        frame.loc[rows, "detail"] = [f"repeats {good['id'].iloc[of]}" for of in repeats if of is not None]
    good_N = frame["reason"].isna()
    bad = pa.Table.from_pandas(frame.loc[~good_N, ["id", "reason", "detail"]], preserve_index=False)
    return frame.index[good_N].to_numpy(), [{**row, "key": None} for row in bad.to_pylist()]


def _hash(name: str) -> bytes:
    return hashlib.blake2b(safe_id(name).encode(), digest_size=8).digest()


def check_library(run: Run) -> None:
    """Raise `UserError` if the library has changed since the seed stage read it, or the stage is not finished and cannot read it."""
    config, notes, done = run.config.library, run.path("seed", "library.json"), run.done("seed")
    parts = _parts(run)
    if not parts or not run.begun("seed"):
        return
    if done is not None and extended(run.out):  # by an earlier version, which compared otherwise
        return
    try:
        library = Library(config)
    except UserError:
        if done is None:
            raise
        return  # the export reports it when it needs the credits
    if found := changes(library, pa.concat_tables(parts), notes, complete=done is not None):
        raise UserError(
            f"library.path {config.path} has changed since it was read: {found}. Undo that, or start over with a different out= "
            f"(a copy of {run.out / REPLIES} in it keeps all answers)"
        )


def _parts(run: Run) -> list[pa.Table]:
    """Parts of the library that were inspected and embedded so far."""
    found: list[pa.Table] = []
    while _vectors(run, len(found)).is_file() and (path := _part(run, len(found))).is_file():
        found.append(frames.read_table(path))
    return found


def _part(run: Run, number: int) -> Path:
    return run.path("seed", "inspected") / f"part-{number:05d}.parquet"


def _vectors(run: Run, number: int) -> Path:
    return _part(run, number).with_suffix(".npy")


def scan_library(
    run: Run, library: Library, encoder: ImageEncoder
) -> tuple[list[pa.Table], list[np.ndarray]]:
    """Inspect and embed the library block by block; while one is embedded, the next is fetched and decoded.

    Returns:
        For each part the table ``inspected``, and the memory-mapped vectors of its good pictures.

    Raises:
        UserError: the library cannot be read, or an id occurs twice.
    """
    config = run.config.library
    seen: set[bytes] = set()
    tables = _parts(run)
    for table in tables:
        _add_ids(seen, table, config)
    if not tables:
        note_files(library, run.path("seed", "library.json"), {})
    # A sixth each: two blocks are in memory at once, and decoding needs more.
    most_bytes = max(1, int(config.memory_mb * 2**20 / 6))
    left = _unread(library, [name for table in tables for name in table["id"].to_pylist()])
    todo = blocks(fetched(left), config.shard_size, most_bytes)
    with ThreadPoolExecutor(1) as beside:

        def prepare(number: int) -> Future[list[ImageRef] | None]:
            return beside.submit(
                lambda: _inspect_block(run, rows, number) if (rows := next(todo, None)) else None
            )

        waiting = prepare(len(tables))
        while (refs := waiting.result()) is not None:
            number = len(tables)
            waiting = prepare(number + 1)
            save_vectors(_vectors(run, number), embed_pictures(encoder, refs))
            tables.append(frames.read_table(_part(run, number)))
            _add_ids(seen, tables[-1], config)
    good = [number for number, table in enumerate(tables) if table["reason"].null_count]
    return tables, [np.load(_vectors(run, number), mmap_mode="r") for number in good]


def _inspect_block(run: Run, rows: Rows, number: int) -> list[ImageRef]:
    """Write the table ``inspected`` of a block; returns the pictures to embed."""
    config = run.config
    there, failed = resolve(rows, run.out / "downloads", config.download, progress=run.progress)
    found = inspect(there, config.library)
    reason = [
        failed.get(row["id"]) or why for row, why in zip(rows, found["reason"].to_pylist(), strict=True)
    ]
    place = found.schema.get_field_index("reason")
    found = found.set_column(place, found.schema.field(place), pa.array(reason, pa.string()))
    frames.write_table(_part(run, number), found)
    return [row["data"] or row["ref"] for row, why in zip(there, reason, strict=True) if why is None]


def _add_ids(seen: set[bytes], table: pa.Table, config: LibraryConfig) -> None:
    """Add the ids of a part; raises if one occurs twice."""
    for name in table["id"].to_pylist():
        if _hash(name) in seen:
            raise UserError(
                f"library.path {config.path}: the id {name!r} occurs twice (white space counts as %20): choose another "
                "library.id_column; null numbers the rows"
            )
        seen.add(_hash(name))


def _unread(library: Library, read: list[str]) -> Iterator[dict]:
    """Rows of a library that were not read yet: the later ones, or, if some were added between, those with other ids."""
    listed = (encodable(row)["id"] for row in library.rows(pictures=False))
    if list(islice(listed, len(read))) == read:
        return library.rows(len(read))
    known = set(read)
    return (row for row in library.rows() if encodable(row)["id"] not in known)


def keep_pictures(run: Run, library: Library, images: Rows) -> None:
    """Copy the seed pictures that are not separate files into files. Raises `UserError`: the library has changed."""
    missing = {image["id"]: image for image in images if image["ref"] is None}

    def path(image: dict[str, Any]) -> Path:
        return run.path("seed", "pictures") / image["sha256"][:2] / image["sha256"]

    wanted = {name for name, image in missing.items() if not path(image).is_file()}
    if wanted:
        for row in fetched(row for row in library.rows() if row["id"] in wanted):
            image = missing[row["id"]]
            if row["data"] is None or hashlib.sha256(row["data"]).hexdigest() != image["sha256"]:
                break
            write_bytes(path(image), row["data"], sync=False)
            wanted.remove(row["id"])
        os.sync()
    if wanted:
        raise UserError(
            f"library.path {run.config.library.path}: picture {min(wanted)!r} has changed since it was inspected; delete "
            f"{run.path('seed')} and run the same command again"
        )
    for image in missing.values():
        image["ref"] = str(path(image))
    for image in images:
        if image["ref"].startswith(own := f"{run.out}/"):
            image["ref"] = frames.OUT + image["ref"].removeprefix(own)


def embed_pictures(encoder: ImageEncoder, refs: list[ImageRef]) -> np.ndarray:
    """(N, D) float32; (0, 0) without pictures."""
    return encoder.pictures(refs) if refs else np.empty((0, 0), np.float32)


def gather(parts: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Rows of the parts' concatenation, without building it: at the paper's size it takes 9.3 GB."""
    starts = np.cumsum([0, *map(len, parts)])
    found = np.empty((len(rows), parts[0].shape[1]), parts[0].dtype)
    for part, start, end in zip(parts, starts[:-1], starts[1:], strict=True):
        first, last = np.searchsorted(rows, [start, end])
        found[first:last] = part[rows[first:last] - start]
    return found


def cluster(vectors_ND: np.ndarray, num_clusters: int, iterations: int, seed: int) -> np.ndarray:
    """Cluster number of each row, by faiss' k-means. Raises `UserError`: more clusters than rows."""
    import faiss

    num, width = vectors_ND.shape
    if num_clusters > num:
        raise UserError(f"seed.clusters={num_clusters} needs at least as many pictures; {num} are usable")
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 256}
    means = faiss.Kmeans(width, num_clusters, niter=iterations, seed=seed, **limits)
    means.train(vectors_ND)
    blocks_BD = (vectors_ND[start : start + 65536] for start in range(0, num, 65536))
    return np.concatenate([means.index.search(block_BD, 1)[1][:, 0] for block_BD in blocks_BD])


def sample_clusters(cluster_N: np.ndarray, per_cluster: int, seed: int) -> list[int]:
    """Rows of at most `per_cluster` members of each cluster, drawn at random; ascending."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(cluster_N))
    order = order[np.argsort(cluster_N[order], kind="stable")]
    sorted_N = cluster_N[order]
    starts = np.searchsorted(sorted_N, sorted_N, side="left")
    return sorted(order[np.arange(len(order)) - starts < per_cluster].tolist())


def save_vectors(path: Path, vectors: np.ndarray) -> None:
    """Write vectors atomically."""
    with replacing(path) as waiting, waiting.open("wb") as out:
        np.save(out, vectors)
