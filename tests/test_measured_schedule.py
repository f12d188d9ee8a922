"""Drafts or none by the number of requests, as it follows from what steps take."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec import measured_schedule
from rollout_spec.measured_schedule import MeasuredSchedule

MOST = [7] * 25 + [3] * 24 + [1] * 48 + [0] * 32


def run(seconds_of, right, num_requests=16, steps=1000, seed=0):
    """K of each step, and (seconds that all took, seconds without drafts) per emitted token.

    Args:
        seconds_of: By tokens and draft tokens.
        right: Probability that a drafted token is right, once it is reached.
    """
    rng, schedule, chosen, total, emitted = np.random.default_rng(seed), MeasuredSchedule(MOST), [], 0.0, 0
    for _ in range(steps):
        k = schedule[num_requests]
        accepted = np.cumprod(rng.random((num_requests, k)) < right, 1).sum(1)
        seconds = seconds_of(num_requests * (k + 1), num_requests * k)
        schedule.observe(np.full(num_requests, k), accepted, seconds)
        chosen.append(k)
        total += seconds
        emitted += num_requests + accepted.sum()
    return np.array(chosen), (total / emitted, seconds_of(num_requests, 0) / num_requests)


@pytest.mark.parametrize("num_requests", [1, 16, 40, 90])
def test_whole_drafts_where_they_cost_nothing(num_requests):
    chosen, (ours, none) = run(lambda tokens, drafts: 0.01, 0.7, num_requests)
    assert np.mean(chosen[100:] == MOST[num_requests]) > 0.9
    assert chosen.max() == MOST[num_requests], "longer ones are not tried either"
    assert ours < 0.75 * none


@pytest.mark.parametrize(
    ("seconds_of", "right"),
    [
        pytest.param(lambda tokens, drafts: tokens * 1e-3, 0.5, id="each token costs"),
        pytest.param(lambda tokens, drafts: 0.010 + 0.015 * (drafts > 0), 0.5, id="drafts cost as such"),
        pytest.param(lambda tokens, drafts: 0.010 + tokens * 5e-5, 0.02, id="hardly one is right"),
    ],
)
def test_none_where_they_do_not_pay(seconds_of, right):
    chosen, (ours, none) = run(seconds_of, right, steps=6000)
    assert np.mean(chosen[200:] == 0) > 0.85
    assert ours < 1.1 * none


@pytest.mark.parametrize("right", [0.02, 0.3])
def test_one_request_is_given_more_drafts_to_try(right):
    """As a few tell nothing, and still few."""
    chosen, (ours, none) = run(lambda tokens, drafts: 0.010 + 0.010 * (drafts > 0), right, 1, 8000)
    assert np.mean(chosen[1000:] == 0) > 0.85
    assert ours < 1.1 * none


def test_what_a_request_costs_is_not_blamed_on_drafts():
    """Reading a request's KV cache takes as long with drafts as without, and longer than verifying them."""
    rng, schedule, chosen = np.random.default_rng(0), MeasuredSchedule(MOST), []
    for step in range(2000):
        num_requests = int(rng.integers(1, 97)) if step < 1000 else 40
        k = schedule[num_requests]
        accepted = np.cumprod(rng.random((num_requests, k)) < 0.5, 1).sum(1)
        schedule.observe(np.full(num_requests, k), accepted, 0.005 + 3e-4 * num_requests)
        chosen.append(k)
    assert np.mean(np.array(chosen[1000:]) == 3) > 0.95


def test_steps_of_unlike_requests_say_nothing_of_times():
    schedule = MeasuredSchedule(MOST)
    for _ in range(2 * measured_schedule.TRIAL):
        schedule.observe(np.array([7, 0]), np.array([7, 0]), 1.0)
        assert schedule[2] == 7, "it is not known yet"


def test_requests_that_have_no_draft_say_nothing_of_what_is_right():
    schedule, chosen, drafted = MeasuredSchedule(MOST), [], np.array([1, *[0] * 89])
    for _ in range(1000):
        chosen.append(schedule[90])
        schedule.observe(drafted, drafted, None)
    assert np.mean(np.array(chosen) == 1) > 0.9


@pytest.mark.parametrize(("is_right", "expected"), [(1, 7), (0, 0)])
def test_while_no_time_is_known_drafts_go_by_what_is_right(is_right, expected):
    """Prompts are read in each step. What is tried is tried a few times."""
    schedule, chosen = MeasuredSchedule(MOST), []
    for _ in range(1000):
        chosen.append(schedule[16])
        schedule.observe(np.full(16, chosen[-1]), np.full(16, chosen[-1] * is_right), None)
    assert np.mean(np.array(chosen[200:]) == expected) > 0.9


def test_drafts_that_become_right_are_noticed():
    """As in a second epoch."""
    rng, schedule, chosen = np.random.default_rng(0), MeasuredSchedule(MOST), []
    for step in range(6000):
        k = schedule[16]
        accepted = np.cumprod(rng.random((16, k)) < (0.05 if step < 3000 else 0.7), 1).sum(1)
        schedule.observe(np.full(16, k), accepted, 0.010 + 0.003 * (k > 0))
        chosen.append(k)
    assert np.mean(np.array(chosen[500:3000]) == 0) > 0.9
    assert np.mean(np.array(chosen[4500:]) == 7) > 0.9


def test_drafts_for_which_a_step_had_no_room():
    """Of one request, or more tokens than the schedule knows."""
    schedule = MeasuredSchedule(MOST)
    for _ in range(100):
        k = schedule[16]
        drafted = np.full(16, k)
        drafted[-1] = min(k, 2)
        schedule.observe(drafted, np.zeros(16, np.int64), 0.01 + 0.001 * k)
    assert schedule.choose(16) == 0
    schedule.observe(np.full(16, 9), np.full(16, 9), 0.01)


def test_few_requests_keep_their_drafts_where_those_of_many_are_cut():
    """vLLM cuts by what a step of so many takes; what is cut counts as wrong."""
    rng, schedule, chosen = np.random.default_rng(0), MeasuredSchedule([8] * 257), []
    for step in range(6000):
        num_requests = 256 if step % 2 else 8
        k = schedule[num_requests]
        accepted = np.cumprod(rng.random((num_requests, k)) < (0.1 if step % 2 else 0.7), 1).sum(1)
        schedule.observe(np.full(num_requests, k), accepted, 0.010 + 0.003 * (k > 0))
        chosen.append(k)
    assert np.mean(np.array(chosen[1000::2]) == 8) > 0.95
    assert np.mean(np.array(chosen[1001::2]) == 0) > 0.9


@pytest.mark.parametrize("slow", [0.010, 10.0], ids=["", "one step is slow"])
def test_times_of_long_ago_and_a_slow_step_are_not_held_against_a_k(slow):
    """During a pause steps become shorter, as with shorter contexts, and drafts right again."""
    schedule, chosen = MeasuredSchedule(MOST), []
    for step in range(3000):
        k = schedule[16]
        without, more = (0.020, 0.005) if step < 800 else (0.008, 0.002)
        is_first = step >= 800 and k == 7 and 7 not in chosen[800:]
        is_right = not 300 <= step < 800
        schedule.observe(
            np.full(16, k), np.full(16, min(k, 1) * is_right), slow if is_first else without + more * (k > 0)
        )
        chosen.append(k)
    assert np.mean(np.array(chosen[100:300]) == 7) > 0.9
    assert np.mean(np.array(chosen[500:800]) == 0) > 0.9
    assert np.mean(np.array(chosen[2100:]) == 7) > 0.85
