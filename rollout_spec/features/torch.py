"""`rollout_spec.features` of a step's tokens, computed where the logits are.

Nothing here waits for the device, but the first signatures of a model: `prepare` is called before it serves.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rollout_spec.features.format import LOGPROB_STEP, MAX_CODE, SIGNATURE_WORDS, TOP_TOKENS, signature_matrix
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.reference import GREEDY_TEMPERATURE

CHUNK = 64
"""Tokens of the vocabulary of which only the most probable one counts, but in the TOP_TOKENS best chunks."""


@functools.lru_cache(maxsize=4)
def _matrix(hidden_size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(signature_matrix(hidden_size)).to(device)


def prepare(hidden_size: int, device: torch.device) -> None:
    """Make the matrix of random projections and copy it to the device."""
    _matrix(hidden_size, device)


def pack_signatures(hidden: Tensor) -> Tensor:
    """The first words of the features: float [N, H] to int64 [N, SIGNATURE_WORDS]."""
    signs = hidden.float() @ _matrix(hidden.shape[1], hidden.device) > 0
    places = torch.arange(64, device=hidden.device)
    return (signs.view(hidden.shape[0], SIGNATURE_WORDS, 64).long() << places).sum(-1)


def pack_distributions(logits: Tensor, batch: SamplingBatch, request: Tensor) -> Tensor:
    """The other words of the features of N rows, int64 [N, FEATURE_WORDS - SIGNATURE_WORDS].

    The logits are read once. The tokens are the most probable ones; their probabilities are slightly too large, because
    most of the improbable tokens are missing in the sum that they are divided by. Tokens that top-k, top-p or min-p cut
    off are not kept, and the others then share the whole probability.

    Args:
        logits: float [N, V], before the temperature.
        batch: How the requests are sampled. At temperature 0 features are those of temperature 1.
        request: int64 [N], each row's request in `batch`.
    """
    vocab_size = logits.shape[1]
    whole = vocab_size - vocab_size % CHUNK
    best = logits[:, :whole].unflatten(1, (-1, CHUNK)).amax(-1)
    if whole < vocab_size:
        best = torch.cat((best, logits[:, whole:].amax(-1, keepdim=True)), 1)
    best = best.float()
    places = best.topk(min(TOP_TOKENS, best.shape[1])).indices
    tokens = (places[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    inside = logits.gather(1, tokens.clamp(max=vocab_size - 1)).float()
    inside.masked_fill_(tokens >= vocab_size, -torch.inf)
    top, at = inside.topk(TOP_TOKENS)
    ids = tokens.gather(1, at)

    temperature = batch.temperature[request, None]
    divisor = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)
    counted = torch.cat((inside, best.scatter(1, places, -torch.inf)), 1) / divisor
    logprobs = top / divisor - counted.logsumexp(-1, keepdim=True)
    kept = _not_cut_off(logprobs.exp(), batch, request)
    whole_mass = torch.where(kept, logprobs, -torch.inf).logsumexp(-1, keepdim=True)
    logprobs = torch.where(kept.all(-1, keepdim=True), logprobs, logprobs - whole_mass)
    codes = (1 - logprobs / LOGPROB_STEP).round().nan_to_num(MAX_CODE).clamp(1, MAX_CODE).int()
    codes.masked_fill_(~kept | (ids >= vocab_size), 0)  # where the vocabulary is smaller than TOP_TOKENS
    shifts = 8 * torch.arange(TOP_TOKENS, dtype=torch.int32, device=logits.device)
    return torch.cat((ids.int(), (codes << shifts).sum(1, keepdim=True, dtype=torch.int32)), 1).view(torch.int64)


def _not_cut_off(probability: Tensor, batch: SamplingBatch, request: Tensor) -> Tensor:
    """Whether top-k, top-p and min-p leave each of the most probable tokens, bool [N, TOP_TOKENS]; always the first.

    Args:
        probability: float32 [N, TOP_TOKENS], best first.
    """
    kept = torch.ones_like(probability, dtype=torch.bool)
    if batch.top_k is not None:
        top_k = batch.top_k[request, None]
        kept &= (torch.arange(TOP_TOKENS, device=kept.device) < top_k) | (top_k < 1)
    if batch.top_p is not None:
        kept &= probability.cumsum(-1) - probability < batch.top_p[request, None]
    if batch.min_p is not None:
        kept &= probability >= batch.min_p[request, None] * probability[:, :1]
    kept[:, 0] = True
    return kept
