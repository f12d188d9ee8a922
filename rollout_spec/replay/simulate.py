"""The replay itself: recorded rollouts through a drafter, step by step as an engine would take them.

A drafted token is accepted when it equals the recorded next one. For point-mass drafts this estimates lossless
verification without bias: the recorded token is a sample of the target. Each step emits one more token, the recovered
or bonus token. As in an engine, the first token of a rollout comes from the prefill and is not drafted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rollout_spec.drafters.base import Drafter, tell_outcomes
from rollout_spec.replay.traces import Problem, Rollout
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Int32Array

Regime = Literal["own", "finished", "inflight", "epoch"]
REGIMES: tuple[Regime, ...] = get_args(Regime)


class Request(NamedTuple):
    """A rollout to be generated again."""

    problem: Problem
    rollout: Rollout


class Wave(NamedTuple):
    """Requests that advance in lock step, and whether they enter the history when they end."""

    requests: list[Request]
    keep: bool


class ReplayResult(NamedTuple):
    """What a replay measured. Times are of the drafter's calls alone."""

    stats: SpeculationStats
    reliability: np.ndarray
    """float64 [10, 3], by confidence in bins of 0.1: drafted tokens, their summed confidence, accepted tokens."""
    build_seconds: float
    """Seconds of indexing the `history_tokens` tokens of the earlier epoch."""
    history_tokens: int
    index_seconds: float
    """Seconds in start_request, extend, observe and stop_request of the replayed requests."""
    draft_seconds: float
    """Seconds in propose, where our drafters also index what extend collected."""
    memory_bytes: int
    """`Drafter.memory_bytes` at the end."""
    indexed_tokens: int
    """Prompt (once per problem) and completion tokens that entered the history and stayed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, derived figures included."""
        s = self.stats
        reached = self.reliability[:, 0]
        return {
            "tokens_per_step": s.tokens_per_step,
            "drafted_per_step": s.draft_tokens / max(s.request_steps, 1),
            "acceptance_rate": s.acceptance_rate,
            "mean_acceptance_length": s.mean_acceptance_length,
            "accepted_per_position": s.accepted_per_position,
            "request_steps": s.request_steps,
            "emitted_tokens": s.emitted_tokens,
            "draft_tokens": s.draft_tokens,
            "accepted_tokens": s.accepted_tokens,
            "index_us_per_request_step": 1e6 * self.index_seconds / max(s.request_steps, 1),
            "draft_us_per_request_step": 1e6 * self.draft_seconds / max(s.request_steps, 1),
            "history_tokens": self.history_tokens,
            "build_seconds_per_million_tokens": 1e6 * self.build_seconds / max(self.history_tokens, 1),
            "memory_bytes": self.memory_bytes,
            "bytes_per_history_token": self.memory_bytes / max(self.indexed_tokens, 1),
            "calibration": [
                {"drafted": int(n), "confidence": c / n, "accepted": a / n}
                for n, c, a in self.reliability[reached > 0].tolist()
            ],
        }


def split(
    problem: Problem, regime: Regime, *, max_samples: int | None, max_history: int | None
) -> tuple[list[Rollout], list[Rollout]]:
    """A problem's (earlier, live) rollouts.

    With two or more recorded epochs, the first is what is earlier and the second is live; with one, half and half.
    Regimes other than `epoch` leave the earlier rollouts out.
    """
    epochs = sorted({rollout.epoch for rollout in problem.rollouts})
    if len(epochs) > 1:
        earlier = [rollout for rollout in problem.rollouts if rollout.epoch == epochs[0]]
        live = [rollout for rollout in problem.rollouts if rollout.epoch == epochs[1]]
    elif regime == "epoch":
        half = len(problem.rollouts) // 2
        earlier, live = problem.rollouts[:half], problem.rollouts[half:]
    else:
        earlier, live = [], problem.rollouts
    return (earlier[:max_history] if regime == "epoch" else []), live[:max_samples]


