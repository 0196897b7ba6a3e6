"""The seed stage: inspect and embed the library, cluster it, sample from each cluster; and later extensions."""

import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.rmir import frames
from data_prep.rmir.config import EncoderConfig, LibraryConfig
from data_prep.rmir.pictures.changes import Changes, LibraryState, compare, files_of
from data_prep.rmir.pictures.download import LOST, OUTAGE_OF, Reached, is_address, resolve
from data_prep.rmir.pictures.encoders import ImageEncoder, embed_all, load_encoder
from data_prep.rmir.pictures.library import (
    DUPLICATE,
    NEAR_DUPLICATE,
    Library,
    blocks,
    encodable,
    fetched,
    inspect,
)
from data_prep.rmir.results.export import credits_changed
from data_prep.rmir.run import ITERATIONS, Run, reasons
from rge.common.errors import UserError
from rge.common.files import replacing, write_bytes
from rge.common.parts import ImageRef
from rge.common.schema import safe_id
from rge.content.near_duplicates import near_duplicates
from rge.distributed.ray_data import mapped
from rge.tables.pictures import find, would_find

PARTS_AHEAD = 4
"""Blocks per device of a cluster that wait, with their pictures."""
Rows = list[dict[str, Any]]
IMAGE_COLUMNS = ("id", "ref", "caption", "sha256", "width", "height", "phash")


def seed(run: Run) -> dict[str, Any]:
    """Inspect and embed the library, cluster it, and sample pictures of each cluster."""
    config, folder = run.config, run.path("seed")
    library, state = Library(config.library), LibraryState.read(folder)
    # Checked before anything is embedded; `cluster` checks again with the usable pictures.
    listed = sum(1 for _ in islice(library.rows(pictures=False), config.seed.clusters))
    if listed < config.seed.clusters and not state.extensions:
        raise UserError(
            f"{config.seed.clusters} need at least as many pictures; there are {listed:,}"
            f". Set seed.clusters={max(1, listed // 2)}, or add pictures",
            config.library.path,
            key="seed.clusters",
        )
    if skipped := library.skipped():
        print(f"library.path {config.library.path}: skipped {skipped}", file=sys.stderr, flush=True)
    encoder, captioner = load_encoder(config.image_encoder), load_encoder(config.caption_encoder)
    table, parts = scan_library(run, library, encoder, state)
    images, kept_ND = _before(run, table, state)
    most_bits = config.library.near_duplicates
    unique, bad = usable(table, state, most_bits, [image["id"] for image in images])
    listed = len(table) - len(state.gone)
    if not len(unique):
        raise UserError(
            f"none of the {listed} pictures is usable: {reasons(bad)}",
            config.library.path,
            key="library.path",
        )
    new, share_new = unique, None
    if state.extensions:
        # Repeats of pictures that are gone now count as pictures of their own.
        at_first, _ = usable(table, LibraryState(), most_bits)
        new = unique[(unique >= state.extensions[-1]["start"]) | ~np.isin(unique, at_first)]
        new = new[~_is_in(table["id"].take(new), [image["id"] for image in images])]
        share_new = len(new) / max(1, (at_first < state.extensions[0]["start"]).sum())
    # Only good pictures have vectors, so a picture's row is the number of good pictures before it.
    vector_of = np.cumsum(pc.is_null(table["reason"]).to_numpy()) - 1
    more, vectors_ND = _sampled(run, table.take(new), gather(parts, vector_of[new]), share_new, images)
    images += more
    for image in images:
        image["caption"] = state.captions.get(image["id"], image["caption"])
    keep_pictures(run, library, images)
    save_vectors(folder / "images.npy", np.concatenate([kept_ND, vectors_ND]) if len(kept_ND) else vectors_ND)
    captions = [image["caption"] for image in images if image["caption"]]
    captions_ND = embed_all(config, config.caption_encoder, captions=captions, loaded=captioner)
    save_vectors(folder / "captions.npy", captions_ND)
    frames.write_table(folder / "rejected.parquet", bad.table)
    frames.write_rows(folder / "images.parquet", images)
    return {
        "listed": listed,
        "usable": len(unique),
        "seed": len(images),
        "with_caption": len(captions),
        "rejected": reasons(bad),
        "encoders": {"images": encoder.name, "captions": captioner.name},
        **({"extensions": state.extensions} if state.extensions else {}),
    }


