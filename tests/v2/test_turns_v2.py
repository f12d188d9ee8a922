"""Conversations in vLLM's V2 model runner, with the drafter on the host and on the device."""

from __future__ import annotations

import pytest

from rollout_spec.drafters.base import problem_of_prompt
from tests.integrations.engines import FIRST_PROMPTS, PLAIN, build, converse, runner_of, session_of, verify_all

pytestmark = pytest.mark.engine

SETTINGS = {**PLAIN, "logprobs": 0}
PROBLEMS = {problem_of_prompt(prompt) for prompt in [*FIRST_PROMPTS, [1, 4, 9]]}


def test_later_turns_draft_from_earlier_ones(tiny_model, stock, reference_model):
    on = build(tiny_model, **verify_all(drafter="suffix", num_speculative_tokens=3))
    counts = converse(on, stock, reference_model, **SETTINGS)
    assert counts[0]["problem"][0] == 0  # nobody else has the same problem
    assert counts[2]["problem"][1] > counts[1]["problem"][1] > 0
    drafter = session_of(on).drafter
    drafter.check_integrity()
    assert set(drafter._problems) == PROBLEMS


def test_later_turns_draft_from_earlier_ones_on_the_device(tiny_model, stock, reference_model):
    options = {"max_resident_tokens": 4096}
    on = build(tiny_model, **verify_all(drafter="device", num_speculative_tokens=3, drafter_options=options))
    counts = converse(on, stock, reference_model, **SETTINGS)
    assert counts[0]["problem"][0] == 0
    assert counts[2]["problem"][1] > counts[1]["problem"][1] > 0
    drafter = runner_of(on).speculator.drafter
    drafter.check_integrity()
    assert {rollout.problem_id for rollout in drafter._archive.order} == PROBLEMS
