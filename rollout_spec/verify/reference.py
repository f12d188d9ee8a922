"""Verification as its formulas say it, in torch on any device: what every faster implementation must agree with.

A *row* is one position's target logits; a request's rows are its drafted positions and then the bonus position. The
*recovered* token is the one emitted at the first difference, the *bonus* token the one after a fully accepted draft.
Shapes: N rows, V tokens, B requests, D drafted tokens. Only `verify` waits for the device, and the first signatures of
a model: `prepare` is called before it serves.

Ratio tests run here on CPUs, and a GPU's kernels are checked against it at an engine's start (`self_check.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout_spec.features import signature_matrix
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


class Layout(NamedTuple):
    """Where each of N logits rows belongs. A request's rows are its drafted positions, then the bonus position."""

    starts: Tensor
    """int32 [B + 1]: each request's first row, then N."""
    temperature: Tensor
    """float32 [N]: the row's. It and the seed are gathered once: vLLM's V2 runner keeps them in pinned host memory."""
    seed: Tensor
    """int64 [N]: the row's."""
    position: Tensor
    """int64 [N]: the row's input position."""
    draft: Tensor
    """int32 [N]: the token drafted there; the placeholder at bonus positions, and where the id does not fit."""

    @classmethod
    def without_drafts(cls, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Layout:
        """Of rows that have a request each. Temperature float [N], seeds int64 [N], positions integer [N]."""
        starts = torch.arange(seeds.shape[0] + 1, dtype=torch.int32, device=seeds.device)
        draft = torch.full_like(starts[:-1], PLACEHOLDER_TOKEN_ID)
        return cls(starts, temperature.float(), seeds, positions.long(), draft)

    def with_temperature_applied(self) -> Layout:
        """The same for logits that have been divided by their temperature: it is 1 then, or 0."""
        return self._replace(temperature=(self.temperature >= GREEDY_TEMPERATURE).float())

    def of(self, num_rows: int) -> Layout:
        """Of tensors that are longer than there are rows, the rows."""
        return Layout(self.starts, *(tensor[:num_rows] for tensor in self[1:]))

    def places(self) -> tuple[Tensor, Tensor]:
        """(request of the batch, place among its rows) of each row, int64 [N]."""
        row, starts = torch.arange(self.draft.shape[0], device=self.starts.device), self.starts.long()
        owner = torch.bucketize(row, starts[1:], right=True)
        return owner, row - starts[owner]


def verify(
    logits: Tensor, draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, rows: SamplingBatch, **options: Any
) -> VerifyResult:
    """`verify_rows` for drafts by request: int32 [D], and the inclusive sums of their lengths, int32 [B]."""
    layout = lay_out(cu_num_draft_tokens, draft_token_ids, rows)
    if options.get("max_draft_tokens") is None:
        options["max_draft_tokens"] = max([1, *torch.diff(layout.starts).tolist()]) - 1
    return verify_rows(logits, layout, **options)


def lay_out(cu_num_draft_tokens: Tensor, draft_token_ids: Tensor, rows: SamplingBatch) -> Layout:
    """The layout of N = D + B rows, on the device of the arguments. O(N).

    Args:
        cu_num_draft_tokens: integer [B], inclusive sums of draft lengths.
        draft_token_ids: integer [D].
        rows: The requests'.
    """
    num_requests, num_drafts = cu_num_draft_tokens.shape[0], draft_token_ids.shape[0]
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=cu_num_draft_tokens.device)
    starts[1:] += cu_num_draft_tokens
    row = torch.arange(num_requests + num_drafts, device=starts.device)
    owner = row[:num_requests].repeat_interleave(starts.diff(), output_size=row.shape[0])
    tokens = draft_token_ids.long()
    tokens = pad(tokens.where((tokens >= 0) & (tokens < 2**31), PLACEHOLDER_TOKEN_ID).int(), (0, 1))
    is_bonus = row + 1 == starts[owner + 1]
    return Layout(
        starts,
        rows.temperature.float()[owner],
        rows.seeds[owner],
        rows.positions.long()[owner] + row - starts[owner],
        tokens[row - owner].masked_fill(is_bonus, PLACEHOLDER_TOKEN_ID),
    )


