"""Where the tokens go: replays of the recorded rollouts, with their noise, through a drafter.

The recorded token is what the policy samples with that noise, whatever is drafted (in bfloat16 up to near ties, see
`sampling.py`). A drafter's text holds what each function says; what it learns from outcomes, its confidence and the
exponent of its coupled choice, it learns from one rollout to the next as in an engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.engines.build import WORDS_ALONE
from experiments.real_policy.tasks import task_of
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.replay.simulate import Cursor, Request, show
from rollout_spec.replay.traces import Problem, Rollout

K = 8
ORDER = 16
"""Longest match that is told apart."""
MATCH_BINS = (0, 1, 2, 3, 5, 9, 16)
"""Lower ends of the bins of match lengths."""


class Case(NamedTuple):
    """A problem, what is known of it, and what is generated again."""

    problem: Problem
    history: list[Rollout]
    tests: list[Rollout]


class Step(NamedTuple):
    """One request's step."""

    rollout: Rollout
    at: int
    """Tokens of the completion before it."""
    draft: np.ndarray
    num_accepted: int


def new_drafter(k: int = K, **options: Any) -> Drafter:
    """The default drafter of an engine, from words alone and from one problem's texts only unless `options` say so."""
    return build_drafter("mixture", **{"max_draft_tokens": k, "shared": False} | WORDS_ALONE | options)


def feed(drafter: Drafter, problem: Problem, rollouts: Iterable[Rollout]) -> None:
    """Put finished rollouts of a problem into the drafter's history."""
    for rollout in rollouts:
        name = f"history/{rollout.epoch}/{rollout.sample_id}"
        drafter.start_request(name, rollout.prompt, problem_id=problem.problem_id)
        show(drafter, name, rollout, 0, rollout.tokens.size)
        drafter.stop_request(name)


def generate_again(
    drafter: Drafter, requests: Sequence[Request], *, noise: bool = True, k: int = K, keep: bool = False
) -> Iterator[Step]:
    """Generate recorded rollouts again, all requests in lock step; the first token of each is the prefill's.

    Args:
        noise: Whether the drafter is told the seeds.
        keep: Whether the others see a rollout after its end, too. While they run they see each other in any case.
    """
    live: dict[str, Cursor] = {}
    for number, (problem, rollout) in enumerate(requests):
        if rollout.tokens.size < 2:
            continue
        req_id = f"request/{number}"
        seed = rollout.seed if noise else None
        drafter.start_request(req_id, rollout.prompt, problem_id=problem.problem_id, seed=seed)
        live[req_id] = Cursor(problem, rollout)
        live[req_id].advance(1)
        show(drafter, req_id, rollout, 0, 1)
    while live:
        names = list(live)
        drafts = drafter.propose(names, np.full(len(names), k, np.int32))
        targets, accepted = [], []
        for cursor, draft in zip(live.values(), drafts, strict=True):
            n = cursor.num_agreeing(draft.token_ids)
            yield Step(cursor.rollout, cursor.num_said, draft.token_ids, n)
            targets.append(cursor.advance(n + 1))
            # Where the recording ends inside a draft, its last token is the target's own.
            accepted.append(min(n, targets[-1].size - 1))
        drafter.observe(names, targets, np.array(accepted, np.int32))
        for name, tokens in zip(names, targets, strict=True):
            said = live[name].num_said
            show(drafter, name, live[name].rollout, said - tokens.size, said)
            if live[name].done:
                del live[name]
                drafter.stop_request(name, keep=keep)


def tokens_per_step(steps: Iterable[Step]) -> float:
    """Tokens per request and step."""
    emitted = count = 0
    for step in steps:
        emitted += min(step.num_accepted + 1, step.rollout.tokens.size - step.at)
        count += 1
    return emitted / max(count, 1)


def by_history(cases: Sequence[Case], *, noise: bool = True, k: int = K) -> float:
    """Tokens per step where each test rollout sees its case's history and its own text."""
    steps: list[Step] = []
    drafter = new_drafter(k)
    for case in cases:
        feed(drafter, case.problem, case.history)
        for rollout in case.tests:
            steps += generate_again(drafter, [Request(case.problem, rollout)], noise=noise, k=k)
    return tokens_per_step(steps)


