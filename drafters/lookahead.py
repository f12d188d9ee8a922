"""Lookahead: what the target would have said after drafts that it did not take.

The verifier samples the target at every drafted position, also after the first difference. Those tokens are samples of
the target given a context that did not come to pass, but often does a little later: as in lookahead decoding (Fu et
al., arXiv:2402.02057), n-grams of them fill a pool. They cost nothing, for the verification has been paid for, and they
are the present policy's where history's are an older one's. Unlike in lookahead decoding nothing is verified for the
pool's sake, so it is small help: the README says how much.

The pool is a direct-mapped table from a problem and LOOKAHEAD_ORDER tokens to the newest token after them, which gets a
fixed share of the next token's probability.
"""

from __future__ import annotations

import numpy as np

from rollout_spec.drafters.kernels import Pool


def new_pool(num_entries: int) -> Pool:
    """An empty pool; `num_entries` is a power of two. 12 bytes per entry."""
    return Pool(keys=np.zeros(num_entries, np.uint64), tokens=np.full(num_entries, -1, np.int32))
