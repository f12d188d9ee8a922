"""The verifier as the engine calls it."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from rollout_spec.types import SamplingRows, VerifyResult
from rollout_spec.verify import cpu, vectorised
from rollout_spec.verify.reference import LogprobsMode, VerifyMethod


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingRows,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    max_draft_tokens: int | None = None,
) -> VerifyResult:
    """Check every drafted token against the target, and sample what follows the accepted ones.

    The emitted tokens are distributed exactly as tokens sampled one by one. With `method="sample"` they do not even
    depend on the drafts.

    Args:
        target_logits: float [N, V] on any device, N = D + B rows: each request's drafted positions, then its bonus
            position. Not changed.
        draft_token_ids: integer [D].
        cu_num_draft_tokens: integer [B], inclusive sums of draft lengths without a leading 0.
        rows: How each request is sampled.
        method: `"sample"`: compare drafts with the target's own sample under the request's dice. `"rejection"`: ratio
            test and residual sampling (arXiv:2211.17192), with noise that no drafter sees.
        draft_probs: float [D, V], the distributions that the drafts were sampled from, for `"rejection"`; None: each
            draft was certain.
        logprobs_mode: Which log-probabilities to return, None for none. Processed ones include temperature, top-k,
            top-p and min-p.
        max_draft_tokens: The longest draft, if the caller knows it; otherwise it is read from the device.

    Returns:
        A `VerifyResult` on the logits' device. Nothing is copied to the host. O(N V), or O(N V log V) with top-k or
        top-p.

    Raises:
        ValueError: shapes do not fit, a mode is unknown, or draft probabilities are given to `"sample"`, which would
            ignore them.
        TypeError: a tensor has the wrong kind of dtype.
    """
    if target_logits.dim() != 2 or not target_logits.is_floating_point():
        raise TypeError(
            f"target_logits must be floating point [N, V], got {target_logits.dtype} {list(target_logits.shape)}"
        )
    for name, tensor in (("draft_token_ids", draft_token_ids), ("cu_num_draft_tokens", cu_num_draft_tokens)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
            raise TypeError(f"{name} must be int32 or int64 [n], got {tensor.dtype} {list(tensor.shape)}")
    num_requests = cu_num_draft_tokens.shape[0]
    num_rows = draft_token_ids.shape[0] + num_requests
    if target_logits.shape[0] != num_rows:
        raise ValueError(
            f"target_logits must have a row per drafted token and one per request, {num_rows}, "
            f"got {target_logits.shape[0]}"
        )
    for name in ("temperature", "seeds", "positions", "top_k", "top_p", "min_p"):
        values = getattr(rows, name)
        if values is not None and tuple(values.shape) != (num_requests,):
            raise ValueError(f"rows.{name} must have shape [{num_requests}], got {list(values.shape)}")
    if method not in get_args(VerifyMethod):
        raise ValueError(f"method must be one of {get_args(VerifyMethod)}, got {method!r}")
    if logprobs_mode is not None and logprobs_mode not in get_args(LogprobsMode):
        raise ValueError(f"logprobs_mode must be one of {get_args(LogprobsMode)} or None, got {logprobs_mode!r}")
    if draft_probs is not None:
        if method == "sample":
            raise ValueError('draft_probs would be ignored by method="sample": pass None or use method="rejection"')
        expected = (draft_token_ids.shape[0], target_logits.shape[1])
        if tuple(draft_probs.shape) != expected:
            raise ValueError(f"draft_probs must have shape {list(expected)}, got {list(draft_probs.shape)}")
    if method == "sample" and target_logits.device.type == "cpu":
        return cpu.verify(
            target_logits,
            draft_token_ids,
            cu_num_draft_tokens,
            rows,
            logprobs_mode=logprobs_mode,
            max_draft_tokens=max_draft_tokens,
        )
    return vectorised.verify(
        target_logits,
        draft_token_ids,
        cu_num_draft_tokens,
        rows,
        method=method,
        draft_probs=draft_probs,
        logprobs_mode=logprobs_mode,
        max_draft_tokens=max_draft_tokens,
    )
