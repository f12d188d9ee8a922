"""Chooses, per request and step, between the draft of history and that of a model drafter.

Both drafts are made in every step, and the one is verified of which more tokens are expected to be accepted. How many
that is follows from what became of earlier drafts: history's confidence is calibrated by its drafter, and here are the
rates at which a model's drafted tokens were right, by their place in the draft, by the probability that the model gave
them, and by whether the request is sampled or greedy. Both drafts are compared with the tokens that the request kept,
whichever was verified, so that a drafter which is not chosen for a while can be chosen again.

`choice_device.py` is the same on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.propose import count_outcome
from rollout_spec.drafters.host.vote import VERSION_DECAY
from rollout_spec.jit.compiler import inlined, njit
from rollout_spec.types import Drafts, Float32Array, Int32Array

POSITION_EDGES = (0, 1, 3)
"""Places in a draft share counters up to these: the first token, the second, the next two, and all after them."""
NUM_POSITION_BINS = len(POSITION_EDGES) + 1
NUM_PROBABILITY_BINS = 8
"""Bins of equal width for the model's probability of its token."""
PRIOR = 8.0
"""Prior trials of a bin, at the rate of the model's own probability."""
NO_TOKEN = -1


class ModelDrafts(NamedTuple):
    """What a model drafted for B requests. M is how many tokens it drafts."""

    token_ids: Int32Array
    """int32 [B, M]."""
    probabilities: Float32Array
    """float32 [B, M]: the model's own, of each token once it is reached."""


def no_model_drafts(num_requests: int) -> ModelDrafts:
    """No drafts for so many requests, as in a step in which the model did not run."""
    return ModelDrafts(np.zeros((num_requests, 0), np.int32), np.zeros((num_requests, 0), np.float32))


class LastDrafts(NamedTuple):
    """Both drafts of the step that is running, by the requests' rows."""

    history: Int32Array  # [rows, K], NO_TOKEN after the draft's end
    model: Int32Array  # [rows, M]
    cells: Int32Array  # [rows, M], index into the rates' counters
    is_sampled: NDArray[np.bool_]  # [rows], False for greedy requests
    is_model: NDArray[np.bool_]  # [rows], whether the model's was chosen


