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
from rollout_spec.estimate.costs import EngineCost, Floats, MeasuredCost
from rollout_spec.estimate.recorded import RecordedRollout, RecordedTarget
from rollout_spec.loop import Decoder
from rollout_spec.measured_schedule import MeasuredSchedule
from rollout_spec.step_sizes import CHEAP_TOKENS, CHEAP_TOKENS_A100, MOST_CUT_REQUESTS, affordable_ranges
from rollout_spec.types import Drafts


class Adaptive:
    """Cuts whole drafts as vLLM's adaptive verification does: by the drafter's confidences and what steps cost.

    How many draft tokens a step keeps is decided by the previous drafts' confidences, the latest that the host has;
    which ones, by these drafts'. Its `schedule` says whether there are drafts at all.

    Args:
        seconds: Of steps by their number of requests and their numbers of tokens, as far as the engine knows.
        num_speculative_tokens: Of whole drafts.
        batch: Most requests of a step.
    """

    def __init__(
        self, seconds: Callable[[int, NDArray[np.int64]], Floats], num_speculative_tokens: int, batch: int
    ) -> None:
        most = np.where(np.arange(batch + 1) <= MOST_CUT_REQUESTS, num_speculative_tokens, 0)
        self.schedule = MeasuredSchedule(most.tolist())
        self._seconds = seconds
        self._before: dict[str, Floats] = {}

    def begin_phase(self) -> None:
        """All requests are new."""
        self._before = {}

    def _survival(self, drafts: Drafts, decoder: Decoder) -> Floats:
        """The probability that each drafted token is reached and right, float64 [B, K]; 0 where there is none."""
        rows = [decoder.drafting.drafter.row_of(request.req_id) for request in decoder.live]
        confidence = decoder.drafting.drafter.table.arrays.confidence[rows].astype(np.float64)
        return np.where(np.arange(confidence.shape[1]) < drafts.lengths[:, None], confidence, 0.0)

    def _known_to_host(self, survival: Floats, decoder: Decoder) -> Floats:
        """What the host has of it, float64 [B, K]: of the drafts before. New requests count as certain."""
        names = [request.req_id for request in decoder.live]
        before = np.array([self._before.get(name, np.ones(survival.shape[1])) for name in names])
        self._before = dict(zip(names, survival, strict=True))
        return before

    def cut(self, drafts: Drafts, decoder: Decoder) -> Drafts:
        """These drafts with the lengths that are verified."""
        if not decoder.drafting.num_asked:
            return drafts
        survival = self._survival(drafts, decoder)
        known = self._known_to_host(survival, decoder)
        size, k = survival.shape
        scores = -np.sort(-known, axis=None)
        emitted = size + np.append(0.0, np.cumsum(scores))
        num_kept = int(np.argmax(emitted / self._seconds(size, size + np.arange(size * k + 1))))
        kept = np.zeros(size * k, bool)
        kept[np.argsort(-survival, axis=None, kind="stable")[:num_kept]] = True
        return drafts._replace(lengths=kept.reshape(size, k).sum(1))


Policy = Budget | Adaptive | MeasuredSchedule | Callable[[int], int]
"""How many tokens are drafted for each request of a step: as many as pay, as engines decide on the host, on a device or
in the scheduler; or K by the number of requests, 0 to switch drafts off."""


def k_by_requests(gpu: str | None, num_speculative_tokens: int, used_experts: float) -> Callable[[int], int]:
    """The most tokens that engines draft for each of so many requests, where vLLM does not cut drafts.

    Args:
        gpu: A name in `costs.PEAKS`; None: not an A100.
        used_experts: Share of its experts that a token of the model uses.
    """
    cheap = CHEAP_TOKENS_A100 if gpu == "a100" else CHEAP_TOKENS
    ranges = affordable_ranges(num_speculative_tokens, cheap, used_experts)  # without gaps; the last has no end
    return lambda num_requests: next((k for first, _, k in reversed(ranges) if first <= num_requests), 0)


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
    ended: list[tuple[RecordedRollout, float]]
    """The rollouts that have ended, and the seconds of each, by an equal share of its steps."""


def simulate(
    rollouts: Sequence[RecordedRollout],
    drafter: Drafter,
    policy: Policy,
    cost: EngineCost | MeasuredCost,
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
    schedule = policy if isinstance(policy, MeasuredSchedule) else None
    if isinstance(policy, Adaptive):
        schedule = policy.schedule
        policy.begin_phase()
        draft: Any = decoder.drafting.draft
        decoder.drafting.draft = lambda *args, **kwargs: policy.cut(draft(*args, **kwargs), decoder)  # type: ignore[method-assign]
    waiting = [rollout for rollout in reversed(rollouts) if rollout.token_ids.size]
    tokens, clock = 0, 0.0  # the seconds of a request that was there from the beginning
    started: dict[str, tuple[RecordedRollout, float]] = {}
    while waiting or decoder.live:
        while waiting and len(decoder.live) < batch:
            rollout = waiting.pop()
            tokens += 1  # the first one comes with the prompt
            if rollout.token_ids.size > 1:
                request = target.request(rollout)
                started[request.req_id] = rollout, clock
                decoder.start(request)
        num_requests = len(decoder.live)
        if not num_requests:
            return
        k = num_speculative_tokens
        if schedule is not None:
            k = schedule.choose(num_requests)
        elif callable(policy):
            k = policy(num_requests)
        counts = decoder.step(k)
        num_draft_tokens, num_accepted = int(counts.drafted.sum()), int(counts.accepted.sum())
        if not isinstance(policy, Budget | Adaptive):
            num_draft_tokens = k * num_requests  # where there is no draft something else is verified
        draft_seconds = cost.drafting(num_requests) * (decoder.drafting.num_asked > 0)
        seconds = cost.whole_step(num_requests, num_draft_tokens, is_drafting=k > 0) + draft_seconds
        decoder.observe_step(counts, seconds, draft_seconds)
        if schedule is not None:
            schedule.observe(np.full(num_requests, k), counts.accepted, seconds)
        target.end_finished(decoder)
        tokens += int(counts.emitted.sum())
        clock += seconds / num_requests
        ended = []
        if len(decoder.live) < num_requests:
            left = started.keys() - {request.req_id for request in decoder.live}
            ended = [(rollout, clock - start) for rollout, start in map(started.pop, left)]
        yield Step(num_requests, num_draft_tokens, num_accepted, seconds, draft_seconds, tokens, ended)


class Phase(NamedTuple):
    """A simulated rollout phase."""

    seconds: float
    steps: int
    request_steps: int
    """The requests of each step, summed."""
    tokens: int
    drafted: int
    accepted: int


def sum_up(steps: Sequence[Step]) -> Phase:
    """The phase of these steps, one or more."""
    return Phase(
        seconds=sum(step.seconds for step in steps),
        steps=len(steps),
        request_steps=sum(step.num_requests for step in steps),
        tokens=steps[-1].tokens,
        drafted=sum(step.num_draft_tokens for step in steps),
        accepted=sum(step.num_accepted for step in steps),
    )
