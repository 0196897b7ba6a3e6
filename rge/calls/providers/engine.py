"""vLLM in this process as a provider (``api=vllm``): no address, no price, the same requests and the same answers.

An engine fills a GPU, so there is one at a time: models that are asked in turn take turns, and one that is asked again is still
there. Work is done in one thread of its own, for calls over HTTP may be under way meanwhile.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rge.calls.model_config import ModelConfig
from rge.calls.providers.bodies import Shown, json_schema, messages
from rge.calls.request import Request
from rge.common.errors import UserError

if TYPE_CHECKING:
    from rge.rollout.vllm_chat import VllmChat  # imports vLLM

ROUNDS = 8
"""Times `ModelConfig.concurrency` that an engine is given at once: what a kill costs."""
_TEMPLATE = ("chat_template_kwargs", "mm_processor_kwargs")
"""Of `ModelConfig.extra_body`, for the chat template and the processor, as vLLM's server takes them; the others are sampling's."""

_thread: ThreadPoolExecutor | None = None
_engine: "tuple[str, VllmChat] | None" = None


def thread() -> ThreadPoolExecutor:
    """Where engines live: one thread of this process."""
    global _thread
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
    return _thread


def answers(model: ModelConfig, requests: Sequence[Request], shown: Sequence[Shown]) -> list[bytes | str]:
    """Bodies of chat completions, as a server would send them; call it in `thread`.

    Args:
        model: with ``api=vllm``.
        requests: what is asked.
        shown: the pictures of each.

    Returns:
        Of each request: the body, or, where the engine cannot take it, why.

    Raises:
        UserError: vLLM is not installed, or does not start.
    """
    engine = _loaded(model)
    try:
        return list(_asked(engine, model, requests, shown))
    except (ValueError, TypeError) as error:
        if len(requests) == 1:
            return [" ".join(str(error).split())]
    # One that is too long turns all away; it is found by halves.
    half = len(requests) // 2
    return [
        *answers(model, requests[:half], shown[:half]),
        *answers(model, requests[half:], shown[half:]),
    ]


def close() -> None:
    """Give the engine's memory back."""

    def end() -> None:
        global _engine
        if _engine is not None:
            _engine[1].close()
            _engine = None

    if _thread is not None:
        thread().submit(end).result()


def _loaded(model: ModelConfig) -> "VllmChat":
    global _engine
    settings = {"model": model.name, **model.engine}
    known = json.dumps([settings, model.concurrency], sort_keys=True)
    if _engine is not None and _engine[0] == known:
        return _engine[1]
    if find_spec("vllm") is None:
        raise UserError(
            f"{model.name}: api=vllm needs vLLM, which is not installed: pip install -e '.[vllm]', in an environment of its own "
            "since it pins torch and transformers (without a GPU: see docs/performance.md)"
        )
    if _engine is not None:
        _engine[1].close()
        _engine = None
    from rge.rollout.vllm_chat import VllmChat

    try:
        made = VllmChat(settings.pop("model"), rows=model.concurrency, more=settings)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        raise UserError(
            f"{model.name}: vLLM does not start (models.NAME.engine: {model.engine}): {error}"
        ) from error
    _engine = (known, made)
    return made


def _asked(
    engine: "VllmChat", model: ModelConfig, requests: Sequence[Request], shown: Sequence[Shown]
) -> list[bytes]:
    template = {key: value for key, value in model.extra_body.items() if key in _TEMPLATE}
    further = {key: value for key, value in model.extra_body.items() if key not in _TEMPLATE}
    conversations, sampling, schemas = [], [], []
    for request, pictures in zip(requests, shown, strict=True):
        structured = model.structured and request.fields is not None
        conversations.append(messages(request, pictures, structured))
        schemas.append(json_schema(request.fields or ()) if structured else None)
        one: dict[str, Any] = {
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "n": request.n,
        }
        if model.send_seed and request.temperature > 0:
            one["seed"] = request.sample
        if request.top_logprobs:
            one["logprobs"] = request.top_logprobs
        sampling.append(one | further)
    outputs = engine.answer(conversations, sampling, schemas=schemas, **template)
    return [_body(engine, model, output) for output in outputs]


def _body(engine: "VllmChat", model: ModelConfig, output: Any) -> bytes:
    choices = []
    for one in output.outputs:
        choice: dict[str, Any] = {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.finish_reason,
        }
        if one.logprobs:
            first = one.logprobs[0]
            listed = sorted(first.items(), key=lambda item: item[1].rank or 0)
            tops = [{"token": each.decoded_token, "logprob": each.logprob} for _, each in listed]
            said = first[one.token_ids[0]]
            choice["logprobs"] = {
                "content": [{"token": said.decoded_token, "logprob": said.logprob, "top_logprobs": tops}]
            }
        choices.append(choice)
    body = {
        "object": "chat.completion",
        "model": model.name,
        "system_fingerprint": engine.name,
        "choices": sorted(choices, key=lambda choice: choice["index"]),
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        },
    }
    return json.dumps(body).encode()