def usable(
    table: pa.Table, state: LibraryState, most_bits: int | None, preferred: Collection[str] = ()
) -> tuple[np.ndarray, frames.Rows]:
    """Rows of the usable, distinct pictures that are still in the library; and the others with their reasons.

    Of near-duplicates, the first stays, or the first of the `preferred` ids.
    """
    columns = ["id", "reason", "ref", "sha256", "phash"]
    # Arrow's own columns: objects of Python would take several times their memory.
    whole = table.select(columns).to_pandas(types_mapper=pd.ArrowDtype)
    frame = whole.drop(index=state.gone).rename(columns={"ref": "detail"})
    good = frame[frame["reason"].isna()]
    repeated_N = good.duplicated("sha256")
    frame.loc[good.index[repeated_N], "reason"] = DUPLICATE
    good = good[~repeated_N]
    if most_bits is not None:
        good = good.iloc[np.argsort(~good["id"].isin(preferred).to_numpy(bool), kind="stable")]
        repeats = near_duplicates(good["phash"].tolist(), most_bits)
        rows = good.index[[of is not None for of in repeats]]
        frame.loc[rows, "reason"] = NEAR_DUPLICATE
        frame.loc[rows, "detail"] = [f"repeats {good['id'].iloc[of]}" for of in repeats if of is not None]
    good_N = frame["reason"].isna()
    left_out = frame.loc[~good_N, ["id", "reason", "detail"]].assign(key=None)
    bad = pa.Table.from_pandas(left_out, schema=frames.SCHEMAS["rejected"], preserve_index=False)
    return frame.index[good_N].to_numpy(), frames.Rows(bad.replace_schema_metadata(), Path())


def _sampled(
    run: Run, new: pa.Table, vectors_ND: np.ndarray, share_new: float | None, images: Rows
) -> tuple[Rows, np.ndarray]:
    """Cluster the new pictures and sample from each cluster; returns rows and vectors.

    An extension of the earlier `images` gets clusters of its own, so that these do not change; `share_new` is its size relative to
    the first library's.
    """
    config = run.config.seed
    if not len(new):
        return [], vectors_ND
    num_clusters, first = config.clusters, 0
    if share_new is not None:
        num_clusters = min(len(new), max(1, round(config.clusters * share_new)))
        first = 1 + max((image["cluster"] for image in images), default=-1)
    cluster_N = first + cluster(vectors_ND, num_clusters, config.seed)
    chosen = sample_clusters(cluster_N, config.per_cluster, config.seed)
    rows = new.take(chosen).select(IMAGE_COLUMNS).to_pylist()
    found = [{**row, "cluster": number} for row, number in zip(rows, cluster_N[chosen].tolist(), strict=True)]
    order = list(range(len(found)))
    if share_new is not None:  # random, since `drawn` takes the first ones
        order.sort(
            key=lambda place: hashlib.blake2b(safe_id(found[place]["id"]).encode(), digest_size=8).digest()
        )
    return [found[place] for place in order], vectors_ND[chosen][order]


def _is_in(values: pa.ChunkedArray, names: Collection[str]) -> np.ndarray:
    return pc.is_in(values, value_set=pa.array(names, pa.string())).to_numpy()


def _before(run: Run, table: pa.Table, state: LibraryState) -> tuple[Rows, np.ndarray]:
    """Seed pictures from before the last extension that are still in the library, and their vectors."""
    if not state.extensions:
        return [], np.empty((0, 0), np.float32)
    gone = set(map(_key, table.select(["id", "sha256"]).take(pa.array(state.gone, pa.int64())).to_pylist()))
    number = len(state.extensions)
    images = run.rows("seed", f"images-{number}")
    stays = [row for row, image in enumerate(images) if _key(image) not in gone]
    vectors_ND = np.load(run.path("seed", f"images-{number}.npy"), mmap_mode="r")
    return [images[row] for row in stays], vectors_ND[stays]


