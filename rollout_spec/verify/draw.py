"""Drafts of a model, drawn with the noise by which the target will sample.

With argmax(logit / T + noise) of the same noise, draft and target agree as far as their distributions overlap, where a
greedy draft agrees with the probability that the target gives to it. That sampled tokens are then compared with drafts
needs no draft probabilities. (Coupling by shared Gumbel noise: Daliri et al., arXiv:2408.07978.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec.types import SamplingBatch
from rollout_spec.verify import cpu
from rollout_spec.verify.layout import lay_out


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token from each row, with the noise that the target has at this position.

    Top-k, top-p, min-p and penalties are not applied, as in vLLM's own model drafters. O(B V); does not wait for the
    device.

    Args:
        logits: float [B, V], of the drafter.
        temperature: float32 [B]; 0: the most probable token.
        seeds: int64 [B], of the requests' noise.
        positions: int64 [B], input positions of the target's rows that will be compared with the tokens.

    Returns:
        (tokens int64 [B], probabilities float32 [B] that the drafter gives to them). Where logits are broken, token 0
        with probability 0.
    """
    if logits.is_cuda:
        from rollout_spec.verify import kernel  # brings triton, which machines without a GPU may lack

        tokens, logprobs = kernel.draw(logits, temperature, seeds, positions)
    else:
        rows = SamplingBatch(temperature, seeds, positions)
        no_drafts = torch.zeros(logits.shape[0], dtype=torch.int32)
        layout = lay_out(no_drafts, torch.empty(0, dtype=torch.int32), rows)
        result = cpu.verify_rows(logits, layout, logprobs_mode="processed_logprobs", max_draft_tokens=0)
        tokens, logprobs = result.target_token_ids, result.logprobs
    return finish(tokens, logprobs)


def finish(tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, probabilities) of `draw` from sampled tokens and their log-probabilities."""
    probabilities = torch.where(tokens >= 0, logprobs.exp(), 0.0)
    return tokens.clamp(min=0), probabilities.clamp(max=1.0)
