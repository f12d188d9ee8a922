"""Budgets: allocation against brute force, and what the two estimates learn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.budget.decide import MAX_PROBES, NUM_BINS, Budget, new_bins
from rollout_spec.budget.decide import allocate as allocate_into
from rollout_spec.budget.estimates import MIN_OBSERVATIONS

UNIT = st.floats(0, 1, width=32)


def allocate(survival, starts, value, cost):
    taken = np.empty(starts.size - 1, np.int64)
    gain = allocate_into(survival, starts, value, cost, new_bins(), taken)
    assert gain == pytest.approx(
        net_gain(taken, survival, starts, value, cost), abs=2 * value * survival.size / NUM_BINS
    )
    return taken


@st.composite
def cases(draw, max_requests=3, max_draft_tokens=3):
    """(survival, starts, value, cost)."""
    drafts = draw(st.lists(st.lists(UNIT, max_size=max_draft_tokens), min_size=1, max_size=max_requests))
    survival = np.concatenate([np.minimum.accumulate(np.array(draft, float)) for draft in drafts])
    starts = np.cumsum([0, *map(len, drafts)])
    value = draw(st.floats(0, 2, width=32))
    steps = draw(st.lists(UNIT, max_size=survival.size))
    return survival, starts, value, np.cumsum([0.0, *steps])


def net_gain(taken, survival, starts, value, cost):
    gain = sum(survival[starts[i] : starts[i] + n].sum() * value for i, n in enumerate(taken))
    return gain - cost[sum(taken)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_allocation_equals_brute_force(case):
    survival, starts, value, cost = case
    taken = allocate(survival, starts, value, cost)
    choices = itertools.product(*(range(n + 1) for n in np.diff(starts)))
    best = max(net_gain(c, survival, starts, value, cost) for c in choices if sum(c) < cost.size)
    gain = net_gain(taken.tolist(), survival, starts, value, cost)
    assert gain == pytest.approx(best, abs=2 * value * survival.size / NUM_BINS)
    assert (taken <= np.diff(starts)).all()
    assert taken.sum() < cost.size


def step(budget, confidence, seconds, right, draft_seconds=0.0):
    """One step of requests with equal drafts, of which `right` tokens would be accepted. Returns (asked, slots)."""
    size, k = confidence.shape
    slots, asked = np.zeros(size, np.int64), budget.wants_drafts(size)
    if asked:
        starts = np.arange(size + 1) * k
        flat = confidence.astype(np.float32).ravel()
        slots = budget.decide(flat, starts, num_tokens=size)
        budget.survival.observe(flat, starts, slots, np.minimum(slots, right))
    taken, drafting = int(slots.sum()), draft_seconds * asked
    budget.observe_step(
        size + taken, seconds(taken) + drafting, drafted=taken > 0, num_asked=size * asked, draft_seconds=drafting
    )
    return asked, taken


def test_a_drafter_that_is_never_right_is_asked_ever_less_often():
    """Steps cost the same whatever they verify, so only survival speaks against its drafts."""
    budget = Budget()
    asked = [step(budget, np.full((2, 4), 0.9), lambda taken: 1.0, 0, 0.01)[0] for _ in range(1500)]
    assert sum(asked[-500:]) < 50


@pytest.mark.parametrize(("drafted_seconds", "often"), [(1.0, True), (1.7, False)])
def test_a_drafter_must_gain_what_it_takes_after_its_slots_are_paid(drafted_seconds, often):
    """Nine tokens in ten come true and save half a step each, the drafter takes 0.4 of one: it pays where slots are
    free, and not where they leave 0.2."""
    budget, rng, confidence = Budget(), np.random.default_rng(0), np.full((2, 1), 0.9)
    asked = [
        step(budget, confidence, lambda n: drafted_seconds if n else 1.0, int(rng.random() < 0.9), 0.4)[0]
        for _ in range(1500)
    ]
    assert (sum(asked[-500:]) > 250) == often
    assert often or sum(asked[-500:]) < 100


def test_a_drafter_that_compiles_at_first_is_not_given_up():
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    taken = [
        step(budget, confidence, lambda n: 1.0, 2, 1000.0 if n == MIN_OBSERVATIONS else 0.01)[1] for n in range(100)
    ]
    assert np.median(taken[20:]) == 4


@pytest.mark.parametrize(("slot_seconds", "expected"), [(0.0, 6), (1.0, 0)])
def test_free_slots_that_come_true_are_all_taken_and_dear_ones_are_not(slot_seconds, expected):
    budget, confidence = Budget(), np.tile([0.9, 0.8, 0.7, 0.6], (2, 1))
    taken = [step(budget, confidence, lambda n: 1.0 + slot_seconds * n, 3)[1] for _ in range(1500)]
    assert np.median(taken[-100:]) == expected


@pytest.mark.parametrize(("size", "num_drafted"), [(2, 2), (64, 2), (256, 40)])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 64, 72, 256, 512)])
@pytest.mark.parametrize(("drafted_seconds", "draft_seconds"), [(3.0, 0.0), (1.0, 0.6)])
def test_what_drafting_costs_at_all_counts(size, num_drafted, sizes, drafted_seconds, draft_seconds):
    """Slots are free and come true, but a step with drafts or the drafter's work take longer than that gains."""
    budget = Budget()
    budget.cost.pad_to(sizes)
    confidence, starts = np.full(num_drafted, 0.9, np.float32), np.minimum(np.arange(size + 1), num_drafted)
    asked, busy = [], []
    for _ in range(600):
        slots = np.zeros(size, np.int64)
        asked.append(budget.wants_drafts(size))
        if asked[-1]:
            slots = budget.decide(confidence, starts, num_tokens=size)
            budget.survival.observe(confidence, starts, slots, slots)
        taken = int(slots.sum())
        busy.append(taken > 0)
        drafting = draft_seconds * asked[-1] * (1 if num_drafted < size else 2)
        seconds = (drafted_seconds if taken else 1.0) + drafting
        budget.observe_step(
            size + taken, seconds, drafted=taken > 0, num_asked=size * asked[-1], draft_seconds=drafting
        )
    assert sum(busy[300:]) < 15
    assert not draft_seconds or sum(asked[300:]) < 30