def drawn(run: Run, most: int | None) -> Sequence[dict[str, Any]]:
    """The seed pictures to ask about: all, or `most` drawn at random.

    An extended seed set keeps the pictures drawn before the extension and fills up with new ones.
    """
    images = run.rows("seed", "images")
    if most is None or most >= len(images):
        return images
    extended = run.path("seed", "images-1.parquet").is_file()
    original = run.rows("seed", "images-1") if extended else images
    rng = np.random.default_rng(run.config.seed.seed)
    rows = sorted(rng.choice(len(original), min(most, len(original)), replace=False).tolist())
    old = [_key(image) for image in original]
    chosen, known = {old[row] for row in rows}, set(old)
    first = [image for image in images if _key(image) in chosen]
    fresh = [image for image in images if _key(image) not in known]
    return [*first, *fresh[: most - len(first)]]


def _key(image: dict[str, Any]) -> tuple[str, str]:
    """Id and content of a picture."""
    return image["id"], image["sha256"]


def settle_library(run: Run) -> None:
    """Compare the library with what the seed stage read, and handle changes as ``library.changed`` says.

    Raises `UserError`: it changed and ``library.changed=stop``; it is unreadable and the seed stage is not finished; or
    it would hold the run's folder.
    """
    folder, config = run.path("seed"), run.config.library
    parts = _parts(run)
    if not parts or not run.begun("seed"):
        _check_outside_library(run)
        return
    state, done = LibraryState.read(folder), run.done("seed")
    finished = done is not None and len(done["counts"].get("extensions", ())) == len(state.extensions)
    if done is not None and not finished:  # killed after an extension was recorded
        run.path("seed", "done.json").unlink()
    try:
        library = Library(config)
    except UserError:
        if not finished:
            raise
        return  # the export reports it when it needs the credits
    files = files_of(library)
    if state.files and state.files == files:
        return
    table = pa.concat_tables(parts)
    found = compare(library, table, state)
    if not finished:  # the rest has not been read yet
        found.added = []
    state.files, state.in_order = files, state.in_order and found.in_order
    state.stamps |= found.stamps
    if not str(found):
        if finished and run.done("split") and credits_changed(run, library):
            print(
                "source, author or licence of a picture has changed: stage=split will write the data set again",
                file=sys.stderr,
            )
            run.path("split", "done.json").unlink()
        state.write(folder)  # last: with it, the library counts as compared
        return
    if config.changed == "stop":
        raise UserError(
            f"it has changed since it was read: {found}. library.changed=extend adds new pictures, removes missing ones and "
            "keeps the results of the others; a different out= starts over",
            config.path,
            key="library.changed",
        )
    print(f"library.path {config.path} has changed: {found}", file=sys.stderr, flush=True)
    _carry_over(folder, state, found, table, finished)


def _check_outside_library(run: Run) -> None:
    """Raise if the run's own pictures and tables would belong to the library: in the folder that it reads, or found by its pattern."""
    path = str(run.config.library.path)
    files = find(path, run.config.library.exclude)
    if "file" not in files.fs.protocol or files.kind == "saved":
        return
    folder, pattern = Path(files.root).resolve(), path if files.is_local else files.fs._strip_protocol(path)
    reads_folder = files.fs.isdir(path)
    for file in (run.path("seed", "images.parquet").resolve(), _part(run, 0).resolve()):
        if reads_folder:
            within = file.relative_to(folder).parts if file.is_relative_to(folder) else ()
            is_read = bool(within) and not any(part.startswith(".") for part in within)
        else:
            is_read = would_find(pattern, file)
        if is_read:
            raise UserError(
                f"the run's own files, such as {file}, would be taken for the library's (library.path={path})"
                f": choose another",
                run.out,
                key="out",
            )


