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
from rollout_spec.integrations.vllm.measured_schedule import MeasuredSchedule
from rollout_spec.loop import Decoder
from rollout_spec.replay import RecordedTarget, Rollout
from rollout_spec.types import Drafts

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
    verify_seconds: float = 0.0
    """Extra seconds of a step with draft tokens."""
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
        seconds += self.verify_seconds * (num_draft_tokens > 0)
        return max(seconds, self.host_seconds + self.host_request_seconds * num_requests)


class Adaptive:
    """Cuts whole drafts as vLLM's adaptive verification does: by the drafter's confidences and what steps cost.

    How many draft tokens a step keeps follows from the confidences of the drafts before, as the host has no later ones;
    which ones, from those of these drafts.

    Args:
        seconds: Of a step by its number of tokens, as vLLM has measured it.
    """

    def __init__(self, seconds: Callable[[NDArray[np.int64]], Floats]) -> None:
        self._seconds = seconds
        self._before: dict[str, Floats] = {}

    def survival(self, drafts: Drafts, decoder: Decoder, target: RecordedTarget) -> Floats:
        """The probability that each drafted token is reached and right, float64 [B, K]; 0 where there is none."""
        rows = [decoder.drafting.drafter.row_of(request.req_id) for request in decoder.live]
        confidence = decoder.drafting.drafter.table.arrays.confidence[rows].astype(np.float64)
        return np.where(np.arange(confidence.shape[1]) < drafts.lengths[:, None], confidence, 0.0)

    def known_to_host(self, survival: Floats, decoder: Decoder) -> Floats:
        """What the host has of it, float64 [B, K]: of the drafts before. New requests count as certain."""
        names = [request.req_id for request in decoder.live]
        before = np.array([self._before.get(name, np.ones(survival.shape[1])) for name in names])
        self._before = dict(zip(names, survival, strict=True))
        return before

    def cut(self, drafts: Drafts, decoder: Decoder, target: RecordedTarget) -> Drafts:
        """These drafts with the lengths that are verified."""
        survival = self.survival(drafts, decoder, target)
        size, k = survival.shape
        scores = -np.sort(-self.known_to_host(survival, decoder), axis=None)
        emitted = size + np.append(0.0, np.cumsum(scores))
        num_kept = int(np.argmax(emitted / self._seconds(size + np.arange(size * k + 1))))
        kept = np.zeros(size * k, bool)
        kept[np.argsort(-survival, axis=None, kind="stable")[:num_kept]] = True
        return drafts._replace(lengths=kept.reshape(size, k).sum(1))


class Oracle(Adaptive):
    """The same if it knew which drafted tokens are right."""

    def survival(self, drafts: Drafts, decoder: Decoder, target: RecordedTarget) -> Floats:
        """1 for what is right, else 0."""
        texts = [tokens[:n] for tokens, n in zip(drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=True)]
        right, start, survival = target(decoder.live, texts).token_ids, 0, np.zeros(drafts.token_ids.shape)
        for row, text in zip(survival, texts, strict=True):
            row[: len(text)] = np.cumprod(right[start : start + len(text)] == text)
            start += len(text) + 1
        return survival

    def known_to_host(self, survival: Floats, decoder: Decoder) -> Floats:
        """All of it."""
        return survival


Policy = Budget | Adaptive | MeasuredSchedule | Callable[[int], int]
"""How many tokens are drafted for each request of a step: as many as pay, as engines decide on the host, on a device or
in the scheduler; or K by the number of requests, 0 to switch drafts off."""


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
    if isinstance(policy, Adaptive):
        draft: Any = decoder.drafting.draft
        decoder.drafting.draft = lambda *args, **kwargs: policy.cut(draft(*args, **kwargs), decoder, target)  # type: ignore[method-assign]
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
        k = num_speculative_tokens
        if isinstance(policy, MeasuredSchedule):
            k = policy.choose(num_requests)
        elif callable(policy):
            k = policy(num_requests)
        counts = decoder.step(k)
        num_draft_tokens, num_accepted = int(counts.drafted.sum()), int(counts.accepted.sum())
        if not isinstance(policy, Budget | Adaptive):
            num_draft_tokens = k * num_requests  # where there is no draft something else is verified
        size = num_requests + num_draft_tokens
        draft_seconds = cost.drafting(num_requests) * (decoder.drafting.num_asked > 0)
        seconds = cost.whole_step(num_requests, num_draft_tokens) + draft_seconds
        seconds += cost.cold_seconds * (size not in sizes)
        sizes.add(size)
        decoder.observe_step(counts, seconds, draft_seconds)
        if isinstance(policy, MeasuredSchedule):
            policy.observe(np.full(num_requests, k), counts.accepted, seconds)
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
