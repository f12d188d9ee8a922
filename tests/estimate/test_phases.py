"""The simulated engine: what a phase takes for a policy of draft lengths and a cost curve."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.costs import EngineCost
from rollout_spec.estimate.phases import RecordedRollout, simulate, sum_up
from rollout_spec.measured_schedule import MeasuredSchedule

FLAT = EngineCost(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
STEEP = EngineCost(np.array([1.0, 2.0]), np.array([1.0, 2.0]))


def phase_rollouts(num_problems=3, samples=6, tokens=120, seed=0):
    """Rollouts of a problem that are mostly alike, of different lengths."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for number in range(num_problems):
        base = rng.integers(0, 200, tokens)
        for _ in range(samples):
            text = np.where(rng.random(tokens) < 0.15, rng.integers(0, 200, tokens), base)
            text = text[: int(rng.integers(tokens // 2, tokens))].astype(np.int32)
            rollouts.append(RecordedRollout(number, np.array([number, 7], np.int32), text))
    return rollouts


def fixed(k):
    return lambda num_requests: k


def run(policy, cost, rollouts, batch=4, k=4):
    drafter = build_drafter("suffix", max_draft_tokens=k)
    return list(simulate(rollouts, drafter, policy, cost, num_speculative_tokens=k, batch=batch))


def phase(*args, **kwargs):
    return sum_up(run(*args, **kwargs))


def test_the_budget_pays_where_tokens_are_free_and_stays_out_where_they_are_not():
    rollouts, others = phase_rollouts(), phase_rollouts(seed=1)
    for cost in (FLAT, STEEP):
        budget = Budget()
        run(budget, cost, others, batch=6)
        ours, none, *always = (phase(p, cost, rollouts, batch=6) for p in (budget, *map(fixed, (0, 1, 2, 4))))
        assert {result.tokens for result in (ours, none, *always)} == {none.tokens}
        if cost is FLAT:
            assert ours.seconds < 0.8 * none.seconds
            assert ours.seconds < 1.1 * min(result.seconds for result in always)
        else:
            assert ours.seconds < 1.02 * none.seconds
            assert always[-1].seconds > 1.2 * none.seconds


def test_where_the_scheduler_chooses_k_all_requests_have_as_many_whatever_was_found():
    steps = run(MeasuredSchedule([4] * 5), FLAT, phase_rollouts())
    assert {step.num_draft_tokens / step.num_requests for step in steps} == {0, 4}


def test_a_step_takes_what_its_requests_cost_and_more_than_the_host():
    cost = STEEP._replace(request_seconds=10.0)
    assert [cost.whole_step(1, 0), cost.whole_step(4, 0), cost.whole_step(4, 8)] == pytest.approx([11, 44, 52])
    assert cost._replace(host_seconds=(5.0, 0.0)).whole_step(4, 8) == pytest.approx(52, rel=1e-3)
    assert cost._replace(host_seconds=(1000.0, 2.0)).whole_step(4, 8) == pytest.approx(1008, rel=1e-3)
    assert cost._replace(host_seconds=(52.0, 0.0)).whole_step(4, 8) == pytest.approx(52 * 2 ** (1 / 3))
    verifying = cost._replace(verify_seconds=7.0)
    assert [verifying.whole_step(4, 0), verifying.whole_step(4, 8)] == pytest.approx([44, 52 + 7])
    assert cost._replace(draft_seconds=(3.0, 0.5)).drafting(4) == 5
