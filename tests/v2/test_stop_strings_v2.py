"""Stop strings in the V2 model runner, against stock vLLM, which samples with the same noise there."""

from __future__ import annotations

import pytest

from rollout_spec import engine_kwargs
from tests.integrations.engines import build, generate, stats_of, verify_all
from tests.integrations.vllm.test_stop_strings import stopping_params, summary

pytestmark = pytest.mark.engine

PROMPTS = [[1, 4 + i % 2, 9] for i in range(6)]


@pytest.fixture(scope="module")
def expected(stock):
    return [summary(output) for output in generate(stock, params(), PROMPTS)]


def params():
    return stopping_params(6, min_tokens=4, max_tokens=24)


def test_a_drafter_on_the_host(tiny_model, expected):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Adversary"))
    assert [summary(output) for output in generate(llm, params(), PROMPTS)] == expected


def test_the_device_drafter(tiny_model, expected):
    """Scheduled asynchronously; its history comes back in the second round."""
    llm = build(
        tiny_model,
        max_num_seqs=6,
        **engine_kwargs(num_speculative_tokens=4, drafter="device", drafter_options={"max_resident_tokens": 4096}),
    )
    for _ in range(2):
        assert [summary(output) for output in generate(llm, params(), PROMPTS)] == expected
    assert stats_of(llm)["accepted_tokens"] > 10
