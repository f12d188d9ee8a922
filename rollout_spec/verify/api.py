"""The verifier as the engine calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from rollout_spec.checks import choice, integer, shown, shown_array, switch
from rollout_spec.types import SamplingBatch, VerifyResult
from rollout_spec.verify import cpu, vectorised
from rollout_spec.verify.layout import Layout, lay_out
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, LogprobsMode, VerifyMethod
from rollout_spec.verify.vectorised import cuts, process

MAX_DRAFT_TOKENS = 1 << 16
"""Bound on what a caller may say of the longest draft: the output has as many columns."""
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)
_ROW_DTYPES = {
    "temperature": _FLOATS,
    "seeds": (torch.int64,),
    "positions": _INTEGERS,
    "top_k": _INTEGERS,
    "top_p": _FLOATS,
    "min_p": _FLOATS,
}


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
    max_draft_tokens: int | None = None,
) -> VerifyResult:
    """Check every drafted token against the target, and sample what follows the accepted ones.

    The emitted tokens are distributed exactly as tokens sampled one by one. With `method="sample"` they do not even
    depend on the drafts.

    Args:
        target_logits: float [N, V] on the CPU or a CUDA device, N = D + B rows: each request's drafted positions, then
            its bonus position. Not changed.
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
        max_draft_tokens: The longest draft, if the caller knows it; otherwise it is read from the device.

    Returns:
        A `VerifyResult` on the logits' device. Nothing is copied to the host if `max_draft_tokens` is given. O(N V);
        with top-k or top-p O(N V log V), a sort.

    Raises:
        ValueError: shapes do not fit, a mode is unknown, or draft probabilities are given to `"sample"`, which would
            ignore them. On the CPU, where reading values is cheap, also: `cu_num_draft_tokens` does not describe
            `draft_token_ids`, `max_draft_tokens` is too small, a request that is not greedy has no seed, a
            temperature, top-p or min-p is out of range, or a tensor is on another device.
        TypeError: a tensor has the wrong kind of dtype.
    """
    longest = _check(
        target_logits, draft_token_ids, cu_num_draft_tokens, rows, method, draft_probs, logprobs_mode, max_draft_tokens
    )
    return verify_rows(
        target_logits,
        lay_out(cu_num_draft_tokens, draft_token_ids, rows),
        rows,
        method=method,
        draft_probs=draft_probs,
        logprobs_mode=logprobs_mode,
        after_difference=switch("after_difference", after_difference),
        max_draft_tokens=longest,
    )


def verify_rows(
    target_logits: Tensor,
    layout: Layout,
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """`verify` for rows that are laid out already, as engines call it: nothing is checked.

    Args:
        layout: Of the rows. Of `rows` its positions are not read.
        hidden: float [N, H], the states that the logits were computed from: asks for `VerifyResult.features`.
        max_draft_tokens: At least the longest draft.
    """
    if layout.seed is not None and cuts(rows):
        is_raw = logprobs_mode == "raw_logprobs"
        result = verify_rows(
            process(target_logits.float(), rows, layout.request.long()),
            layout._replace(temperature=(layout.temperature >= GREEDY_TEMPERATURE).float()),
            processed_rows(rows),
            method=method,
            draft_probs=draft_probs,
            logprobs_mode=None if is_raw else logprobs_mode,
            hidden=hidden,
            after_difference=after_difference,
            max_draft_tokens=max_draft_tokens,
        )
        return _with_raw_logprobs(result, target_logits) if is_raw else result
    more: dict[str, Any] = {
        "logprobs_mode": logprobs_mode, "after_difference": after_difference, "max_draft_tokens": max_draft_tokens,
    }  # fmt: skip
    if target_logits.is_cuda and layout.request.shape[0]:
        from rollout_spec.verify import kernel  # brings triton, which machines without a GPU may lack

        return kernel.verify_rows(target_logits, layout, method=method, draft_probs=draft_probs, hidden=hidden, **more)
    if method == "sample" and not target_logits.is_cuda:
        return cpu.verify_rows(target_logits, layout, hidden=hidden, **more)
    result = vectorised.verify_rows(target_logits, layout, rows, method=method, draft_probs=draft_probs, **more)
    if hidden is None:
        return result
    return result._replace(features=cpu.pack_features(target_logits, layout, hidden))


def processed_rows(rows: SamplingBatch) -> SamplingBatch:
    """How to sample from logits that temperature, top-k, top-p and min-p were applied to."""
    is_sampled = (rows.temperature >= GREEDY_TEMPERATURE).float()
    return replace(rows, temperature=is_sampled, top_k=None, top_p=None, min_p=None)


def _with_raw_logprobs(result: VerifyResult, logits: Tensor) -> VerifyResult:
    """The result with log-probabilities and ranks under `logits`, float [N, V]."""
    scores = logits.float()
    chosen = scores.gather(1, result.target_token_ids.clamp(min=0)[:, None])
    return result._replace(logprobs=chosen[:, 0] - scores.logsumexp(-1), ranks=(scores >= chosen).sum(-1))


def _check(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    method: VerifyMethod,
    draft_probs: Tensor | None,
    logprobs_mode: LogprobsMode | None,
    max_draft_tokens: int | None,
) -> int:
    """Raise what `verify` raises. Returns the longest draft."""
    for name, tensor in (
        ("target_logits", target_logits),
        ("draft_token_ids", draft_token_ids),
        ("cu_num_draft_tokens", cu_num_draft_tokens),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown_array(tensor)}")
    if not isinstance(rows, SamplingBatch):
        raise TypeError(f"rows must be a SamplingBatch, got {shown(rows)}")
    if target_logits.dim() != 2 or not target_logits.is_floating_point():
        raise TypeError(
            f"target_logits must be floating point [N, V], got {target_logits.dtype} {list(target_logits.shape)}"
        )
    for name, tensor in (("draft_token_ids", draft_token_ids), ("cu_num_draft_tokens", cu_num_draft_tokens)):
        if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
            raise TypeError(f"{name} must be int32 or int64 [n], got {tensor.dtype} {list(tensor.shape)}")
    if target_logits.shape[1] == 0:
        raise ValueError("target_logits must have at least one token per row, got none")
    num_requests = cu_num_draft_tokens.shape[0]
    num_rows = draft_token_ids.shape[0] + num_requests
    if target_logits.shape[0] != num_rows:
        raise ValueError(
            f"target_logits must have a row per drafted token and one per request, {num_rows}, "
            f"got {target_logits.shape[0]}"
        )
    for name in ("temperature", "seeds", "positions", "top_k", "top_p", "min_p"):
        values = getattr(rows, name)
        if values is None and name in ("temperature", "positions"):
            raise TypeError(f"rows.{name} must be given, got None")
        if values is not None and not isinstance(values, Tensor):
            raise TypeError(f"rows.{name} must be a tensor, got {shown_array(values)}")
        if values is not None and tuple(values.shape) != (num_requests,):
            raise ValueError(f"rows.{name} must have shape [{num_requests}], got {list(values.shape)}")
        if values is not None and values.dtype not in _ROW_DTYPES[name]:
            raise TypeError(f"rows.{name} must be {' or '.join(map(str, _ROW_DTYPES[name]))}, got {values.dtype}")
    choice("method", method, get_args(VerifyMethod))
    if logprobs_mode is not None:
        choice("logprobs_mode", logprobs_mode, get_args(LogprobsMode))
    if max_draft_tokens is not None:
        max_draft_tokens = integer("max_draft_tokens", max_draft_tokens, 0, MAX_DRAFT_TOKENS)
    if draft_probs is not None:
        if not isinstance(draft_probs, Tensor) or not draft_probs.is_floating_point():
            raise TypeError(f"draft_probs must be a floating-point tensor, got {shown_array(draft_probs)}")
        if method == "sample":
            raise ValueError('draft_probs would be ignored by method="sample": pass None or use method="rejection"')
        expected = (draft_token_ids.shape[0], target_logits.shape[1])
        if tuple(draft_probs.shape) != expected:
            raise ValueError(f"draft_probs must have shape {list(expected)}, got {list(draft_probs.shape)}")
    if target_logits.device.type == "cpu":
        of_rows = {f"rows.{name}": getattr(rows, name) for name in _ROW_DTYPES}
        others = {"draft_token_ids": draft_token_ids, "cu_num_draft_tokens": cu_num_draft_tokens, **of_rows}
        for name, tensor in {**others, "draft_probs": draft_probs}.items():
            if tensor is not None and (tensor.device.type != "cpu" or tensor.requires_grad):
                raise ValueError(f"{name} must be on the logits' device, the CPU, and need no gradient")
        _check_values(draft_token_ids.shape[0], cu_num_draft_tokens, rows, max_draft_tokens)
    if max_draft_tokens is not None or num_requests == 0:
        return max_draft_tokens or 0
    return int(torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).max())


def _check_values(
    num_drafts: int, cu_num_draft_tokens: Tensor, rows: SamplingBatch, max_draft_tokens: int | None
) -> None:
    """Raise ValueError where compiled loops would read or write past an array, or sample greedily by mistake."""
    cu = cu_num_draft_tokens.numpy()
    lengths = np.diff(cu, prepend=0)  # wraps only where a sum is negative
    if (cu < 0).any() or (lengths < 0).any() or (cu[-1] if len(cu) else 0) != num_drafts:
        raise ValueError(
            f"cu_num_draft_tokens must rise to the number of drafted tokens, {num_drafts}, got {cu.tolist()}"
        )
    longest = int(lengths.max(initial=0))
    if max_draft_tokens is not None and max_draft_tokens < longest:
        raise ValueError(f"max_draft_tokens must be at least the longest draft, {longest}, got {max_draft_tokens}")
    for name, most in (("temperature", np.finfo(np.float64).max), ("top_p", 1), ("min_p", 1)):
        values = getattr(rows, name)
        if values is not None and not ((values.numpy() >= 0) & (values.numpy() <= most)).all():  # NaN is neither
            expected = "finite and at least 0" if name == "temperature" else "from 0 to 1"
            raise ValueError(f"rows.{name} must be {expected}, got {values.tolist()}")
    if rows.seeds is None and (rows.temperature.numpy() >= GREEDY_TEMPERATURE).any():
        raise ValueError("rows.seeds must be given unless every temperature is 0: without noise nothing is sampled")
