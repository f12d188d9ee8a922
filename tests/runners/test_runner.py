"""An engine has the model runner that was asked for."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from tests.integrations.engines import IS_V2, OF_RUNNER, build, generate, mixed_params, runner_of, stats_of

pytestmark = pytest.mark.engine

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
