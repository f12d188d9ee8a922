"""Chooses, per request and step, between the draft of history and that of a model drafter.

Both drafts are made in every step, and the one is verified of which more tokens are expected to be accepted. How many
that is follows from what became of earlier drafts: history's confidence is calibrated by its drafter, and here are the
rates at which a model's drafted tokens were right, by their place in the draft, by the probability that the model gave
them, and by whether the request is sampled or greedy. Both drafts are compared with the tokens that the request kept,
whichever was verified, so that a drafter which is not chosen for a while can be chosen again.

`choice_device.py` is the same on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.jit.compiler import njit
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Float32Array, Int32Array

POSITION_EDGES = (0, 1, 3)
"""Places in a draft share counters up to these: the first token, the second, the next two, and all after them."""
NUM_POSITION_BINS = len(POSITION_EDGES) + 1
NUM_PROBABILITY_BINS = 8
"""Bins of equal width for the model's probability of its token."""
PRIOR = 8.0
"""Prior trials of a bin, at the rate of the model's own probability."""


class ModelDrafts(NamedTuple):
    """What a model drafted for B requests. M is how many tokens it drafts."""

    token_ids: Int32Array
    """int32 [B, M]."""
    probabilities: Float32Array
    """float32 [B, M]: the model's own, of each token once it is reached."""


class DraftChoice:
    """Chooses between drafts. What becomes of them is learned by `drafters/host/step.py`.

    Attributes:
        counts: float64 [2 * NUM_POSITION_BINS * NUM_PROBABILITY_BINS, 2]: a model's drafted tokens that were reached,
            and of these those that were right; greedy requests first.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2 * NUM_POSITION_BINS * NUM_PROBABILITY_BINS, 2))

    def choose(
        self, table: RequestTable, rows: NDArray[np.int64], room: NDArray[np.int64], model: ModelDrafts
    ) -> NDArray[np.int64]:
        """Choose between the drafts in `Requests.history` and those of a model: fills `Requests.is_model`. O(B K).

        Args:
            rows: int64 [B].
            room: int64 [B], most tokens of each draft.
            model: Of the same requests, at most K tokens each.

        Returns:
            int64 [C], index in `rows` of the requests whose model's draft is verified and could be longer.
        """
        requests = table.arrays
        _choose(table.arrays, rows, room, model.token_ids, model.probabilities, self.counts)
        num_model = model.token_ids.shape[1]
        is_full = requests.is_model[rows] & (requests.num_offered[rows] == num_model) & (room > num_model)
        return np.flatnonzero(is_full)

    def model_counts(self) -> tuple[int, int]:
        """(drafted tokens of the model that were reached, those that were right), older ones discounted."""
        reached, right = self.counts.sum(0).tolist()
        return round(reached), round(right)


@njit(allocates=False)
def _cell(is_sampled: bool, position: int, probability: float) -> int:
    """Index into the counters."""
    position_bin = 0
    for edge in POSITION_EDGES:
        position_bin += position > edge
    probability_bin = min(int(probability * NUM_PROBABILITY_BINS), NUM_PROBABILITY_BINS - 1)
    return (int(is_sampled) * NUM_POSITION_BINS + position_bin) * NUM_PROBABILITY_BINS + probability_bin


@njit(allocates=False)
def _choose(
    requests: Any,
    rows: NDArray[np.int64],
    room: NDArray[np.int64],
    token_ids: Int32Array,
    probabilities: Float32Array,
    counts: NDArray[np.float64],
) -> None:
    for i in range(rows.size):
        row = rows[i]
        by_history = 0.0
        for j in range(requests.history.lengths[row]):
            by_history += requests.history.confidence[row, j]
        by_model, survival = 0.0, 1.0
        num_model = min(token_ids.shape[1], room[i], requests.model_tokens.shape[1])
        requests.model_tokens[row] = PLACEHOLDER_TOKEN_ID
        requests.continued.lengths[row] = 0  # of an earlier draft
        for j in range(num_model):
            p = float(probabilities[i, j])
            cell = _cell(requests.is_sampled[row], j, p)
            survival *= (counts[cell, 1] + PRIOR * p) / (counts[cell, 0] + PRIOR)
            by_model += survival
            requests.model_tokens[row, j] = token_ids[i, j]
            requests.model_cells[row, j] = cell
            requests.confidence[row, j] = survival
        requests.is_model[row] = by_model > by_history
        requests.num_offered[row] = num_model if requests.is_model[row] else 0
