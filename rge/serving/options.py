"""Options of `rge serve`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rge.common.registry import PluginOptions

AtLeastOne = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0)]


@dataclass(kw_only=True)
class ServeOptions(PluginOptions):
    """Serve embeddings, rationales, reranking and search over HTTP, as OpenAI's, vLLM's, Cohere's, Jina's and TEI's clients ask."""

    checkpoint: str
    """Checkpoint directory, the id of one on the Hugging Face hub, or ``demo``."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    base: str | None = None
    """Directory or hub id of the model that a checkpoint of adapters belongs to; null: where its ``rge.json`` says."""
    index: str | None = None
    """Index to search in (`rge index`), made by this checkpoint; null: there is no /v1/search."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: on all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: a free one, which the first line of the output names."""
    name: str | None = None
    """The model's name for clients; null: checkpoint= as it was given."""
    key_env: str | None = None
    """Environment variable with the key that requests must carry as a bearer token; null: none is asked for."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may call this server by (``*.example.com`` for all below one), beside its addresses; empty: localhost
    and host=, or any where a key is asked for. It keeps web pages from reading a server in their visitor's network."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may ask this server from a browser, such as https://example.com; ``*``: all."""
    access_log: bool = True
    """Write a line a request to stderr, with its X-Request-ID."""
    engine: Literal["own", "vllm"] = "own"
    """What writes rationales: the model itself, or vLLM beside it."""
    vllm_memory: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a GPU's memory for vLLM: the language model once more, and its cache."""
    device: str | None = None
    """Such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Weights' dtype; null: float32 on CPU, the recipe's on GPU."""
    max_new_tokens: AtLeastOne | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    exact: bool = False
    """Compute every state alone, so that an embedding is the same to the last bit whatever came in beside it; slower."""
    batch_size: AtLeastOne = 64
    """Inputs embedded at once, and rationales written at once."""
    batch_wait_ms: Annotated[float, Field(ge=0)] = 5.0
    """How long a batch that is not full waits for others, where several clients ask."""
    max_queue: AtLeastOne = 4096
    """Inputs that may wait; above it requests are refused with 429."""
    max_waiting_mb: AtLeastOne = 2048
    """Bodies and pictures that may be held for requests under way; above it requests are refused with 503."""
    timeout_s: Above = 120.0
    """Time for a request, from its first byte to its answer; above it 408 or 504."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """After SIGTERM or Ctrl-C: time for requests under way to be answered."""
    max_body_mb: AtLeastOne = 32
    """Body of a request; above it 413."""
    max_inputs: AtLeastOne = 2048
    """Inputs of a request; 2,048 is OpenAI's limit."""
    max_chars: AtLeastOne = 65_536
    """Characters of an input's text, and of an instruction; what is longer than the checkpoint's prompts is cut, with a warning."""
    max_pictures: AtLeastOne = 128
    """Pictures of a request."""
    max_picture_mp: Annotated[float, Field(gt=0, le=89)] = 50.0
    """Megapixels of a picture, looked up before it is decoded."""
    allow_urls: bool = False
    """Fetch pictures from http and https addresses, public ones only; without it, pictures come as data URLs."""
