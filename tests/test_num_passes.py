"""The number of forward passes per step, as it follows from what steps take."""

from collections import Counter

import numpy as np
import pytest

from rollout_spec.num_passes import MAX_SUB_STEPS, PATIENCE, TRIAL, NumPasses

OVERLAP = 3
"""As in `estimate/costs.py`."""


def seconds_of(n, device, step=3.0, further=1.2):
    """Milliseconds of a step: what its passes take the device and what it takes the host, of which one waits."""
    return ((n * device) ** OVERLAP + (step + (n - 1) * further) ** OVERLAP) ** (1 / OVERLAP)


def run(passes, device, steps=400, num_requests=64, noise=0.0, has_drafts=True, seed=0, **host):
    """The number of passes of each step. What a step takes is heard where the ones before and after it have as many."""
    rng, chosen, took = np.random.default_rng(seed), [], []
    for _ in range(steps):
        n = passes.choose(num_requests, has_drafts)
        chosen.append(n)
        took.append(seconds_of(n, device, **host) * np.exp(rng.normal(0, noise)))
        if len(set(chosen[-3:])) == 1 and len(chosen) > 2:
            passes.observe(num_requests, has_drafts, n, took[-2])
    return chosen


HOST_BOUND, BETWEEN, DEVICE_BOUND = (0.8, 4), (4.0, 2), (12.0, 1)
CASES = pytest.mark.parametrize(("device", "best"), [HOST_BOUND, BETWEEN, DEVICE_BOUND])


@CASES
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_as_few_as_are_nearly_the_fastest(device, best, noise):
    chosen = run(NumPasses(), device, 1000, noise=noise)
    cost = sum(seconds_of(n, device) for n in chosen) / sum(chosen)
    assert cost < 1.06 * min(seconds_of(n, device) / n for n in (1, 2, 4))
    if noise < 0.2:
        assert Counter(chosen[100:]).most_common(1)[0][0] == best


@CASES
def test_few_steps_try_others(device, best):
    chosen = run(NumPasses(), device, 4 * PATIENCE)
    assert sum(n != best for n in chosen[:PATIENCE]) <= 5 * TRIAL
    assert sum(n != best for n in chosen[PATIENCE:]) <= 6 * TRIAL


def test_what_steps_take_may_change():
    passes = NumPasses()
    for device, best in (HOST_BOUND, DEVICE_BOUND, HOST_BOUND):
        run(passes, device, 20 * PATIENCE)
        assert Counter(run(passes, device, 200)).most_common(1)[0][0] == best


def test_a_new_size_begins_like_the_last_one():
    passes = NumPasses()
    run(passes, DEVICE_BOUND[0])
    assert run(passes, DEVICE_BOUND[0], 1, num_requests=16) == [1]
    assert not passes.is_trial
    assert run(passes, DEVICE_BOUND[0], 20, num_requests=16, has_drafts=False) == [1] * 20


def test_a_number_that_no_step_could_time_is_not_tried_for_ever():
    passes = NumPasses()
    chosen = [passes.choose(64, True) for _ in range(1000)]
    assert Counter(chosen).most_common(1)[0][0] == 2
    assert passes.is_trial == (chosen[-1] != 2)


@pytest.mark.parametrize("most", [1, 2, 3, 4, MAX_SUB_STEPS])
def test_never_more_than_the_largest(most):
    assert max(run(NumPasses(most), HOST_BOUND[0])) == max(n for n in (1, 2, 4) if n <= most)


def test_what_was_not_asked_for_says_nothing():
    passes = NumPasses()
    passes.observe(64, True, 3, 1.0)
    assert passes.choose(64, True) in (1, 2, 4)
