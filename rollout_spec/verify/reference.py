"""Verification as its formulas say it, in torch on any device: what every faster implementation must agree with.

A *row* is one position's target logits; a request's rows are its drafted positions and then the bonus position. The
*recovered* token is the one emitted at the first difference, the *bonus* token the one after a fully accepted draft.
Shapes: N rows, V tokens, B requests, D drafted tokens. Only `lay_out_on_host` and `verify` wait for the device.

Ratio tests run here on CPUs. Where drafts come with probabilities, or where `SamplingBatch` says that tokens are cut
off, every method runs here, on any device; engines let vLLM cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollout_spec.noise.host import DOMAIN_ACCEPT, DOMAIN_RESIDUAL, DOMAIN_TARGET
from rollout_spec.noise.torch import gumbel, uniform32
from rollout_spec.types import (
    GREEDY_TEMPERATURE,
    PLACEHOLDER_TOKEN_ID,
    LogprobsMode,
    SamplingBatch,
    VerifyMethod,
    VerifyResult,
)
from rollout_spec.verify.layout import Layout, lay_out

MASS_TOLERANCE = 1e-5
"""A nucleus may fall this share short of top-p: float32 sums differ in the seventh digit, and the same nucleus must be
found whatever the order of summation, also where equal probabilities add up to top-p exactly."""


def verify(
    logits: Tensor, draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, rows: SamplingBatch, **options: Any
) -> VerifyResult:
    """Verify a batch of drafts; the arguments are those of `rollout_spec.verify.api.verify`, and are not checked."""
    layout = lay_out_on_host(cu_num_draft_tokens, draft_token_ids, rows)
    if options.get("max_draft_tokens") is None:
        options["max_draft_tokens"] = max([1, *torch.diff(layout.starts).tolist()]) - 1
    return verify_rows(logits, layout, processed=process(logits.float(), rows, layout.request.long()), **options)


def lay_out_on_host(cu_num_draft_tokens: Tensor, draft_token_ids: Tensor, rows: SamplingBatch) -> Layout:
    """`lay_out` by the CPU's loop for arguments on any device, which the result is on, too."""
    on_host = SamplingBatch(rows.temperature.cpu(), rows.seeds.cpu(), rows.positions.cpu())
    layout = lay_out(cu_num_draft_tokens.cpu(), draft_token_ids.cpu(), on_host)
    return Layout(*(field.to(cu_num_draft_tokens.device) for field in layout))


def verify_rows(
    logits: Tensor,
    layout: Layout,
    *,
    max_draft_tokens: int,
    method: VerifyMethod = "sample",
    processed: Tensor | None = None,
    draft_probs: Tensor | None = None,
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
) -> VerifyResult:
    """See `rollout_spec.verify.api.verify_rows`; without features.

    Args:
        processed: float32 [N, V], what is sampled from; None: the logits over each row's temperature.
        draft_probs: float [D, V]; see `rejection_sample`.
    """
    raw = logits.float()
    processed = scaled(raw, layout.temperature) if processed is None else processed
    targets = target_tokens(raw, processed, layout, method, draft_probs)
    result = accept(targets, raw, layout, max_draft_tokens)
    if method == "rejection" or not after_difference:
        emitted = torch.where(is_emitted(layout, result.num_accepted), targets, PLACEHOLDER_TOKEN_ID)
        result = result._replace(target_token_ids=emitted)
    if logprobs_mode is None:
        return result
    logprobs, ranks = score(raw if logprobs_mode == "raw_logprobs" else processed, targets)
    return result._replace(logprobs=logprobs, ranks=ranks)


def target_tokens(
    raw: Tensor, processed: Tensor, layout: Layout, method: VerifyMethod, draft_probs: Tensor | None = None
) -> Tensor:
    """The target's token at each row, int64 [N]; the placeholder where the row has no distribution."""
    drawn = sample(processed, layout) if method == "sample" else rejection_sample(processed, layout, draft_probs)
    return torch.where(raw.amax(-1).isfinite(), drawn, PLACEHOLDER_TOKEN_ID)  # NaN wins a maximum


def sample(processed: Tensor, layout: Layout) -> Tensor:
    """The target's own token at each row, int64 [N]: argmax of logits plus noise, an exact sample (Gumbel-max)."""
    return with_noise(processed, layout, DOMAIN_TARGET).argmax(-1)


def rejection_sample(processed: Tensor, layout: Layout, draft_probs: Tensor | None = None) -> Tensor:
    """Accept a row's draft with probability min(1, p / q), else sample the residual max(p - q, 0): int64 [N].

    Leviathan et al., arXiv:2211.17192, algorithm 1. `draft_probs` float [D, V]; None: q is 1 at the draft. The noise
    comes from streams that drafters do not use, so drafts may depend on the request's other noise.
    """
    p = processed.softmax(-1)
    # Neither the bonus position nor a draft outside the vocabulary: there p is sampled.
    is_draft = ((layout.draft >= 0) & (layout.draft < p.shape[1]))[:, None]
    draft = layout.draft.long().clamp(0, p.shape[1] - 1)[:, None]
    if draft_probs is None or draft_probs.shape[0] == 0:
        q = torch.zeros_like(p).scatter(1, draft, 1.0)
    else:
        owner, _ = _places(layout)  # each earlier request has one row more than drafts
        row = torch.arange(p.shape[0], device=p.device)
        q = draft_probs[(row - owner).clamp(max=draft_probs.shape[0] - 1)].float()
    p_draft, q_draft = p.gather(1, draft), q.gather(1, draft)
    u = uniform32(layout.seed, layout.position, draft.new_zeros(1), domain=DOMAIN_ACCEPT)
    accepts = is_draft & (p_draft > 0) & (u * q_draft <= p_draft)
    weights = torch.where(is_draft, residual(p, q), p)
    recovered = with_noise(weights.log(), layout, DOMAIN_RESIDUAL).argmax(-1)
    tokens = torch.where(accepts[:, 0], draft[:, 0], recovered)
    return torch.where(layout.temperature < GREEDY_TEMPERATURE, processed.argmax(-1), tokens)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised; p itself where the two are equal up to rounding and every sample of p is right."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def with_noise(scores: Tensor, layout: Layout, domain: int) -> Tensor:
    """Scores [N, V] plus the Gumbel noise of each row that is not greedy."""
    noise = gumbel(layout.seed, layout.position, scores.shape[1], domain=domain)
    return scores + noise.masked_fill_((layout.temperature < GREEDY_TEMPERATURE)[:, None], 0.0)