def _carry_over(folder: Path, state: LibraryState, found: Changes, table: pa.Table, finished: bool) -> None:
    """Record the changes; back up the choice of a finished seed stage and mark the stage as not done."""
    left = {*found.removed, *found.changed}
    state.gone = sorted({*state.gone, *np.flatnonzero(_is_in(table["id"], left)).tolist()})
    state.captions = {
        name: text for name, text in state.captions.items() if name not in left
    } | found.captions
    state.stamps = {name: stamp for name, stamp in state.stamps.items() if name not in left}
    if finished:
        number = len(state.extensions) + 1
        for ending in ("parquet", "npy"):
            shutil.copyfile(folder / f"images.{ending}", folder / f"images-{number}.{ending}")
        counts = {"added": len(found.added), "removed": len(found.removed), "changed": len(found.changed)}
        state.extensions.append({"start": len(table), **counts, "captions": len(found.captions)})
    state.write(folder)
    (folder / "done.json").unlink(missing_ok=True)


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
    run: Run, library: Library, encoder: ImageEncoder, state: LibraryState
) -> tuple[pa.Table, list[np.ndarray]]:
    """Inspect and embed the library block by block; while one is embedded, the next is fetched and decoded.

    Returns:
        The table ``inspected``, and for each part the memory-mapped vectors of its good pictures.

    Raises:
        UserError: the library, or every picture of its first ones, cannot be read; or an id occurs twice.
    """
    config, tables = run.config.library, _parts(run)
    if not tables:
        state.files = files_of(library)
        state.write(run.path("seed"))
    # A sixth each: two blocks are in memory at once, and decoding needs more.
    most_bytes = max(1, int(config.memory_mb * 2**20 / 6))
    todo = blocks(fetched(_unread(library, state, tables)), config.shard_size, most_bytes)
    proceed = run.config.on_unanswered == "proceed"
    reached = None if proceed else Reached(min(OUTAGE_OF, config.shard_size))
    jobs = (
        (_part(run, number), _resolved(run, rows, reached))
        for number, rows in enumerate(todo, start=len(tables))
    )
    if run.config.engine == "ray":
        work = partial(_scanner, config, run.config.image_encoder)
        for path in mapped(work, jobs, address=run.config.address, ahead=PARTS_AHEAD):
            tables.append(frames.read_table(path))
        return _scanned(run, tables)
    inspected = (_inspect_block(config, *job) for job in jobs)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(next, inspected, None)
        while (refs := waiting.result()) is not None:
            waiting = beside.submit(next, inspected, None)
            number = len(tables)
            save_vectors(
                _vectors(run, number), encoder.pictures(refs) if refs else np.empty((0, 0), np.float32)
            )
            tables.append(frames.read_table(_part(run, number)))
    return _scanned(run, tables)


def _scanned(run: Run, tables: list[pa.Table]) -> tuple[pa.Table, list[np.ndarray]]:
    good = [number for number, table in enumerate(tables) if table["reason"].null_count]
    return pa.concat_tables(tables), [np.load(_vectors(run, number), mmap_mode="r") for number in good]


def _scanner(config: LibraryConfig, encoder: EncoderConfig) -> Callable[[tuple[Path, Rows]], Path]:
    """Inspects and embeds a block, as `scan_library` does in one process; returns the path of its table."""
    loaded = load_encoder(encoder)

    def work(job: tuple[Path, Rows]) -> Path:
        path, rows = job
        refs = _inspect_block(config, path, rows)
        save_vectors(
            path.with_suffix(".npy"), loaded.pictures(refs) if refs else np.empty((0, 0), np.float32)
        )
        return path

    return work


def _resolved(run: Run, rows: Rows, reached: Reached | None) -> Rows:
    """A block's rows with the pictures that had to be downloaded."""
    rows = resolve(rows, run.out / "downloads", run.config.download, progress=run.progress)
    if reached is not None:
        reached.note(rows)
    return rows


