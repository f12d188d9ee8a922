"""Stop strings in the V2 model runner, against stock vLLM, which samples with the same noise there."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from rollout_spec import engine_kwargs
from tests.integrations.engines import build, generate, mixed_params, runner_of, stats_of, verify_all
from tests.integrations.vllm.test_stop_strings import stopping_params, summary

pytestmark = pytest.mark.engine

PROMPTS = [[1, 4 + i % 2, 9] for i in range(6)]


@pytest.fixture(scope="module")
def expected(stock):
    return [summary(output) for output in generate(stock, params(), PROMPTS)]


def params():
    return stopping_params(6, min_tokens=4, max_tokens=24)


def finish_up(llm):
    """Ended requests are noticed one step later."""
    generate(llm, [SamplingParams(max_tokens=2, ignore_eos=True, seed=1)])


def test_a_drafter_on_the_host(tiny_model, expected):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Adversary"))
    drafter = runner_of(llm).speculator.session.drafter
    drafter.finished.clear()
    assert [summary(output) for output in generate(llm, params(), PROMPTS)] == expected
    finish_up(llm)
    assert {tuple(tokens) for tokens, *_ in expected} <= {tuple(tokens) for tokens in drafter.finished}


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
    finish_up(llm)
    archive = [archived.read() for archived in runner_of(llm).speculator.drafter._archive.order]
    kept = {tuple(tokens[prompt:].tolist()) for tokens, _, prompt, _ in archive}
    assert {tuple(tokens) for tokens, *_ in expected} <= kept


def test_a_request_that_ends_by_length_keeps_all_it_said(tiny_model):
    """Reading its text for a stop string that never comes cuts nothing."""
    llm = build(
        tiny_model,
        max_num_seqs=6,
        **engine_kwargs(num_speculative_tokens=2, drafter="device", drafter_options={"max_resident_tokens": 4096}),
    )
    never = mixed_params(2, 3, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=6, ignore_eos=True)
    for p in never:
        p.stop = ["no such text"]
    outputs = generate(llm, never)
    finish_up(llm)
    archive = [archived.read() for archived in runner_of(llm).speculator.drafter._archive.order]
    kept = {tuple(tokens[prompt:].tolist()) for tokens, _, prompt, _ in archive}
    assert {tuple(output.token_ids) for output in outputs} <= kept
