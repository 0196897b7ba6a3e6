"""The caches of one embedder's embeddings, by side and mode, filled by all processes."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rge.common.modes import Mode
from rge.common.prompt_profiles import PROFILES
from rge.common.schema import Item
from rge.identity.run_identity import Identity, changes_since, digest, in_words, joined, software_of
from rge.vectors import shards
from rge.vectors.fill_cache import ROOMS, Cluster, Embeds, Side, fill
from rge.vectors.processes import ALONE, ProcessGroup
from rge.vectors.shards import Cache, cache_key, caches_in, describe, encoder_key


@dataclass
class EmbeddingCaches:
    """The caches of one embedder in one folder."""

    encoder: Embeds
    root: Path  # of all caches
    _: KW_ONLY
    process_group: ProcessGroup = ALONE
    cluster: Cluster | None = None  # embeds in place of this process
    batch_size: int = 32
    seed: int = 0  # of sampled rationales
    made_with: Identity | None = None  # software and plugins that they depend on so far (first process only)
    _notices: set[str] = field(default_factory=set)
    _filled: dict[tuple[Any, ...], Cache] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether rationales are sampled."""
        return self.encoder.settings.generation.temperature > 0

    def asking(self, *, seed: int | None = None, **generation: Any) -> Self:
        """The same items and model with another seed or generation settings; see `Embeds.with_`."""
        encoder, cluster = self.encoder.with_(**generation), self.cluster
        if cluster is not None:
            cluster = replace(cluster, load=partial(_asking, cluster.load, generation))
        seed = self.seed if seed is None else seed
        return replace(self, encoder=encoder, cluster=cluster, seed=seed, _filled={})

    def fill(
        self,
        side: Side,
        mode: Mode,
        items: Iterable[Item],
        contents: Sequence[str],
        ids: Sequence[str],
        *,
        modality: str = "both",
        fingerprint: str = "",
        **about: Any,
    ) -> Cache:
        """Complete the cache of these items, in their order; see `rge.vectors.fill_cache.fill` for errors.

        ``contents``: their `rge.vectors.contents.content_digest`; ``ids``: those of the items; ``fingerprint``: of the set that they
        belong to, if any; ``about``: further words for the cache's description.
        """
        if cache := self._filled.get((side, mode, modality)):
            return cache
        seed = self.seed if self.samples and mode != "direct" else None
        asked = encoder_key(
            checkpoint_hash=self.encoder.checkpoint_hash,
            settings=keyed_settings(self.encoder, mode) | {"seed": seed},
            side=side,
            mode=mode,
        )
        encoder = self.process_group.once(lambda: self._encoder_key(asked))
        key = cache_key(encoder, modality=modality, fingerprint=fingerprint, contents=contents)
        described = {"side": side, "mode": mode, "modality": modality, **about, "asked": asked}
        described |= {"checkpoint_hash": self.encoder.checkpoint_hash}
        names = contents
        if seed is not None:  # a sampled rationale also depends on the item's id
            names = [f"{content} {name}" for content, name in zip(contents, ids, strict=True)]
        cache = Cache(self.root / f"{side}-{mode}-{modality}-{key[:20]}", names)
        self.process_group.once(lambda: shards.open_cache(cache, **described, key=key, encoder=encoder))
        self.process_group.once(lambda: self._record(cache))  # now, in case the run is killed
        elsewhere = fill(
            self.encoder, items, cache, side=side, mode=mode, batch_size=self.batch_size, seed=seed,
            process_group=self.process_group, cluster=self.cluster,
        )  # fmt: skip
        if elsewhere is not None:
            self.made_with = joined(self.made_with, elsewhere)
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
            sys.stderr.write(f"{notice}\n")
        return digest([asked, software_of(ROOMS)])

    def _record(self, cache: Cache) -> None:
        """Record in `made_with` and beside the cache which modules and packages its embeddings depend on."""
        self.made_with = joined(self.made_with, software_of(ROOMS))
        describe(cache, made_with=self.made_with)


def _asking(load: Callable[[], Embeds], generation: dict[str, Any]) -> Embeds:
    return load().with_(**generation)


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
    if mode == "direct":  # nothing is generated, so generation settings have no effect
        settings.pop("generation", None)
    return settings