def test_a_new_cost_without_drafts_is_noticed():
    """Steps get as cheap as never before, but for those with drafts: half right, these no longer pay."""
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    early = [step(budget, confidence, lambda n: 2.0 if n else 3.0, 1)[1] for _ in range(6000)]
    late = [step(budget, confidence, lambda n: 2.0 if n else 0.5, 1)[1] for _ in range(3000)]
    assert sum(n > 0 for n in early[-1000:]) > 900
    assert sum(n > 0 for n in late[-500:]) < 50


def test_dear_steps_are_tried_again():
    """The price of drafts falls after a while: that is found out."""
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    early = [step(budget, confidence, lambda n: 1.0 + 2 * n, 2)[1] for _ in range(6 * 128)]
    late = [step(budget, confidence, lambda n: 1.0, 2)[1] for _ in range(40 * 128)]
    assert sum(n > 0 for n in early) < 40
    assert np.median(late[-128:]) == 4


def test_each_size_is_looked_at():
    """Phases begin with 64 requests and end with 4, whose first steps without drafts were slow: that is found out."""
    budget, drafted, slow = Budget(), [], MIN_OBSERVATIONS
    for _ in range(12):
        for size in [64] * 200 + [4] * 300:
            taken = 0

            def seconds(n, size=size):
                nonlocal slow
                if size == 64:
                    return 6.0
                if not n and slow:
                    slow -= 1
                    return 5.0
                return 3.0 if n else 1.0

            _, taken = step(budget, np.full((size, 1), 0.5), seconds, 1)
            if size == 4:
                drafted.append(taken > 0)
    assert 0 < sum(drafted[:300]) < 100
    assert sum(drafted[-900:]) < 60


