"""Budgets while other processes make steps longer: what pays is still found, and what does not is still left."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.budget.decide import Budget

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
        slots = np.zeros(SIZE, np.int64)
        if budget.wants_drafts(SIZE):
            slots = budget.decide(CONFIDENCE, STARTS, num_tokens=SIZE)
            budget.survival.observe(CONFIDENCE, STARTS, slots, np.minimum(slots, 3))
        n = int(slots.sum())
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


def test_ranks_that_observe_the_same_decide_the_same():
    def run():
        rng = np.random.default_rng(3)
        return slots_taken(600, lambda n: 1.0 + 0.05 * n, lambda i, n: float(rng.lognormal(0, 0.5)))

    np.testing.assert_array_equal(run(), run())


@pytest.mark.parametrize("share", [1, 16])
def test_what_is_expensive_is_tried_as_a_whole_a_few_times_only(share):
    """Each slot costs a whole step. Ranks that learn times late must not go on meanwhile."""
    taken = slots_taken(1500, lambda n: 1.0 + n, lambda i, n: 1.0, share)
    assert (taken == SIZE * K).sum() <= 5
    assert taken[300:].max() <= 4
    assert taken.sum() < 0.12 * taken.size


@pytest.mark.parametrize("share", [1, 16])
def test_less_than_all_pays(share):
    """Steps of up to 12 tokens cost nothing more, larger ones four times as much."""
    taken = slots_taken(1500, lambda n: 1.0 if SIZE + n <= 12 else 4.0, lambda i, n: 1.0, share)
    assert (taken[-500:] > 8).mean() < 0.05
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
