"""Budgets: allocation against brute force, what steps cost, and both while other processes make steps longer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.budget import FRESH_STEPS, LONGEST_SLEEP, MIN_OBSERVATIONS, NEW_SIZE_COST, NUM_BINS, Budget, StepCost
from rollout_spec.budget import allocate as allocate_into

UNIT = st.floats(0, 1, width=32)


def allocate(survival, starts, value, cost):
    taken = np.empty(starts.size - 1, np.int64)
    gain = allocate_into(survival, starts, value, cost, np.empty((2, NUM_BINS)), taken)
    assert gain == pytest.approx(
        net_gain(taken, survival, starts, value, cost), abs=2 * value * survival.size / NUM_BINS
    )
    return taken


@st.composite
def cases(draw):
    """(survival, starts, value, cost)."""
    drafts = draw(st.lists(st.lists(UNIT, max_size=3), min_size=1, max_size=3))
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


def decide(budget, confidence, starts, num_tokens, max_draft_tokens=None):
    """The tokens of each draft that are verified, in a step for which `wants_drafts` said True."""
    size = starts.size - 1
    taken, gain = np.zeros(size, np.int64), 0.0
    allowed = confidence.size if max_draft_tokens is None else min(confidence.size, max_draft_tokens)
    if allowed > 0:
        value, cost = budget.costs(size, num_tokens, allowed)
        trusted = np.minimum(budget.trust * confidence.astype(float), 1.0)
        gain = allocate_into(trusted, starts, value, cost, np.empty((2, NUM_BINS)), taken)
    budget.note(size, gain)
    return taken


def observe(budget, confidence, starts, slots, accepted):
    expected = sum(confidence[start : start + n].sum() for start, n in zip(starts, slots, strict=False))
    budget.observe_drafts(expected, accepted.sum())


def take(budget, confidence, starts, right):
    """Whether the drafter is asked, and the slots of each draft, of which `right` tokens would be accepted."""
    size = starts.size - 1
    slots, asked = np.zeros(size, np.int64), budget.wants_drafts(size)
    if asked:
        slots = decide(budget, confidence, starts, num_tokens=size)
        observe(budget, confidence, starts, slots, np.minimum(slots, right))
    return asked, slots


def step(budget, confidence, seconds, right, draft_seconds=0.0):
    """One step of requests with equal drafts, of which `right` tokens would be accepted. Returns (asked, slots)."""
    size, k = confidence.shape
    asked, slots = take(budget, confidence.astype(np.float32).ravel(), np.arange(size + 1) * k, right)
    taken, drafting = int(slots.sum()), draft_seconds * asked
    budget.observe_step(
        size + taken, seconds(taken) + drafting, drafted=taken > 0, num_asked=size * asked, draft_seconds=drafting
    )
    return asked, taken


def test_a_drafter_that_is_never_right_is_asked_ever_less_often():
    """Steps cost the same whatever they verify, so only survival speaks against its drafts."""
    budget = Budget()
    asked = [step(budget, np.full((2, 4), 0.9), lambda taken: 1.0, 0, 0.1)[0] for _ in range(1500)]
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
    assert often or 500 // (LONGEST_SLEEP + 2) <= sum(asked[-500:]) < 100


def test_a_drafter_that_compiles_at_first_is_not_given_up():
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    taken = [
        step(budget, confidence, lambda n: 1.0, 2, 1000.0 if n == MIN_OBSERVATIONS else 0.01)[1] for n in range(100)
    ]
    assert np.median(taken[20:]) == 4


@pytest.mark.parametrize(("slot_seconds", "expected"), [(0.0, 8), (1.0, 0)])
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
        is_asked, slots = take(budget, confidence, starts, right=1)
        taken = int(slots.sum())
        asked.append(is_asked)
        busy.append(taken > 0)
        drafting = draft_seconds * is_asked * (1 if num_drafted < size else 2)
        seconds = (drafted_seconds if taken else 1.0) + drafting
        budget.observe_step(size + taken, seconds, drafted=taken > 0, num_asked=size * is_asked, draft_seconds=drafting)
    assert sum(busy[300:]) < 15
    assert not draft_seconds or sum(asked[300:]) < 30


def test_a_new_cost_without_drafts_is_noticed():
    """Steps get as cheap as never before, but for those with drafts: half right, these no longer pay."""
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    early = [step(budget, confidence, lambda n: 2.0 if n else 3.0, 1)[1] for _ in range(6000)]
    late = [step(budget, confidence, lambda n: 2.0 if n else 0.5, 1)[1] for _ in range(3000)]
    assert sum(n > 0 for n in early[-1000:]) > 900
    assert sum(n > 0 for n in late[-500:]) < 50


def test_the_last_step_of_about_the_size_counts():
    """Larger ones were measured a long time ago."""
    cost = StepCost()
    for num_tokens, drafted, count in ((100, False, 10), (400, True, 200), (64, False, 10)):
        for _ in range(count):
            cost.observe(num_tokens, 0.01, drafted=drafted)
    assert not cost.undrafted(80)[1]


def test_dear_steps_are_tried_again():
    """The price of drafts falls after a while: that is found out."""
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    early = [step(budget, confidence, lambda n: 1.0 + 2 * n, 2)[1] for _ in range(6 * 128)]
    late = [step(budget, confidence, lambda n: 1.0, 2)[1] for _ in range(40 * 128)]
    assert sum(n > 0 for n in early) < 40
    assert np.median(late[-128:]) == 4


def test_each_size_is_looked_at():
    """Phases begin with 64 requests and end with 4, whose first steps without drafts were slow: that is found out."""
    budget, drafted, slow = Budget(), [], 2
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


@pytest.mark.parametrize(("sizes", "size"), [((9, 18, 27), 3), ((9, 18, 27), 4), ((1, 8, 64, 512), 20)])
def test_drafts_pay_where_steps_are_padded_to_few_sizes(sizes, size):
    """As in V1 with full graphs for steps in which every request has K tokens."""
    budget = Budget()
    budget.cost.pad_to(sizes)
    taken = [step(budget, np.full((size, 4), 0.9), lambda n: 1.0, 4)[1] for _ in range(200)]
    assert np.median(taken[-100:]) > 0


@pytest.mark.parametrize("size", [1, 64])
def test_drafts_that_gain_little_are_verified_where_that_is_free(size):
    budget = Budget()
    taken = [step(budget, np.full((size, 1), 0.2), lambda n: 1.0, n % 5 == 0)[1] for n in range(3000)]
    assert np.mean(np.array(taken[-1000:]) > 0) > 0.8


@given(st.integers(-1, 6))
def test_the_token_budget_is_kept(max_draft_tokens):
    budget = Budget()
    for _ in range(MIN_OBSERVATIONS):
        budget.cost.observe(2, 1.0, drafted=False)
    confidence = np.full(8, 0.99, np.float32)
    most = 0
    for _ in range(30):
        assert budget.wants_drafts(2)
        taken = decide(budget, confidence, np.array([0, 4, 8]), num_tokens=2, max_draft_tokens=max_draft_tokens)
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
        assert decide(budget, confidence, starts, num_tokens=num_tokens).sum() == expected


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
    assert decide(budget, confidence, starts, num_tokens=num_tokens).sum() == expected


def test_a_step_of_a_padded_size_is_new_once():
    cost, costs = StepCost(), np.empty(5)
    cost.pad_to((8, 16))
    cost.drafted(4, 4, 1.0, costs)
    assert costs[1:].min() >= NEW_SIZE_COST
    cost.observe(5, 1.0, drafted=True)
    cost.drafted(4, 4, 1.0, costs)
    assert costs[1:].max() < NEW_SIZE_COST / 2


# -- what steps cost ----------------------------------------------------------------------------------------------


def test_a_curve_never_falls():
    """A larger step that took less shows that a smaller one was held up, unless that was long ago."""
    cost, costs = StepCost(), np.empty(80)
    for n, seconds in ((10, 1.0), (20, 3.0), (40, 2.0), (80, 4.0)):
        for _ in range(MIN_OBSERVATIONS):
            cost.observe(n, seconds, drafted=True)
    cost.drafted(1, 1, 1.0, costs)
    assert costs[[9, 19, 39, 79]].tolist() == [0.0, 1.0, 1.0, 3.0]
    for _ in range(FRESH_STEPS):
        cost.observe(20, 3.0, drafted=True)
    cost.drafted(1, 1, 1.0, costs)
    assert costs[[19, 39]].tolist() == [2.0, 2.0]


def test_drafts_that_were_wrong_are_tried_again_when_the_policy_has_changed():
    budget = Budget()
    for accepted in (0, 6):
        for _ in range(100):
            budget.observe_drafts(8.0, accepted)
            budget.observe_step(9, 1.0, drafted=True)
        assert budget.trust == pytest.approx(accepted / 8, abs=0.4 if accepted else 0.02)
        for _ in range(2000):
            budget.observe_step(1, 1.0, drafted=False)
        assert budget.trust > 0.6


# -- noise -----------------------------------------------------------------------------------------------------------

SIZE, K = 4, 4
CONFIDENCE = np.tile(np.float32([0.9, 0.8, 0.7, 0.6]), SIZE)
STARTS = np.arange(SIZE + 1) * K


def slots_taken(steps, seconds, slowdown, share=1):
    """Slots of each step of four requests, three of whose four drafted tokens are right.

    Args:
        seconds: What a step with so many slots takes by itself.
        slowdown: How much longer a step is, by its number and its slots.
        share: Steps after which the budget learns what they took, as on tensor-parallel ranks, unless they are awaited.
    """
    budget, taken, unshared = Budget(), [], []
    for i in range(steps):
        n = int(take(budget, CONFIDENCE, STARTS, right=3)[1].sum())
        unshared.append((SIZE + n, seconds(n) * slowdown(i, n), n > 0))
        taken.append(n)
        if len(unshared) >= share or budget.cost.is_awaited(SIZE + n, drafted=n > 0):
            for num_tokens, took, drafted in unshared:
                budget.observe_step(num_tokens, took, drafted=drafted)
            unshared = []
    return np.array(taken)


def test_a_burst_at_the_beginning():
    """It begins with the first steps that have drafts: those without were measured before."""
    taken = slots_taken(160, lambda n: 1.0, lambda i, n: 3.0 if 3 <= i < 8 else 1.0)
    assert np.median(taken[-100:]) >= 3 * SIZE
    assert (taken[40:] == 0).sum() < 12


def test_a_burst_that_only_some_steps_feel():
    """Every second step takes twice as long, and so most of the first measurements of a size."""
    taken = slots_taken(300, lambda n: 1.0 + 0.01 * n, lambda i, n: 1.0 + i % 2)
    assert np.median(taken[-200:]) >= 3 * SIZE


@pytest.mark.parametrize("steps", [50, 150, 400])
def test_a_burst_in_the_middle(steps):
    taken = slots_taken(500 + steps, lambda n: 1.0, lambda i, n: 30.0 if 250 <= i < 250 + steps else 1.0)
    during, after = taken[250 : 250 + steps], taken[250 + steps :]
    assert (during == 0).mean() < 0.1
    assert (after == 0).mean() < 0.1


@pytest.mark.parametrize("steps", [range(1), range(3, 4), range(6, 7), range(300, 301), range(7, 400, 9)])
def test_steps_of_an_hour_are_forgotten(steps):
    """The machine was suspended, or the drafter hung: once, at any moment, or now and then."""
    pays = slots_taken(900, lambda n: 0.01 + 0.0001 * n, lambda i, n: 360_000.0 if i in steps else 1.0)
    assert np.median(pays[-450:]) >= 3 * SIZE
    assert (pays[-450:] == 0).mean() < 0.1
    expensive = slots_taken(900, lambda n: 0.01 + 0.01 * n, lambda i, n: 360_000.0 if i in steps else 1.0)
    assert (expensive[-450:] > 0).mean() < 0.05


@pytest.mark.parametrize("noise", [lambda i, n: 1.0, lambda i, n: 1.0 + (i % 3 == 0), lambda i, n: 1.0 + (i // 50 % 2)])
@pytest.mark.parametrize("seconds", [lambda n: 1.0 + n, lambda n: 1.0 + 5 * (n > 0)])
def test_slots_that_are_expensive_are_left_whatever_the_noise(noise, seconds):
    """Each costs a whole step, or all of them together five."""
    taken = slots_taken(1000, seconds, noise)
    assert (taken[:100] > 0).sum() < 30
    assert (taken[100:] > 0).mean() < 0.05


def test_slots_that_become_expensive_are_found_out():
    """Steps with drafts alone take longer, and for good: that is no other process's doing."""
    taken = slots_taken(2500, lambda n: 1.0, lambda i, n: 6.0 if n and i >= 500 else 1.0)
    assert (taken[300:500] > 0).mean() > 0.9
    assert (taken[-500:] > 0).mean() < 0.05


