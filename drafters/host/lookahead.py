"""Lookahead: what the target sampled after rejected draft tokens.

Where a drafter wants it, the verifier samples the target at every drafted position, also after the first difference.
Those tokens follow a context that was rejected, but that often comes a little later: as in lookahead decoding (Fu et
al., arXiv:2402.02057), their n-grams are kept in a pool. They cost no forward pass, and come from the present policy,
where history comes from older ones. Unlike in lookahead decoding no position is verified for the pool alone, so the
gain is small.

The pool is a direct-mapped table from a problem and LOOKAHEAD_ORDER tokens to the newest token after them, which gets a
fixed share of the next token's probability.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.ngram import hash_context
from rollout_spec.jit import njit
from rollout_spec.types import Int32Array

LOOKAHEAD_ORDER = 3
"""Context length of the pool."""


class Pool(NamedTuple):
    """N-grams that the target sampled after a rejected draft."""

    keys: NDArray[np.uint64]  # [power of two]
    tokens: Int32Array  # [power of two], -1: empty


def new_pool(num_entries: int) -> Pool:
    """An empty pool; `num_entries` is a power of two. 12 bytes per entry."""
    return Pool(keys=np.zeros(num_entries, np.uint64), tokens=np.full(num_entries, -1, np.int32))


@njit(allocates=False)
def find(pool, problem, text, end):
    """The token that followed the last LOOKAHEAD_ORDER tokens of text[:end], -1: none known."""
    if end < LOOKAHEAD_ORDER:
        return -1
    key = hash_context(problem, text, end, np.int64(LOOKAHEAD_ORDER))
    entry = np.int64(key >> np.uint64(32)) & (pool.keys.size - 1)
    return pool.tokens[entry] if pool.keys[entry] == key else -1


@njit(allocates=False)
def insert(pool, problem, text, end, token):
    """Remember that `token` followed the last LOOKAHEAD_ORDER tokens of text[:end]."""
    if end >= LOOKAHEAD_ORDER:
        key = hash_context(problem, text, end, np.int64(LOOKAHEAD_ORDER))
        entry = np.int64(key >> np.uint64(32)) & (pool.keys.size - 1)
        pool.keys[entry] = key
        pool.tokens[entry] = token
