"""Replays recorded rollouts in a simulated engine: how long a rollout phase takes under each budget policy.

**Simulated**: a step takes what a cost curve says for its tokens; a drafted token is accepted when it equals the
recorded one. Prompts cost nothing. Requests wait for a free place, as with continuous batching, and the phase ends when
the last one has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.decide import Budget, allocate, new_bins
from rollout_spec.budget.estimates import Ints, flatten
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter, tell_outcomes
from rollout_spec.replay.cost import EngineCost
from rollout_spec.replay.simulate import Cursor, Request, show
from rollout_spec.types import Draft

MIN_SURVIVAL = 0.01
"""The drafters' default: what an engine drafts whose drafts are not cut otherwise."""


class Step(NamedTuple):
    """What a policy is shown of a step with B requests and D drafted tokens."""

    confidence: NDArray[np.float32]  # [D], the drafter's
    starts: Ints  # [B + 1], each draft's first token, then D
    problems: list[int]
    acceptable: Ints  # [B] drafted tokens that would be accepted: for oracles

    @property
    def num_drafted(self) -> Ints:
        """int64 [B]."""
        return np.diff(self.starts)


class Policy(Protocol):
    """Decides how many tokens of each draft are verified."""

    def wants_drafts(self, num_requests: int) -> bool:
        """Whether to ask the drafter at all."""

    def decide(self, step: Step) -> Ints:
        """Drafted tokens to verify, int64 [B]."""

    def observe(self, step: Step, verified: Ints, accepted: Ints) -> None:
        """Learn how many tokens of each draft were verified and accepted, int64 [B] each."""

    def on_step(self, num_requests: int, num_draft_tokens: int, seconds: float, draft_seconds: float) -> None:
        """Learn the seconds that the step took, and how many of them were drafting."""

    def on_finish(self, problem: int, length: int) -> None:
        """A rollout ended."""


class _PolicyBase:
    """A policy that always drafts and ignores what it is told."""

    def wants_drafts(self, num_requests: int) -> bool:
        return True

    def observe(self, step: Step, verified: Ints, accepted: Ints) -> None:
        pass

    def on_step(self, num_requests: int, num_draft_tokens: int, seconds: float, draft_seconds: float) -> None:
        pass

    def on_finish(self, problem: int, length: int) -> None:
        pass


class NoDrafts(_PolicyBase):
    """Speculation switched off."""

    def wants_drafts(self, num_requests: int) -> bool:
        return False

    def decide(self, step: Step) -> Ints:
        return np.zeros_like(step.num_drafted)


class FixedK(_PolicyBase):
    """The first K tokens of every draft whose confidence is at least `threshold`."""

    def __init__(self, k: int, threshold: float = 0.0) -> None:
        self._k = k
        self._threshold = threshold

    def decide(self, step: Step) -> Ints:
        probable = np.concatenate(([0], np.cumsum(step.confidence >= self._threshold)))[step.starts]
        return np.minimum(np.diff(probable), self._k)


class Ranges(_PolicyBase):
    """K by the number of requests in the step, as in `RolloutSpecConfig.num_speculative_tokens_per_batch_size`.

    What it decides does not depend on what steps cost. So one run tells the time on any cost curve.

    Args:
        ranges: (first, last, K), rising; K = 0 in between. The last range has no upper end.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        self._ranges = ranges
        self._num_steps: Counter[int] = Counter()  # by their number of requests

    def k(self, num_requests: int) -> int:
        """Drafted tokens of each request in a step with so many."""
        if num_requests > self._ranges[-1][1]:
            return self._ranges[-1][2]
        return next((k for first, last, k in self._ranges if first <= num_requests <= last), 0)

    def wants_drafts(self, num_requests: int) -> bool:
        return self.k(num_requests) > 0

    def decide(self, step: Step) -> Ints:
        return np.minimum(step.num_drafted, self.k(len(step.problems)))

    def on_step(self, num_requests: int, num_draft_tokens: int, seconds: float, draft_seconds: float) -> None:
        self._num_steps[num_requests] += 1

    def seconds(self, cost: EngineCost) -> float:
        """What the steps so far take if every request has K draft tokens, as the device's drafts are not cut."""
        total = 0.0
        for size, num_steps in self._num_steps.items():
            k = self.k(size)
            total += num_steps * (cost.whole_step(size, size * k) + cost.drafting(size) * (k > 0))
        return total