def schedule(problems: Sequence[tuple[Problem, list[Rollout]]], regime: Regime, batch: int) -> Iterator[Wave]:
    """The order in which rollouts are generated, `batch` at a time where the regime allows it.

    `own`: one after another, and nothing is kept. `finished`: sample k of `batch` problems together, after their
    samples before k. `inflight`: all samples of a problem together. `epoch`: as `finished`, but nothing is kept, so
    that every rollout sees the earlier epoch only.
    """
    if regime == "own":
        for problem, live in problems:
            for rollout in live:
                yield Wave([Request(problem, rollout)], keep=False)
        return
    if regime == "inflight":
        wave: list[Request] = []
        for problem, live in problems:
            if wave and len(wave) + len(live) > batch:
                yield Wave(wave, keep=True)
                wave = []
            wave += [Request(problem, rollout) for rollout in live]
        if wave:
            yield Wave(wave, keep=True)
        return
    for start in range(0, len(problems), batch):
        some = problems[start : start + batch]
        for k in range(max(len(live) for _, live in some)):
            requests = [Request(problem, live[k]) for problem, live in some if k < len(live)]
            yield Wave(requests, keep=regime == "finished")


def replay(
    problems: Sequence[Problem],
    make_drafter: Callable[[], Drafter],
    regime: Regime,
    *,
    num_speculative_tokens: int = 16,
    batch: int = 64,
    max_samples: int | None = None,
    max_history: int | None = None,
    noise: bool = False,
    next_token: Callable[[Problem, Rollout, Sequence[int]], int] | None = None,
) -> ReplayResult:
    """Replay recorded rollouts in one regime.

    Args:
        make_drafter: Called once; drafters with compiled code should be warm already.
        num_speculative_tokens: Most tokens asked for per request and step, K.
        batch: Requests that advance together where the regime allows it.
        max_samples: Live rollouts per problem. None: all.
        max_history: Rollouts of the earlier epoch per problem. None: all.
        noise: Whether the drafter is told the seeds of the rollouts' noise, where they have one.
        next_token: The target's own token after a prompt and completion, where the target can be asked. Then the
            drafter observes the target at every drafted position, as in an engine, and not only up to the first
            difference.

    Raises:
        ValueError: unknown regime, or batch or num_speculative_tokens below 1.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {REGIMES}, got {regime!r}")
    if batch < 1 or num_speculative_tokens < 1:
        raise ValueError(f"batch and K must be at least 1, got {batch} and {num_speculative_tokens}")
    drafter = make_drafter()
    parts = [split(problem, regime, max_samples=max_samples, max_history=max_history) for problem in problems]

    seen: set[int] = set()
    started = time.perf_counter()
    history_tokens = 0
    for problem, (earlier, _) in zip(problems, parts, strict=True):
        remember(drafter, problem, earlier)
        history_tokens += sum(rollout.tokens.size for rollout in earlier)
        if earlier:
            history_tokens += earlier[0].prompt.size
            seen.add(problem.problem_id)
    if history_tokens:
        drafter.begin_policy_version(1)
    build_seconds = time.perf_counter() - started
    indexed_tokens = history_tokens

    run = _Run(drafter, num_speculative_tokens, noise, next_token)
    lives = [(problem, live) for problem, (_, live) in zip(problems, parts, strict=True) if live]
    for wave in schedule(lives, regime, batch):
        run.wave(wave)
        if wave.keep:
            for problem, rollout in wave.requests:
                indexed_tokens += rollout.tokens.size
                indexed_tokens += 0 if problem.problem_id in seen else rollout.prompt.size
                seen.add(problem.problem_id)
    return ReplayResult(
        stats=run.stats,
        reliability=run.reliability,
        build_seconds=build_seconds,
        history_tokens=history_tokens,
        index_seconds=run.index_seconds,
        draft_seconds=run.draft_seconds,
        memory_bytes=drafter.memory_bytes(),
        indexed_tokens=indexed_tokens,
    )


def replay_steadily(
    requests: Sequence[Request], drafter: Drafter, *, num_speculative_tokens: int = 16, batch: int = 64
) -> ReplayResult:
    """Replay with a full batch throughout, for timing: continuous batching that ends when fewer requests are left.

    The drafter's history is what it holds already, so `build_seconds` and the token counts are 0.
    """
    run = _Run(drafter, num_speculative_tokens, False, None)
    run.steady(requests, batch)
    return ReplayResult(
        run.stats, run.reliability, 0.0, 0, run.index_seconds, run.draft_seconds, drafter.memory_bytes(), 0
    )


def remember(drafter: Drafter, problem: Problem, rollouts: Sequence[Rollout]) -> None:
    """Put rollouts of a problem that have ended into a drafter's history."""
    for rollout in rollouts:
        req_id = f"{problem.prompt_id}/{rollout.epoch}/{rollout.sample_id}/earlier"
        drafter.start_request(req_id, rollout.prompt, problem_id=problem.problem_id)
        show(drafter, req_id, rollout, 0, rollout.tokens.size)
        drafter.stop_request(req_id)


