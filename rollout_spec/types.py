"""The values that drafters, verifiers and the engine pass to each other.

Arrays are NumPy in drafters on the host, torch tensors in verifiers; shapes and meanings are
the same. B is the number of requests, D the number of drafted tokens of all requests, N = D + B the number of
logits rows: each request's rows are its drafts' positions in order, then the bonus position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

PLACEHOLDER_TOKEN_ID = -1
"""Pads `VerifyResult.output_token_ids` after a request's last emitted token, as in vLLM."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

VerifyMethod = Literal["sample", "rejection"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


class Draft(NamedTuple):
    """What a drafter proposes for one request. Both arrays have the same length, 0 when nothing is proposed."""

    token_ids: Int32Array
    """int32 [n]: the proposed continuation."""
    confidence: Float32Array
    """float32 [n]: estimated probability that the target reaches and accepts token i; never increases with i."""


class Drafts(NamedTuple):
    """What a drafter proposes for a batch of B requests. K is the most tokens of a draft."""

    token_ids: Int32Array
    """int32 [B, K]: of row i the first `lengths[i]` are the proposed continuation."""
    lengths: NDArray[np.int64]
    """int64 [B], 0 where nothing is proposed."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each request of a batch is sampled. One entry per request, not per logits row.

    Attributes:
        temperature: float32 [B]; 0 means greedy.
        seeds: int64 [B], of the noise (see `rollout_spec.noise`). Ignored for greedy requests.
        positions: int64 [B], input position of the request's first logits row: the index, in prompt plus output,
            of the token that was fed in to produce it. Row j of the request has position `positions + j`.
    """

    temperature: Any
    seeds: Any
    positions: Any


class VerifyResult(NamedTuple):
    """Outcome of one verification. S is the longest draft of the batch."""

    output_token_ids: Any
    """int32 [B, S + 1]: accepted drafts, then the recovered or bonus token, then PLACEHOLDER_TOKEN_ID."""
    num_accepted: Any
    """int32 [B]: accepted drafts of each request."""
    target_token_ids: Any
    """int64 [N]: the target's own token at every emitted row; the placeholder at rows without a sample, and after the
    first difference, unless the target's samples are asked for there, too."""
    logprobs: Any
    """float32 [N] or None: log-probability of `target_token_ids` at its row, raw or processed as asked for; meaningless
    at rows whose token is not emitted."""
    ranks: Any
    """int64 [N] or None: number of tokens at least as probable, itself included, as vLLM counts ranks;
    meaningless at rows whose token is not emitted."""
    num_broken_rows: Any
    """int32 [B]: each request's emitted rows with no sample because a logit was NaN or +inf, which no mask can do: 0 or
    1, as nothing is emitted after a row without a sample. A row of only -inf has no sample either, but is not
    counted."""
    features: Any = None
    """int64 [N, FEATURE_WORDS] or None: `rollout_spec.features` of the tokens sampled at these rows, if asked for;
    meaningless at rows whose token is not emitted."""
