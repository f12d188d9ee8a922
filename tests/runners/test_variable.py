"""ROLLOUT_SPEC alone makes engines speculate that are built as RL frameworks build theirs, and changes no rollout."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec.integrations.vllm import hooks
from tests.integrations.engines import IS_V2, build, set_step_times, stats_of

pytestmark = pytest.mark.engine

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
