"""K by the number of requests, as it follows from what steps take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import measured_schedule
from rollout_spec.integrations.vllm.measured_schedule import MeasuredSchedule

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
    chosen, (ours, none) = run(seconds_of, right)
    assert np.mean(chosen[200:] == 0) > 0.85
    assert ours < 1.06 * none


def test_shorter_ones_where_the_last_tokens_do_not_pay():
    chosen, (ours, none) = run(lambda tokens, drafts: 0.010 + 4e-4 * max(0, tokens - 64), 0.6)
    assert np.mean(chosen[200:] == 3) > 0.7
    assert ours < 0.7 * none


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
    for _ in range(5):
        schedule.observe(np.array([7, 0]), np.array([7, 0]), 1.0)
        assert schedule[2] == 7, "it is not known yet"


def test_whole_drafts_while_no_time_is_known():
    """Prompts are read in each step. What is tried is tried a few times."""
    schedule, chosen = MeasuredSchedule(MOST), []
    for _ in range(400):
        chosen.append(schedule[16])
        schedule.observe(np.full(16, chosen[-1]), np.full(16, chosen[-1]), None)
    assert np.mean(np.array(chosen[40:]) == 7) > 0.9


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


def test_where_nothing_may_be_drafted():
    assert run(lambda tokens, drafts: 0.01, 0.7, 120, 50)[0].tolist() == [0] * 50


def test_what_the_schedule_is_told_of_a_step(monkeypatch):
    """A step takes from when it was scheduled, or the one before had ended, to when its output is there."""
    now, told = [0.0], []
    monkeypatch.setattr(measured_schedule, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    schedule = MeasuredSchedule(MOST)
    monkeypatch.setattr(schedule, "observe", lambda *of_step: told.append(of_step))

    def output(at, drafts, sampled, prompt_tokens=0):
        now[0] = at
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(drafts, 1),
            total_num_scheduled_tokens=sum(1 + k for k in drafts.values()) + prompt_tokens,
            scheduled_spec_decode_tokens={name: [-1] * k for name, k in drafts.items() if k},
        )
        rows = {name: i for i, name in enumerate(sampled)}
        schedule.observe_output(
            scheduled, SimpleNamespace(sampled_token_ids=list(sampled.values()), req_id_to_index=rows)
        )

    assert schedule[2] == 7  # scheduled at 0: whole drafts, as nothing is known
    now[0] = 1.0
    assert schedule[2] == 7  # scheduled while the first one runs
    output(3.0, {"a": 2, "b": 0}, {"a": [5, 6], "b": [7]})
    output(5.0, {"a": 2, "b": 2}, {"a": [5], "b": [7, 8, 9]})
    now[0] = 9.0  # nobody asked for anything meanwhile
    assert schedule[1] == 7
    output(10.0, {"c": 0}, {"c": []}, prompt_tokens=20)  # a prompt's first part
    output(10.0, {}, {})
    drafted, accepted, seconds = zip(*told, strict=True)
    assert [of_step.tolist() for of_step in drafted] == [[2, 0], [2, 2], []]
    assert [of_step.tolist() for of_step in accepted] == [[1, 0], [0, 2], []]
    assert seconds == (3.0, 2.0, None)
