"""Models that write texts: behind an endpoint, or a vision-language model in this process. What was written is kept.

Both keep every text under what was asked (`rge.calls.store`), so that a run that was killed, or that ran out of its budget,
asks only for the rest.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eval.judging.judges import identity_of_files
from rge.calls.caller import Caller
from rge.calls.model_config import ModelConfig
from rge.calls.replies import Reply
from rge.calls.request import Part, Picture, Request
from rge.calls.store import AnswerStore, key_of
from rge.common.commands import progress_bar
from rge.common.errors import UserError
from rge.common.images import load_image

KEPT_AT_ONCE = 8
"""Texts that a model in this process writes between two times of keeping them."""


@dataclass(frozen=True)
class Asked:
    """One prompt: texts and pictures in the order they are read, and instructions in front of them."""

    parts: tuple[Part, ...]
    system: str | None = None


@dataclass(frozen=True)
class Written:
    """What came of a prompt.

    Attributes:
        text: as written; empty where there is none.
        stop: why it ended: ``stop``, ``length``, or why there is none: ``refusal``, ``empty``, ``rejected request`` ...
        tokens: written; None where the server does not say.
    """

    text: str
    stop: str
    tokens: int | None = None

    def reply(self) -> Reply:
        """As an answer to look into."""
        return Reply(self.text, self.stop, None, self.tokens)


class Writer(Protocol):
    """Writes a text for every prompt; ``name`` is what decides them, for a result's identity."""

    name: dict[str, Any]

    def write(
        self,
        prompts: Sequence[Asked],
        *,
        max_tokens: int,
        title: str,
        read: Callable[[Reply], object] | None = None,
        form: str | None = None,
    ) -> list[Written]:
        """One text a prompt.

        Args:
            prompts: what to write to; equal ones are asked once.
            max_tokens: cap on each text.
            title: of the progress bar.
            read: what it cannot read is asked for again, where asking again can help.
            form: what the text must look like, for then.

        Raises:
            UserError: the model cannot be asked (any more); what was written is kept.
        """


class RemoteWriter:
    """A model behind an endpoint.

    Args:
        caller: asks and keeps; shared by all models of a run.
        label: the model's name in it.
    """

    def __init__(self, caller: Caller, label: str):
        self._caller, self._label = caller, label
        config = caller.models[label]
        self.name = {"model": config.name, "max_side_px": config.max_side_px, **config.answers_by()}

    def write(
        self,
        prompts: Sequence[Asked],
        *,
        max_tokens: int,
        title: str,
        read: Callable[[Reply], object] | None = None,
        form: str | None = None,
    ) -> list[Written]:
        """See `Writer`."""
        config = self._caller.models[self._label]
        requests = [
            Request(
                self._label,
                tuple(_sized(part, config) for part in one.parts),
                one.system,
                max_tokens=max_tokens,
                form=form,
            )
            for one in prompts
        ]
        outcomes = self._caller.run(requests, read=read, title=title)
        lost = [one for one in outcomes if one.lost]
        if lost:
            raise UserError(
                f"{len(lost)} of {len(outcomes)} calls to {config.name} were lost, the first with: {lost[0].error}; what was "
                "answered is kept, the same command continues"
            )
        found = []
        for one in outcomes:
            if one.reply is None:
                found.append(Written("", one.error.kind if one.error else "empty"))
            else:
                found.append(Written(one.reply.text.strip(), one.reply.stop, one.reply.output_tokens))
        return found


