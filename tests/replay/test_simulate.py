"""The replay's bookkeeping: who is replayed in which order, what enters the history, what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter
from rollout_spec.replay.simulate import REGIMES, Request, replay, replay_steadily, schedule, split
from rollout_spec.replay.traces import Problem, Rollout
from rollout_spec.types import Draft
from tests.adversaries import Adversary

PROMPT = np.array([1, 2], np.int32)


def a_problem(name="p", samples=3, epochs=1, size=40):
    """Every sample of every epoch says the same fresh tokens."""
    text = np.arange(100, 100 + size, dtype=np.int32)
    return Problem(name, [Rollout(k, e, PROMPT, text, (size,)) for e in range(epochs) for k in range(samples)])


def places(rollouts):
    return [(rollout.epoch, rollout.sample_id) for rollout in rollouts]


def test_rollouts_are_split_by_epoch_or_in_halves():
    one, two = a_problem(), a_problem(epochs=2)
    no_limit = {"max_samples": None, "max_history": None}
    for regime in set(REGIMES) - {"epoch"}:
        assert list(map(places, split(one, regime, **no_limit))) == [[], [(0, 0), (0, 1), (0, 2)]]
        assert list(map(places, split(two, regime, **no_limit))) == [[], [(1, 0), (1, 1), (1, 2)]]
    assert list(map(places, split(one, "epoch", **no_limit))) == [[(0, 0)], [(0, 1), (0, 2)]]
    assert list(map(places, split(two, "epoch", max_samples=2, max_history=1))) == [[(0, 0)], [(1, 0), (1, 1)]]


@pytest.mark.parametrize(
    ("regime", "waves"),
    [
        ("own", ["a0", "a1", "b0", "b1", "b2", "c0"]),
        ("finished", ["a0 b0", "a1 b1", "b2", "c0"]),
        ("epoch", ["a0 b0", "a1 b1", "b2", "c0"]),
        ("inflight", ["a0 a1", "b0 b1 b2 c0"]),
    ],
)
def test_waves(regime, waves):
    problems = [a_problem("a", 2), a_problem("b", 3), a_problem("c", 1)]
    found = list(schedule([(p, p.rollouts) for p in problems], regime, 4 if regime == "inflight" else 2))
    names = [" ".join(f"{problem.prompt_id}{rollout.sample_id}" for problem, rollout in w.requests) for w in found]
    assert names == waves
    assert {wave.keep for wave in found} == {regime in ("finished", "inflight")}


class OutcomeRecorder(Adversary):
    """Drafts the next token, a wrong one and a third one, and keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.seeds, self.versions, self.outcomes = [], [], []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        super().start_request(req_id, prompt_token_ids, problem_id=problem_id, seed=seed)
        self.seeds.append(seed)

    def propose(self, req_ids, max_tokens):
        confidence = np.array([0.95, 0.55, 0.15], np.float32)
        said = [len(self._outputs[req_id]) for req_id in req_ids]
        return [Draft(np.array([100 + n, 3, 102 + n], np.int32), confidence) for n in said]

    def observe(self, req_ids, target_token_ids, num_accepted):
        super().observe(req_ids, target_token_ids, num_accepted)
        self.outcomes += [(len(t), int(n)) for t, n in zip(target_token_ids, num_accepted, strict=True)]

    def begin_policy_version(self, version):
        self.versions.append(version)


def test_what_was_accepted_is_counted_by_confidence():
    """After the prefill's token, 8 more in steps of two: three tokens are drafted, and two where the recording ends."""
    result = replay([a_problem(samples=1, size=9)], OutcomeRecorder, "own", num_speculative_tokens=3)
    assert (result.stats.request_steps, result.stats.accepted_tokens, result.stats.emitted_tokens) == (4, 4, 8)
    expected = np.zeros((10, 3))
    expected[9], expected[5], expected[1] = (4, 3.8, 4), (4, 2.2, 0), (3, 0.45, 0)
    np.testing.assert_allclose(result.reliability, expected, rtol=1e-6)


def test_a_recording_that_ends_in_a_draft_has_no_token_after_it():
    """The last accepted one is then the target's own."""
    drafter = OutcomeRecorder()
    result = replay([a_problem(samples=1, size=8)], lambda: drafter, "own", num_speculative_tokens=3)
    assert drafter.outcomes == [(2, 1), (2, 1), (2, 1), (1, 0)]
    assert (result.stats.accepted_tokens, result.stats.emitted_tokens) == (4, 7)


def test_the_drafter_is_told_seeds_and_versions():
    drafter = OutcomeRecorder()
    problem = a_problem(epochs=2)
    seeded = problem._replace(rollouts=[r._replace(seed=10 + r.sample_id) for r in problem.rollouts])
    replay([seeded], lambda: drafter, "epoch", noise=True)
    assert drafter.seeds == [None, None, None, 10, 11, 12]  # earlier rollouts are text
    assert drafter.versions == [1]
    drafter = OutcomeRecorder()
    replay([seeded], lambda: drafter, "own")
    assert drafter.seeds == [None] * 3
    assert drafter.versions == []


@pytest.mark.parametrize(("regime", "indexed"), [("own", 0), ("finished", 122), ("inflight", 122), ("epoch", 42)])
def test_tokens_that_entered_the_history_are_counted_prompts_once(regime, indexed):
    result = replay([a_problem()], lambda: build_drafter("suffix"), regime, num_speculative_tokens=4)
    assert result.indexed_tokens == indexed
    assert result.history_tokens == (indexed if regime == "epoch" else 0)


def test_a_steady_replay_keeps_what_has_ended():
    """Each sample but the first is drafted from the ones before."""
    drafter = build_drafter("suffix", max_draft_tokens=4, min_survival=0.0)
    problem = a_problem()
    requests = [Request(problem, rollout) for rollout in problem.rollouts]
    result = replay_steadily(requests, drafter, num_speculative_tokens=4, batch=1)
    assert result.stats.request_steps == 39 + 2 * 8
