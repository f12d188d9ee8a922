"""How long a rollout phase would take on an engine whose steps cost what a curve says, for a policy of draft lengths.

**Simulated**: recorded rollouts are decoded by `loop.py`, and a step takes what the curve says for its tokens. Prompts
cost nothing. Requests wait for a free place, as with continuous batching, and the phase ends when the last one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.drafters.base import Drafter
from rollout_spec.loop import Decoder
from rollout_spec.replay import RecordedTarget, Rollout

Floats = NDArray[np.float64]


class EngineCost(NamedTuple):
    """Seconds of a step by its tokens, interpolated linearly; beyond the last point with the upper half's mean slope.

    `tokens` and `seconds` are float64 [n] with n >= 2; tokens rise, seconds do not fall.
    """

    name: str
    tokens: Floats
    seconds: Floats
    draft_seconds: float = 0.0
    """Seconds of drafting per request, in steps that ask the drafter."""
    draft_call_seconds: float = 0.0
    """Seconds of drafting per step that asks the drafter, besides those per request."""
    cold_seconds: float = 0.0
    """Extra seconds of the first step with each number of tokens, in which kernels for that size are made."""
    request_seconds: float = 0.0
    """Seconds per request in every step, besides its tokens: reading its KV cache, and what else is not hidden."""
    host_seconds: float = 0.0
    """With asynchronous scheduling the host works while the device computes. No step takes less than this."""
    host_request_seconds: float = 0.0
    """What each request of a step adds to `host_seconds`."""

    def step(self, num_tokens: float) -> float:
        """Seconds of a step without drafts."""
        return float(self.steps(np.array([num_tokens]))[0])

    def steps(self, num_tokens: NDArray[Any]) -> Floats:
        """Seconds of steps without drafts, float64 of the shape of `num_tokens`."""
        half = (self.tokens.size - 1) // 2  # not the last two points alone: measured times may be equal there
        slope = (self.seconds[-1] - self.seconds[half]) / (self.tokens[-1] - self.tokens[half])
        beyond = np.maximum(np.asarray(num_tokens, np.float64) - self.tokens[-1], 0.0)
        return np.asarray(np.interp(num_tokens, self.tokens, self.seconds) + slope * beyond)

    def drafting(self, num_requests: int) -> float:
        """Seconds of asking the drafter in a step."""
        return self.draft_call_seconds + self.draft_seconds * num_requests

    def whole_step(self, num_requests: int, num_draft_tokens: int) -> float:
        """Seconds of a step, without those of the drafter and of a size's first step."""
        seconds = self.step(num_requests + num_draft_tokens) + self.request_seconds * num_requests
        return max(seconds, self.host_seconds + self.host_request_seconds * num_requests)


Policy = Budget | Callable[[int], int]
"""How many tokens are drafted for each request of a step: as many as pay, as engines decide; or K by the number of
requests, 0 to switch drafts off."""


def by_ranges(ranges: Sequence[tuple[int, int, int]]) -> Callable[[int], int]:
    """K by requests as vLLM's `num_speculative_tokens_per_batch_size` says it.

    Args:
        ranges: (first, last, K), rising; K = 0 in between. The last range has no upper end.
    """

    def k(num_requests: int) -> int:
        if num_requests > ranges[-1][1]:
            return ranges[-1][2]
        return next((k for first, last, k in ranges if first <= num_requests <= last), 0)

    return k


class Step(NamedTuple):
    """A step of a simulated engine."""

    num_requests: int
    num_draft_tokens: int
    num_accepted: int
    seconds: float
    """Those of drafting included."""
    draft_seconds: float
    tokens: int
    """Generated so far, the first one of each rollout included."""


def simulate(
    rollouts: Sequence[Rollout],
    drafter: Drafter,
    policy: Policy,
    cost: EngineCost,
    *,
    num_speculative_tokens: int,
    batch: int,
) -> Iterator[Step]:
    """Decode recorded rollouts, `batch` at a time, and yield the steps.

    Args:
        policy: A `Budget` learns from these steps, and may know others.
        num_speculative_tokens: Most tokens drafted per request and step, K.
    """
    target, budget = RecordedTarget(), policy if isinstance(policy, Budget) else None
    decoder = Decoder(drafter, target, num_speculative_tokens, knows_noise=False, budget=budget)
    waiting = [rollout for rollout in reversed(rollouts) if rollout.token_ids.size]
    sizes: set[int] = set()  # numbers of tokens that some step has had
    tokens = 0
    while waiting or decoder.live:
        while waiting and len(decoder.live) < batch:
            rollout = waiting.pop()
            tokens += 1  # the first one comes with the prompt
            if rollout.token_ids.size > 1:
                decoder.start(target.request(rollout))
        num_requests = len(decoder.live)
        if not num_requests:
            return
        counts = decoder.step(num_speculative_tokens if isinstance(policy, Budget) else policy(num_requests))
        num_draft_tokens, num_accepted = int(counts.drafted.sum()), int(counts.accepted.sum())
        size = num_requests + num_draft_tokens
        draft_seconds = cost.drafting(num_requests) * (decoder.drafting.num_asked > 0)
        seconds = cost.whole_step(num_requests, num_draft_tokens) + draft_seconds
        seconds += cost.cold_seconds * (size not in sizes)
        sizes.add(size)
        decoder.observe_step(counts, seconds, draft_seconds)
        target.settle(decoder)
        tokens += int(counts.emitted.sum())
        yield Step(num_requests, num_draft_tokens, num_accepted, seconds, draft_seconds, tokens)


class Phase(NamedTuple):
    """A simulated rollout phase."""

    seconds: float
    steps: int
    tokens: int
    drafted: int
    accepted: int


def sum_up(steps: Sequence[Step]) -> Phase:
    """The phase of these steps, one or more."""
    return Phase(
        seconds=sum(step.seconds for step in steps),
        steps=len(steps),
        tokens=steps[-1].tokens,
        drafted=sum(step.num_draft_tokens for step in steps),
        accepted=sum(step.num_accepted for step in steps),
    )
