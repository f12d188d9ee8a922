"""The verifier as engines and `loop.py` call it: by kernels on a GPU, by compiled loops and the reference on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_spec.types import LogprobsMode, VerifyMethod, VerifyResult
from rollout_spec.verify import cpu, reference
from rollout_spec.verify.reference import Layout


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
    """Check every drafted token against the target, and sample what follows the accepted ones.

    The emitted tokens are distributed exactly as tokens sampled one by one. With `method="sample"` they do not even
    depend on the drafts. Nothing is cut off: who samples with top-k, top-p or min-p passes logits that are -inf where
    tokens were removed, and the layout `with_temperature_applied`.

    Args:
        logits: float [N, V], the target's, on the CPU or a CUDA device, N = D + B rows: each request's drafted
            positions, then its bonus position. Not changed.
        layout: What is drafted at each row, and how it is sampled; `reference.lay_out` makes it. Ids outside the
            vocabulary are never accepted.
        method: `"sample"`: compare drafts with the target's own sample under the request's noise. `"rejection"`: accept
            a draft with the probability that the target gives it, else sample the rest (arXiv:2211.17192 for drafts of
            probability 1), with noise streams that drafters do not use.
        logprobs_mode: Which log-probabilities to return, None for none. Processed ones include the temperature.
        with_ranks: Whether log-probabilities need to come with ranks, for which a GPU reads rows again.
        hidden: float [N, H], the states that the logits were computed from: asks for `VerifyResult.features`.
        after_difference: Whether `target_token_ids` also says what the target samples at the rows after each request's
            first difference, which follow rejected drafts. Rejection sampling samples nothing there.
        max_draft_tokens: At least the longest draft.

    Returns:
        A `VerifyResult` on the logits' device. O(N V); does not wait for the device, nor check anything.
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
