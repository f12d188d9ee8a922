"""Verification, row by row in NumPy: what every faster implementation must agree with.

A *row* is one position's target logits; a request's rows are its drafted positions and then the bonus position. The
*recovered* token is the one emitted at the first difference, the *bonus* token the one after a fully accepted draft.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.noise import host as noise
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Float32Array, Int32Array, SamplingBatch, VerifyResult

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
MASS_TOLERANCE = 1e-5
"""A nucleus may fall this share short of top-p: float32 sums differ in the seventh digit, and the same nucleus must be
found whatever the order of summation, also where equal probabilities add up to top-p exactly."""

VerifyMethod = Literal["sample", "rejection"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class _Row(NamedTuple):
    """Which request and position a row belongs to, its draft token, and its sampling parameters."""

    request: int
    position: int
    draft: int  # drafted token, PLACEHOLDER_TOKEN_ID at the bonus position
    draft_index: int  # index into the drafted tokens, -1 at the bonus position
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def verify(
    target_logits: Float32Array,
    draft_token_ids: Int32Array,
    cu_num_draft_tokens: NDArray[Any],
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Float32Array | None = None,
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
) -> VerifyResult:
    """Verify a batch of drafts; the arguments are those of `rollout_spec.verify.api.verify`, as NumPy arrays.

    O(N * V log V).
    """
    num_requests = len(cu_num_draft_tokens)
    num_draft_tokens = np.diff(cu_num_draft_tokens, prepend=0)
    width = int(num_draft_tokens.max(initial=0)) + 1
    output = np.full((num_requests, width), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    targets = np.full(len(target_logits), PLACEHOLDER_TOKEN_ID, np.int64)
    logprobs = np.zeros(len(target_logits), np.float32)
    ranks = np.ones(len(target_logits), np.int64)
    num_invalid_rows, num_broken_rows = np.zeros((2, num_requests), np.int32)
    starts = np.concatenate(([0], np.cumsum(num_draft_tokens + 1)))
    for request in range(num_requests):
        alive = True
        for j, row in enumerate(range(starts[request], starts[request + 1])):
            if not alive and not after_difference:
                break
            place = _place(request, j, row, int(num_draft_tokens[request]), draft_token_ids, rows)
            raw = np.asarray(target_logits[row], np.float32)
            processed = process_row(raw, place)
            if not _has_distribution(raw):
                token = PLACEHOLDER_TOKEN_ID
                num_invalid_rows[request] += alive
                num_broken_rows[request] += alive and not np.isneginf(np.max(raw))
            elif method == "sample":
                token = sample_row(processed, place)
            else:
                probs = None if draft_probs is None or place.draft_index < 0 else draft_probs[place.draft_index]
                token = rejection_sample_row(processed, place, probs) if alive else PLACEHOLDER_TOKEN_ID
            if token != PLACEHOLDER_TOKEN_ID:
                targets[row] = token
                scores = log_softmax(processed if logprobs_mode == "processed_logprobs" else raw)
                logprobs[row], ranks[row] = scores[token], int((scores >= scores[token]).sum())
            if alive:
                output[request, j] = token
                alive = token != PLACEHOLDER_TOKEN_ID and token == place.draft
                num_accepted[request] += alive
    wanted = logprobs_mode is not None
    return VerifyResult(
        output,
        num_accepted,
        targets,
        logprobs if wanted else None,
        ranks if wanted else None,
        num_invalid_rows,
        num_broken_rows,
    )


def sample_row(processed: Float32Array, row: _Row) -> int:
    """The target's own token: argmax of logits plus the request's noise, an exact sample (Gumbel-max)."""
    if row.greedy:
        return int(np.argmax(processed))
    tokens = np.arange(len(processed))
    return int(np.argmax(processed + noise.gumbel(row.seed, row.position, tokens)))


def rejection_sample_row(processed: Float32Array, row: _Row, draft_probs: Float32Array | None) -> int:
    """Accept the draft with probability min(1, p / q), else sample the residual max(p - q, 0).

    Leviathan et al., arXiv:2211.17192, algorithm 1. `draft_probs` float [V]; None: q is 1 at the draft. The noise comes
    from streams that drafters do not use, so drafts may depend on the request's other noise.
    """
    if row.greedy:
        return int(np.argmax(processed))
    p = np.exp(log_softmax(processed).astype(np.float64))
    weights = p
    if 0 <= row.draft < len(p):  # neither the bonus position nor a draft outside the vocabulary
        is_draft = np.arange(len(p)) == row.draft
        q = is_draft.astype(np.float64) if draft_probs is None else np.asarray(draft_probs, np.float64)
        u = float(noise.uniform32(row.seed, row.position, 0, noise.DOMAIN_ACCEPT))
        if p[row.draft] > 0 and u * q[row.draft] <= p[row.draft]:
            return row.draft
        residual = np.maximum(p - q, 0)
        weights = residual if residual.any() else p  # p == q up to rounding: every sample of p is right
    tokens = np.arange(len(p))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(weights) + noise.gumbel(row.seed, row.position, tokens, noise.DOMAIN_RESIDUAL)))


def process_row(logits: Float32Array, row: _Row) -> Float32Array:
    """Temperature, min-p, top-k, top-p, in vLLM's order (`vllm/v1/sample/sampler.py`); removed tokens get -inf.

    Where equal logits straddle the cut, the lowest token ids are kept: exactly k tokens, or the smallest nucleus.
    (vLLM's Triton kernel does the same; its torch version keeps all ties for top-k and the last ones for top-p.) A
    greedy row stays as it is: vLLM resets its other parameters.
    """
    if row.greedy or not _has_distribution(logits):
        return logits
    x = logits / np.float32(row.temperature)
    if row.min_p > 0:
        probs = np.exp(log_softmax(x))
        x = np.where(probs < row.min_p * probs.max(), -np.inf, x)
    x = x.astype(np.float32)
    if not 0 < row.top_k < len(x) and row.top_p >= 1:
        return x
    descending = np.argsort(-x, kind="stable")
    if 0 < row.top_k < len(x):
        x[descending[row.top_k :]] = -np.inf
    if row.top_p < 1:
        probs = np.exp(log_softmax(x).astype(np.float64))[descending]
        before = np.cumsum(probs) - probs
        x[descending[1:][before[1:] >= row.top_p * (1 - MASS_TOLERANCE)]] = -np.inf
    return x


def log_softmax(logits: Float32Array) -> Float32Array:
    """float32 log-probabilities of one row; -inf stays -inf."""
    x = logits.astype(np.float64) - float(np.max(logits))
    return np.asarray((x - np.log(np.exp(x).sum())).astype(np.float32))


def _has_distribution(logits: Float32Array) -> bool:
    return bool(np.isfinite(np.max(logits)))  # NaN wins every maximum


def _place(request: int, j: int, row: int, num_drafts: int, draft_token_ids: Int32Array, rows: SamplingBatch) -> _Row:
    def value(name: str, default: float) -> Any:
        values = getattr(rows, name)
        return default if values is None else values[request]

    draft_index = row - request if j < num_drafts else -1  # each earlier request has one row more than drafts
    return _Row(
        request=request,
        position=int(rows.positions[request]) + j,
        draft=int(draft_token_ids[draft_index]) if draft_index >= 0 else PLACEHOLDER_TOKEN_ID,
        draft_index=draft_index,
        temperature=float(rows.temperature[request]),
        seed=int(value("seeds", 0)),
        top_k=int(value("top_k", 0)),
        top_p=float(value("top_p", 1.0)),
        min_p=float(value("min_p", 0.0)),
    )
