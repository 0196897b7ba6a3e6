"""Descriptions stored with a checkpoint: ``rge.json``, the model card, and files for other libraries."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from rge.checkpoints.settings import (
    EYES,
    RGE_JSON,
    CheckpointSettings,
    Instructions,
    Pixels,
    Source,
    TaskPrompts,
    TrainedStage,
    read_settings,
)
from rge.common.files import read_json
from rge.common.schema import Record
from rge.config import Recipe, to_dict
from rge.data.config import SourceConfig
from rge.data.readers import some_records
from rge.model.adapter_files import is_hub_id
from rge.optim.config import StageConfig

RECORDS_READ = 4096
"""Evenly spread records per source in which instructions are counted; smaller sources are read in full."""

MOST_KNOWN = 256
"""Maximum number of instructions listed, most frequent first."""


def sentence_transformers_files(default: str | None) -> dict[str, Any]:
    """The files by which sentence-transformers and MTEB load a checkpoint, with the `default` instruction of its queries.

    Without them, sentence-transformers would silently average the token states.
    """
    module = {
        "idx": 0,
        "name": "0",
        "path": "",
        "type": "rge.integrations.sentence_transformers.ReasoningEmbedder",
    }
    # Of these entries, MTEB reads the names.
    entry = {"method": "forward", "method_output_name": "sentence_embedding"}
    return {
        "modules.json": [module],
        "sentence_bert_config.json": {"modality_config": {"text": entry, "image": entry}},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": default or "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


def seen_of(source: SourceConfig) -> list[Record]:
    """Some records of a source, without pictures and with the source's name and instruction as their own."""
    own: dict[str, Any] = {} if source.name is None else {"source": source.name}
    if source.instruction is not None:
        own["instruction"] = source.instruction or None
    return [record.model_copy(update=own) for record in some_records(source, RECORDS_READ)]


def prompts_of(
    recipe: Recipe, sources: Sequence[SourceConfig], weights: Sequence[float], tasks: Iterable[str]
) -> tuple[TaskPrompts, dict[str, TaskPrompts]]:
    """Settings of the training prompts: those of most queries, and what differs from them in `tasks`, named as in `instructions_of`."""

    def settings(source: SourceConfig) -> TaskPrompts:
        own = recipe.resolved(source)
        assert own.min_pixels is not None, "resolved"
        assert own.max_pixels is not None, "resolved"
        pixels = Pixels(min=own.min_pixels, max=own.max_pixels)
        return TaskPrompts(
            profile=own.profile, max_prompt_tokens=own.max_prompt_tokens, pixels=pixels, video=own.video
        )

    every = [settings(source) for source in sources]
    share: defaultdict[str, float] = defaultdict(float)
    of_task: defaultdict[str, Counter[int]] = defaultdict(Counter)
    written = [one.model_dump_json() for one in every]
    for number, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        share[written[number]] += weight
        for record in seen_of(source) if len({*written}) > 1 else ():
            of_task[record.source][number] += 1
            of_task[f"{record.source}/{record.category}"][number] += 1
    usual = every[written.index(max(share, key=share.__getitem__))]
    found = {}
    for name in tasks:
        own = every[of_task[name].most_common(1)[0][0]] if name in of_task else usual
        if apart := {key: value for key, value in own if value != getattr(usual, key)}:
            found[name] = TaskPrompts(**apart)
    return usual, found


def instructions_of(sources: Sequence[SourceConfig], weights: Sequence[float] | None = None) -> Instructions:
    """Instructions of the training queries: ``rge.json``'s ``instructions``.

    ``default``: the most frequent one, weighted like the sources in training (None if most queries had none); ``known``: up to
    `MOST_KNOWN`; ``by_task``: the most frequent per task, which is a source's name or else a record's ``source``, or these and
    ``/category`` if its categories differ.
    """
    total: defaultdict[str | None, float] = defaultdict(float)
    tasks: dict[tuple[str, str], Counter[str | None]] = defaultdict(Counter)
    weights = StageConfig(sources=[*sources]).weights([None] * len(sources)) if weights is None else weights
    for source, weight in zip(sources, weights, strict=True):
        records = seen_of(source)
        for record in records:
            instruction = record.instruction or None
            total[instruction] += weight / len(records)
            tasks[record.source, record.category][instruction] += 1
    ranked = sorted(total, key=total.__getitem__, reverse=True)  # stable: of equals the first
    by_task: dict[str, str | None] = {}
    for name, keys in groupby(sorted(tasks), key=itemgetter(0)):
        chosen = {f"{name}/{category}": tasks[name, category].most_common(1)[0][0] for _, category in keys}
        agreed = set(chosen.values())
        by_task |= {name: agreed.pop()} if len(agreed) == 1 else chosen
    return Instructions(
        default=ranked[0] if ranked else None,
        known=[instruction for instruction in ranked if instruction][:MOST_KNOWN],
        by_task=by_task,
    )


def trained_on(start: str, recipe: Recipe, stage: str) -> list[TrainedStage]:
    """Stages of a checkpoint's training with their sources, oldest first: those of its start, and its own.

    ``start``: what `stage` starts from. The first one may be ``naming``, which teaches a small base's vision tower.
    """
    own = TrainedStage(stage=stage, sources=to_dict(recipe)[stage]["sources"])
    if (Path(start) / RGE_JSON).is_file():
        return [*read_settings(Path(start)).trained_on, own]
    if (eyes := read_json(Path(start) / EYES)) is None:
        return [own]
    return [TrainedStage(stage="naming", sources=[Source(path=eyes["records"])]), own]


