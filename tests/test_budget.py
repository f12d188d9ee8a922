"""Budgets: allocation against brute force, and what the three estimates learn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout_spec.budget import (
    LONGEST_SLEEP,
    MIN_OBSERVATIONS,
    WINDOW,
    Budget,
    RemainingLength,
    StepCost,
    Survival,
    allocate,
    worth,
)

UNIT = st.floats(0, 1, width=32)


@st.composite
def cases(draw, max_requests=3, max_slots=3):
    """(survival, value, cost, most slots)."""
    size, k = draw(st.integers(1, max_requests)), draw(st.integers(1, max_slots))
    survival = np.array(draw(st.lists(st.lists(UNIT, min_size=k, max_size=k), min_size=size, max_size=size)))
    survival = np.minimum.accumulate(survival, axis=1)
    value = np.array(draw(st.lists(st.floats(0, 2, width=32), min_size=size, max_size=size)))
    steps = draw(st.lists(UNIT, max_size=size * k))
    most = np.array(draw(st.lists(st.integers(0, k + 1), min_size=size, max_size=size)))
    return survival, value, np.cumsum([0.0, *steps]), most


def net_gain(taken, survival, value, cost):
    gain = sum(survival[i, :n].sum() * value[i] for i, n in enumerate(taken))
    return gain - cost[sum(taken)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_allocation_equals_brute_force(case):
    survival, value, cost, most = case
    taken = allocate(survival, value, cost, most)
    choices = itertools.product(*(range(min(n, survival.shape[1]) + 1) for n in most))
    best = max(net_gain(c, survival, value, cost) for c in choices if sum(c) < cost.size)
    assert net_gain(taken.tolist(), survival, value, cost) == pytest.approx(best, abs=1e-9)
    assert (taken <= np.minimum(most, survival.shape[1])).all()
    assert taken.sum() < cost.size


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 2), st.floats(1, 3, width=32))
def test_more_survival_never_gets_fewer_slots(case, row, factor):
    survival, value, cost, most = case
    row %= survival.shape[0]
    before = allocate(survival, value, cost, most)
    better = survival.copy()
    better[row] = np.minimum(better[row] * factor, 1.0)
    # Among equal gains any choice is as good; what is asked is asked where there is a difference.
    gains = [g for i in range(len(value)) for g in (better[i] * value[i]).tolist() if g > 0]
    assume(len(set(gains)) == len(gains))
    assert allocate(better, value, cost, most)[row] >= before[row]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes do not fit"):
        allocate(np.ones((2, 3)), np.ones(3), np.zeros(4), np.ones(2, np.int64))


def test_survival_learns_what_the_drafter_overrates():
    survival, rng = Survival(), np.random.default_rng(0)
    confidence = np.tile([0.9, 0.8], (64, 1))
    assert survival.predict(confidence)[0].tolist() == pytest.approx([0.9, 0.8])
    for _ in range(50):
        accepted = np.where(rng.random(64) < 0.45, np.where(rng.random(64) < 0.5, 2, 1), 0)
        survival.observe(confidence, np.full(64, 2), accepted)
    assert survival.predict(confidence)[0] == pytest.approx([0.45, 0.225], abs=0.03)
    slots, said, seen = survival.reliability()[-1]
    assert slots > 0
    assert said == pytest.approx(0.9)
    assert seen == pytest.approx(0.45, abs=0.03)


@given(st.lists(st.lists(UNIT, min_size=4, max_size=4), min_size=1, max_size=5))
def test_survival_never_rises_along_a_draft(confidence):
    falling = np.minimum.accumulate(np.array(confidence), axis=1)
    survival = Survival()
    survival.observe(falling, np.full(len(falling), 3), np.zeros(len(falling), np.int64))
    predicted = survival.predict(falling)
    assert (np.diff(predicted, axis=1) <= 0).all()
    assert (predicted[falling == 0] == 0).all()


def test_cost_is_robust_and_forgets():
    cost = StepCost()
    assert cost.plain(8) is None
    for seconds in (1.0, 1.0, 50.0):  # one step was held up
        cost.observe(8, seconds, drafted=False)
    assert cost.plain(8) == 1.0
    assert cost.plain(100) is None
    for _ in range(WINDOW):  # another machine, another model
        cost.observe(8, 2.0, drafted=False)
    assert cost.plain(8) == 2.0


def test_two_sizes_with_drafts_tell_what_drafts_cost_from_what_slots_cost():
    cost = StepCost()
    slots = np.arange(1, 100)
    seconds, largest = cost.drafted(32, slots, hopeful=False)
    assert largest == 4
    assert not seconds.any()
    for n in (4, 8):
        for _ in range(MIN_OBSERVATIONS):
            cost.observe(32 + n, 5.0 + 0.1 * n, drafted=True)
    seconds, largest = cost.drafted(32, slots, hopeful=False)
    assert largest == 16
    np.testing.assert_allclose(seconds, 5.0 + 0.1 * slots)
    assert cost.drafted(32, slots, hopeful=True)[1] == 4


def test_padded_steps_cost_the_same():
    cost = StepCost(sizes=(8, 16, 32))
    for n, seconds in ((9, 1.0), (17, 2.0)):
        for _ in range(MIN_OBSERVATIONS):
            cost.observe(n, seconds, drafted=True)
    seconds, _ = cost.drafted(4, np.arange(5, 20), hopeful=False)
    assert seconds[0] == seconds[7]  # 9 and 16 tokens
    assert seconds[8] > seconds[7]


def test_remaining_length():
    lengths = RemainingLength()
    assert lengths.predict(1, 10, 90) == (45, 45)
    for length in (100, 200, 300):
        lengths.observe(1, length)
    mean, deviation = lengths.predict(1, 0, 1000)
    assert (mean, deviation) == pytest.approx((200, np.std([100, 200, 300])))
    assert lengths.predict(1, 150, 1000)[0] == 100
    assert lengths.predict(1, 150, 20)[0] == 20
    assert lengths.predict(2, 150, 1000)[0] == 100  # as in the rest of the run
    assert lengths.predict(1, 250, 50) == (25, 25)  # one longer rollout says little


def test_the_longest_request_is_worth_the_step():
    even = worth(np.full(4, 50.0), np.full(4, 10.0), 1.0, 0.0)
    np.testing.assert_allclose(even, 0.25)
    uneven = worth(np.array([10.0, 500.0]), np.full(2, 5.0), 1.0, 0.1)
    assert uneven == pytest.approx([0.1, 0.9])


def test_a_drafter_that_is_never_right_is_asked_ever_less_often():
    """Steps cost the same whatever they verify, so only survival speaks against its drafts."""
    budget, asked = Budget(), []
    confidence = np.full((2, 4), 0.9)
    for _ in range(1500):
        slots = np.zeros(2, np.int64)
        asked.append(budget.wants_drafts())
        if asked[-1]:
            slots = budget.decide(confidence, np.full(2, 4), (np.full(2, 50.0), np.full(2, 20.0)))
            budget.survival.observe(confidence, slots, np.zeros(2, np.int64))
        budget.cost.observe(2 + int(slots.sum()), 1.0, drafted=bool(slots.any()))
    assert sum(asked[-500:]) < 500 / LONGEST_SLEEP + 10


def test_free_slots_that_come_true_are_all_taken_and_dear_ones_are_not():
    for slot_seconds, expected in ((0.0, 6), (1.0, 0)):
        budget = Budget()
        confidence = np.tile([0.9, 0.8, 0.7, 0.6], (2, 1))
        taken = []
        for _ in range(200):
            slots = np.zeros(2, np.int64)
            if budget.wants_drafts():
                slots = budget.decide(confidence, np.full(2, 4), (np.full(2, 50.0), np.full(2, 20.0)))
                budget.survival.observe(confidence, slots, np.minimum(slots, 3))
            taken.append(int(slots.sum()))
            budget.cost.observe(2 + taken[-1], 1.0 + slot_seconds * taken[-1], drafted=taken[-1] > 0)
        assert np.median(taken[100:]) == expected


@given(st.integers(0, 6))
def test_the_token_budget_is_kept(max_slots):
    budget = Budget()
    for _ in range(MIN_OBSERVATIONS):
        budget.cost.observe(2, 1.0, drafted=False)
    remaining = (np.full(2, 50.0), np.full(2, 20.0))
    for _ in range(30):
        taken = budget.decide(np.full((2, 4), 0.99), np.full(2, 4), remaining, max_slots=max_slots)
        assert taken.sum() <= max_slots
        budget.cost.observe(2 + int(taken.sum()), 1.0, drafted=bool(taken.any()))
