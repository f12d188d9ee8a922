"""How many draft tokens are verified: the rule, and whole drafts or none as it follows from what steps take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec import schedule
from rollout_spec.schedule import Schedule, best_cut

K = 7


@given(st.integers(1, 4), st.lists(st.floats(0, 1), max_size=6), st.data())
def test_the_best_cut_is_that_of_brute_force(num_requests, survival, data):
    """Whatever steps take, also where not all draft tokens have room."""
    seconds = np.array(data.draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=len(survival) + 2)))
    likeliest = sorted(survival, reverse=True)
    rates = [(num_requests + sum(likeliest[:n])) / of_step for n, of_step in enumerate(seconds[: len(survival) + 1])]
    assert rates[best_cut(num_requests, np.array(survival, np.float64), seconds)] == pytest.approx(max(rates))


def run(seconds_of, right, num_requests=16, steps=1000, k=K):
    """K of each step, and (seconds that all took, seconds without drafts) per emitted token.

    Args:
        seconds_of: By tokens and draft tokens.
        right: Probability that a drafted token is right, once it is reached, by step.
        num_requests: Of every step, or by step.
        k: Most draft tokens of a request.
    """
    rng, of_engine, chosen, total, emitted = np.random.default_rng(0), Schedule(K), [], 0.0, 0
    for step in range(steps):
        size = num_requests(step) if callable(num_requests) else num_requests
        chosen.append(of_engine.choose(size, k))
        accepted = np.cumprod(rng.random((size, chosen[-1])) < right(step), 1).sum(1)
        seconds = seconds_of(size * (chosen[-1] + 1), size * chosen[-1])
        of_engine.observe(np.full(size, chosen[-1]), accepted, seconds)
        total += seconds
        emitted += size + accepted.sum()
    return np.array(chosen), (total / emitted, seconds_of(size, 0) / size)


@pytest.mark.parametrize(("num_requests", "k"), [(1, 7), (16, 7), (40, 3), (90, 1)])
def test_whole_drafts_where_they_cost_nothing(num_requests, k):
    chosen, (ours, none) = run(lambda tokens, drafts: 0.01, lambda step: 0.7, num_requests, k=k)
    assert np.mean(chosen[100:] == k) > 0.9
    assert set(chosen) <= {0, k}
    assert ours < 0.75 * none


@pytest.mark.parametrize(
    ("seconds_of", "right", "num_requests"),
    [
        pytest.param(lambda tokens, drafts: tokens * 1e-3, 0.5, 16, id="each token costs"),
        pytest.param(lambda tokens, drafts: 0.010 + 0.015 * (drafts > 0), 0.5, 16, id="drafts cost as such"),
        pytest.param(lambda tokens, drafts: 0.010 + tokens * 5e-5, 0.02, 16, id="hardly one is right"),
        # As a few tell nothing, one request is given more of them to try, and still few.
        pytest.param(lambda tokens, drafts: 0.010 + 0.010 * (drafts > 0), 0.02, 1, id="one request"),
        pytest.param(lambda tokens, drafts: 0.010 + 0.010 * (drafts > 0), 0.3, 1, id="one request, some are right"),
    ],
)
def test_none_where_they_do_not_pay(seconds_of, right, num_requests):
    chosen, (ours, none) = run(seconds_of, lambda step: right, num_requests, steps=8000)
    assert np.mean(chosen[1000:] == 0) > 0.85
    assert ours < 1.1 * none


def test_drafts_that_become_right_are_noticed():
    """As in a second epoch."""
    chosen, _ = run(lambda _, drafts: 0.010 + 0.003 * (drafts > 0), lambda step: (0.05, 0.7)[step >= 3000], steps=6000)
    assert np.mean(chosen[500:3000] == 0) > 0.9
    assert np.mean(chosen[4500:] == K) > 0.9


def test_what_a_request_costs_is_not_blamed_on_drafts():
    """Reading a request's KV cache takes as long with drafts as without, and longer than verifying them."""
    sizes = np.append(np.random.default_rng(0).integers(1, 97, 1000), np.full(1000, 40))
    of_requests = lambda tokens, drafts: 0.005 + 3e-4 * (tokens - drafts)  # noqa: E731
    chosen, _ = run(of_requests, lambda step: 0.5, lambda step: sizes[step], steps=2000, k=3)
    assert np.mean(chosen[1000:] == 3) > 0.95


