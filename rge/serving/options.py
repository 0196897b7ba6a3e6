"""Options of `rge serve`; free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rge.common.options import AtLeastOne, NotNegative, Positive
from rge.common.registry import PluginOptions


@dataclass(kw_only=True)
class ServeOptions(PluginOptions):
    """Serve embeddings, rationales, reranking and search over HTTP, for clients of OpenAI, vLLM, Cohere, Jina and TEI."""

    checkpoint: str
    """Checkpoint: a directory, an id on the Hugging Face hub, or ``demo``."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    base: str | None = None
    """Base model of a checkpoint of adapters: a directory or an id on the hub; null: the one in its ``rge.json``."""
    index: str | None = None
    """Index to search, made with this checkpoint by `rge index`; null: no /v1/search."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all addresses."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any free port, which the first line of output names."""
    name: str | None = None
    """The model's name for clients; null: the value of checkpoint=."""
    key_env: str | None = None
    """Environment variable with the key that requests must send as a bearer token; null: no key."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^(\*|(\*\.)?[^*/:\s]+)$")], ...] = ()
    """Host names that clients may use for this server, besides its addresses (``*.example.com``: all subdomains);
    empty: localhost and host=, or any if a key is required."""
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|null|[\w+.-]+://[^*/\s]+)$")], ...] = ()
    """Web origins whose pages may call this server from a browser, such as https://example.com; ``*``: all."""
    access_log: bool = True
    """Write one line per request to stderr, with its X-Request-ID."""
    engine: Literal["own", "vllm"] = "own"
    """What writes rationales: the model itself, or vLLM."""
    vllm_memory: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a GPU's memory for vLLM, which holds a second copy of the language model and its cache."""
    device: str | None = None
    """Device, such as cuda:0; null: a GPU if there is one."""
    dtype: str | None = None
    """Dtype of the weights; null: float32 on CPU, the recipe's on GPU."""
    max_prompt_tokens: AtLeastOne | None = None
    """Cap on a prompt in tokens; null: that of its training."""
    min_pixels: AtLeastOne | None = None
    """Smallest picture, width times height after scaling; null: that of its training."""
    max_pixels: AtLeastOne | None = None
    """Largest picture, which determines its number of tokens; null: that of its training."""
    max_new_tokens: AtLeastOne | None = None
    """Cap on a rationale in tokens; null: the checkpoint's."""
    exact: bool = False
    """Compute every state alone, so that an embedding does not depend on the rest of its batch, to the last bit;
    slower."""
    batch_size: AtLeastOne = 64
    """Inputs embedded, and rationales written, at once."""
    batch_tokens: AtLeastOne | None = None
    """Most prompt tokens of these inputs, each counted as the longest; null: no limit."""
    batch_wait_ms: NotNegative = 5.0
    """How long a batch that is not full waits for more inputs, if several clients are active."""
    max_queue: AtLeastOne = 4096
    """Maximum number of waiting inputs; beyond it, requests get a 429."""
    max_waiting_mb: AtLeastOne = 2048
    """Maximum memory for bodies and pictures of requests in progress; beyond it, requests get a 503."""
    timeout_s: Positive = 120.0
    """Time limit of a request, from its first byte to its response; beyond it, 408 or 504."""
    drain_s: NotNegative = 30.0
    """Time to finish requests in progress after SIGTERM or Ctrl-C."""
    max_body_mb: AtLeastOne = 32
    """Maximum size of a request's body, and of the pictures fetched for it together; beyond it, 413 or 400."""
    max_inputs: AtLeastOne = 2048
    """Maximum number of inputs per request; 2,048 is OpenAI's limit."""
    max_chars: AtLeastOne = 65_536
    """Maximum number of characters of an input's text, and of an instruction."""
    max_pictures: AtLeastOne = 128
    """Maximum number of pictures, and pages of documents, per request."""
    max_picture_mp: Annotated[float, Field(gt=0, le=89)] = 50.0
    """Maximum size of a picture in megapixels, checked before it is decoded. Pages of documents are rendered at a lower
    resolution instead."""
    max_video_s: Positive = 600.0
    """Maximum length of a video in seconds, of which at most max_pictures frames are shown."""
    max_decode_s: Positive = 30.0
    """Maximum time for opening and decoding the documents and videos of an input, in a process of their own; beyond it, 400."""
    max_decode_mb: AtLeastOne = 2048
    """Maximum memory of that process, beyond its libraries; beyond it, 400."""
    allow_urls: bool = False
    """Fetch pictures, documents and videos from public http and https addresses; false: only accept data URLs."""
