"""What budgets go by: survival and step cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.budget import estimates
from rollout_spec.budget.estimates import (
    COLD_USES,
    LEAST_COST,
    MIN_OBSERVATIONS,
    UNTRIED_STEPS,
    WINDOW,
    StepCost,
    Survival,
    predict_survival,
)


def survival_of(survival, confidence, starts):
    predicted = np.empty(confidence.size)
    predict_survival(confidence, starts, survival.counts, survival.step, predicted)
    return predicted


UNIT = st.floats(0, 1, width=32)


def undrafted(cost, num_tokens):
    """Seconds of a step without drafts, None if they are a guess."""
    seconds, is_known, _ = cost.undrafted(num_tokens)
    return seconds if is_known else None


def drafted(cost, num_tokens, undrafted, most=8):
    """Seconds that 0, 1, 2, ... draft tokens cost more."""
    costs = np.zeros(most + 1)
    limit, _, _ = cost.drafted(num_tokens, num_tokens, undrafted, costs)
    return costs[: limit + 1]


def test_survival_learns_what_the_drafter_overrates():
    survival, rng = Survival(), np.random.default_rng(0)
    confidence, starts = np.tile(np.float32([0.9, 0.8]), 64), np.arange(65) * 2
    assert survival_of(survival, confidence, starts)[:2].tolist() == pytest.approx([0.9, 0.8])
    for _ in range(50):
        accepted = np.where(rng.random(64) < 0.45, np.where(rng.random(64) < 0.5, 2, 1), 0)
        survival.observe(confidence, starts, np.full(64, 2), accepted)
    assert survival_of(survival, confidence, starts)[:2] == pytest.approx([0.45, 0.225], abs=0.03)
    slots, said, seen = survival.reliability()[-1]
    assert slots > 0
    assert said == pytest.approx(0.9)
    assert seen == pytest.approx(0.45, abs=0.03)


@given(st.lists(st.lists(UNIT, max_size=4), min_size=1, max_size=5))
def test_survival_never_rises_along_a_draft(drafts):
    falling = [np.minimum.accumulate(np.array(draft, np.float32)) for draft in drafts]
    sizes = np.array([len(draft) for draft in drafts])
    confidence, starts = np.concatenate(falling), np.cumsum([0, *sizes])
    survival = Survival()
    survival.observe(confidence, starts, sizes, np.zeros_like(sizes))
    predicted = survival_of(survival, confidence, starts)
    for i in range(sizes.size):
        assert (np.diff(predicted[starts[i] : starts[i + 1]]) <= 0).all()
    assert (predicted[confidence == 0] == 0).all()


def test_survival_follows_a_policy_that_changes():
    """After more outcomes than a counter holds, and then as many others."""
    survival, starts = Survival(), np.arange(5001)
    confidence, once = np.full(5000, 0.9, np.float32), np.ones(5000, np.int64)
    survival.observe(confidence, starts, once, once)
    assert survival_of(survival, confidence[:1], starts[:2])[0] > 0.99
    assert survival.counts[..., 0].max() <= estimates.MAX_TRIALS
    survival.observe(confidence, starts, once, np.zeros_like(once))
    assert survival_of(survival, confidence[:1], starts[:2])[0] < 0.3
    slots, said, _ = survival.reliability()[-1]
    assert slots <= estimates.MAX_TRIALS
    assert said == pytest.approx(0.9)


def test_cost_is_robust_and_forgets():
    cost = StepCost()
    assert undrafted(cost, 8) is None
    for seconds in (1.0, 1.0, 50.0):  # one step was held up
        cost.observe(8, seconds, drafted=False)
    assert undrafted(cost, 8) == 1.0
    assert undrafted(cost, 100) is None
    for _ in range(WINDOW):  # the machine has become slower for good
        cost.observe(8, 2.0, drafted=False)
    assert undrafted(cost, 8) == 2.0


def test_what_looked_expensive_is_left_out_until_it_is_measured_again():
    cost = StepCost()
    for n in (12, 16):
        for _ in range(100):
            cost.observe(n, 1.0, drafted=True)
    cost.observe(32, 9.0, drafted=True)  # once, at a bad time
    assert drafted(cost, 8, 1.0, 24)[24] == pytest.approx(8.0)
    for _ in range(20):
        cost.observe(12, 1.0, drafted=True)
    assert drafted(cost, 8, 1.0, 24)[24] < 0.2
    assert cost.curve(drafted=True)[0].tolist() == [12, 16, 32]


def test_a_curve_never_falls():
    cost = StepCost()
    for n, seconds in ((10, 1.0), (20, 3.0), (40, 2.0), (80, 4.0)):
        for _ in range(MIN_OBSERVATIONS):
            cost.observe(n, seconds, drafted=True)
    assert cost.curve(drafted=True)[1].tolist() == [1.0, 2.0, 2.0, 4.0]


def test_the_shortest_steps_tell_what_a_size_costs():
    """Four steps in five are held up."""
    cost = StepCost()
    for n in range(100):
        cost.observe(8, 1.0 if n % 5 == 0 else 3.0, drafted=False)
    assert undrafted(cost, 8) == 1.0


def test_steps_without_drafts_cost_no_more_than_larger_ones_with():
    cost = StepCost()
    for _ in range(MIN_OBSERVATIONS):
        cost.observe(8, 3.0, drafted=False)  # at a bad time
        cost.observe(16, 1.5, drafted=True)
    assert undrafted(cost, 8) == 1.5


def price_of_a_new_size(cost, undrafted):
    return drafted(cost, 1000, undrafted)[1] - LEAST_COST * undrafted / 1000


def test_the_first_step_of_a_size_is_not_what_it_costs():
    cost = StepCost()
    for seconds in (15.0, 5.0, 5.0):
        cost.observe(16, seconds, drafted=False)
    assert undrafted(cost, 16) == 5.0
    assert price_of_a_new_size(cost, 5.0) == pytest.approx(10.0 / COLD_USES)
    cost.observe(20, 16.0, drafted=True)
    assert cost.curve(drafted=True)[1].tolist() == [8.0], "at most half of it is taken off"
    cost.observe(21, 12.0, drafted=True)  # of about the same size, and its first step too
    assert cost.curve(drafted=True)[1].tolist() == pytest.approx([6.0], rel=0.1)
    cost.observe(20, 6.5, drafted=True)
    assert cost.curve(drafted=True)[1].tolist() == [6.5]
    cost.observe(22, 4.0, drafted=True)  # a first step does not count beside others
    assert cost.curve(drafted=True)[1].tolist() == [6.5]


def test_what_was_wrong_long_ago_is_tried_again():
    """The longer nothing was tried, and the sooner the less was known; being wrong again brings all of it back."""
    survival, starts, one = Survival(), np.arange(101), np.ones(100, np.int64)
    confidence = np.full(100, 0.9, np.float32)
    survival.observe(confidence, starts, one, 0 * one)

    def after(steps):
        survival.step = steps
        return survival_of(survival, confidence[:1], starts[:2])[0]

    assert after(0) == after(UNTRIED_STEPS) < 0.06
    assert after(4 * UNTRIED_STEPS) > 3 * after(0)
    assert after(50 * UNTRIED_STEPS) > 0.6
    survival.observe(confidence[:1], starts[:2], one[:1], 0 * one[:1])
    assert after(50 * UNTRIED_STEPS) < 0.06
    after(100 * UNTRIED_STEPS)
    survival.observe(confidence[:8], starts[:9], one[:8], one[:8])
    assert after(100 * UNTRIED_STEPS) > 0.8


def test_what_was_verified_and_drafted_counts():
    """Nothing past a draft is read, whatever an engine says that it has verified."""
    survival = Survival()
    survival.observe(np.float32([0.9, 0.8, 0.9]), np.array([0, 2, 3]), np.array([1, 0]), np.array([1, 0]))
    assert survival.counts[..., 0].sum() == survival.counts[..., 2].sum() == 1
    survival = Survival()
    confidence = np.array([0.5, 0.5, 0.9], np.float32)
    survival.observe(confidence, np.array([0, 2, 2, 3]), np.array([8, 8, 1]), np.array([8, 3, 0]))
    assert survival.counts[..., 0].sum() == 3
    assert survival.counts[..., 2].sum() == 2
