"""The verifier as the engine calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from rollout_spec.checks import choice, integer, shown, shown_array, switch
from rollout_spec.types import SamplingBatch, VerifyResult
from rollout_spec.verify import cpu, reference
from rollout_spec.verify.layout import Layout, lay_out
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, LogprobsMode, VerifyMethod, cuts, process, score

MAX_DRAFT_TOKENS = 1 << 16
"""Bound on what a caller may say of the longest draft: the output has as many columns."""
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)
_LOGITS = (torch.bfloat16, torch.float16, *_FLOATS)
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
        draft_probs: float [D, V], the distributions that the drafts were sampled from, for `"rejection"`, which then
            runs in torch. None: point-mass drafts, each of probability 1.
        logprobs_mode: Which log-probabilities to return, None for none. Processed ones include temperature, top-k,
            top-p and min-p.
        after_difference: Whether `target_token_ids` also says what the target samples at the rows after each request's
            first difference, which follow rejected drafts. Rejection sampling samples nothing there.
        max_draft_tokens: The longest draft, if the caller knows it; otherwise it is read from the device.

    Returns:
        A `VerifyResult` on the logits' device. Nothing is copied to the host if `max_draft_tokens` is given. O(N V);
        with top-k or top-p O(N V log V), a sort.

    Raises:
        ValueError: shapes or devices do not fit, a mode is unknown, or draft probabilities are given to `"sample"`,
            which would ignore them. On the CPU, where reading values is cheap, also: `cu_num_draft_tokens` does not
            describe `draft_token_ids`, `max_draft_tokens` is too small, a request that is not greedy has no seed, or a
            temperature, top-p or min-p is out of range.
        TypeError: a tensor is none, or has the wrong dtype or number of dimensions.
    """
    choice("method", method, get_args(VerifyMethod))
    if logprobs_mode is not None:
        choice("logprobs_mode", logprobs_mode, get_args(LogprobsMode))
    if draft_probs is not None and method == "sample":
        raise ValueError('draft_probs would be ignored by method="sample": pass None or use method="rejection"')
    _check(target_logits, draft_token_ids, cu_num_draft_tokens, rows, draft_probs)
    lengths = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    may_read = max_draft_tokens is None or target_logits.device.type == "cpu"
    longest = max([0, *lengths.tolist()]) if may_read else 0
    if max_draft_tokens is not None:
        longest = integer("max_draft_tokens", max_draft_tokens, longest, MAX_DRAFT_TOKENS)
    layout = lay_out(cu_num_draft_tokens, draft_token_ids, rows)
    options: dict[str, Any] = {
        "method": method,
        "logprobs_mode": logprobs_mode,
        "after_difference": switch("after_difference", after_difference),
        "max_draft_tokens": longest,
    }
    if draft_probs is not None:
        return reference.verify_rows(target_logits, layout, rows, draft_probs=draft_probs, **options)
    return verify_rows(target_logits, layout, rows, **options)


def verify_rows(
    target_logits: Tensor,
    layout: Layout,
    rows: SamplingBatch,
    *,
    method: VerifyMethod = "sample",
    logprobs_mode: LogprobsMode | None = None,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """`verify` of point-mass drafts for rows that are laid out already, as engines call it: nothing is checked.

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

        return kernel.verify_rows(target_logits, layout, method=method, hidden=hidden, **more)
    if method == "sample" and not target_logits.is_cuda:
        return cpu.verify_rows(target_logits, layout, hidden=hidden, **more)
    result = reference.verify_rows(target_logits, layout, rows, method=method, **more)
    if hidden is None:
        return result
    return result._replace(features=cpu.pack_features(target_logits, layout, hidden))


def processed_rows(rows: SamplingBatch) -> SamplingBatch:
    """How to sample from logits that temperature, top-k, top-p and min-p were applied to."""
    is_sampled = (rows.temperature >= GREEDY_TEMPERATURE).float()
    return replace(rows, temperature=is_sampled, top_k=None, top_p=None, min_p=None)


def _with_raw_logprobs(result: VerifyResult, logits: Tensor) -> VerifyResult:
    """The result with log-probabilities and ranks under `logits`, float [N, V]."""
    logprobs, ranks = score(logits.float(), result.target_token_ids)
    return result._replace(logprobs=logprobs, ranks=ranks)


def _check(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    draft_probs: Tensor | None,
) -> None:
    """Raise what `verify` raises of its tensors."""
    if not isinstance(rows, SamplingBatch):
        raise TypeError(f"rows must be a SamplingBatch, got {shown(rows)}")
    _check_tensor("draft_token_ids", draft_token_ids, _INTEGERS, (None,))
    _check_tensor("cu_num_draft_tokens", cu_num_draft_tokens, _INTEGERS, (None,))
    num_drafts, num_requests = draft_token_ids.shape[0], cu_num_draft_tokens.shape[0]
    _check_tensor("target_logits", target_logits, _LOGITS, (num_drafts + num_requests, None))
    if target_logits.shape[1] == 0:
        raise ValueError("target_logits must have at least one token per row, got none")
    given = {f"rows.{name}": getattr(rows, name) for name in _ROW_DTYPES}
    for name, dtypes in _ROW_DTYPES.items():
        if given[f"rows.{name}"] is not None or name in ("temperature", "positions"):
            _check_tensor(f"rows.{name}", given[f"rows.{name}"], dtypes, (num_requests,))
    if draft_probs is not None:
        _check_tensor("draft_probs", draft_probs, _LOGITS, (num_drafts, target_logits.shape[1]))
    given |= {"draft_token_ids": draft_token_ids, "cu_num_draft_tokens": cu_num_draft_tokens}
    given["draft_probs"] = draft_probs
    for name, tensor in given.items():
        if tensor is not None and tensor.device != target_logits.device:
            raise ValueError(f"{name} must be on the logits' device, {target_logits.device}, got {tensor.device}")
    if target_logits.device.type == "cpu":
        _check_values(num_drafts, cu_num_draft_tokens.tolist(), rows)


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """Raise where a value is no tensor of one of the dtypes and of the shape, in which None is any size."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    message = f"{name} must be a tensor [{sizes}] of {' or '.join(map(str, dtypes))}, got {shown_array(value)}"
    if not isinstance(value, Tensor) or value.dtype not in dtypes or value.dim() != len(shape):
        raise TypeError(message)
    if any(size not in (None, actual) for size, actual in zip(shape, value.shape, strict=True)):
        raise ValueError(message)


def _check_values(num_drafts: int, ends: list[int], rows: SamplingBatch) -> None:
    """Raise where compiled loops would read or write past an array, or sample greedily by mistake."""
    if [0, *ends] != sorted([0, *ends]) or [0, *ends][-1] != num_drafts:
        raise ValueError(f"cu_num_draft_tokens must rise to the number of drafted tokens, {num_drafts}, got {ends}")
    for name, most in (("temperature", torch.finfo(torch.float64).max), ("top_p", 1), ("min_p", 1)):
        values = getattr(rows, name)
        if values is not None and not bool(((values >= 0) & (values <= most)).all()):  # NaN is neither
            expected = "finite and at least 0" if name == "temperature" else "from 0 to 1"
            raise ValueError(f"rows.{name} must be {expected}, got {values.tolist()}")
    if rows.seeds is None and bool((rows.temperature >= GREEDY_TEMPERATURE).any()):
        raise ValueError("rows.seeds must be given unless every temperature is 0: without noise nothing is sampled")
