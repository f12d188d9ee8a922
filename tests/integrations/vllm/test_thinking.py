"""Thinking budgets in the V1 model runner, whose own code for them is wrong where it speculates."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from tests.integrations.engines import build, generate, stats_of, verify_all
from tests.integrations.thinking import KINDS, num_used_up, requests_of, settings_of

pytestmark = pytest.mark.engine


def test_refused_where_the_engine_speculates(tiny_model):
    """Alone, before anything is generated; vLLM would end the thinking of others, whose rollouts would be wrong."""
    llm = build(tiny_model, **settings_of("w5 w6"), **verify_all(num_speculative_tokens=4))
    prompts, params = requests_of("in the prompt")
    with pytest.raises(ValueError, match=r"thinking_token_budget, use the V2 runner .*, or set speculation=False"):
        generate(llm, params, prompts)
    assert not llm.llm_engine.has_unfinished_requests()
    assert stats_of(llm)["steps"] == 0
    generate(llm, params[1::2], prompts[1::2])


@pytest.mark.parametrize(("end", "begins"), KINDS)
def test_without_drafts_they_are_those_of_vllm(tiny_model, end, begins):
    prompts, params = requests_of(begins, temperature=0.0)  # where V1's own noise does not matter
    stock = build(tiny_model, **settings_of(end))
    ours = build(tiny_model, **settings_of(end), **engine_kwargs(speculation=False))
    expected, outputs = (generate(llm, params, prompts) for llm in (stock, ours))
    assert [list(output.token_ids) for output in outputs] == [list(output.token_ids) for output in expected]
    assert num_used_up(ours, prompts, params, outputs) > 2