@given(st.integers(-1, 6))
def test_the_token_budget_is_kept(max_draft_tokens):
    budget = Budget()
    for _ in range(MIN_OBSERVATIONS):
        budget.cost.observe(2, 1.0, drafted=False)
    confidence = np.full(8, 0.99, np.float32)
    most = 0
    for _ in range(30):
        assert budget.wants_drafts(2)
        taken = budget.decide(confidence, np.array([0, 4, 8]), num_tokens=2, max_draft_tokens=max_draft_tokens)
        assert taken.sum() <= max(max_draft_tokens, 0)
        most = max(most, taken.sum())
        budget.cost.observe(2 + int(taken.sum()), 1.0, drafted=bool(taken.any()))
    assert most == max(max_draft_tokens, 0)


def test_prompts_in_a_step_count():
    """Slots are free in a step of few tokens; where 300 tokens of prompts fill it, each costs what it is worth."""
    confidence, starts = np.full(8, 0.5, np.float32), np.array([0, 4, 8])
    budget = Budget()
    for _ in range(MIN_OBSERVATIONS):
        for n in (2, 302):
            budget.cost.observe(n, max(1.0, n / 100), drafted=False)
        for n in (3, 50, 100, 303, 350, 400):
            budget.cost.observe(n, max(1.0, n / 100), drafted=True)
    for num_tokens, expected in ((2, 8), (302, 0)):
        assert budget.wants_drafts(num_tokens)
        assert budget.decide(confidence, starts, num_tokens=num_tokens).sum() == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(12, 4), (11, 5), (16, 0)])
def test_a_captured_size_is_filled_and_not_passed(num_tokens, expected):
    """A step of 16 tokens costs what one of 12 does, and one more token ten times as much."""
    budget = Budget()
    budget.cost.pad_to((16, 32))
    for _ in range(20):
        budget.cost.observe(12, 1.0, drafted=False)
        budget.cost.observe(16, 1.0, drafted=True)
        budget.cost.observe(32, 10.0, drafted=True)
    assert budget.wants_drafts(num_tokens)
    confidence, starts = np.full(6, 0.9, np.float32), np.array([0, 3, 6])
    assert budget.decide(confidence, starts, num_tokens=num_tokens).sum() == expected


def test_sizes_that_were_run_are_preferred():
    """A new size takes 8 times as long once: it is left for one that was run, unless it gains more."""
    budget = Budget()
    for n, seconds in ((2, 9.0), (2, 1.0), (2, 1.0), (6, 9.0), (6, 1.0), (18, 9.0), (18, 1.0)):
        budget.cost.observe(n, seconds, drafted=n > 2)
    for drafted, expected in ((4, 4), (5, 4), (6, 6), (12, 12)):
        assert budget.wants_drafts(2)
        confidence, starts = np.full(drafted, 0.6, np.float32), np.array([0, drafted // 2, drafted])
        assert budget.decide(confidence, starts, num_tokens=2).sum() == expected


def test_the_first_drafts_are_verified_as_a_whole_or_nearly():
    budget, confidence = Budget(), np.full((16, 8), 0.6)
    taken = [step(budget, confidence, lambda n: 1.0 + n / 128, 8)[1] for _ in range(20)]
    assert taken[MIN_OBSERVATIONS] == 64
    assert max(taken) == 128


def test_sizes_unlike_all_before_are_guessed():
    """Eight times as many tokens in every step."""
    budget, asked = Budget(), []
    for n in range(MAX_PROBES + 6):
        asked.append(budget.wants_drafts(8**n))
        budget.observe_step(8**n, 1.0 + 8**n / 100, drafted=False)
    assert not any(asked[:MAX_PROBES])
    assert all(asked[MAX_PROBES + 1 :])