def test_few_requests_keep_their_drafts_where_those_of_many_do_not_pay():
    as_such = lambda tokens, drafts: 0.010 + 0.003 * (drafts > 0)  # noqa: E731
    chosen, _ = run(as_such, lambda step: (0.7, 0.1)[step % 2], lambda step: (8, 256)[step % 2], steps=6000)
    assert np.mean(chosen[1000::2] == K) > 0.95
    assert np.mean(chosen[1001::2] == 0) > 0.9


def test_steps_of_unlike_requests_say_nothing_of_times():
    of_engine = Schedule(K)
    for _ in range(2 * schedule.TRIAL):
        of_engine.observe(np.array([K, 0]), np.array([K, 0]), 1.0)
        assert of_engine.choose(2, K) == K, "it is not known yet"


def test_requests_that_have_no_draft_say_nothing_of_what_is_right():
    of_engine, chosen, drafted = Schedule(K), [], np.array([1, *[0] * 89])
    for _ in range(1000):
        chosen.append(of_engine.choose(90, 1))
        of_engine.observe(drafted, drafted, None)
    assert np.mean(np.array(chosen) == 1) > 0.9


@pytest.mark.parametrize(("is_right", "expected"), [(1, K), (0, 0)])
def test_while_no_time_is_known_drafts_go_by_what_is_right(is_right, expected):
    """Prompts are read in each step. What is tried is tried a few times."""
    of_engine, chosen = Schedule(K), []
    for _ in range(1000):
        chosen.append(of_engine.choose(16, K))
        of_engine.observe(np.full(16, chosen[-1]), np.full(16, chosen[-1] * is_right), None)
    assert np.mean(np.array(chosen[200:]) == expected) > 0.9


def test_drafts_for_which_a_step_had_no_room():
    """Of one request, or of all, or more tokens than the schedule knows."""
    of_engine = Schedule(K)
    for _ in range(100):
        k = of_engine.choose(16, K)
        drafted = np.full(16, k)
        drafted[-1] = min(k, 2)
        of_engine.observe(drafted, np.zeros(16, np.int64), 0.01 + 0.001 * k)
    assert of_engine.choose(16, K) == of_engine.choose(16, 0) == 0
    of_engine.observe(np.full(16, 9), np.full(16, 9), 0.01)


@pytest.mark.parametrize("slow", [0.010, 10.0], ids=["", "one step is slow"])
def test_times_of_long_ago_and_a_slow_step_are_not_held_against_a_k(slow):
    """During a pause steps become shorter, as with shorter contexts, and drafts right again."""
    of_engine, chosen = Schedule(K), []
    for step in range(3000):
        k = of_engine.choose(16, K)
        without, more = (0.020, 0.005) if step < 800 else (0.008, 0.002)
        is_first = step >= 800 and k == K and K not in chosen[800:]
        seconds = slow if is_first else without + more * (k > 0)
        of_engine.observe(np.full(16, k), np.full(16, min(k, 1) * (not 300 <= step < 800)), seconds)
        chosen.append(k)
    assert np.mean(np.array(chosen[100:300]) == K) > 0.9
    assert np.mean(np.array(chosen[500:800]) == 0) > 0.9
    assert np.mean(np.array(chosen[2100:]) == K) > 0.85


def test_a_trial_ends_where_its_k_is_no_longer_allowed():
    of_engine = Schedule(7)
    assert of_engine.choose(24, 7) == 7, "it is tried"
    assert of_engine.choose(25, 3) in (0, 3)


@pytest.mark.parametrize(("n", "k"), [(1, 7), (32, 7), (48, 7), (50, 3), (96, 3), (192, 1), (4096, 1)])
def test_one_k_is_that_of_half_the_requests(n, k):
    assert schedule.one_k(schedule.affordable_ranges(7, 192), n) == k