def accept(targets: Tensor, raw: Tensor, layout: Layout, max_draft_tokens: int) -> VerifyResult:
    """Cut each request's tokens after the first one that is not its draft.

    Args:
        targets: int64 [N], the target's tokens, the placeholder where a row has no distribution.
        raw: float32 [N, V], which says whether it is broken there.
    """
    owner, offset = _places(layout)
    shape = layout.starts.shape[0] - 1, max_draft_tokens + 1
    output = targets.new_full(shape, PLACEHOLDER_TOKEN_ID)
    output[owner, offset] = targets
    matches = targets.new_zeros(shape)
    matches[owner, offset] = ((targets == layout.draft) & (targets >= 0)).long()
    num_accepted = matches.cumprod(1).sum(1)
    is_kept = torch.arange(shape[1], device=targets.device) <= num_accepted[:, None]
    output = torch.where(is_kept, output, PLACEHOLDER_TOKEN_ID)
    is_broken = is_emitted(layout, num_accepted) & ~(raw.amax(-1) < float("inf"))
    num_broken = torch.zeros_like(num_accepted).index_add_(0, owner, is_broken.long())
    return VerifyResult(output.int(), num_accepted.int(), targets, None, None, num_broken.int())


def score(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability float32 [N], rank int64 [N]) of one token per row: how many tokens are at least as probable."""
    chosen = scores.gather(1, tokens.clamp(min=0)[:, None])
    return chosen[:, 0] - scores.logsumexp(-1), (scores >= chosen).sum(-1)


def _places(layout: Layout) -> tuple[Tensor, Tensor]:
    """(request of the batch, place among its rows) of each row, int64 [N]."""
    row, starts = torch.arange(layout.draft.shape[0], device=layout.draft.device), layout.starts.long()
    owner = torch.bucketize(row, starts[1:], right=True)
    return owner, row - starts[owner]


def is_emitted(layout: Layout, num_accepted: Tensor) -> Tensor:
    """Which rows' tokens are a request's accepted drafts or the one after them, bool [N]."""
    owner, offset = _places(layout)
    return offset <= num_accepted[owner]


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over each row's temperature, float32 [N, V]; those of greedy rows as they are."""
    return logits.float() / divisors(temperature)


def divisors(temperature: Tensor) -> Tensor:
    """What rows of these temperatures, float32 [N], are divided by: float32 [N, 1], 1 for greedy ones."""
    return torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)[:, None]


def cuts(rows: SamplingBatch) -> bool:
    """Whether top-k, top-p or min-p may remove tokens."""
    return rows.top_k is not None or rows.top_p is not None or rows.min_p is not None


def process(raw: Tensor, rows: SamplingBatch, request: Tensor) -> Tensor:
    """Temperature, min-p, top-k, top-p, in vLLM's order (`vllm/v1/sample/sampler.py`); removed tokens get -inf.

    Where equal logits straddle the cut, the lowest token ids are kept: exactly k tokens, or the smallest nucleus.
    (vLLM's Triton kernel does the same; its torch version keeps all ties for top-k and the last ones for top-p.)
    Greedy rows stay as they are: vLLM resets their other parameters.

    Args:
        raw: float32 [N, V].
        rows: One entry per request.
        request: int64 [N], each row's index into the fields of `rows`.
    """
    temperature = rows.temperature.float()[request]
    x = scaled(raw, temperature)
    if not cuts(rows):
        return x
    if rows.min_p is not None:
        threshold = x.amax(-1, keepdim=True) + rows.min_p.float()[request, None].log()  # log(0) removes nothing
        x = x.masked_fill(x < threshold, float("-inf"))
    kept, order = x.sort(dim=-1, descending=True, stable=True)
    if rows.top_k is not None:
        top_k = rows.top_k[request, None]
        kept = kept.masked_fill((torch.arange(x.shape[1], device=x.device) >= top_k) & (top_k > 0), float("-inf"))
    if rows.top_p is not None:
        top_p, probs = rows.top_p.float()[request, None], kept.softmax(-1)
        is_outside = (probs.cumsum(-1) - probs >= top_p * (1 - MASS_TOLERANCE)) & (top_p < 1)
        is_outside[:, 0] = False
        kept = kept.masked_fill(is_outside, float("-inf"))
    return torch.where((temperature < GREEDY_TEMPERATURE)[:, None], raw, x.scatter(1, order, kept))