class LengthClasses(_PolicyBase):
    """As in DAS (arXiv:2511.13841): the longer a problem's rollouts, the more tokens of its drafts are verified.

    A problem's class is the tercile of its mean length so far among all problems; unknown problems are in the middle.

    Args:
        budgets: Most tokens per draft in the lowest, middle and highest tercile.
    """

    def __init__(self, budgets: tuple[int, int, int]) -> None:
        self._budgets = budgets
        self._lengths: dict[int, list[int]] = {}

    def decide(self, step: Step) -> Ints:
        means = {problem: float(np.mean(lengths)) for problem, lengths in self._lengths.items()}
        low, high = np.quantile(list(means.values()), [1 / 3, 2 / 3]) if means else (0.0, 0.0)
        classes = [int(means[p] > low) + int(means[p] > high) if p in means else 1 for p in step.problems]
        return np.minimum(step.num_drafted, np.array([self._budgets[c] for c in classes], np.int64))

    def on_finish(self, problem: int, length: int) -> None:
        self._lengths.setdefault(problem, []).append(length)


class Learned(_PolicyBase):
    """This package's `Budget`, which learns costs and survival while it runs."""

    def __init__(self) -> None:
        self.budget = Budget()

    def wants_drafts(self, num_requests: int) -> bool:
        return self.budget.wants_drafts(num_requests)

    def decide(self, step: Step) -> Ints:
        return self.budget.decide(step.confidence, step.starts, num_tokens=len(step.problems))

    def observe(self, step: Step, verified: Ints, accepted: Ints) -> None:
        self.budget.survival.observe(step.confidence, step.starts, verified, accepted)

    def on_step(self, num_requests: int, num_draft_tokens: int, seconds: float, draft_seconds: float) -> None:
        self.budget.observe_step(
            num_requests + num_draft_tokens,
            seconds,
            drafted=num_draft_tokens > 0,
            num_asked=num_requests if draft_seconds else 0,
            draft_seconds=draft_seconds,
        )


class Oracle(_PolicyBase):
    """Knows the curve and what will be accepted, and maximises tokens per second in each step.

    Not a lower bound on a phase's time, which depends on which requests are made faster. It pays for drafting in every
    step.
    """

    def __init__(self, cost: EngineCost) -> None:
        self._cost = cost

    def decide(self, step: Step) -> Ints:
        size = len(step.problems)
        plain = self._cost.step(size)
        positions = np.arange(step.confidence.size) - np.repeat(step.starts[:-1], step.num_drafted)
        survival = (positions < np.repeat(step.acceptable, step.num_drafted)).astype(np.float64)
        extra = self._cost.steps(np.arange(size, size + int(step.acceptable.sum()) + 1)) - plain
        extra[1:] += self._cost.drafted_seconds
        taken = np.empty(size, np.int64)
        allocate(survival, step.starts, plain / size, extra, new_bins(), taken)
        return taken


class Phase(NamedTuple):
    """A simulated rollout phase."""

    seconds: float
    tail_seconds: float
    """From the time when nine rollouts in ten have ended to the end of the last."""
    token_tail_seconds: float
    """From the time when nine tokens in ten are generated to the last."""
    steps: int
    tokens: int
    drafted: int
    accepted: int


