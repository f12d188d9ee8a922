"""Thinking budgets: in V2 drafts change nothing; in V1, whose code for them is wrong with drafts, they are refused.

Of the kinds that differ, who says that thinking begins, and by how many tokens it ends.
"""

import pytest

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import compat
from tests.integrations.engines import IS_V2, OF_RUNNER, PLAIN, build, generate, mixed_params, stats_of, verify_all

pytestmark = [
    pytest.mark.skipif(IS_V2 and compat.is_before(0, 28), reason="vLLM says that its V2 has no thinking budgets")
]

BEGIN = 7  # the id of w3
DRAFTING = verify_all(num_speculative_tokens=3, **OF_RUNNER)


@pytest.fixture(scope="module", params=["w5 w6", pytest.param("w5", marks=pytest.mark.exhaustive)])
def engines(request, tiny_model):
    """One that drafts nothing, stock vLLM's where its noise does not matter, and one that drafts."""
    settings = {"reasoning_config": {"reasoning_start_str": "w3", "reasoning_end_str": request.param}}
    options = [engine_kwargs(speculation=False), {}, DRAFTING]
    return [build(tiny_model, max_num_seqs=8, **settings, **arguments) for arguments in options]


def requests_of(begins, **fixed):
    """(prompts, params) of requests with a budget, and of as many without one among them."""
    params = mixed_params(12, 5, **{"max_tokens": 30, "ignore_eos": True, **PLAIN, **fixed})
    said = BEGIN if begins == "in the prompt" else 8
    prompts = [[1, 4 + i % 3, said, 4 + i % 5] for i in range(len(params))]
    for p in params[::2]:
        p.thinking_token_budget = 5
        p.logit_bias = {} if begins == "in the prompt" else {BEGIN: 1.0}
    return prompts, params


def said_by(llm, params, prompts):
    return [list(output.token_ids) for output in generate(llm, params, prompts)]


@pytest.mark.parametrize("begins", ["in the prompt", "by the model"])
def test_thinking_ends_where_the_budget_does(engines, begins):
    plain, stock, drafting = engines
    prompts, params = requests_of(begins, temperature=0.0)
    expected = said_by(plain, params, prompts)
    assert said_by(stock, params, prompts) == expected
    prompts, params = requests_of(begins)
    expected = said_by(plain, params, prompts)
    if IS_V2:
        for _ in range(2):  # the second time history knows them
            assert said_by(drafting, params, prompts) == expected
        assert stats_of(drafting)["accepted_tokens"] > 0
    else:
        steps = stats_of(drafting)["steps"]
        with pytest.raises(ValueError, match="thinking_token_budget, use the V2 runner .*, or set spec"):
            generate(drafting, params, prompts)
        assert stats_of(drafting)["steps"] == steps, "before anything is generated"
        assert not drafting.llm_engine.has_unfinished_requests()
        assert said_by(drafting, params[1::2], prompts[1::2]) == expected[1::2], "the others are served"
    without = []
    for fixed in ({"temperature": 0.0}, {}):
        prompts, params = requests_of(begins, **fixed)
        with_budgets = said_by(plain, params, prompts)
        for p in params:
            p.thinking_token_budget = None
        without += [a != b for a, b in zip(said_by(plain, params, prompts), with_budgets, strict=True)]
    assert sum(without) > 2, "without budgets they go on"
