"""The embeddings of one set by one encoder, with their cache keys.

Filling a cache and reading it are separate steps: all processes fill, but only the first one reads.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from eval.embedding import shards
from eval.embedding.fill_cache import Embeds, Mode, Side, check_collapse, cut, fill
from eval.embedding.processes import ProcessGroup
from eval.embedding.shards import Cache, cache_key, caches_in, describe, encoder_key
from eval.sets.contents import Contents
from eval.sets.retrieval_set import Modality, RetrievalSet
from rge.common.modes import SILENT
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Encoded, Item
from rge.identity.run_identity import Identity, changes_since, digest, in_words, joined, software_of

ROOMS = ("rge", "eval.models", "eval.embedding")
"""Our packages whose loaded modules embeddings depend on; user modules and plugins always count."""


@dataclass
class Embeddings:
    """The embeddings of one encoder on one set."""

    encoder: Embeds
    wanted: RetrievalSet
    contents: Contents
    root: Path  # of all caches
    process_group: ProcessGroup
    batch_size: int
    seed: int  # of sampled rationales
    candidate_mode: Mode
    dims: int | None  # components kept of each embedding, but not in caches; None: all
    memory_mb: float  # for a pool's embeddings; larger ones become a memory map
    made_with: Identity | None = None  # software and plugins that they depend on so far (first process only)
    _notices: set[str] = field(default_factory=set)
    _filled: dict[tuple[Any, ...], Cache] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether rationales are sampled."""
        return self.encoder.settings.generation.temperature > 0

    def asking(self, *, seed: int | None = None, **generation: Any) -> Self:
        """The same set and model with another seed or generation settings; see `Embeds.with_`."""
        encoder = self.encoder.with_(**generation)
        return replace(self, encoder=encoder, seed=self.seed if seed is None else seed, _filled={})

    def fill_queries(self, mode: Mode, modality: Modality) -> Cache:
        """Complete the cache of the queries for a condition."""
        items = self.wanted.query_items(modality)
        return self._fill("query", mode, modality, items, self.contents.queries[modality])

    def fill_candidates(self) -> Cache:
        """Complete the cache of the pool."""
        items, contents = self.wanted.corpus_items(), self.contents.candidates
        return self._fill("candidate", self.candidate_mode, "both", items, contents)

    def queries(self, mode: Mode, modality: Modality) -> Encoded:
        """Embeddings and rationales of the queries, in file order; a UserError if all embeddings are the same."""
        encoded = shards.read(self.fill_queries(mode, modality))
        encoded = replace(encoded, embeddings=cut(encoded.embeddings, self.dims))
        check_collapse(encoded.embeddings, self.contents.queries[modality], "query")
        return encoded

    def candidates(self) -> np.ndarray:
        """Embeddings of the pool in id order, (C, D) float32; a UserError if all are the same."""
        cache = self.fill_candidates()
        embedding_CD = cut(shards.read_embeddings(cache, self.wanted.file_order_C, self.memory_mb), self.dims)
        contents = [self.contents.candidates[row] for row in self.wanted.file_rows_C.tolist()]
        check_collapse(embedding_CD, contents, "candidate")
        return embedding_CD

    def _fill(
        self, side: Side, mode: Mode, modality: str, items: Iterable[Item], contents: Sequence[str]
    ) -> Cache:
        if cache := self._filled.get((side, mode, modality)):
            return cache
        wanted, seed = self.wanted, self.seed if self.samples and mode not in SILENT else None
        asked = encoder_key(
            checkpoint_hash=self.encoder.checkpoint_hash,
            settings=keyed_settings(self.encoder, mode) | {"seed": seed},
            side=side,
            mode=mode,
        )
        encoder = self.process_group.once(lambda: self._encoder_key(asked))
        key = cache_key(encoder, modality=modality, fingerprint=wanted.fingerprint, contents=contents)
        about = {"side": side, "mode": mode, "modality": modality, "set": wanted.name, "asked": asked}
        about |= {"checkpoint_hash": self.encoder.checkpoint_hash}
        names = contents
        if seed is not None:  # a sampled rationale also depends on the item's id
            ids = wanted.query_ids if side == "query" else [wanted.corpus_ids[r] for r in wanted.file_order_C]
            names = [f"{content} {name}" for content, name in zip(contents, ids, strict=True)]
        cache = Cache(self.root / f"{side}-{mode}-{modality}-{key[:20]}", names)
        self.process_group.once(lambda: shards.open_cache(cache, **about, key=key, encoder=encoder))
        self.process_group.once(lambda: self._record(cache))  # now, in case the run is killed
        fill(
            self.encoder, items, cache, side=side, mode=mode, batch_size=self.batch_size, seed=seed,
            process_group=self.process_group,
        )  # fmt: skip
        self.process_group.once(lambda: self._record(cache))  # again, with modules loaded by embedding
        self._filled[side, mode, modality] = cache
        return cache

    def _encoder_key(self, asked: str) -> str:
        """Key of the encoder and its software: that of an existing cache if nothing has changed since, else a new one."""
        made_with: dict[str, Identity] = {}
        for _, about in caches_in(self.root):
            if "made_with" in about and about.get("asked") == asked:
                known = made_with.get(about["encoder"])
                made_with[about["encoder"]] = joined(known, about["made_with"])
        changed: dict[str, tuple[Any, Any]] = {}
        for encoder, then in made_with.items():
            if not (changed := changes_since(then)):
                self.made_with = joined(self.made_with, then)
                return encoder
        notice = (
            f"embeddings in {self.root} are not reused because of changes: {'; '.join(in_words(changed))}"
        )
        if changed and notice not in self._notices:
            self._notices.add(notice)
            print(notice, file=sys.stderr, flush=True)
        return digest([asked, software_of(ROOMS)])

    def _record(self, cache: Cache) -> None:
        """Record in `made_with` and beside the cache which modules and packages its embeddings depend on."""
        self.made_with = joined(self.made_with, software_of(ROOMS))
        describe(cache, made_with=self.made_with)


def keyed_settings(encoder: Embeds, mode: Mode) -> dict[str, Any]:
    """The encoder settings that affect embeddings, including prompt templates."""
    settings = {
        key: value
        for key, value in encoder.settings.content().items()
        if key not in ("notes", "trained_on", "identity")
    }
    profile = encoder.settings.profile
    if profile in PROFILES:
        settings["templates"] = asdict(PROFILES[profile])
    if mode in SILENT:  # nothing is generated, so generation settings have no effect
        settings.pop("generation", None)
    return settings