class LocalWriter:
    """A vision-language model in this process, greedy, one prompt at a time.

    It is loaded when something is not kept yet. A checkpoint of ours writes its rationale, up to ``<emb>``.

    Args:
        path: its directory, or id on the hub.
        store: where texts are kept.
        device: such as ``cuda:0``; None takes a GPU if there is one.
        dtype: of the weights; None: float32 on CPU, bfloat16 on a GPU.
    """

    def __init__(self, path: str, store: AnswerStore, *, device: str | None = None, dtype: str | None = None):
        import torch

        self._path, self._store = path, store
        self._loaded: tuple[Any, list[int]] | None = None
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = dtype or ("float32" if self._device == "cpu" else "bfloat16")
        self.name = {"model": identity_of_files(path), "dtype": self._dtype}

    def write(
        self,
        prompts: Sequence[Asked],
        *,
        max_tokens: int,
        title: str,
        read: Callable[[Reply], object] | None = None,
        form: str | None = None,
    ) -> list[Written]:
        """See `Writer`; it would say the same again, so nothing is asked for twice."""
        about = {"written by": self.name, "max_tokens": max_tokens}
        keys = [key_of(about, one.system, [_key(part) for part in one.parts]) for one in prompts]
        known = self._store.get_values(list(dict.fromkeys(keys)))
        todo = {key: one for key, one in zip(keys, prompts, strict=True) if key not in known}
        new: dict[str, Any] = {}
        with progress_bar(total=len(todo), desc=title, disable=not todo) as bar:
            for number, (key, one) in enumerate(todo.items(), 1):
                new[key] = self._one(one, max_tokens)
                if number % KEPT_AT_ONCE == 0 or number == len(todo):
                    self._store.put_values(new)
                    known |= new
                    new = {}
                bar.update()
        return [Written(*known[key]) for key in keys]

    def _one(self, asked: Asked, max_tokens: int) -> tuple[str, str, int]:
        import torch

        backbone, stops = self._backbone()
        content = [
            {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": f"{part}\n"}
            for part in asked.parts
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if asked.system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": asked.system}]})
        text = backbone.processor.apply_chat_template(messages, add_generation_prompt=True)
        pictures = [load_image(part.ref) for part in asked.parts if isinstance(part, Picture)]
        inputs = backbone.processor(text=[text], images=pictures or None, return_tensors="pt")
        start = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            ids = backbone.model.generate(
                **inputs.to(self._device), do_sample=False, max_new_tokens=max_tokens, eos_token_id=stops
            )[0, start:].tolist()
        ended = bool(ids) and ids[-1] in stops
        said = backbone.processor.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
        return said.strip(), ("stop" if said.strip() else "empty") if ended else "length", len(ids)

    def _backbone(self) -> tuple[Any, list[int]]:
        if self._loaded is None:
            from rge.model.backbone import load_backbone

            own = Path(self._path) / "rge.json"
            pixels = json.loads(own.read_text(encoding="utf-8"))["pixels"] if own.is_file() else {}
            backbone = load_backbone(
                self._path,
                dtype=self._dtype,
                min_pixels=pixels.get("min"),
                max_pixels=pixels.get("max"),
                add_emb=True,
            )
            backbone.model.to(self._device).eval()
            ends = backbone.model.generation_config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            stops = [one for one in (*ends, backbone.processor.tokenizer.eos_token_id) if one is not None]
            self._loaded = backbone, sorted({*stops, backbone.emb_id})
        return self._loaded


def load_writers(
    names: Sequence[str],
    models: Mapping[str, ModelConfig],
    store: AnswerStore,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Writer]:
    """Writers by the names that options give them.

    Args:
        names: keys of ``models``, or directories and ids of models that run here.
        models: behind endpoints.
        store: where all keep what they wrote.
        device: of models that run here.
        dtype: of their weights.

    Raises:
        UserError: a model is given and not used, or its settings or key cannot be right.
    """
    unused = [label for label in models if label not in names]
    if unused:
        raise UserError(f"models.{unused[0]} is neither answerer= nor among judges=")
    caller = Caller(models, store, progress=True)
    return {
        name: RemoteWriter(caller, name)
        if name in models
        else LocalWriter(_place(name, models), store, device=device, dtype=dtype)
        for name in dict.fromkeys(names)
    }


def _place(name: str, models: Mapping[str, ModelConfig]) -> str:
    if not Path(name).is_dir() and "/" not in name:  # neither here nor OWNER/NAME on the hub
        raise UserError(
            f"{name!r} is neither a directory nor one of models. (there are: {', '.join(models) or 'none'}): "
            f"models.{name}.name=NAME models.{name}.base_url=http://HOST/v1 describe a model behind an endpoint"
        )
    return name


def _sized(part: Part, config: ModelConfig) -> Part:
    return Picture(part.ref, part.sha256, config.max_side_px) if isinstance(part, Picture) else part


def _key(part: Part) -> Any:
    return {"sha256": part.sha256} if isinstance(part, Picture) else part
