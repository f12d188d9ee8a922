"""K by the number of requests, from what steps take and from what drafts were right: in place of vLLM's own schedule.

The device drafter's drafts are cut by vLLM's adaptive verification where that works. Elsewhere all requests of a step
have equally many draft tokens, and vLLM's scheduler looks up how many. What it looks up is chosen here: the K with most
tokens per second, of those that `step_sizes.affordable_ranges` allows, which is what CUDA graphs are captured for. A
step's time is kept by K and about as many requests, as it depends on both: each request's KV cache is read once,
however many tokens it has. All of it is in the scheduler's process, so ranks cannot disagree.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIOR_TOKENS = 64.0
"""So many drafted tokens at each position are taken to have been right at first. Old outcomes never count less than so
many new ones."""
JUDGED_STEPS = 512
"""What was right counts for about so many steps, also while nothing is drafted."""
SIZES_PER_DOUBLING = 4
"""Numbers of requests whose steps are taken to be alike."""
ENOUGH, RECENT_STEPS, MOST_TRIALS = 2, 5, 8
"""A K costs the median of its last RECENT_STEPS steps, once ENOUGH are known. For that it is tried MOST_TRIALS times in
a row at most: the time of a step with prompts says nothing."""
PATIENCE, LONGEST_PATIENCE = 128, 1024
"""A K that gives as many tokens per second as the best, or of which too little is known, is tried again after PATIENCE
steps of about as many requests; one that gives half as many after 16 times as many."""


class MeasuredSchedule:
    """The list of K by the number of requests that vLLM's scheduler reads, once for each step that it schedules.

    Args:
        most: Most K for 0, 1, 2, ... requests.

    Attributes:
        is_enabled: Whether anything is drafted.
    """

    def __init__(self, most: Sequence[int]) -> None:
        self.is_enabled = True
        self._most = list(most)
        self._ks = sorted(set(self._most) | {0}, reverse=True)
        self._reached, self._right = np.full((2, self._ks[0]), PRIOR_TOKENS)
        self._sizes: dict[int, _Size] = {}
        # When steps were scheduled that have not been heard of; some are not, after a fault.
        self._scheduled: deque[float] = deque(maxlen=8)
        self._last_update = 0.0

    def __getitem__(self, num_requests: int) -> int:
        """How many tokens to draft for each request of the next step. Notes when it was asked."""
        self._scheduled.append(time.perf_counter())
        return self.choose(num_requests)

    def choose(self, num_requests: int) -> int:
        """The K with most tokens per second, or one about which too little is known. O(K)."""
        most = self._most[num_requests]
        if most == 0 or not self.is_enabled:
            return 0
        size = self._size(num_requests)
        size.num_steps += 1
        tokens = np.append(1.0, 1.0 + np.cumsum(np.cumprod(self._right / self._reached)))
        rates: dict[int, float] = {}
        for k in self._ks:
            if k <= most:
                steps = sorted(size.seconds[k])
                if len(steps) >= ENOUGH:
                    rates[k] = tokens[k] / steps[len(steps) // 2]
                elif size.trials[k] < MOST_TRIALS:
                    return size.choose(k)
        best = max(rates, key=lambda k: rates[k], default=most)
        for k in self._ks:
            patience = PATIENCE * (rates[best] / rates[k]) ** 4 if k in rates else PATIENCE
            if k <= most and size.num_steps - size.last[k] > min(patience, LONGEST_PATIENCE):
                return size.choose(k)
        return size.choose(best)

    def observe(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64], seconds: float | None) -> None:
        """Learn from a step.

        Args:
            drafted, accepted: int64 [B], draft tokens of each request.
            seconds: What the step took; None: it has read prompts.
        """
        shrink = np.maximum(1 - 1 / JUDGED_STEPS, PRIOR_TOKENS / self._reached)
        self._reached *= shrink
        self._right *= shrink
        k = min(int(drafted.max(initial=0)), self._reached.size)
        for position in range(k):
            self._reached[position] += np.count_nonzero((drafted > position) & (accepted >= position))
            self._right[position] += np.count_nonzero(accepted > position)
        # A request may have fewer, as the last one where the step had no room for more.
        if seconds is not None and drafted.size and drafted.sum() >= 0.9 * k * drafted.size:
            self._size(drafted.size).seconds[k].append(max(seconds, 1e-6))

    def observe_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Learn from what vLLM's scheduler is told of a step, by vLLM's names for it."""
        scheduled, output = scheduler_output, model_runner_output
        if not scheduled.num_scheduled_tokens or not self._scheduled:
            return
        now, began = time.perf_counter(), self._scheduled.popleft()
        seconds, self._last_update = now - max(began, self._last_update), now
        drafts, sampled = scheduled.scheduled_spec_decode_tokens, output.sampled_token_ids
        if not drafts and not self._most[len(scheduled.num_scheduled_tokens)]:
            return
        rows = [(len(drafts.get(name, ())), len(sampled[i])) for name, i in output.req_id_to_index.items() if sampled]
        counts = np.array([row for row in rows if row[1]], np.int64).reshape(-1, 2)
        has_prompts = scheduled.total_num_scheduled_tokens != len(rows) + sum(k for k, _ in rows)
        self.observe(counts[:, 0], counts[:, 1] - 1, None if has_prompts else seconds)

    def _size(self, num_requests: int) -> _Size:
        """What is known of steps of about so many requests."""
        return self._sizes.setdefault(int(SIZES_PER_DOUBLING * math.log2(num_requests)), _Size())


class _Size:
    """Steps of about as many requests, by K."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.trials, self.last = Counter[int](), Counter[int]()  # how often it was chosen, and in which step
        self.seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))

    def choose(self, k: int) -> int:
        """Note that it is chosen."""
        self.trials[k] += 1
        self.last[k] = self.num_steps
        return k