def model_card(settings: CheckpointSettings, name: str, licence: str | None = None) -> str:
    """``README.md`` of a checkpoint, with front matter for the Hugging Face hub.

    Its examples load a path that starts with ``./``: anyone could register a name such as ``a/b`` as a hub id, and the example
    sets `trust_remote_code`.
    """
    base, measured = settings.recipe.model.path, settings.validation
    hub_ids = [base] if is_hub_id(base) else [part.hub_id for part in settings.origins if part.hub_id]
    figures = measured.figures.items() if measured else ()
    return jinja2.Template(CARD, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(
        settings.content(),
        name=name,
        path=f"./{name.rsplit('/', 1)[-1]}",
        licence=licence,
        on_hub=hub_ids[0] if hub_ids else None,
        parts=[f"{part.name} ({part.part}, {part.licence})" for part in settings.origins],
        base=_shown(base),
        base_sha256=settings.base and settings.base.sha256,
        adapted=settings.base and _shown(settings.base.path),
        trained=[f"{one.stage} on {', '.join(map(_title, one.sources))}" for one in settings.trained_on],
        default=settings.instructions.default,
        range=" to ".join(dict.fromkeys((f"{settings.pixels.min:,}", f"{settings.pixels.max:,}"))),
        measured=", ".join(measured.sources) if measured else None,
        figures=[f"{key.removeprefix('val_')} {it:.4g}" for key, it in figures if isinstance(it, float)],
    )


def _title(source: Source) -> str:
    """`SourceConfig.title` of a source, which a newer version may have given further keys."""
    known = {item.name for item in fields(SourceConfig)}
    return SourceConfig(**{key: value for key, value in source.content().items() if key in known}).title


def _shown(model: str) -> str:
    return model if is_hub_id(model) else Path(model).name


CARD = """\
---
{% if on_hub %}
base_model: {{ on_hub }}
{% endif %}
library_name: sentence-transformers
pipeline_tag: image-text-to-text
{% if on_hub and licence is none %}
license: other
license_name: as-base-model
license_link: https://huggingface.co/{{ on_hub }}
{% endif %}
{% if licence is not none %}
license: {{ licence }}
{% endif %}
tags:
- rge
- sentence-transformers
- multimodal-retrieval
- reasoning
- feature-extraction
---

# {{ name }}

{% if reasons != "none" %}
A reasoning-guided multimodal embedder ([RGE](https://arxiv.org/abs/2511.16150)). Given pictures, text or both, it writes
a short rationale that ends with `<emb>`; the hidden state at that token is the embedding.
{% else %}
A multimodal embedder trained without rationales: the baseline for reasoning-guided embedders. The embedding of pictures
or text is the hidden state at `<emb>`, directly after the prompt.
{% endif %}

## Use

```python
from rge import Embedder

embedder = Embedder.from_pretrained("{{ path }}"{{ ', base="%s"' % adapted if adapted }})
query = embedder.encode_query("What do you need to open this?", images="padlock.png")
scores = embedder.similarity(query, embedder.encode_document(images=["key.png", "nail.png"]))
```

{% if adapted %}
These files are PEFT adapters and the embedding rows of new tokens. They need the base model `{{ adapted }}` (sha256 \
`{{ base_sha256[:12] }}` over its safetensors files); `base=` is optional if it is still at its training path. \
`peft.PeftModel.from_pretrained(base_model, "{{ path }}")` loads them too.

{% endif %}
With sentence-transformers: `SentenceTransformer("{{ path }}", trust_remote_code=True)`, then `encode_query` and \
`encode_document` (requires the package `rge`, which the flag lets sentence-transformers import).

Not verified yet: `rge verify {{ path }} card=true` compares all routes to an embedding.

## Training

* Base model: {% if parts %}{{ parts | join(" and ") }}; the rest was trained from scratch. Their licences also apply to \
these weights{% else %}{{ base }}. Its licence also applies to \
these weights{% endif %}.
* Stage `{{ stage }}` of recipe `{{ recipe.recipe }}`, {{ step }} steps.
* Training data: {{ trained | join("; ") }}.
* Instruction of most training queries: {{ default.__repr__() if default else "none" }}. `encode_query` prepends it to \
queries by default.
* Pictures: {{ range }} pixels. Prompts: up to {{ "{:,}".format(max_prompt_tokens) }} tokens. Rationales: up to \
{{ generation.max_new_tokens }} tokens.
{% if dimensions %}
* Embeddings can be truncated to {{ dimensions | join(", ") }} components.
{% endif %}
{% if measured is not none %}

## Validation

On {{ measured }}: {{ figures | join(", ") }}.
{% endif %}
"""


def verified_card(card: str, said: str) -> str:
    """Say in a model card how the checkpoint was verified; a card without such a line stays as it is."""
    return re.sub(
        r"^(Not verified yet: |Verified with ).*$", f"Verified with {said}", card, count=1, flags=re.M
    )


def renamed_card(card: str, name: str) -> str:
    """Rename the checkpoint in the title and examples of a model card."""
    if title := re.search(r"^# (.+)$", card, re.MULTILINE):
        card = card.replace(title[0], f"# {name}", 1).replace(
            f"\n- name: {title[1]}\n", f"\n- name: {name}\n", 1
        )
    if loaded := re.search(r'Embedder\.from_pretrained\(("[^"]+")', card):
        card = card.replace(f"({loaded[1]}", f'("{name}"')
    return card
