"""Verification as torch operations over the whole batch, without waiting for the device.

Same results as `reference`, which explains the terms. Shapes: N rows, V tokens, B requests, D drafted tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_spec.noise import host as noise
from rollout_spec.noise.torch import negative_gumbel, uniform32
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch, VerifyResult
from rollout_spec.verify.layout import Layout, offsets
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, MASS_TOLERANCE, LogprobsMode, VerifyMethod

MAX_SORTED = 1 << 25
"""Logits that are sorted at once: with what sorting takes besides, 0.8 GB."""


class _RowIndex(NamedTuple):
    """Where each row belongs."""

    request: Tensor  # int64 [N]
    offset: Tensor  # int64 [N] row's place among its request's rows
    is_draft: Tensor  # bool [N] False at the bonus position


def verify_rows(
    target_logits: Tensor,
    layout: Layout,
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """See `rollout_spec.verify.api.verify_rows`; without features. `target_logits` is not changed."""
    index = _index_rows(layout)
    raw = target_logits.float()
    processed = process(raw, rows, index.request)
    drafted = layout.draft.long()
    if method == "sample":
        targets, valid = _sample(processed, layout)
    else:
        targets, valid = _rejection_sample(processed, layout, index, draft_probs)
    # Both are the placeholder at a bonus row without a distribution, and where a caller pads drafts.
    matches = (targets == drafted) & index.is_draft & valid
    num_requests = layout.starts.shape[0] - 1
    output, num_accepted = _accept(targets, matches, index, num_requests, max_draft_tokens + 1)
    is_emitted = index.offset <= num_accepted[index.request]
    if method == "rejection" or not after_difference:
        targets = torch.where(is_emitted, targets, PLACEHOLDER_TOKEN_ID)
    logprobs = ranks = None
    if logprobs_mode is not None:
        scores = processed if logprobs_mode == "processed_logprobs" else raw
        chosen = scores.gather(1, targets.clamp(min=0)[:, None])
        logprobs = chosen[:, 0] - scores.logsumexp(-1)
        ranks = (scores >= chosen).sum(-1)
    highest = raw.amax(-1)  # NaN wins every maximum

    def count(rows: Tensor) -> Tensor:
        return torch.zeros_like(num_accepted).index_add_(0, index.request, (rows & is_emitted).int())

    num_broken = count(~highest.isfinite() & (highest != float("-inf")))
    return VerifyResult(output, num_accepted, targets, logprobs, ranks, count(~valid), num_broken)


def _index_rows(layout: Layout) -> _RowIndex:
    request, offset = layout.request.long(), offsets(layout)
    return _RowIndex(request, offset, offset < torch.diff(layout.starts)[request] - 1)


def cuts(rows: SamplingBatch) -> bool:
    """Whether top-k, top-p or min-p may remove tokens."""
    return rows.top_k is not None or rows.top_p is not None or rows.min_p is not None


def process(raw: Tensor, rows: SamplingBatch, request: Tensor) -> Tensor:
    """Temperature, min-p, top-k and top-p. `raw` itself is returned if all rows are greedy.

    Args:
        raw: float32 [N, V].
        rows: One entry per request. Greedy rows stay as they are: vLLM resets their other parameters.
        request: int64 [N], each row's index into the fields of `rows`.

    Returns:
        float32 [N, V].
    """
    if rows.seeds is None:
        return raw
    greedy = rows.temperature < GREEDY_TEMPERATURE
    x = raw / torch.where(greedy, 1.0, rows.temperature.float())[request, None]
    if cuts(rows):
        at_once = max(MAX_SORTED // x.shape[1], 1)
        for start in range(0, x.shape[0], at_once):
            _truncate(x[start : start + at_once], rows, greedy, request[start : start + at_once])
    return x


def _truncate(x: Tensor, rows: SamplingBatch, greedy: Tensor, request: Tensor) -> None:
    """Min-p, top-k and top-p, in place. `x`: float32 [n, V], scaled; `greedy`: bool, one per request."""
    if rows.min_p is not None:
        # p < min_p * max p, in logits. log(0) = -inf removes nothing.
        min_p = torch.where(greedy, 0.0, rows.min_p)
        threshold = x.amax(-1, keepdim=True) + min_p[request, None].log()
        x.masked_fill_(x < threshold, float("-inf"))
    if rows.top_k is None and rows.top_p is None:
        return
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        keep_all = greedy | (rows.top_k < 1)
        top_k = torch.where(keep_all, x.shape[1], rows.top_k.long())[request, None]
        ordered.masked_fill_(torch.arange(x.shape[1], device=x.device) >= top_k, float("-inf"))
    if rows.top_p is not None:
        top_p = torch.where(greedy, 1.0, rows.top_p)[request, None]
        probs = ordered.softmax(-1)
        removed = (probs.cumsum(-1) - probs >= top_p * (1 - MASS_TOLERANCE)) & (top_p < 1)
        removed[:, 0] = False
        ordered.masked_fill_(removed, float("-inf"))
    x.scatter_(1, order, ordered)


def _noise(vocab_size: int, layout: Layout, domain: int) -> Tensor:
    """Minus the Gumbel noise of each row, float32 [N, V]; 0 in greedy rows."""
    negative = negative_gumbel(layout.seed, layout.position, vocab_size, domain=domain)
    return negative.masked_fill_((layout.temperature < GREEDY_TEMPERATURE)[:, None], 0.0)


def _choose(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(argmax, whether the row has a distribution) of each row: NaN and +inf win the maximum and show there."""
    best, token = scores.max(-1)
    valid = best.isfinite()
    return torch.where(valid, token, PLACEHOLDER_TOKEN_ID), valid


