"""Whether steps have drafts, from what steps take and from what drafts were right: in place of vLLM's own schedule.

All requests of a step are drafted equally many tokens by the device drafter, and vLLM's scheduler looks up how many.
What it looks up is chosen here: the most that are allowed or none, whichever gives more tokens per second. Where vLLM's
adaptive verification cuts drafts on the device, all of them are allowed, but a step with drafts takes the host longer
even if all are cut. Elsewhere `step_sizes.affordable_ranges` says how many are, by the number of requests.

What drafts give is kept for each number of requests: each request's KV cache is read once, however many tokens it has,
and of many requests drafts are cut more. One scheduler decides for all ranks of an engine; where each rank has its own
(`external_launcher`), `hooks.init_scheduler` leaves vLLM's schedule.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR_TOKENS = 64.0
"""Each position begins with this many drafted tokens, all counted as right. Outcomes never fade below this many."""
JUDGED_STEPS = 128
"""Outcomes fade within about this many steps, also while nothing is drafted, until PRIOR_TOKENS are left."""
SIZES_PER_DOUBLING = 2
"""Sizes per doubling of the number of requests. Steps of one size are taken to be alike."""
ENOUGH, RECENT_STEPS, OUTLIER = 2, 32, 2.0
"""A K costs the mean of its last RECENT_STEPS steps, once ENOUGH are known, without those that took more than OUTLIER
times their median. The median alone is no measure: of few requests, a step in which all drafts are cut takes half as
long as one in which some are verified."""
TRIAL, TRIED_DRAFTS, MOST_TRIALS = 5, 32, 2
"""A K is tried for TRIAL steps in a row, of which two count (`sub_steps.Steps`). During a pause few requests are given
some TRIED_DRAFTS whole drafts, which tell how many tokens are right. Steps with prompts are not timed: a K of which no
step could be timed is tried at most MOST_TRIALS times."""
WORTH_IT, SURELY = 1.1, 2.5
"""Whole drafts whose time is not known are made if they give WORTH_IT times the tokens. With SURELY times nothing else
is tried: on an H100 a step with drafts took the host 1.5 to 2.2 times as long as one without."""
PATIENCE = 128
"""The K that gives fewer tokens per second is tried again after PATIENCE r² steps of about as many requests, if the
other gives r times as many."""


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
        self._sizes: dict[int, _Size] = {}
        self._last = _Size(np.full((2, max(self._most)), PRIOR_TOKENS))  # the one that was asked for last

    def __getitem__(self, num_requests: int) -> int:
        """How many tokens to draft for each request of the next step."""
        return self.choose(num_requests)

    def choose(self, num_requests: int) -> int:
        """The most draft tokens or none, whichever gives more tokens per second or is too little known. O(K)."""
        most = self._most[num_requests]
        if most == 0 or not self.is_enabled:
            return 0
        size = self._size(num_requests)
        size.num_steps += 1
        if size.num_left and size.tried in (0, most):
            return size.go_on()
        tokens = size.tokens(most)
        rates = {k: n / size.usual_seconds(k) for k, n in ((most, tokens), (0, 1.0)) if len(size.seconds[k]) >= ENOUGH}
        if most in rates:
            best = max(rates, key=lambda k: rates[k])
        else:
            best = most if tokens > WORTH_IT else 0
        size.last[best] = size.num_steps
        for k in [most] if tokens >= SURELY else [most, 0]:
            is_unknown = k not in rates and size.num_trials[k] < MOST_TRIALS
            times_worse = rates[best] / rates[k] if len(rates) == 2 else 1.0
            if is_unknown or size.num_steps - size.last[k] > PATIENCE * times_worse**2:
                is_pause = best == 0 and k == most
                return size.begin_trial(k, max(TRIAL, TRIED_DRAFTS // num_requests) if is_pause else TRIAL)
        return best

    def observe(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64], seconds: float | None) -> None:
        """Learn from a forward pass.

        Args:
            drafted, accepted: int64 [B], draft tokens of each request.
            seconds: What the pass took; None: that is not known, or it has read prompts.
        """
        if drafted.size and self._most[drafted.size]:
            self._size(drafted.size).observe(drafted, accepted, seconds)

    def _size(self, num_requests: int) -> _Size:
        """What is known of steps of about so many requests. A new size begins with what was right in the last one."""
        name = round(SIZES_PER_DOUBLING * math.log2(num_requests))
        if name not in self._sizes:
            self._sizes[name] = _Size(self._last.outcomes * (PRIOR_TOKENS / self._last.outcomes[0]))
        self._last = self._sizes[name]
        return self._last


class _Size:
    """Steps of about as many requests, by K.

    Args:
        outcomes: float64 [2, K], drafted tokens, and those that were accepted, by position.
    """

    def __init__(self, outcomes: NDArray[np.float64]) -> None:
        self.outcomes = outcomes
        self.num_steps = 0
        self.tried, self.num_left = 0, 0  # which K is being tried, and for how many further steps
        self.num_trials, self.last = Counter[int](), Counter[int]()  # of a K; `last`: the step in which it was chosen
        self.seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))

    def tokens(self, k: int) -> float:
        """What each request gets in a step with K draft tokens."""
        drafted, accepted = self.outcomes[:, :k]
        return 1.0 + float(np.minimum.accumulate(accepted / drafted).sum())

    def usual_seconds(self, k: int) -> float:
        """What a step with K draft tokens takes, of which some are known. O(RECENT_STEPS log RECENT_STEPS)."""
        steps = sorted(self.seconds[k])
        usual = steps[: bisect.bisect(steps, OUTLIER * steps[(len(steps) - 1) // 2])]
        return sum(usual) / len(usual)

    def observe(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64], seconds: float | None) -> None:
        """As of `MeasuredSchedule`."""
        self.outcomes *= np.maximum(1 - 1 / JUDGED_STEPS, PRIOR_TOKENS / self.outcomes[0])
        k = min(int(drafted.max()), self.outcomes.shape[1])
        positions = np.arange(k)[:, None]
        self.outcomes[:, :k] += (drafted > positions).sum(1), (accepted > positions).sum(1)
        # A request may have fewer, as the last one where the step had no room for more.
        if seconds is not None and drafted.sum() >= 0.9 * k * drafted.size:
            self.seconds[k].append(max(seconds, 1e-6))

    def begin_trial(self, k: int, num_steps: int) -> int:
        """The next steps will have K draft tokens. What such steps took long ago is forgotten, but for some."""
        self.num_trials[k] += 1
        while len(self.seconds[k]) > ENOUGH:
            self.seconds[k].popleft()
        self.tried, self.num_left = k, num_steps
        return self.go_on()

    def go_on(self) -> int:
        """The K that is being tried."""
        self.num_left -= 1
        self.last[self.tried] = self.num_steps
        return self.tried
