"""The verifier as engines and other callers use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from rollout_spec.checks import choice, shown, shown_array
from rollout_spec.types import LogprobsMode, SamplingBatch, VerifyMethod, VerifyResult
from rollout_spec.verify import cpu, reference
from rollout_spec.verify.layout import Layout, lay_out

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)
_LOGITS = (torch.bfloat16, torch.float16, *_FLOATS)


def verify(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
) -> VerifyResult:
    """Check every drafted token against the target, and sample what follows the accepted ones.

    The emitted tokens are distributed exactly as tokens sampled one by one. With `method="sample"` they do not even
    depend on the drafts. With draft probabilities, and where tokens are cut off, the reference does it in torch.

    Args:
        logits: float [N, V], the target's, on the CPU or a CUDA device, N = D + B rows: each request's drafted
            positions, then its bonus position. Not changed.
        draft_token_ids: integer [D]. Ids outside the vocabulary are never accepted.
        cu_num_draft_tokens: integer [B], inclusive sums of draft lengths without a leading 0.
        rows: How each request is sampled.
        method: `"sample"`: compare drafts with the target's own sample under the request's noise. `"rejection"`: ratio
            test and residual sampling (arXiv:2211.17192), with noise streams that drafters do not use.
        draft_probs: float [D, V], the distributions that the drafts were sampled from, for `"rejection"`. None:
            point-mass drafts, each of probability 1.
        logprobs_mode: Which log-probabilities to return, None for none. Processed ones include temperature, top-k,
            top-p and min-p.
        after_difference: Whether `target_token_ids` also says what the target samples at the rows after each request's
            first difference, which follow rejected drafts. Rejection sampling samples nothing there.

    Returns:
        A `VerifyResult` on the logits' device. O(N V), with top-k or top-p O(N V log V), a sort. Waits for the device,
        which knows the longest draft; `verify_rows` does not.

    Raises:
        ValueError: dtypes, shapes, devices or numbers of drafts do not fit, a mode is unknown, or draft probabilities
            are given to `"sample"`, which would ignore them.
        TypeError: what must be a tensor or a `SamplingBatch` is none.
    """
    choice("method", method, get_args(VerifyMethod))
    if logprobs_mode is not None:
        choice("logprobs_mode", logprobs_mode, get_args(LogprobsMode))
    if draft_probs is not None and method == "sample":
        raise ValueError('draft_probs would be ignored by method="sample": pass None or use method="rejection"')
    _check(logits, draft_token_ids, cu_num_draft_tokens, rows, draft_probs)
    layout = lay_out(cu_num_draft_tokens, draft_token_ids, rows)
    options: dict[str, Any] = {
        "method": method,
        "logprobs_mode": logprobs_mode,
        "after_difference": after_difference,
        "max_draft_tokens": int(torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).max()),
    }
    if draft_probs is None and not reference.cuts(rows):
        return verify_rows(logits, layout, **options)
    processed = reference.process(logits.float(), rows, layout.request.long())
    return reference.verify_rows(logits, layout, processed=processed, draft_probs=draft_probs, **options)


def verify_rows(
    logits: Tensor,
    layout: Layout,
    *,
    method: VerifyMethod = "sample",
    logprobs_mode: LogprobsMode | None = None,
    with_ranks: bool = True,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """`verify` of point-mass drafts for rows that are laid out already, as engines call it: nothing is checked.

    No token is cut off: who samples with top-k, top-p or min-p passes logits that are -inf where tokens were removed,
    and the layout `of_processed`.

    Args:
        with_ranks: Whether log-probabilities need to come with ranks, for which a GPU reads rows again.
        hidden: float [N, H], the states that the logits were computed from: asks for `VerifyResult.features`.
        max_draft_tokens: At least the longest draft.
    """
    options: dict[str, Any] = {
        "logprobs_mode": logprobs_mode, "after_difference": after_difference, "max_draft_tokens": max_draft_tokens,
    }  # fmt: skip
    if logits.is_cuda:
        from rollout_spec.verify import kernel  # brings triton, which machines without a GPU may lack

        return kernel.verify_rows(logits, layout, method=method, with_ranks=with_ranks, hidden=hidden, **options)
    if method == "sample":
        return cpu.verify_rows(logits, layout, hidden=hidden, **options)
    result = reference.verify_rows(logits, layout, method=method, **options)
    if hidden is None:
        return result
    each = Layout.without_drafts(layout.temperature, layout.seed, layout.position)  # features of all rows
    return result._replace(features=cpu.verify_rows(logits, each, hidden=hidden, max_draft_tokens=0).features)


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    verify_rows: Callable[..., VerifyResult] = verify_rows,
) -> tuple[Tensor, Tensor]:
    """Sample a model's draft from each row with the noise by which the target will sample at this position.

    With argmax(logit / T + noise) of the same noise, draft and target agree as far as their distributions overlap,
    where a greedy draft agrees with the probability that the target gives to it. That sampled tokens are then compared
    with drafts needs no draft probabilities. (Coupling by shared Gumbel noise: Daliri et al., arXiv:2408.07978.)
    Top-k, top-p, min-p and penalties are not applied, as in vLLM's own model drafters.

    Args:
        logits: float [B, V], of the drafter.
        temperature: float [B]; 0: the most probable token.
        seeds: int64 [B], of the requests' noise.
        positions: integer [B], input positions of the target's rows that will be compared with the tokens.

    Returns:
        (tokens int64 [B], probabilities float32 [B] that the drafter gives to them). Where logits are broken, token 0
        with probability 0. O(B V); does not wait for the device.
    """
    layout = Layout.without_drafts(temperature, seeds, positions)
    result = verify_rows(logits, layout, logprobs_mode="processed_logprobs", with_ranks=False, max_draft_tokens=0)
    probabilities = torch.where(result.target_token_ids >= 0, result.logprobs.exp(), 0.0)
    return result.target_token_ids.clamp(min=0), probabilities.clamp(max=1.0)


def _check(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    draft_probs: Tensor | None,
) -> None:
    """Raise what `verify` raises of its tensors: compiled loops would read or write past them."""
    if not isinstance(rows, SamplingBatch):
        raise TypeError(f"rows must be a SamplingBatch, got {shown(rows)}")
    given = {"logits": logits, "draft_token_ids": draft_token_ids, "cu_num_draft_tokens": cu_num_draft_tokens}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(value)}")
    num_drafts, num_requests, device = draft_token_ids.numel(), cu_num_draft_tokens.numel(), logits.device
    for name, value, dtypes, shape in (
        ("logits", logits, _LOGITS, (num_drafts + num_requests, *logits.shape[-1:])),
        ("draft_token_ids", draft_token_ids, _INTEGERS, (num_drafts,)),
        ("cu_num_draft_tokens", cu_num_draft_tokens, _INTEGERS, (num_requests,)),
        ("draft_probs", draft_probs, _LOGITS, (num_drafts, *logits.shape[-1:])),
        ("rows.temperature", rows.temperature, _FLOATS, (num_requests,)),
        ("rows.seeds", rows.seeds, (torch.int64,), (num_requests,)),
        ("rows.positions", rows.positions, _INTEGERS, (num_requests,)),
        ("rows.top_k", rows.top_k, _INTEGERS, (num_requests,)),
        ("rows.top_p", rows.top_p, _FLOATS, (num_requests,)),
        ("rows.min_p", rows.min_p, _FLOATS, (num_requests,)),
    ):
        if value is None and name in ("draft_probs", "rows.top_k", "rows.top_p", "rows.min_p"):
            continue
        message = f"{name} must be a tensor {list(shape)} of {' or '.join(map(str, dtypes))} on {device}, got "
        if not isinstance(value, Tensor):
            raise TypeError(message + shown(value))
        if value.dtype not in dtypes or value.shape != shape or value.device != device:
            raise ValueError(f"{message}{shown_array(value)} on {value.device}")
    if num_requests == 0 or logits.shape[1] == 0:
        raise ValueError(f"there must be a request and a token, got logits of shape {list(logits.shape)}")
    ends = [0, *cu_num_draft_tokens.tolist()]
    if ends != sorted(ends) or ends[-1] != num_drafts:
        raise ValueError(f"cu_num_draft_tokens must rise to the number of drafted tokens, {num_drafts}, got {ends[1:]}")
