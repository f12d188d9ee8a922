"""`compare_every`: which generations are compared with which, See also test_controller.py."""

import math

import numpy as np
import pytest

from rollout_spec.integrations.trainers.comparison import Comparison


def compare(comparison, generations):
    """(requests, tokens, seconds) of each."""
    for generation in generations:
        comparison.observe(*generation)
    return comparison.measured()


def test_each_generation_without_drafts_is_compared_with_both_its_neighbours():
    comparison = Comparison(3)
    assert [comparison.is_plain() or comparison.observe(8, 1, 1.0) for _ in range(3)] == [None, None, True]
    # Time per token 1, 1, [4], 4: the machine has become slower meanwhile.
    measured = compare(Comparison(3), [(8, 10, 10.0), (8, 20, 20.0), (8, 10, 40.0), (8, 10, 40.0)])
    assert measured == (pytest.approx(2.0), None, None, 1)


@pytest.mark.parametrize("odd", range(3))
def test_generations_with_other_numbers_of_requests_are_not_compared(odd):
    generations = [(8, 10, 1.0)] * 3
    generations[odd] = (9, 10, 1.0)
    assert compare(Comparison(3), [(8, 10, 1.0), *generations]) is None
    nothing = [(8, 10, 1.0)] * 3
    nothing[odd] = (0, 0, 1.0)
    assert compare(Comparison(3), [(8, 10, 1.0), *nothing]) is None


def test_turns_are_compared_with_the_same_turns():
    """Two in each step, of which the second takes twice as long; a step may have a third."""
    comparison = Comparison(3)
    for step in range(4):
        for turn in range(3 if step == 1 else 2):
            seconds = (1.0 + turn) * (1.5 if comparison.is_plain(turn) else 1.0)
            comparison.observe(8, 10, seconds, turn)
    assert comparison.measured().generations == 2
    assert comparison.measured().speedup == pytest.approx(1.5)


@pytest.mark.parametrize("every", [3, 5])
def test_the_interval_has_the_true_value_in_nine_of_ten_runs(every):
    """Also where the machine changes slowly."""
    rng, right, runs = np.random.default_rng(0), 0, 400
    for _ in range(runs):
        comparison, drift = Comparison(every), rng.normal(0, 0.02)
        for number in range(every * 6 + 1):
            seconds = math.exp(rng.normal(0, 0.1) + drift * number) * (1.7 if comparison.is_plain() else 1.0)
            comparison.observe(8, 1, seconds)
        measured = comparison.measured()
        assert measured.generations == 6
        right += measured.speedup_low <= 1.7 <= measured.speedup_high
    assert 0.86 < right / runs < 0.94