class Continuations:
    """What followed each context of up to ORDER tokens, in texts that grow."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], set[int]] = defaultdict(set)

    def add(self, text: Sequence[int], start: int) -> None:
        """Add the tokens text[start:], each as a continuation of what precedes it."""
        for at in range(max(start, 1), len(text)):
            for length in range(1, min(ORDER, at) + 1):
                self._after[tuple(text[at - length : at])].add(text[at])

    def match_length(self, context: Sequence[int]) -> int:
        """How many last tokens of a context have been seen together, followed by something; at most ORDER."""
        length = 0
        while length < min(ORDER, len(context)) and tuple(context[len(context) - length - 1 :]) in self._after:
            length += 1
        return length

    def after(self, context: Sequence[int], length: int) -> set[int]:
        """What followed the last `length` tokens of a context."""
        return self._after.get(tuple(context[len(context) - length :]), set())


MIN_CONTEXT = 2
"""Matching tokens from which on history is said to have a context."""


def why_steps_end(cases: Sequence[Case], k: int = K) -> dict[str, float]:
    """Shares of the steps by what ended their draft, without those whose draft reaches the rollout's end.

    `all accepted`: K tokens were drafted and right. Where a draft was right and shorter: `no context`, the last
    MIN_CONTEXT tokens do not occur in the history, or `cut`, they do. Where a token was wrong: `wrong choice`, the
    right one followed the last MIN_CONTEXT tokens somewhere in the history, or `not in history`.
    """
    reasons: Counter[str] = Counter()
    drafter = new_drafter(k)
    for case in cases:
        feed(drafter, case.problem, case.history)
        for rollout in case.tests:
            known = _known(case)
            text = [*rollout.prompt.tolist(), *rollout.tokens.tolist()]
            first = indexed = rollout.prompt.size
            for step in generate_again(drafter, [Request(case.problem, rollout)], k=k):
                known.add(text[: first + step.at], indexed)
                indexed = first + step.at
                stop = indexed + step.num_accepted  # of this token's predecessors the draft was right
                if stop >= len(text):
                    continue
                offered = known.after(text[:stop], MIN_CONTEXT)
                if step.num_accepted == k:
                    reasons["all accepted"] += 1
                elif step.num_accepted == len(step.draft):
                    reasons["cut" if offered else "no context"] += 1
                else:
                    reasons["wrong choice" if text[stop] in offered else "not in history"] += 1
    total = sum(reasons.values())
    return {name: count / total for name, count in reasons.items()}


def first_tokens(cases: Sequence[Case], top_ids: dict[tuple[str, int, int], np.ndarray]) -> list[dict[str, Any]]:
    """How often one drafted token is right, asked for at every position of the tests, by match length.

    Args:
        top_ids: The target's most probable tokens at every position, by (prompt_id, epoch, sample_id).

    Returns:
        For each bin of match lengths its share of the positions, and the share of its positions at which the token
        followed the last MIN_CONTEXT tokens (the match, where that is shorter) somewhere in the history (`covered`: a
        drafter that knew the target's distribution and noise would be right), at which the drafts without and with
        noise are right (`point`, `coupled`), and at which the target's most probable token is sampled (`most
        probable`: what the best draft without noise would reach).
    """
    rows = []
    for case in cases:
        drafters = {noise: new_drafter(1, min_survival=0.0) for noise in (False, True)}
        for drafter in drafters.values():
            feed(drafter, case.problem, case.history)
        for rollout in case.tests:
            known = _known(case)
            text = [*rollout.prompt.tolist(), *rollout.tokens.tolist()]
            first = rollout.prompt.size
            likely = top_ids[case.problem.prompt_id, rollout.epoch, rollout.sample_id]
            for noise, drafter in drafters.items():
                seed = rollout.seed if noise else None
                drafter.start_request("r", rollout.prompt, problem_id=case.problem.problem_id, seed=seed)
            for at, token in enumerate(rollout.tokens.tolist()):
                context = text[: first + at]
                length = known.match_length(context)
                offered = known.after(context, min(length, MIN_CONTEXT)) if length else set()
                right = {}
                for noise, drafter in drafters.items():
                    (draft,) = drafter.propose(["r"], np.ones(1, np.int32))
                    right[noise] = draft.token_ids.tolist()[:1] == [token]
                    drafter.observe(["r"], [[token]], np.zeros(1, np.int32))
                    show(drafter, "r", rollout, at, at + 1)
                rows.append((length, token in offered, right[False], right[True], int(likely[at, 0]) == token))
                known.add(text[: first + at + 1], first + at)
            for drafter in drafters.values():
                drafter.stop_request("r", keep=False)
    values = np.array(rows, np.float64)
    bins = np.digitize(values[:, 0], MATCH_BINS) - 1
    names = ("covered", "point", "coupled", "most_probable")
    found = []
    for number, low in enumerate([*MATCH_BINS, None]):
        here = values[bins == number] if low is not None else values
        if low is None or len(here):
            figures = dict(zip(names, here[:, 1:].mean(0).tolist(), strict=True))
            found.append({"match_length": low, "share": len(here) / len(values)} | figures)
    return found


def _known(case: Case) -> Continuations:
    """The continuations in a case's prompt and history."""
    known = Continuations()
    for number, rollout in enumerate(case.history):
        known.add([*rollout.prompt.tolist(), *rollout.tokens.tolist()], rollout.prompt.size if number else 1)
    if not case.history and case.tests:
        known.add(case.tests[0].prompt.tolist(), 1)
    return known


def worth(problems: Sequence[Problem], epoch: int, steps_per_epoch: int) -> dict[str, float]:
    """Tokens per step of an epoch's rollouts by what they see besides their own text: one group's rollouts at a time.

    Every problem has a drafter of its own in each case.

    Args:
        steps_per_epoch: Policy versions from one epoch to the next, on average: older rollouts count for less.
    """
    groups = {problem.prompt_id: _by_epoch(problem) for problem in problems}
    groups = {prompt_id: by_epoch for prompt_id, by_epoch in groups.items() if epoch in by_epoch}

    def alone(source_epoch: int | None) -> float:
        """With the problem's group of one epoch, but for the rollout itself; None: with nothing."""
        steps: list[Step] = []
        for prompt_id, by_epoch in groups.items():
            if source_epoch not in by_epoch and source_epoch is not None:
                continue
            # The siblings' history differs for each rollout, so each is a problem of its own here.
            requests = [Request(Problem(f"{prompt_id}/{r.sample_id}", []), r) for r in by_epoch[epoch]]
            drafter = new_drafter()
            for problem, rollout in requests:
                feed(drafter, problem, [r for r in by_epoch.get(source_epoch, []) if r is not rollout])
            drafter.begin_policy_version((epoch - (source_epoch or 0)) * steps_per_epoch)
            for request in requests:
                steps += generate_again(drafter, [request])
        return tokens_per_step(steps)

    found = {"nothing else": alone(None)}
    in_flight: list[Step] = []
    beside: list[Step] = []
    for problem in problems:
        requests = [Request(problem, rollout) for rollout in groups.get(problem.prompt_id, {}).get(epoch, [])]
        in_flight += generate_again(new_drafter(), requests, keep=True)
        others = [
            p
            for p in problems
            if p.prompt_id in groups and p is not problem and task_of(p.prompt_id) == task_of(problem.prompt_id)
        ]
        if others:
            drafter = new_drafter(shared=True)
            feed(drafter, others[0], groups[others[0].prompt_id][epoch])
            for request in requests:
                beside += generate_again(drafter, [request])
    if beside:
        found["another problem of the task"] = tokens_per_step(beside)
    found["siblings in flight"] = tokens_per_step(in_flight)
    found["siblings, finished"] = alone(epoch)
    for age in range(1, epoch + 1):
        found[f"the group of {age} epoch{'s' * (age > 1)} ago"] = alone(epoch - age)
    return found


def _by_epoch(problem: Problem) -> dict[int, list[Rollout]]:
    found: dict[int, list[Rollout]] = {}
    for rollout in problem.rollouts:
        found.setdefault(rollout.epoch, []).append(rollout)
    return found


def over_training(steps: Sequence[Sequence[Request]], *, noise: bool = True, k: int = K) -> list[float]:
    """Tokens per step of each training step, every draft verified: its requests in lock step, all earlier ones known.

    As in an engine, other problems' rollouts are drafted from, too.

    Args:
        steps: The training's steps in order, each with a policy version of its own.
    """
    drafter, found = new_drafter(k, shared=True), []
    for version, requests in enumerate(steps):
        drafter.begin_policy_version(version)
        found.append(tokens_per_step(generate_again(drafter, requests, noise=noise, k=k, keep=True)))
    return found