def _inspect_block(config: LibraryConfig, path: Path, rows: Rows) -> list[ImageRef]:
    """Write the table ``inspected`` of a block; returns the pictures to embed."""
    found = inspect(rows, config)
    for row, about in zip(rows, found, strict=True):
        if LOST in row and is_address(row["ref"]):
            about["reason"] = f"download: {row[LOST]}"
    frames.write_rows(path, found)
    return [
        row["data"] or row["ref"] for row, about in zip(rows, found, strict=True) if about["reason"] is None
    ]


def _unread(library: Library, state: LibraryState, tables: list[pa.Table]) -> Iterator[dict[str, Any]]:
    """Rows of a library not read yet: those after the ones in `tables`, or, if it changed, those with unknown ids.

    Raises `UserError`: an id occurs twice.
    """
    seen: set[str] = set()

    def add(name: str) -> None:
        if (written := safe_id(name)) in seen:
            raise UserError(
                "the id occurs twice (white space counts as %20): choose another library.id_column"
                "; null numbers the rows",
                library.config.path,
                key=name,
                kind="twice",
            )
        seen.add(written)

    names = [name for table in tables for name in table["id"].to_pylist()]
    gone = set(state.gone)
    for number, name in enumerate(names):
        if number not in gone:
            add(name)
    unchanged = state.in_order and not state.gone and not state.extensions
    known = frozenset() if unchanged else frozenset(seen)
    for row in library.rows(len(names) if unchanged else 0):
        name = encodable(row)["id"]
        if safe_id(name) not in known:
            add(name)
            yield row


def keep_pictures(run: Run, library: Library, images: Rows) -> None:
    """Copy the seed pictures that are not separate files into files. Raises `UserError`: the library has changed."""
    missing = {image["id"]: image for image in images if image["ref"] is None}

    def path(image: dict[str, Any]) -> Path:
        return run.path("seed", "pictures") / image["sha256"][:2] / image["sha256"]

    wanted = {name for name, image in missing.items() if not path(image).is_file()}
    changed = set()
    if wanted:
        for row in fetched(row for row in library.rows() if row["id"] in wanted):
            image = missing[row["id"]]
            if row["data"] is None:
                continue
            if hashlib.sha256(row["data"]).hexdigest() == image["sha256"]:
                write_bytes(path(image), row["data"], sync=False)
                wanted.remove(row["id"])
            else:
                changed.add(row["id"])
        os.sync()
    if changed:
        raise UserError(
            f"the picture has changed since it was inspected: delete {run.path('seed')} and run the same command again",
            run.config.library.path,
            key=min(changed),
            kind="changed",
        )
    if wanted:
        raise UserError(
            "the picture cannot be read now: run the same command again",
            run.config.library.path,
            key=min(wanted),
            kind="unreadable",
        )
    for image in missing.values():
        image["ref"] = str(path(image))
    own = os.path.join(os.path.abspath(run.out), "")
    for image in images:
        # Later commands may be started in another folder, and the run's own may be moved.
        ref = os.path.abspath(image["ref"])
        image["ref"] = frames.OUT + ref.removeprefix(own) if ref.startswith(own) else ref


def gather(parts: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Rows of the parts' concatenation, without building it: at the paper's size it takes 9.3 GB."""
    starts = np.cumsum([0, *map(len, parts)])
    found = np.empty((len(rows), parts[0].shape[1]), parts[0].dtype)
    for part, start, end in zip(parts, starts[:-1], starts[1:], strict=True):
        first, last = np.searchsorted(rows, [start, end])
        found[first:last] = part[rows[first:last] - start]
        if isinstance(part, np.memmap):  # its pages would stay in memory beside the copies
            part._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return found


def cluster(vectors_ND: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster number of each row, by faiss' k-means. Raises `UserError`: more clusters than rows."""
    import faiss

    num, width = vectors_ND.shape
    if num_clusters > num:
        raise UserError(
            f"{num_clusters} need at least as many pictures; {num} are usable", key="seed.clusters"
        )
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 256}
    means = faiss.Kmeans(width, num_clusters, niter=ITERATIONS, seed=seed, **limits)
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