def show(drafter: Drafter, req_id: str, rollout: Rollout, start: int, end: int) -> None:
    """Tell a drafter the tokens from `start` to `end`, and what the target saw there if that is known and wanted."""
    tokens = rollout.tokens[start:end]
    if rollout.features is None or not getattr(drafter, "wants_features", False):
        drafter.extend(req_id, tokens)
        return
    extend: Any = drafter.extend
    extend(req_id, tokens, rollout.features[start:end])


class _Run:
    """The state of one replay: the drafter and what was counted."""

    def __init__(
        self,
        drafter: Drafter,
        num_speculative_tokens: int,
        noise: bool,
        next_token: Callable[[Problem, Rollout, Sequence[int]], int] | None,
    ) -> None:
        self._drafter = drafter
        self._k = num_speculative_tokens
        self._noise = noise
        self._next_token = next_token
        self._num_started = 0
        self.stats = SpeculationStats()
        self.reliability = np.zeros((10, 3))
        self.index_seconds = 0.0
        self.draft_seconds = 0.0

    def wave(self, wave: Wave) -> None:
        """Generate a wave's rollouts in lock step."""
        live = self._start(wave.requests)
        while self._end(live, keep=wave.keep):
            self._step(live)

    def steady(self, requests: Sequence[Request], batch: int) -> None:
        """Generate rollouts `batch` at a time, the next one as soon as one ends, while there are as many."""
        waiting = list(reversed(requests))
        live: dict[str, Cursor] = {}
        while len(live) + len(waiting) >= batch:
            while len(live) < batch:
                live |= self._start([waiting.pop()])
            self._step(live)
            self._end(live, keep=True)
        for req_id in live:
            self._drafter.stop_request(req_id)

    def _start(self, requests: Sequence[Request]) -> dict[str, Cursor]:
        """Begin requests; the first token comes from the prefill."""
        clock, drafter = time.perf_counter, self._drafter
        live: dict[str, Cursor] = {}
        for problem, rollout in requests:
            if not rollout.tokens.size:
                continue
            req_id = str(self._num_started)
            self._num_started += 1
            cursor = Cursor(problem, rollout)
            seed = rollout.seed if self._noise else None
            started = clock()
            drafter.start_request(req_id, rollout.prompt, problem_id=problem.problem_id, seed=seed)
            cursor.advance(1)
            show(drafter, req_id, rollout, 0, cursor.num_said)
            self.index_seconds += clock() - started
            live[req_id] = cursor
        return live

    def _end(self, live: dict[str, Cursor], *, keep: bool) -> int:
        """Stop the requests that are done. Returns how many are left."""
        for req_id in [req_id for req_id, cursor in live.items() if cursor.done]:
            del live[req_id]
            started = time.perf_counter()
            self._drafter.stop_request(req_id, keep=keep)
            self.index_seconds += time.perf_counter() - started
        return len(live)

    def _step(self, live: dict[str, Cursor]) -> None:
        clock, drafter = time.perf_counter, self._drafter
        req_ids = list(live)
        limits = np.full(len(req_ids), self._k, np.int32)
        started = clock()
        drafts = drafter.propose(req_ids, limits)
        self.draft_seconds += clock() - started
        accepted, targets, before = [], [], []
        for (draft, confidence), cursor in zip(drafts, live.values(), strict=True):
            n = cursor.num_agreeing(draft)
            accepted.append(n)
            targets.append(self._targets(cursor, draft, n))
            self._count_confidence(confidence[: cursor.expected(len(draft)).size], n)
            before.append(cursor.num_said)
            cursor.advance(n + 1)
        # Where a recording or a run ends inside a draft there is no token after the accepted ones: the last one of
        # them is then the target's own.
        outcomes = np.array([min(n, t.size - 1) for n, t in zip(accepted, targets, strict=True)], np.int32)
        started = clock()
        tell_outcomes(drafter, req_ids, targets, outcomes)
        for (req_id, cursor), start in zip(live.items(), before, strict=True):
            show(drafter, req_id, cursor.rollout, start, cursor.num_said)
        self.index_seconds += clock() - started
        # A draft may reach beyond the recorded end: tokens after it are not counted as emitted.
        emitted = [min(n + 1, target.size) for n, target in zip(accepted, targets, strict=True)]
        self.stats.record([len(draft.token_ids) for draft in drafts], accepted)
        self.stats.emitted_tokens += sum(emitted) - sum(accepted) - len(accepted)

    def _targets(self, cursor: Cursor, draft: Int32Array, num_accepted: int) -> Int32Array:
        """The target's own tokens at the drafted positions, int32, as far as they are known."""
        known = cursor.expected(num_accepted + 1)
        if self._next_token is None or known.size <= num_accepted:
            return known
        text = [*cursor.context(), *draft[: num_accepted + 1].tolist()]
        after = []
        for token in draft[num_accepted + 1 :].tolist():
            after.append(self._next_token(cursor.problem, cursor.rollout, text))
            text.append(token)
        if len(draft) > num_accepted:
            after.append(self._next_token(cursor.problem, cursor.rollout, text))
        return np.concatenate((known, np.array(after, np.int32)))

    def _count_confidence(self, confidence: np.ndarray, num_accepted: int) -> None:
        bins = np.minimum((confidence * 10).astype(np.int64), 9)
        np.add.at(self.reliability[:, 0], bins, 1)
        np.add.at(self.reliability[:, 1], bins, confidence)
        np.add.at(self.reliability[:, 2], bins[:num_accepted], 1)