@pytest.mark.parametrize("share", [1, 16])
def test_what_is_expensive_is_tried_as_a_whole_a_few_times_only(share):
    """Each slot costs a whole step. Ranks that learn times late must not go on meanwhile."""
    taken = slots_taken(1500, lambda n: 1.0 + n, lambda i, n: 1.0, share)
    assert (taken == SIZE * K).sum() <= 5
    assert taken.sum() < 0.12 * taken.size


@pytest.mark.parametrize("share", [1, 16])
def test_less_than_all_pays(share):
    """Steps of up to 13 tokens cost nothing more, larger ones four times as much."""
    taken = slots_taken(1500, lambda n: 1.0 if SIZE + n <= 13 else 4.0, lambda i, n: 1.0, share)
    assert (taken[-500:] > 9).mean() < 0.05
    assert (taken[-500:] > 0).mean() > 0.9


@pytest.mark.parametrize("seed", range(20))
def test_cold_sizes(seed):
    """The first step of each number of tokens takes three times as long, on top of noise."""
    seen, rng = set(), np.random.default_rng(seed)

    def slowdown(i, n):
        cold = 1.0 if n in seen else 3.0
        seen.add(n)
        return cold * float(np.exp(abs(rng.normal(0, 0.15))))

    taken = slots_taken(200, lambda n: 1.0 + 0.02 * n, slowdown)
    assert np.median(taken[4:40]) >= 2 * SIZE
    assert np.median(taken[40:]) >= 2 * SIZE
