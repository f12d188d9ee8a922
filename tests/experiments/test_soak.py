"""The soak sees what is wrong: its checks find planted faults, and the same seed asks the same.

The soak itself runs here where ROLLOUT_SPEC_SOAK_MINUTES says for how long, e.g. 10.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from experiments.soak.checks import check_answer, compare_round, slope
from experiments.soak.engines import Answer, Rollout
from experiments.soak.workload import VOCAB_SIZE, Kind, Request, Round, Workload
from rollout_spec.noise.host import gumbel
from tests.conftest import environment_for_a_process

PROMPT, SEED = [1, 5, 9], 7
MINUTES = os.environ.get("ROLLOUT_SPEC_SOAK_MINUTES")


def a_request(**changes):
    params = {"temperature": 1.0, "max_tokens": 3, "seed": SEED, "n": 1, "logprobs": 1}
    return dataclasses.replace(Request("a", PROMPT, params, None, 0, None, False, None), **changes)


def sampled(num_tokens=3):
    """What both engines say: tokens of uniform distributions under the request's noise."""
    uniform = {token: -np.log(VOCAB_SIZE) for token in range(VOCAB_SIZE)}
    tokens = [int(gumbel(SEED, len(PROMPT) + i - 1, np.arange(VOCAB_SIZE)).argmax()) for i in range(num_tokens)]
    return Rollout(tokens, "words", [dict(uniform) for _ in tokens], "length", None)


def answer_of(rollout):
    return Answer({("a", 0): rollout})


def compare(ours, reference, request=None):
    round_ = Round(0, 0, [request or a_request()], [])
    return compare_round(round_, answer_of(ours), answer_of(reference))


def test_equal_rollouts_are_equal():
    found = compare(sampled(), sampled())
    assert (found.rollouts, found.tokens, found.ties, found.differences) == (1, 3, 0, [])


def another_token(rollout):
    rollout.token_ids[1] = (rollout.token_ids[1] + 1) % VOCAB_SIZE


def another_logprob(rollout):
    rollout.top[2][rollout.token_ids[2]] -= 0.01


def shorter(rollout):
    del rollout.token_ids[2:], rollout.top[2:]


def another_text(rollout):
    rollout.text = "word"


def another_reason(rollout):
    rollout.finish_reason = "stop"


@pytest.mark.parametrize("change", [another_token, another_logprob, shorter, another_text, another_reason])
def test_each_difference_is_found(change):
    ours = sampled()
    change(ours)
    assert len(compare(ours, sampled()).differences) == 1


def test_a_rollout_that_is_missing_is_a_difference():
    found = compare_round(Round(0, 0, [a_request()], []), Answer(), answer_of(sampled()))
    assert len(found.differences) == 1


def test_tokens_that_were_equally_good_but_for_rounding_are_a_tie():
    ours, reference = sampled(), sampled()
    another_token(ours)
    chosen, other = reference.token_ids[1], ours.token_ids[1]
    noise = gumbel(SEED, len(PROMPT), np.arange(VOCAB_SIZE))
    # As if the target had liked the other token nearly as much as it takes to win.
    for rollout in (ours, reference):
        rollout.top[1][other] += float(noise[chosen] - noise[other]) - 1e-5
    found = compare(ours, reference)
    assert (found.ties, found.differences, found.tokens) == (1, [], 1)


def test_of_a_client_that_left_what_both_have_is_compared():
    request = a_request(leave_after=2)
    ours = sampled()
    shorter(ours)
    assert not compare(ours, sampled(), request).differences
    another_token(ours)
    assert compare(ours, sampled(), request).differences


def test_what_other_weights_have_sampled_is_not_compared_unless_they_came_at_the_same_token():
    ours, reference = sampled(), sampled()
    ours.token_ids[2] = (ours.token_ids[2] + 1) % VOCAB_SIZE
    ours.at_new_weights, reference.at_new_weights = 2, 3
    assert not compare(ours, reference).differences
    reference.at_new_weights = 2
    assert compare(ours, reference).differences


GOOD = {"emitted_tokens": 5, "accepted_tokens": 2, "request_steps": 3, "draft_tokens": 4, "drafter_errors": 0}


@pytest.mark.parametrize(
    "change",
    [{"emitted_tokens": 6}, {"accepted_tokens": 5, "emitted_tokens": 8}, {"request_steps": 0, "emitted_tokens": 2},
     {"drafter_errors": 1}],
)  # fmt: skip
def test_each_wrong_counter_is_found(change):
    answer = answer_of(sampled())
    answer.stats, answer.checks = dict(GOOD), [{"live": 1}]
    round_ = Round(0, 0, [a_request()], [])
    assert check_answer(round_, answer, {}) == []
    answer.stats |= change
    assert len(check_answer(round_, answer, {})) == 1


def test_state_of_a_request_that_is_left_is_found():
    answer = answer_of(sampled())
    answer.stats, answer.checks = dict(GOOD), [{"live": 1}, {"live": 2}]
    assert check_answer(Round(0, 0, [], []), answer, {}) == ["rank 1: state of 2 requests is left after round 0"]


def test_a_slope_is_found_in_noise_and_none_where_there_is_none():
    noise = np.random.default_rng(0).normal(size=300)
    mean, error = slope(noise)
    assert abs(mean) < 3 * error
    mean, error = slope(noise + 0.05 * np.arange(300))
    assert abs(mean - 0.05) < 3 * error
    assert mean > 10 * error


def test_a_seed_asks_the_same_again():
    def rounds(seed):
        workload = Workload(seed, Kind(adapters=True))
        for _ in range(30):
            round_ = workload.next_round()
            workload.observe(round_.requests[0].prompt, [5, 6, 7])
            yield round_

    assert list(rounds("0")) == list(rounds("0")) != list(rounds("1"))
    names = {event.name for round_ in rounds("0") for event in round_.events}
    assert names == {"pause", "preempt", "switch", "weights", "vanish"}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(MINUTES is None, reason="takes as many minutes as ROLLOUT_SPEC_SOAK_MINUTES says")
def test_the_soak():
    command = [sys.executable, "-m", "experiments.soak.soak", "--minutes", str(MINUTES)]
    environment = environment_for_a_process(PYTHONPATH=str(Path(__file__).parents[2]))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