class Cursor:
    """Where a replayed request stands in its recording."""

    def __init__(self, problem: Problem, rollout: Rollout) -> None:
        self.problem = problem
        self.rollout = rollout
        self._tokens = rollout.tokens
        self._ends = list(itertools.accumulate(rollout.runs))
        self._at = 0
        self._run = 0

    @property
    def done(self) -> bool:
        """Whether the whole recording has been replayed."""
        return self._at >= self._tokens.size

    @property
    def num_said(self) -> int:
        """Tokens that are committed, the environment's included."""
        return self._at

    def context(self) -> list[int]:
        """Prompt and what is committed."""
        return [*self.rollout.prompt.tolist(), *self._tokens[: self._at].tolist()]

    def expected(self, n: int) -> Int32Array:
        """The next recorded tokens, at most n and not beyond the end of the generated run."""
        return self._tokens[self._at : min(self._at + n, self._ends[self._run])]

    def num_agreeing(self, draft: Int32Array) -> int:
        """How many first tokens of a draft are the recorded ones."""
        expected = self.expected(len(draft))
        return int(np.cumprod(draft[: expected.size] == expected).sum())

    def advance(self, n: int) -> Int32Array:
        """Commit n generated tokens, fewer at the end of the run, and the environment's run after it."""
        start = self._at
        self._at = min(start + n, self._ends[self._run])
        while self._run + 1 < len(self._ends) and self._at == self._ends[self._run]:
            if self._run % 2 == 0:  # a generated run has ended: the environment's follows at once
                self._at = self._ends[self._run + 1]
            self._run += 1
        return self._tokens[start : self._at]