def verify_rows(
    logits: Tensor,
    layout: Layout,
    *,
    max_draft_tokens: int,
    method: VerifyMethod = "sample",
    logprobs_mode: LogprobsMode | None = None,
    after_difference: bool = False,
) -> VerifyResult:
    """See `rollout_spec.verify.api.verify_rows`; without features."""
    raw = logits.float()
    processed = scaled(raw, layout.temperature)
    targets = target_tokens(raw, processed, layout, method)
    result = accept(targets, raw, layout, max_draft_tokens)
    if method == "rejection" or not after_difference:
        emitted = torch.where(is_emitted(layout, result.num_accepted), targets, PLACEHOLDER_TOKEN_ID)
        result = result._replace(target_token_ids=emitted)
    if logprobs_mode is None:
        return result
    logprobs, ranks = score(raw if logprobs_mode == "raw_logprobs" else processed, targets)
    return result._replace(logprobs=logprobs, ranks=ranks)


def target_tokens(raw: Tensor, processed: Tensor, layout: Layout, method: VerifyMethod) -> Tensor:
    """The target's token at each row, int64 [N]; the placeholder where the row has no distribution."""
    drawn = sample(processed, layout) if method == "sample" else rejection_sample(processed, layout)
    return torch.where(raw.amax(-1).isfinite(), drawn, PLACEHOLDER_TOKEN_ID)  # NaN wins a maximum


def sample(processed: Tensor, layout: Layout) -> Tensor:
    """The target's own token at each row, int64 [N]: argmax of logits plus noise, an exact sample (Gumbel-max)."""
    return with_noise(processed, layout, DOMAIN_TARGET).argmax(-1)


def rejection_sample(processed: Tensor, layout: Layout) -> Tensor:
    """Accept a row's draft with its probability, else sample one of the other tokens: int64 [N].

    Leviathan et al., arXiv:2211.17192, algorithm 1, for a draft of which its drafter is certain. The noise comes from
    streams that drafters do not use, so drafts may depend on the request's other noise.
    """
    p = processed.softmax(-1)
    # Neither the bonus position nor a draft outside the vocabulary: there p is sampled.
    is_draft = ((layout.draft >= 0) & (layout.draft < p.shape[1]))[:, None]
    draft = layout.draft.long().clamp(0, p.shape[1] - 1)[:, None]
    p_draft = p.gather(1, draft)
    u = uniform32(layout.seed, layout.position, draft.new_zeros(1), domain=DOMAIN_ACCEPT)
    accepts = is_draft & (p_draft > 0) & (u <= p_draft)
    weights = torch.where(is_draft, residual(p, draft), p)
    recovered = with_noise(weights.log(), layout, DOMAIN_RESIDUAL).argmax(-1)
    tokens = torch.where(accepts[:, 0], draft[:, 0], recovered)
    return torch.where(layout.temperature < GREEDY_TEMPERATURE, processed.argmax(-1), tokens)


def residual(p: Tensor, draft: Tensor) -> Tensor:
    """Probabilities [N, V] without those of the drafts [N, 1], not normalised; p itself where nothing else is left."""
    rest = p.scatter(1, draft, 0.0)
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
    owner, offset = layout.places()
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


def is_emitted(layout: Layout, num_accepted: Tensor) -> Tensor:
    """Which rows' tokens are a request's accepted drafts or the one after them, bool [N]."""
    owner, offset = layout.places()
    return offset <= num_accepted[owner]


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over each row's temperature, float32 [N, V]; those of greedy rows as they are."""
    return logits.float() / divisors(temperature)


def divisors(temperature: Tensor) -> Tensor:
    """What rows of these temperatures, float32 [N], are divided by: float32 [N, 1], 1 for greedy ones."""
    return torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)[:, None]


@lru_cache(maxsize=4)
def _matrix(hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(signature_matrix(hidden_size)).to(device, dtype)


def prepare(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make the matrix of random projections and copy it to the device."""
    _matrix(hidden_size, dtype if device.type == "cuda" else torch.float32, device)


def project(hidden: Tensor) -> Tensor:
    """Random projections of states, [N, SIGNATURE_BITS], of which signatures keep the signs: one product.

    In the states' own dtype on a GPU. In bfloat16 six signs in ten thousand differ from those in float32.
    """
    if not hidden.is_cuda:
        hidden = hidden.float()
    return hidden @ _matrix(hidden.shape[1], hidden.dtype, hidden.device)


def pack_signatures(hidden: Tensor) -> Tensor:
    """The first words of the features, on the CPU: float [N, H] to int64 [N, SIGNATURE_WORDS]."""
    signs = project(hidden).numpy() > 0
    return torch.from_numpy(np.packbits(signs, axis=1, bitorder="little").view(np.int64))
