"""A flat table of n-grams: where did the last few tokens occur before?

A bucket holds the WAYS newest positions of the contexts that hash to it; a position's continuation is the token at the
position itself (see `store.py`). Inserting shifts one bucket and looking up reads one bucket per context length, with
no pointers to follow. An entry has 26 bits of position and 6 of the hash. Whatever is found is compared with the text,
so removed rollouts need not be looked for: their entries fail the comparison and are pushed out in time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.kernels import WAYS


def new_buckets(num_entries: int) -> NDArray[np.uint32]:
    """An empty table with room for at least `num_entries` entries."""
    size = 1
    while size * WAYS < num_entries:
        size *= 2
    return np.full((size, WAYS), np.uint32(0xFFFFFFFF))