def _sample(processed: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The target's token at every row."""
    if layout.seed is None:
        return _choose(processed)
    return _choose(processed - _noise(processed.shape[1], layout, noise.DOMAIN_TARGET))


def _rejection_sample(
    processed: Tensor, layout: Layout, index: _RowIndex, draft_probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ratio test and residual at every row, as if all rows before it had been accepted."""
    if layout.seed is None:
        return _choose(processed)
    greedy, drafted = layout.temperature < GREEDY_TEMPERATURE, layout.draft.long()
    p = processed.softmax(-1)
    is_token = index.is_draft & (drafted >= 0) & (drafted < p.shape[1])  # drafts outside the vocabulary are rejected
    draft = drafted.clamp(0, p.shape[1] - 1)[:, None]
    p_draft = p.gather(1, draft)[:, 0]
    if draft_probs is None or draft_probs.shape[0] == 0:
        q_draft = torch.ones_like(p_draft)
        residual = p.scatter(1, draft, 0.0)
    else:
        row = torch.arange(p.shape[0], device=p.device)
        q = draft_probs[(row - index.request).clamp(max=draft_probs.shape[0] - 1)].float()
        q_draft = q.gather(1, draft)[:, 0]
        residual = (p - q).clamp(min=0)
    u = uniform32(
        layout.seed,
        layout.position,
        torch.zeros(1, dtype=torch.int64, device=p.device),
        domain=noise.DOMAIN_ACCEPT,
    )[:, 0]
    accepted = is_token & (p_draft > 0) & (u * q_draft <= p_draft)
    # Bonus rows sample p; so do rows whose residual vanished because p == q up to rounding.
    use_p = ~is_token | (residual.sum(-1) == 0)
    weights = torch.where(use_p[:, None], p, residual)
    weights = torch.where(greedy[:, None], processed, weights.log())
    sampled, _ = _choose(weights - _noise(p.shape[1], layout, noise.DOMAIN_RESIDUAL))
    valid = processed.amax(-1).isfinite()
    token = torch.where(accepted & ~greedy, drafted, sampled)
    return torch.where(valid, token, PLACEHOLDER_TOKEN_ID), valid


def _accept(targets: Tensor, matches: Tensor, index: _RowIndex, num_requests: int, width: int) -> tuple[Tensor, Tensor]:
    """Cut each request's tokens after the first difference: (output int32 [B, width], num_accepted int32 [B])."""
    at = index.request * width + index.offset
    tokens = targets.new_full((num_requests * width,), PLACEHOLDER_TOKEN_ID)
    tokens[at] = targets
    accepted = matches.new_zeros((num_requests * width,), dtype=torch.int32)
    accepted[at] = matches.int()
    num_accepted = accepted.view(num_requests, width).cumprod(1).sum(1)
    columns = torch.arange(width, device=targets.device)
    kept = columns <= num_accepted[:, None]
    output = torch.where(kept, tokens.view(num_requests, width), PLACEHOLDER_TOKEN_ID)
    return output.int(), num_accepted.int()
