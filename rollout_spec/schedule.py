"""How many tokens are drafted and verified in an engine's steps: the rule, bounds by the number of requests, a switch.

The rule: verify the n draft tokens that are likeliest to be reached and right, with the n that maximises

    (requests + the n highest probabilities) / seconds(requests + n).

Drafts on the device are cut by it where vLLM can (`best_cut`, by the times that vLLM measures at start), drafts on the
host by `budget.py`, by the times of the steps themselves. Where drafts are made on the device and cannot be cut, all
requests of a step have equally many: as many as the bounds here allow, or none, as `Schedule` finds out.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LARGEST_GRAPH = 2048
"""Larger steps keep a GPU busy for longer than launching their kernels takes, and their graphs would need memory."""
CHEAP_TOKENS, CHEAP_TOKENS_A100 = 192, 144
"""Verifying this many tokens takes about as long as reading the weights, at short contexts: see `modes_simulated.jsonl`
in experiments/results/README.md."""
EXPERTS_WEIGHTS = 0.5
"""Mixtures may verify EXPERTS_WEIGHTS / (share of experts that a token uses) times as many tokens, at least as many as
a dense model. A cautious estimate: layers besides the experts make it 0.57 to 0.9 in today's models."""
MEASURED_CONTEXT = 512
"""Tokens of context of each token in the steps that vLLM measures for its adaptive verification. With 256 to 1,024 of
them, a step of more requests took on an A100 what verifying as many draft tokens took (experiments/results/README.md).
"""
LARGEST_CUT = 1024
"""Tokens of the largest CUDA graph for steps whose drafts vLLM cuts. With 256 requests and a small model, verifying so
many takes a GPU less time than the host needs for the step."""
MOST_CUT_REQUESTS = 512
"""Most requests of a step whose drafts vLLM cuts: an estimate. With more, sorting confidences on the host would take
milliseconds."""
PRIOR_TOKENS = 64.0
"""Each position begins with this many drafted tokens, all counted as right. Outcomes never fade below this many."""
JUDGED_STEPS = 128
"""Outcomes fade within about this many steps, also while nothing is drafted, until PRIOR_TOKENS are left."""
SIZES_PER_DOUBLING = 2
"""Sizes per doubling of the number of requests. Steps of one size are taken to be alike."""
ENOUGH, RECENT_STEPS, OUTLIER = 2, 32, 2.0
"""A K costs the mean of its last RECENT_STEPS steps, once ENOUGH are known, without those that took more than OUTLIER
times their median."""
TRIAL, TRIED_DRAFTS, MOST_TRIALS = 5, 32, 2
"""A K is tried for TRIAL steps in a row, of which two count (`sub_steps.Steps`). A trial in a pause of few
requests has more steps, in which some TRIED_DRAFTS whole drafts are made: they tell how many tokens are right. Steps
with prompts are not timed: a K of which no step could be timed is tried at most MOST_TRIALS times."""
WORTH_IT, SURELY = 1.1, 2.5
"""Whole drafts whose time is not known are made if they give WORTH_IT times the tokens. With SURELY times nothing else
is tried: on an H100 a step with drafts took the host 1.5 to 2.2 times as long as one without."""
PATIENCE = 128
"""The K that gives fewer tokens per second is tried again after PATIENCE r² steps of about as many requests, if the
other gives r times as many."""


def affordable_ranges(
    num_speculative_tokens: int, max_tokens: int = CHEAP_TOKENS, share_of_experts: float = 1.0
) -> list[tuple[int, int, int]]:
    """K by the number of requests: the largest of 1, 3, 7, ... with which a step has at most `max_tokens`, or 0.

    Requests of a step then have 2, 4, 8, … tokens each, which divide the numbers of tokens that vLLM captures CUDA
    graphs for, so that steps are padded little.

    A token of a mixture of experts uses few of its weights, so reading takes longer than computing up to more tokens.

    Args:
        max_tokens: Of a step of a dense model.
        share_of_experts: How many of them a token uses, of all; 1 for a dense model.

    Returns:
        (first, last, K) of ranges of requests, rising, as vLLM takes them; K of the last one is 0.
    """
    if share_of_experts < 1:
        max_tokens = int(max_tokens * max(1.0, EXPERTS_WEIGHTS / share_of_experts))
    ks = [(1 << bits) - 1 for bits in range((num_speculative_tokens + 1).bit_length() - 1, 0, -1)]
    return ranges_of(ks, max_tokens)


def ranges_of(ks: Sequence[int], max_tokens: int, most_requests: int = 1 << 31) -> list[tuple[int, int, int]]:
    """The largest K with which a step has at most `max_tokens` tokens, by the number of requests.

    Args:
        ks: Falling.
        most_requests: With more of them K is 0.

    Returns:
        As `affordable_ranges`.
    """
    ranges, first = [], 1
    for k in ks:
        last = min(max_tokens // (k + 1), most_requests)
        if last >= first:
            ranges.append((first, last, k))
            first = last + 1
    return [*ranges, (first, first, 0)]


def one_k(ranges: Sequence[tuple[int, int, int]], max_num_seqs: int) -> int:
    """The K of these ranges that pays over a whole rollout phase, at least 1, where it must be the same in each step.

    By simulation (`experiments/costs/simulate_modes.py`, policy `constant`) that is the one for half as many requests
    as can run, as fewer and fewer are left.
    """
    return max(1, next(k for first, _, k in reversed(ranges) if first <= max(max_num_seqs // 2, 1)))


def best_cut(num_requests: int, survival: NDArray[np.float64], seconds: NDArray[np.float64]) -> int:
    """How many of a step's draft tokens to verify, by the rule. O(D log D).

    Args:
        survival: float64 [D], the probability that each is reached and right; sorted in place.
        seconds: float64 [> N], of a step with `num_requests` + 0, 1, ... N draft tokens, at most all, in any unit.
    """
    survival.sort()
    tokens = np.empty(min(survival.size + 1, seconds.size))
    tokens[0] = num_requests
    np.cumsum(survival[::-1][: tokens.size - 1], out=tokens[1:])
    tokens[1:] += num_requests
    return int((tokens / seconds[: tokens.size]).argmax())


class Schedule:
    """Whether steps have whole drafts or none, where drafts cannot be cut: whichever gives more tokens per second.

    What drafts give is kept for each number of requests, as each request's KV cache is read once, however many tokens
    it has. By simulation drafts in every step would take some phases 2.3 times as long as none (`modes_simulated.jsonl`
    in experiments/results/README.md).

    Args:
        num_speculative_tokens: Most tokens of a draft.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._sizes: dict[int, _Size] = {}
        self._last = _Size(np.full((2, num_speculative_tokens), PRIOR_TOKENS))  # the one that was asked for last

    def choose(self, num_requests: int, most: int) -> int:
        """How many tokens to draft for each request of the next step: `most` or none. O(K)."""
        if most == 0:
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
        size = self._sizes.get(_name_of(drafted.size)) if drafted.size else None
        if size is not None:  # otherwise its steps have never been asked for: they have no drafts by the bounds
            size.observe(drafted, accepted, seconds)

    def _size(self, num_requests: int) -> _Size:
        """What is known of steps of about so many requests. A new size begins with what was right in the last one."""
        name = _name_of(num_requests)
        if name not in self._sizes:
            self._sizes[name] = _Size(self._last.outcomes * (PRIOR_TOKENS / self._last.outcomes[0]))
        self._last = self._sizes[name]
        return self._last


def _name_of(num_requests: int) -> int:
    return round(SIZES_PER_DOUBLING * math.log2(num_requests))


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
        """As of `Schedule`."""
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
