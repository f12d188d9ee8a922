"""Budgets: allocation against brute force, what steps cost, and both while other processes make steps longer."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.budget import ENOUGH, FRESH_STEPS, LONGEST_SLEEP, NEW_SIZE_COST, NUM_BINS, Budget, StepTimes
from rollout_spec.budget import allocate as allocate_into

UNIT = st.floats(0, 1, width=32)


def allocate(survival, starts, value, cost):
    taken = np.empty(starts.size - 1, np.int64)
    gain = allocate_into(survival, starts, value, cost, np.empty((2, NUM_BINS)), taken)
    expected = net_gain(taken, survival, starts, value, cost)
    assert gain == pytest.approx(expected, abs=2 * value * survival.size / NUM_BINS)
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


def decide(budget, confidence, starts, num_tokens):
    """The tokens of each draft that are verified, in a step for which `wants_drafts` said True."""
    size = starts.size - 1
    taken, gain = np.zeros(size, np.int64), 0.0
    if confidence.size:
        value, cost = budget.costs(size, num_tokens, confidence.size)
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
    taken = [step(budget, confidence, lambda n: 1.0, 2, 1000.0 if n == ENOUGH else 0.01)[1] for n in range(100)]
    assert np.median(taken[20:]) == 4


def test_a_new_cost_without_drafts_is_noticed():
    """Steps get as cheap as never before, but for those with drafts: half right, these no longer pay."""
    budget, confidence = Budget(), np.tile([0.9, 0.8], (2, 1))
    early = [step(budget, confidence, lambda n: 2.0 if n else 3.0, 1)[1] for _ in range(6000)]
    late = [step(budget, confidence, lambda n: 2.0 if n else 0.5, 1)[1] for _ in range(3000)]
    assert sum(n > 0 for n in early[-1000:]) > 900
    assert sum(n > 0 for n in late[-500:]) < 50


def test_the_last_step_of_about_the_size_counts():
    """Larger ones were measured a long time ago."""
    times = StepTimes()
    for num_tokens, drafted, count in ((100, False, 10), (400, True, 200), (64, False, 10)):
        for _ in range(count):
            times.observe(num_tokens, 0.01, drafted=drafted)
    assert not times.wants_undrafted(80)


def test_prompts_in_a_step_count():
    """Slots are free in a step of few tokens; where 300 tokens of prompts fill it, each costs what it is worth."""
    confidence, starts = np.full(8, 0.5, np.float32), np.array([0, 4, 8])
    budget = Budget()
    for _ in range(ENOUGH):
        for n in (2, 302):
            budget.times.observe(n, max(1.0, n / 100), drafted=False)
        for n in (3, 50, 100, 303, 350, 400):
            budget.times.observe(n, max(1.0, n / 100), drafted=True)
    for num_tokens, expected in ((2, 8), (302, 0)):
        assert budget.wants_drafts(num_tokens)
        assert decide(budget, confidence, starts, num_tokens=num_tokens).sum() == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(12, 4), (11, 5), (16, 0)])
def test_a_captured_size_is_filled_and_not_passed(num_tokens, expected):
    """A step of 16 tokens costs what one of 12 does, and one more token ten times as much."""
    budget = Budget()
    budget.times.pad_to((16, 32))
    for _ in range(20):
        budget.times.observe(12, 1.0, drafted=False)
        budget.times.observe(16, 1.0, drafted=True)
        budget.times.observe(32, 10.0, drafted=True)
    assert budget.wants_drafts(num_tokens)
    confidence, starts = np.full(6, 0.9, np.float32), np.array([0, 3, 6])
    assert decide(budget, confidence, starts, num_tokens=num_tokens).sum() == expected


def test_a_step_of_a_padded_size_is_new_once():
    times = StepTimes()
    times.pad_to((8, 16))
    times.observe(3, 1.0, drafted=False)  # as long as one of 4, and another size than one of 5
    times.observe(20, 1.0, drafted=False)
    for is_new in (True, False):
        cost = times.drafted(9, 4)[0]
        assert (cost[1:].min() >= NEW_SIZE_COST) == (cost[1:].max() > NEW_SIZE_COST / 2) == is_new
        times.observe(10, 1.0, drafted=True)


# -- what steps cost ----------------------------------------------------------------------------------------------


def test_a_curve_never_falls():
    """A larger step that took less shows that a smaller one was held up, unless that was long ago."""
    times = StepTimes()
    times.observe(1, 1.0, drafted=False)
    for n, seconds in ((10, 1.0), (20, 3.0), (40, 2.0), (80, 4.0)):
        for _ in range(ENOUGH):
            times.observe(n, seconds, drafted=True)
    assert times.drafted(1, 79)[0][[9, 19, 39, 79]].tolist() == [0.0, 1.0, 1.0, 3.0]
    for _ in range(FRESH_STEPS):
        times.observe(20, 3.0, drafted=True)
    assert times.drafted(1, 39)[0][[19, 39]].tolist() == [2.0, 2.0]


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
        if len(unshared) >= share or budget.times.is_awaited(SIZE + n, drafted=n > 0):
            for num_tokens, took, drafted in unshared:
                budget.observe_step(num_tokens, took, drafted=drafted)
            unshared = []
    return np.array(taken)


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


def test_other_padded_sizes_forget_what_was_measured():
    times = StepTimes()
    times.pad_to((8, 16))
    for _ in range(5):
        times.observe(3, 1.0, drafted=False)
        times.observe(10, 9.0, drafted=True)
    times.pad_to((16, 8))
    assert not times.is_awaited(10, drafted=True), "the same ones"
    times.pad_to((4, 16))
    assert times.wants_undrafted(3)
    assert times.is_awaited(10, drafted=True)
    times.observe(3, 1.0, drafted=False)
    assert not times.drafted(3, 4)[2], "no cost of drafts is known"
