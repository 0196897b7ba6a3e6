"""How strongly a vision-language model would answer with one word rather than another: a judge without generation."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from rge.model.embedding_model import EmbeddingModel
from rge.model.packing import by_length
from rge.model.prompts import Prompt


def word_id(embedder: EmbeddingModel, word: str) -> int:
    """Id of a word that the tokenizer keeps whole.

    Raises:
        ValueError: it does not; the message shows the pieces.
    """
    ids = embedder.processor.tokenizer(word, add_special_tokens=False).input_ids
    if len(ids) != 1:
        pieces = embedder.processor.tokenizer.convert_ids_to_tokens(ids)
        raise ValueError(
            f"{word!r} is {len(ids)} tokens ({', '.join(pieces)}) and not one: choose another word"
        )
    return ids[0]


@torch.no_grad()
def next_token_logits(
    embedder: EmbeddingModel, prompts: Sequence[Prompt], ids: Sequence[int], *, batch_size: int
) -> np.ndarray:
    """Logits of some tokens as the first of the answer, (prompts, ids) float32.

    A row does not depend on the others.
    """
    out = np.empty((len(prompts), len(ids)), np.float32)
    head: nn.Module = embedder.model.get_output_embeddings()  # of a transformers model
    for rows in by_length([len(prompt) for prompt in prompts], batch_size):
        hidden_BD = embedder.states_before_answer([prompts[row] for row in rows])
        out[rows] = head(hidden_BD).float()[:, list(ids)].cpu().numpy()
    return out
