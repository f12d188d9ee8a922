"""Sample-and-compare on CPUs in one compiled loop, as the fused kernel does it on GPUs.

The same tokens as `reference` without top-k, top-p and min-p, which `vectorised` applies first, with torch's softmax.
The noise of every token is hashed; its logarithms are taken only for the few tokens that can still win, by an upper
bound on the noise from the hash's 8 leading bits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec.jit import inlined, njit
from rollout_spec.noise import (
    DOMAIN_TARGET,
    finish_hashes_nb,
    gumbel_from_hash_nb,
    gumbel_from_uniform,
    row_state_nb,
    token_keys,
    uniform_from_hash,
)
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch, VerifyResult
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, LogprobsMode
from rollout_spec.verify.vectorised import index_rows, process

NEGLIGIBLE_EXPONENT = -40.0
"""exp of this is 4e-18: even a vocabulary of a million such terms does not change a float32 log-sum-exp."""


@lru_cache(maxsize=16)
def _keys(vocab_size: int) -> NDArray[np.uint32]:
    return token_keys(np.arange(vocab_size))


def _noise_bounds() -> NDArray[np.float32]:
    """float32 [256], by a hash's 8 leading bits: the largest noise, that of the smallest such hash."""
    return gumbel_from_uniform(uniform_from_hash((np.arange(256, dtype=np.uint32) << np.uint32(24)).astype(np.uint32)))


NOISE_BOUNDS = _noise_bounds()


@inlined
def _sample_row(logits, temperature, seed, position, keys, bounds, hashes):
    """argmax of logits / temperature + noise; PLACEHOLDER_TOKEN_ID if the row has no distribution. O(V)."""
    best_token, best = 0, logits[0]
    for token in range(logits.size):
        if math.isnan(logits[token]):
            return -1
        if logits[token] > best:
            best_token, best = token, logits[token]
    if not math.isfinite(best):
        return -1
    if temperature < GREEDY_TEMPERATURE:
        return best_token
    finish_hashes_nb(row_state_nb(seed, position, DOMAIN_TARGET), keys, hashes)
    # The most probable token first: most of the others cannot beat even its score.
    start = best_token
    best = logits[start] / temperature + gumbel_from_hash_nb(np.int64(hashes[start]))
    for token in range(logits.size):
        score = logits[token] / temperature
        if score + bounds[hashes[token] >> np.uint32(24)] < best:
            continue
        score += gumbel_from_hash_nb(np.int64(hashes[token]))
        if score > best or (score == best and token < best_token):
            best_token, best = token, score
    return best_token


@inlined
def _score_row(logits, temperature, token):
    """(log-probability of `token` under logits / temperature, tokens at least as probable). O(V)."""
    scale = np.float32(1.0) if temperature < GREEDY_TEMPERATURE else temperature
    chosen = logits[token] / scale
    highest, rank = chosen, 0
    for i in range(logits.size):
        score = logits[i] / scale
        rank += 1 if score >= chosen else 0
        highest = max(highest, score)
    total = 0.0
    for i in range(logits.size):
        difference = np.float64(logits[i] / scale) - highest
        if difference > NEGLIGIBLE_EXPONENT:
            total += math.exp(difference)
    return np.float32(np.float64(chosen) - highest - math.log(total)), rank


@njit(nogil=True)
def _verify(
    logits, scored, temperature, scored_temperature, seeds, positions, drafts, cu_drafts, keys, bounds, want_logprobs,
    output, num_accepted, targets, logprobs, ranks, num_invalid,
):  # fmt: skip
    """Fill the outputs. See `VerifyResult` for the shapes."""
    hashes = np.empty(logits.shape[1], np.uint32)
    row = draft = 0
    for request in range(cu_drafts.size):
        alive = True
        position = 0
        while True:
            is_draft = draft < cu_drafts[request]
            token = _sample_row(
                logits[row], temperature[request], seeds[request], positions[request] + position, keys, bounds, hashes
            )
            targets[row] = token
            if token < 0:
                num_invalid[request] += 1
            elif want_logprobs:
                logprobs[row], ranks[row] = _score_row(scored[row], scored_temperature[request], token)
            if alive:
                output[request, position] = token
                alive = is_draft and token >= 0 and token == drafts[draft]
                num_accepted[request] += 1 if alive else 0
            row += 1
            if not is_draft:
                break
            draft += 1
            position += 1


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    *,
    logprobs_mode: LogprobsMode | None = None,
    max_draft_tokens: int | None = None,
) -> VerifyResult:
    """`rollout_spec.verify.api.verify` with `method="sample"` for tensors on the CPU."""
    raw = target_logits.detach().float().contiguous()
    num_rows, vocab_size = raw.shape
    num_requests = cu_num_draft_tokens.shape[0]
    cu_drafts = _numpy(cu_num_draft_tokens.long())
    if max_draft_tokens is None:
        max_draft_tokens = int(np.diff(cu_drafts, prepend=0).max(initial=0))
    temperature = rows.temperature.float()
    logits = raw
    if rows.seeds is not None and any(values is not None for values in (rows.top_k, rows.top_p, rows.min_p)):
        # Greedy rows come back as they were; the others are scaled already.
        logits = process(raw, rows, index_rows(cu_num_draft_tokens, num_rows).request).contiguous()
        temperature = torch.where(temperature < GREEDY_TEMPERATURE, 0.0, 1.0)
    seeds = rows.seeds if rows.seeds is not None else torch.zeros(num_requests, dtype=torch.int64)
    if rows.seeds is None:
        temperature = torch.zeros_like(temperature)
    processed = logprobs_mode == "processed_logprobs"
    output = np.full((num_requests, max_draft_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    targets = np.empty(num_rows, np.int64)
    logprobs = np.zeros(num_rows, np.float32)
    ranks = np.ones(num_rows, np.int64)
    num_invalid = np.zeros(num_requests, np.int32)
    _verify(
        _numpy(logits),
        _numpy(logits if processed else raw),
        _numpy(temperature),
        _numpy(temperature if processed else torch.ones_like(temperature)),
        _numpy(seeds),
        _numpy(rows.positions.long()),
        _numpy(draft_token_ids.long()),
        cu_drafts,
        _keys(vocab_size),
        NOISE_BOUNDS,
        logprobs_mode is not None,
        output,
        num_accepted,
        targets,
        logprobs,
        ranks,
        num_invalid,
    )
    wanted = logprobs_mode is not None
    return VerifyResult(
        torch.from_numpy(output),
        torch.from_numpy(num_accepted),
        torch.from_numpy(targets),
        torch.from_numpy(logprobs) if wanted else None,
        torch.from_numpy(ranks) if wanted else None,
        torch.from_numpy(num_invalid),
    )


def _numpy(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy()
