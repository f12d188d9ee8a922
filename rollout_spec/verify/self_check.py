"""The verifier's kernels against the reference, on the engine's own device and before it serves.

Wrong drafts cost time and no token, so drafters and features are compared by tests and `experiments/check_gpu.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from rollout_spec.noise.host import DOMAIN_ACCEPT, DOMAIN_RESIDUAL, DOMAIN_TARGET
from rollout_spec.noise.torch import uniform32
from rollout_spec.types import LogprobsMode, SamplingBatch, VerifyMethod, VerifyResult
from rollout_spec.verify import kernel, reference
from rollout_spec.verify.reference import Layout

TOLERANCE = 1e-4
"""Of log-probabilities, and of two tokens' scores, relative where they exceed 1: below it either may be sampled, and
ranked before the other. Kernels take logarithms of their own and multiply by 1 / T."""
VOCABULARY = 2049
"""Tokens of most rows, and a few more so that 16 divides their number where it divides the engine's vocabulary: kernels
are compiled by that, and others for fewer tokens."""
Batch = tuple[Tensor, Tensor, Tensor, SamplingBatch]  # logits, drafts, sums of draft lengths, rows


def find_fault(
    device: torch.device,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    num_speculative_tokens: int,
    method: VerifyMethod = "sample",
    logprobs_mode: str = "processed_logprobs",
    for_v2: bool = False,
) -> str | None:
    """Say where some three hundred made-up rows, as an engine has them, are verified wrongly; None: nowhere.

    for_v2: As vLLM's V2 runner has them, which takes a `kernel.StepOutput`.
    """
    generator = torch.Generator(device).manual_seed(0)
    size = min(vocab_size, VOCABULARY + (vocab_size - VOCABULARY) % 16)
    modes = (None, *(mode for mode in get_args(LogprobsMode) if mode == logprobs_mode))
    most = num_speculative_tokens
    cases = list(itertools.product((size,), (dtype, torch.float32), sorted({0, most}), modes, (0.5, 5.0)))
    cases += itertools.product((vocab_size,), (dtype,), (most,), modes[-1:], (0.5, 5.0))
    for columns, kind, limit, mode, scale in cases:
        lengths = [min(length, limit) for length in (limit, 0, 1, 2, 3, 1, 2, 3)]
        batch = random_batch(generator, lengths, columns, kind, scale)
        fault = fault_of(batch, method=method, logprobs_mode=mode, max_draft_tokens=limit, for_v2=for_v2)
        if fault is not None:
            return f"{columns} {kind} logits, up to {limit} drafts, {mode or 'no log-probabilities'}: {fault}"
    return None


def random_batch(
    generator: torch.Generator, lengths: Sequence[int], vocab_size: int, dtype: torch.dtype, scale: float
) -> Batch:
    """Requests of mixed temperatures, two of three drafts right. The last three have no distribution at first."""
    device, size, num_rows = generator.device, len(lengths), sum(lengths) + len(lengths)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator, device=device)

    # vLLM cuts the model's logits off a matrix of padded width, and processes them in one that is not.
    width = vocab_size if dtype == torch.float32 else -(-vocab_size // 64) * 64
    logits = (scale * torch.randn(num_rows, width, generator=generator, device=device)).to(dtype)[:, :vocab_size]
    if scale > 1:  # ties, and tokens that masks have removed
        logits.round_()
        logits[:, 1::3] = float("-inf")
    temperature = torch.tensor([0.6, 0.0, 1.0, 1.5], device=device).repeat(size)[:size]
    rows = SamplingBatch(temperature, integers(-(2**63), 2**63 - 1, size), integers(0, 40_000, size))
    cu = torch.tensor(lengths, device=device).cumsum(0).int()
    nothing = torch.zeros(num_rows - size, dtype=torch.int32, device=device)
    starts = reference.lay_out(cu, nothing, rows).starts.long()
    is_draft = torch.ones(num_rows, dtype=torch.bool, device=device).index_fill_(0, starts[1:] - 1, False)
    targets = reference.verify(logits, nothing, cu, rows, after_difference=True).target_token_ids[is_draft]
    drafts = (targets + (integers(0, 3, num_rows - size) == 0)) % vocab_size
    logits[starts[-4]] = float("-inf")
    logits[starts[-3], 0] = float("nan")
    logits[starts[-2], vocab_size // 2] = float("inf")
    return logits, drafts.int(), cu, rows


def fault_of(
    batch: Batch, *, method: VerifyMethod, logprobs_mode: LogprobsMode | None, for_v2: bool = False, **options: Any
) -> str | None:
    """Say where the kernels differ from the reference; None: nowhere. Waits for the device."""
    logits, drafts, cu, rows = batch
    options |= {"method": method, "logprobs_mode": logprobs_mode}
    layout = reference.lay_out(cu, drafts, rows)
    got = kernel.verify_rows(logits, layout, after_difference=True, **options)
    tokens, raw = got.target_token_ids, logits.float()
    processed = reference.scaled(raw, layout.temperature)
    targets = reference.target_tokens(raw, processed, layout, method)
    expected = reference.accept(tokens, raw, layout, options["max_draft_tokens"])  # given the kernels' own tokens
    is_emitted = reference.is_emitted(layout, expected.num_accepted)
    is_wrong = (tokens != targets) & ~_is_close(processed, layout, tokens, targets, method)
    faults = {"token": is_wrong if method == "sample" else is_wrong & is_emitted}
    if logprobs_mode is not None:
        scores, has_logprob = raw if logprobs_mode == "raw_logprobs" else processed, is_emitted & (targets >= 0)
        chosen = tokens.clamp(0, raw.shape[1] - 1)
        logprobs, ranks = reference.score(scores, chosen)
        logit = scores.gather(1, chosen[:, None])
        is_near = ((scores - logit).abs() <= TOLERANCE * logit.abs().clamp(min=1)) & (scores != logit)
        faults["log-probability"] = has_logprob & ~((got.logprobs - logprobs).abs() <= TOLERANCE)
        faults["rank"] = has_logprob & ((got.ranks - ranks).abs() > is_near.sum(-1))
    for name, wrong in faults.items():
        if wrong.any():
            return f"{name} of row {int(wrong.int().argmax())}"
    for name in ("output_token_ids", "num_accepted", "num_broken_rows"):
        if not torch.equal(getattr(got, name), getattr(expected, name)):
            return f"{name} is {getattr(got, name).tolist()} for {getattr(expected, name).tolist()}"
    return _step_fault(logits, layout, got, is_emitted & (targets >= 0), options) if for_v2 else None


def _step_fault(
    logits: Tensor, layout: Layout, got: VerifyResult, has_token: Tensor, options: dict[str, Any]
) -> str | None:
    """Say where the `StepOutput` of a verification is not what is known of it, `got`. The first request is a chunk."""
    (num_rows, device), num_requests = (logits.shape[0], logits.device), got.num_accepted.shape[0]
    sizes = {
        torch.int64: max(num_rows, got.output_token_ids.numel()),
        torch.float32: num_rows,
        torch.int32: num_requests,
    }
    kinds = [torch.int64, torch.int64, torch.float32, torch.int64, *[torch.int32] * 4]
    written = [torch.full((sizes[kind],), -1, dtype=kind, device=device) for kind in kinds]
    slots = torch.arange(num_requests, dtype=torch.int32, device=device)
    is_chunk = slots == 0
    step = kernel.StepOutput._make((*written, torch.ones_like(slots), slots, 2 * is_chunk.int()))
    kernel.verify_rows(logits, layout, step=step, **options)
    num_sampled, rows = torch.where(is_chunk, 0, got.num_accepted + 1), layout.starts.diff()
    expected = {
        "output": got.output_token_ids.clamp(min=0).flatten().long(),
        "targets": torch.where(has_token, got.target_token_ids, 0),
        "num_broken": got.num_broken_rows,
        "num_sampled": num_sampled,
        "num_rows": rows,
        "num_rejected": torch.where(is_chunk, 0, rows - num_sampled),
    }
    for name, values in expected.items():
        if not torch.equal(getattr(step, name)[: values.numel()], values):
            return f"{name} of V2's runner is {getattr(step, name).tolist()} for {values.tolist()}"
    for name in ("logprobs", "ranks") if got.logprobs is not None else ():
        if not torch.equal(getattr(step, name)[:num_rows][has_token], getattr(got, name)[has_token]):
            return f"{name} of V2's runner"
    return None


def _is_close(processed: Tensor, layout: Layout, ours: Tensor, theirs: Tensor, method: VerifyMethod) -> Tensor:
    """Whether either of two tokens of each row may be sampled, as rounding decides between them: bool [N]."""
    both = torch.stack((ours, theirs), 1)
    is_token = ((both >= 0) & (both < processed.shape[1])).all(1)
    both = both.clamp(0, processed.shape[1] - 1)
    if method == "sample":
        scores = reference.with_noise(processed, layout, DOMAIN_TARGET)
    else:
        scores = reference.with_noise(processed.log_softmax(-1), layout, DOMAIN_RESIDUAL)
    x, y = scores.gather(1, both).unbind(1)
    is_close = (x - y).abs() <= TOLERANCE * y.abs().clamp(min=1)
    if method == "rejection":
        draft = layout.draft.long().clamp(0, processed.shape[1] - 1)[:, None]
        u = uniform32(layout.seed, layout.position, draft.new_zeros(1), domain=DOMAIN_ACCEPT)
        is_close |= ((processed.softmax(-1).gather(1, draft) / u - 1).abs() <= TOLERANCE)[:, 0]
    return is_token & is_close