class DraftChoice:
    """Chooses between drafts, and learns from what the requests say next.

    Attributes:
        counts: float64 [2 * NUM_POSITION_BINS * NUM_PROBABILITY_BINS, 2]: a model's drafted tokens that were reached,
            and of these those that were right; greedy requests first.

    Args:
        num_history_tokens: K, the longest draft.
        num_model_tokens: M, at most K.
    """

    def __init__(self, num_history_tokens: int, num_model_tokens: int) -> None:
        self.counts = np.zeros((2 * NUM_POSITION_BINS * NUM_PROBABILITY_BINS, 2))
        self._shape = num_history_tokens, num_model_tokens
        self._last = _new_last(16, *self._shape)

    def start(self, row: int, *, is_sampled: bool) -> None:
        """A request begins in a row.

        Args:
            is_sampled: Whether its temperature is above 0.
        """
        size = self._last.is_sampled.size
        if row >= size:
            grown = _new_last(max(2 * size, row + 1), *self._shape)
            for old, new in zip(self._last, grown, strict=True):
                new[:size] = old
            self._last = grown
        self._last.history[row], self._last.model[row] = NO_TOKEN, NO_TOKEN
        self._last.is_sampled[row], self._last.is_model[row] = is_sampled, False

    def choose(self, rows: NDArray[np.int64], history: Drafts, model: ModelDrafts, room: NDArray[np.int64]) -> Drafts:
        """The better of two drafts for each request. O(B K).

        Args:
            rows: int64 [B].
            history: Drafts of at most K tokens.
            model: Of the same requests.
            room: int64 [B], most tokens of each draft.

        Returns:
            Drafts [B, K].
        """
        k = self._shape[0]
        drafts = Drafts(
            np.zeros((rows.size, k), np.int32), np.zeros(rows.size, np.int64), np.zeros((rows.size, k), np.float32)
        )
        _choose(rows, history, model, room, self.counts, self._last, drafts)
        return drafts

    def is_model(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the model's draft was chosen last, bool [B]."""
        return self._last.is_model[rows]

    def observe(
        self,
        rows: NDArray[np.int64],
        target_token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Learn what became of the last drafts. O(T). Arguments as of `BatchDrafter.observe_batch`, but for the drafts
        that were chosen.

        Returns:
            (target_token_ids, starts, num_accepted) to tell history of its own drafts, whether they were chosen or not.
        """
        kept, kept_starts = np.empty_like(target_token_ids), np.zeros_like(starts)
        accepted = np.empty_like(num_accepted)
        _observe(rows, target_token_ids, starts, num_accepted, self.counts, self._last, kept, kept_starts, accepted)
        return kept[: kept_starts[-1]], kept_starts, accepted

    def forget(self) -> None:
        """Nothing becomes of the last drafts, as when drafting is switched off."""
        self._last.history[:], self._last.model[:] = NO_TOKEN, NO_TOKEN
        self._last.is_model[:] = False

    def begin_policy_version(self) -> None:
        """The target has changed, and may agree less with the model: what is learned from now on counts more."""
        self.counts *= VERSION_DECAY

    def model_counts(self) -> tuple[int, int]:
        """(drafted tokens of the model that were reached, those that were right), older ones discounted."""
        reached, right = self.counts.sum(0).tolist()
        return round(reached), round(right)


def _new_last(num_rows: int, k: int, m: int) -> LastDrafts:
    return LastDrafts(
        np.full((num_rows, k), NO_TOKEN, np.int32),
        np.full((num_rows, m), NO_TOKEN, np.int32),
        np.zeros((num_rows, m), np.int32),
        np.zeros(num_rows, np.bool_),
        np.zeros(num_rows, np.bool_),
    )


@inlined(allocates=False)
def _cell(is_sampled: bool, position: int, probability: float) -> int:
    """Index into the counters."""
    position_bin = 0
    for edge in POSITION_EDGES:
        position_bin += position > edge
    probability_bin = min(int(probability * NUM_PROBABILITY_BINS), NUM_PROBABILITY_BINS - 1)
    return (int(is_sampled) * NUM_POSITION_BINS + position_bin) * NUM_PROBABILITY_BINS + probability_bin


@njit(allocates=False)
def _choose(
    rows: NDArray[np.int64],
    history: Drafts,
    model: ModelDrafts,
    room: NDArray[np.int64],
    counts: NDArray[np.float64],
    last: LastDrafts,
    drafts: Drafts,
) -> None:
    for i in range(rows.size):
        row = rows[i]
        by_history = 0.0
        last.history[row] = NO_TOKEN
        for j in range(history.lengths[i]):
            last.history[row, j] = history.token_ids[i, j]
            by_history += history.confidence[i, j]
        by_model, survival = 0.0, 1.0
        num_model = max(min(model.token_ids.shape[1], room[i]), 0)
        last.model[row] = NO_TOKEN
        for j in range(num_model):
            p = float(model.probabilities[i, j])
            cell = _cell(last.is_sampled[row], j, p)
            survival *= (counts[cell, 1] + PRIOR * p) / (counts[cell, 0] + PRIOR)
            by_model += survival
            last.model[row, j] = model.token_ids[i, j]
            last.cells[row, j] = cell
            drafts.token_ids[i, j] = model.token_ids[i, j]
            drafts.confidence[i, j] = survival
        drafts.lengths[i] = num_model
        last.is_model[row] = by_model > by_history
        if last.is_model[row]:
            continue
        drafts.lengths[i] = history.lengths[i]
        for j in range(history.lengths[i]):
            drafts.token_ids[i, j] = history.token_ids[i, j]
            drafts.confidence[i, j] = history.confidence[i, j]


@njit(allocates=False)
def _observe(
    rows: NDArray[np.int64],
    targets: NDArray[np.int64],
    starts: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
    counts: NDArray[np.float64],
    last: LastDrafts,
    kept: NDArray[np.int64],
    kept_starts: NDArray[np.int64],
    accepted: NDArray[np.int64],
) -> None:
    at = 0
    for i in range(rows.size):
        row, start = rows[i], starts[i]
        kept_starts[i] = at
        num_said = min(num_accepted[i] + 1, starts[i + 1] - start)
        for j in range(min(num_said, last.model.shape[1])):
            if last.model[row, j] == NO_TOKEN:
                break
            is_right = last.model[row, j] == max(targets[start + j], 0)  # vLLM emits 0 where the target has no sample
            count_outcome(counts[last.cells[row, j]], is_right)
            if not is_right:
                break
        accepted[i], num_kept = num_accepted[i], starts[i + 1] - start
        if last.is_model[row]:
            # History's draft is right as far as it agrees with what was said. The target's samples after the model's
            # first wrong token say nothing about it.
            same = 0
            while (
                same < min(num_said, last.history.shape[1])
                and last.history[row, same] != NO_TOKEN
                and last.history[row, same] == max(targets[start + same], 0)
            ):
                same += 1
            accepted[i], num_kept = min(same, num_said - 1), min(same + 1, num_said)
        for j in range(num_kept):
            kept[at + j] = targets[start + j]
        at += num_kept
        last.history[row], last.model[row] = NO_TOKEN, NO_TOKEN
    kept_starts[rows.size] = at
