"""Rollouts with stop strings end where they end without speculation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollout_spec.noise import host as noise
from tests.integrations.engines import build, every_draft, generate, stats_of, verify_all

pytestmark = pytest.mark.engine

STOPS = (["w7"], ["w3 w", "zz"], ["9"], ["w1", "w11 w"])
"""Whole words, parts of words and strings that two or three tokens spell."""


@pytest.fixture(scope="module")
def on(tiny_model):
    return build(tiny_model, **verify_all(**every_draft(6)))


def stopping_params(count=24, **fixed):
    return [
        SamplingParams(
            **{
                "temperature": 1.0,
                "seed": noise.derive_seed("stop", i),
                "max_tokens": 60,
                "min_tokens": 12 if i % 3 == 0 else 0,
                "stop": STOPS[i % len(STOPS)],
                "include_stop_str_in_output": i % 2 == 0,
                "logprobs": 0,
                **fixed,
            }
        )
        for i in range(count)
    ]


def summary(output):
    return (
        list(output.token_ids),
        output.text,
        output.finish_reason,
        output.stop_reason,
        len(output.logprobs),
        pytest.approx(output.cumulative_logprob, abs=1e-3),
    )


def test_output_ends_with_the_token_that_completes_the_stop_string(on, off):
    params = stopping_params()
    expected = [summary(output) for output in generate(off, params)]
    assert sum(reason == "stop" for _, _, reason, *_ in expected) > 12
    generate(on, params)  # the second time history knows what comes, and drafts run past the stops
    before = stats_of(on)
    ours = generate(on, params)
    after = stats_of(on)
    assert after["accepted_tokens"] - before["accepted_tokens"] > 100
    assert after["live_requests"] == 0
    assert [summary(output) for output in ours] == expected


def test_streamed_pieces_add_up_to_the_same_rollout(on, off):
    def stream(llm, params, kind):
        engine, pieces = llm.llm_engine, {}
        for i, p in enumerate(params):
            engine.add_request(f"{kind.name}-{i}", {"prompt_token_ids": [1, 4, 9]}, p)
        while engine.has_unfinished_requests():
            for output in engine.step():
                pieces.setdefault(output.request_id, []).append(output.outputs[0])
        return [pieces[f"{kind.name}-{i}"] for i in range(len(params))]

    params = stopping_params(12, output_kind=RequestOutputKind.DELTA)
    expected = [summary(output) for output in generate(off, stopping_params(12), [[1, 4, 9]] * 12)]
    for _ in range(2):
        for parts, (tokens, text, reason, stop, count, _) in zip(
            stream(on, params, RequestOutputKind.DELTA), expected, strict=True
        ):
            assert [token for part in parts for token in part.token_ids] == tokens
            assert "".join(part.text for part in parts) == text
            assert sum(len(part.logprobs) for part in parts) == count
            assert (parts[-1].finish_reason, parts[-1].stop_reason) == (reason, stop)


def test_what_is_counted_ends_there_too(tiny_model, off):
    if hasattr(off.llm_engine.output_processor, "_trim_surplus_tokens"):
        pytest.skip("this vLLM cuts at stop strings itself, after it has counted")
    llm = build(
        tiny_model,
        disable_log_stats=False,
        **verify_all(**every_draft(6)),
    )
    prompts = [[1, 4, 9]] * 24
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], stopping_params(), use_tqdm=False)
    expected = [len(output.token_ids) for output in generate(off, stopping_params(), prompts)]
    assert [output.metrics.num_generation_tokens for output in outputs] == expected


def test_an_engine_that_does_not_ask_for_us_is_not_touched(tiny_model):
    assert "process_outputs" not in vars(build(tiny_model).llm_engine.output_processor)


def test_everything_of_a_step_is_cut_alike(tiny_model):
    """Log-probabilities and routed experts too; the next call of vLLM's `update` finds the work done."""
    import numpy as np
    from transformers import AutoTokenizer
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.outputs import LogprobsLists

    from rollout_spec.integrations.vllm.stop_strings import end_at_stop_string

    request = SimpleNamespace(
        request_id="", prompt_token_ids=[1, 4], prompt_embeds=None, sampling_params=SamplingParams(stop=["w5"])
    )
    detokenizer = IncrementalDetokenizer.from_new_request(AutoTokenizer.from_pretrained(tiny_model), request)
    scores = LogprobsLists(np.arange(4)[:, None], np.arange(4.0)[:, None], np.arange(4))
    output = EngineCoreOutput(
        "", [8, 9, 7, 6], new_logprobs=scores, finish_reason=FinishReason.LENGTH, routed_experts=np.arange(4)
    )
    end_at_stop_string(detokenizer, output)
    assert output.new_token_ids == [8, 9]
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0], [1]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [0, 1]
    assert output.routed_experts.tolist() == [0, 1]
    assert detokenizer.update(output.new_token_ids, False) == "w5"
    assert detokenizer.output_token_ids == [8, 9]
    assert detokenizer.update([5], False) is None
    assert detokenizer.output_token_ids == [8, 9, 5]
