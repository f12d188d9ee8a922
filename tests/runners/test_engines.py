"""Engines are what was asked for, by arguments or, as RL frameworks build theirs, by ROLLOUT_SPEC alone."""

import pytest
from vllm import SamplingParams

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import hooks
from tests.integrations.engines import (
    IS_V2,
    OF_RUNNER,
    build,
    generate,
    mixed_params,
    runner_of,
    set_step_times,
    stats_of,
)

OF_ALL = {"trust_remote_code": True, "max_num_batched_tokens": 256}
FRAMEWORKS = {
    "verl": {
        "skip_tokenizer_init": False, "enable_chunked_prefill": True, "enable_prefix_caching": True, "seed": 1,
        "override_generation_config": {"temperature": 1.0, "top_k": -1, "top_p": 1}, "scheduling_policy": "fcfs",
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "disable_log_stats": True,
    },
    "NeMo-RL": {
        "skip_tokenizer_init": True, "enable_prefix_caching": True, "seed": 7, "hf_overrides": {},
        "disable_log_stats": False,
    },
    "SkyRL": {
        "generation_config": "vllm", "enable_prefix_caching": True, "seed": 42, "mm_processor_cache_gb": 0,
        "kv_cache_metrics": True, "language_model_only": False,
    },
}  # fmt: skip
"""What they pass to vLLM and the tests' engines do not have anyway; sleep mode needs a GPU. OpenRLHF passes less than
verl, prime-rl less than SkyRL."""
WITH_SALTS = ("SkyRL",)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_variable_is_enough(tiny_model, monkeypatch, framework):
    said = []
    monkeypatch.setattr(hooks, "say", said.append)
    set_step_times(monkeypatch)
    prompt = {"prompt_token_ids": [1, 4, 9], **({"cache_salt": "version 3"} if framework in WITH_SALTS else {})}
    asked = [SamplingParams(seed=seed, max_tokens=24, logprobs=0, ignore_eos=True) for seed in range(4)]

    def rollouts(variable):
        monkeypatch.setenv("ROLLOUT_SPEC", variable)
        llm = build(tiny_model, **{"max_num_seqs": 4, **OF_ALL, **FRAMEWORKS[framework]})
        outputs = [llm.generate([prompt] * len(asked), asked, use_tqdm=False) for _ in range(2)]
        return [output.outputs[0] for some in outputs for output in some], stats_of(llm)

    plain, _ = rollouts('{"speculation": false}')
    ours, stats = rollouts('{"ignore_cache_salt": true}' if framework in WITH_SALTS else "{}")
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    for a, b in zip(ours, plain, strict=True):
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
    assert stats["drafter_errors"] == 0
    assert stats["accepted_tokens"] > 0
    is_on = f"is on: up to 8 draft tokens per request and step, drafted by '{'device' if IS_V2 else 'history'}'"
    assert sum(is_on in line for line in said) == 1


OFF = engine_kwargs(speculation=False)
BOTH = (engine_kwargs(**OF_RUNNER), OFF)


def test_an_engine_has_its_runner(tiny_model):
    for options in BOTH:
        llm = build(tiny_model, max_num_seqs=4, max_num_batched_tokens=24, **options)
        runner = runner_of(llm)
        assert type(runner.rollout_spec).__name__ == ("EngineV2" if IS_V2 else "EngineV1")
        assert not IS_V2 or type(runner.sampler).__name__ == "SamplerFace"
        generate(llm, mixed_params(3, 1, max_tokens=5, ignore_eos=True), [[1, *range(4, 24), 9]] * 3)
        emitted = stats_of(llm)["emitted_tokens"]
        if IS_V2 and options is not OFF:  # a step ahead of the host, which does not know where requests have ended
            assert 3 * 5 <= emitted <= 3 * (5 + 9)
        else:
            assert emitted == 3 * 5, "chunks of prompts emit nothing"


def test_an_engine_that_does_not_ask_for_us_is_not_touched(tiny_model):
    llm = build(tiny_model)
    assert runner_of(llm).rollout_spec is None
    assert "process_outputs" not in vars(llm.llm_engine.output_processor)
    with pytest.raises(RuntimeError, match="without rollout_spec"):
        llm.collective_rpc("rollout_spec", args=("stats",))
