"""Conversations: a later turn's prompt is the earlier one, the rollout and a tool's answer."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_spec.drafters.base import problem_of_prompt
from tests.integrations.engines import FIRST_PROMPTS, build, converse, session_of, verify_all

pytestmark = pytest.mark.engine


def test_later_turns_draft_from_earlier_ones(tiny_model, off, reference_model):
    on = build(tiny_model, **verify_all(drafter="suffix", num_speculative_tokens=4))
    counts = converse(on, off, reference_model)
    assert counts[0]["problem"][0] == 0  # nobody else has the same problem
    assert counts[2]["problem"][1] > counts[1]["problem"][1] > 0
    session = session_of(on)
    session.drafter.check_integrity()
    problems = {problem_of_prompt(prompt) for prompt in FIRST_PROMPTS}
    assert set(session.drafter._problems) == problems | {problem_of_prompt([1, 4, 9])}
    # A turn's prompt adds the tool's answer, and up to 32 tokens of context.
    ended = 3 * 19 + 2 * 3 * (3 + 32) + 3 * 3 * 16 + 3 + 2 * 3
    assert session.drafter._store.num_tokens <= ended
