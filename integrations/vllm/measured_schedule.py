"""K by the number of requests, from what steps take and from what drafts were right: in place of vLLM's own schedule.

The device drafter's drafts are cut by vLLM's adaptive verification where that works. Elsewhere all requests of a step
have equally many draft tokens, and vLLM's scheduler looks up how many. What it looks up is chosen here as a budget on
the host chooses: by steps without drafts and with them, as they are, and never more than `step_sizes.affordable_ranges`
says, which is what CUDA graphs are captured for. It lives in the scheduler's process, so ranks cannot disagree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import MIN_OBSERVATIONS, Budget

PRIOR_TOKENS = 64.0
"""So many drafted tokens at each position are taken to have been right at first, so that some are drafted."""
REMEMBERED_TOKENS = 65_536.0
"""Outcomes of a position count half once there are so many."""


def warm_up() -> None:
    """Compile what is called for each step."""
    budget = Budget()
    for _ in range(2 * MIN_OBSERVATIONS):
        for num_drafts in (0, 2):
            budget.observe_step(2 + num_drafts, 1e-3, drafted=num_drafts > 0)
        budget.wants_drafts(2)
        budget.costs(2, 2, 2)


class MeasuredSchedule:
    """The list of K by the number of requests that vLLM's scheduler reads, once for each step that it schedules.

    Args:
        most: Most K for 0, 1, 2, ... requests.
        graph_sizes: Numbers of tokens to which steps are padded.
    """

    def __init__(self, most: Sequence[int], graph_sizes: Sequence[int] = ()) -> None:
        self._most = list(most)
        self._budget = Budget()
        self._budget.cost.pad_to(tuple(graph_sizes))
        self._widths = sorted(set(self._most) - {0}, reverse=True)
        k = max(self._most)
        self._reached, self._right = np.full(k, PRIOR_TOKENS), np.full(k, PRIOR_TOKENS)
        self._scheduled: deque[float] = deque()  # when steps were scheduled that have not been heard of
        self._last_update = 0.0

    def __len__(self) -> int:
        """As of vLLM's list."""
        return len(self._most)

    def __getitem__(self, num_requests: int) -> int:
        """How many tokens to draft for each request of the next step. Notes when it was asked."""
        self._scheduled.append(time.perf_counter())
        return self.choose(num_requests)

    def choose(self, num_requests: int) -> int:
        """The K that pays most. O(K times requests)."""
        most = self._most[num_requests]
        if not most or not self._budget.wants_drafts(num_requests):
            return 0
        value, cost = self._budget.costs(num_requests, num_requests, num_requests * most)
        survival = np.cumprod(self._right / self._reached)
        gains = {0: 0.0}
        for k in self._widths:
            if k <= most and num_requests * k < cost.size:
                gains[k] = value * num_requests * float(survival[:k].sum()) - float(cost[num_requests * k])
        best = max(gains, key=lambda k: gains[k])
        self._budget.note(num_requests, gains[best])
        return best

    def observe(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64], seconds: float | None) -> None:
        """Learn from a step.

        Args:
            drafted, accepted: int64 [B], draft tokens of each request.
            seconds: What the step took; None: it has read prompts.
        """
        for position in range(int(drafted.max(initial=0))):
            self._reached[position] += np.count_nonzero((drafted > position) & (accepted >= position))
            self._right[position] += np.count_nonzero(accepted > position)
        if self._reached[0] > REMEMBERED_TOKENS:
            self._reached /= 2
            self._right /= 2
        if seconds is not None:
            num_draft_tokens = int(drafted.sum())
            self._budget.observe_step(drafted.size + num_draft_tokens, seconds, drafted=num_draft_tokens > 0)

    def observe_output(self, scheduled: Any, output: Any) -> None:
        """Learn from what vLLM's scheduler is told of a step.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            output: vLLM's `ModelRunnerOutput`.
        """
        if not scheduled.num_scheduled_tokens or not self._scheduled:
            return
        now, began = time.perf_counter(), self._scheduled.popleft()
        seconds, self._last_update = now - max(began, self._last_update), now
        drafts, sampled = scheduled.scheduled_spec_decode_tokens, output.sampled_token_ids
        rows = [(len(drafts.get(name, ())), len(sampled[i])) for name, i in output.req_id_to_index.items() if sampled]
        counts = np.array([row for row in rows if row[1]], np.int64).reshape(-1, 2)
        has_prompts = scheduled.total_num_scheduled_tokens != len(rows) + sum(k for k, _ in rows)
        self.observe(counts[:, 0], counts[:, 1] - 1, None if has_prompts else seconds)
