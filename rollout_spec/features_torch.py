"""`rollout_spec.features` of a step's tokens, computed where the logits are. Nothing here waits for the device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rollout_spec.features import LOGPROB_STEP, MAX_CODE, SIGNATURE_WORDS, TOP_TOKENS, signature_matrix
from rollout_spec.verify.reference import GREEDY_TEMPERATURE

CHUNK = 64
"""Tokens of the vocabulary of which only the most probable one counts, but in the TOP_TOKENS best chunks."""


@functools.lru_cache(maxsize=1)
def _matrix(hidden_size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(signature_matrix(hidden_size)).to(device)


def pack_signatures(hidden: Tensor) -> Tensor:
    """The first words of the features: float [N, H] to int64 [N, SIGNATURE_WORDS]."""
    signs = hidden.float() @ _matrix(hidden.shape[1], hidden.device) > 0
    places = torch.arange(64, device=hidden.device)
    return (signs.view(hidden.shape[0], SIGNATURE_WORDS, 64).long() << places).sum(-1)


def pack_distributions(logits: Tensor, temperature: Tensor) -> Tensor:
    """The other words of the features of N rows, int64 [N, FEATURE_WORDS - SIGNATURE_WORDS].

    The logits are read once. The tokens are the most probable ones; their probabilities are slightly too large, because
    most of the improbable tokens are missing in the sum that they are divided by.

    Args:
        logits: float [N, V], before the temperature.
        temperature: float32 [N]. Greedy rows count as 1.
    """
    size, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    if vocab_size % CHUNK:
        logits = torch.nn.functional.pad(logits, (0, num_chunks * CHUNK - vocab_size), value=-torch.inf)
    chunks = logits.view(size, num_chunks, CHUNK)
    best = chunks.amax(-1).float()
    places = best.topk(min(TOP_TOKENS, num_chunks)).indices
    inside = chunks.gather(1, places[:, :, None].expand(-1, -1, CHUNK)).float().flatten(1)
    top, at = inside.topk(TOP_TOKENS)
    ids = (places.gather(1, at // CHUNK) * CHUNK + at % CHUNK).int()

    divisor = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)[:, None]
    counted = torch.cat((inside, best.scatter(1, places, -torch.inf)), 1) / divisor
    logprobs = top / divisor - counted.logsumexp(-1, keepdim=True)
    codes = (1 - logprobs / LOGPROB_STEP).round().nan_to_num(MAX_CODE).clamp(1, MAX_CODE).int()
    codes.masked_fill_(ids >= vocab_size, 0)  # of a smaller vocabulary
    shifts = 8 * torch.arange(TOP_TOKENS, dtype=torch.int32, device=logits.device)
    return torch.cat((ids, (codes << shifts).sum(1, keepdim=True, dtype=torch.int32)), 1).view(torch.int64)