def run_phase(
    requests: Sequence[Request],
    make_drafter: Callable[[], Drafter],
    policy: Policy,
    cost: EngineCost,
    *,
    num_speculative_tokens: int,
    batch: int,
    slowdowns: Iterator[float] | None = None,
) -> Phase:
    """Generate the requests again, `batch` at a time, and add up what the steps cost.

    Args:
        slowdowns: Factors on the times that the policy is told, one per step, as by other work on the machine. The
            phase's own seconds do not include them, so that only decisions make a difference.
    """
    drafter = make_drafter()
    waiting = list(enumerate(request for request in requests if request.rollout.tokens.size))[::-1]
    total = len(waiting)
    live: dict[str, Cursor] = {}
    seconds, steps, tokens, drafted, accepted = 0.0, 0, 0, 0, 0
    ends: list[float] = []
    progress: list[tuple[float, int]] = []  # (seconds, tokens) after each step
    sizes: set[int] = set()  # numbers of tokens that some step has had
    while waiting or live:
        while waiting and len(live) < batch:
            number, (problem, rollout) = waiting.pop()
            tokens += 1  # the first one comes with the prompt
            if rollout.tokens.size == 1:
                ends.append(seconds)
                continue
            cursor = live[str(number)] = Cursor(problem, rollout)
            drafter.start_request(str(number), rollout.prompt, problem_id=problem.problem_id)
            cursor.advance(1)
            show(drafter, str(number), rollout, 0, 1)
        if not live:
            break
        ids = list(live)
        asked = policy.wants_drafts(len(ids))
        if asked:
            drafts = drafter.propose(ids, np.full(len(ids), num_speculative_tokens, np.int32))
            step = _make_step(list(live.values()), drafts)
            verified = policy.decide(step)
            hits = np.minimum(step.acceptable, verified)
            policy.observe(step, verified, hits)
        else:
            verified = hits = np.zeros(len(ids), np.int64)
        num_draft_tokens = int(verified.sum())
        drafting = cost.drafting(len(ids)) * asked
        size = len(ids) + num_draft_tokens
        took = cost.whole_step(len(ids), num_draft_tokens) + drafting + cost.cold_seconds * (size not in sizes)
        sizes.add(size)
        seconds += took
        steps += 1
        drafted += num_draft_tokens
        accepted += int(hits.sum())
        slowdown = next(slowdowns) if slowdowns is not None else 1.0
        policy.on_step(len(ids), num_draft_tokens, took * slowdown, drafting * slowdown)
        if asked:  # the target's next token also tells about drafts that were not verified
            seen = [live[req_id].expected(int(n) + 1) for req_id, n in zip(ids, hits, strict=True)]
            outcomes = np.array([min(int(n), s.size - 1) for n, s in zip(hits, seen, strict=True)], np.int32)
            tell_outcomes(drafter, ids, seen, outcomes)
        for i, req_id in enumerate(ids):
            cursor = live[req_id]
            start = cursor.num_said
            tokens += len(cursor.advance(int(hits[i]) + 1))
            show(drafter, req_id, cursor.rollout, start, cursor.num_said)
            if cursor.done:
                del live[req_id]
                drafter.stop_request(req_id)
                ends.append(seconds)
                policy.on_finish(cursor.problem.problem_id, cursor.rollout.tokens.size)
        progress.append((seconds, tokens))
    tail = seconds - ends[int(0.9 * total) - 1] if total >= 10 else seconds
    token_tail = seconds - next((then for then, number in progress if number >= 0.9 * tokens), seconds)
    return Phase(seconds, tail, token_tail, steps, tokens, drafted, accepted)


def _make_step(cursors: Sequence[Cursor], drafts: Sequence[Draft]) -> Step:
    confidence, starts = flatten(drafts)
    return Step(
        confidence,
        starts,
        [cursor.problem.problem_id for cursor in cursors],
        np.array([cursor.num_agreeing(draft) for (draft, _), cursor in zip(drafts, cursors, strict=True)], np.int64),
    )


class Contender(NamedTuple):
    """A policy, and the drafter's `min_survival` that goes with it."""

    make: Callable[[], Policy]
    min_survival: float
    learns: bool = False


def contenders(cost: EngineCost, k: int) -> dict[str, Contender]:
    """The policies that are compared, by label."""
    return {
        "none": Contender(NoDrafts, 0.0),
        **{f"K={n}": Contender(partial(FixedK, n), 0.0) for n in (1, 2, 4, 8, 16) if n <= k},
        "all drafts": Contender(partial(FixedK, k), MIN_SURVIVAL),
        **{f"threshold {t}": Contender(partial(FixedK, k, t), 0.0) for t in (0.05, 0.1, 0.3, 0.6)},
        **{
            f"classes {low}-{middle}-{k}": Contender(partial(LengthClasses, (low, middle, k)), 0.0, learns=True)
            for low, middle in ((0, max(k // 4, 1)), (max(k // 4, 1), max(k // 2, 1)))
        },
        "ours": Contender(Learned, MIN_SURVIVAL, learns=True),
        "oracle": Contender(partial(Oracle, cost), MIN_SURVIVAL),
    }


def compare(
    phases: Sequence[Sequence[Request]],
    cost: EngineCost,
    *,
    num_speculative_tokens: int,
    batch: int,
    policies: Sequence[str] | None = None,
) -> dict[str, Phase]:
    """The last phase under every policy, or those named (see `contenders`).

    Policies that learn run through the phases before it; "ours, new", which comes with "ours", runs through none. The
    drafter, `"suffix"`, is empty at the beginning of every phase.

    Args:
        phases: Each phase's requests.
        num_speculative_tokens: K, the most tokens drafted per request and step.
        batch: Requests that are decoded at a time.
    """
    results = {}
    k = num_speculative_tokens
    for label, contender in contenders(cost, k).items():
        if policies is not None and label not in policies:
            continue
        drafter = partial(build_drafter, "suffix", max_draft_tokens=k, min_survival=contender.min_survival)
        policy = contender.make()
        for requests in phases if contender.learns else phases[-1:]:
            phase = run_phase(requests, drafter, policy, cost, num_speculative_tokens=k, batch=batch)
        results[label] = phase
        if label == "ours" and len(phases) > 1:
            new = contender.make()
            results["ours, new"] = run_phase(phases[-1], drafter, new, cost, num_speculative_tokens=k, batch=batch)
    return results
