"""vLLM 0.24 and 0.25: engines run in V1, and V2 is refused by name."""

from __future__ import annotations

import pytest
import vllm

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm_compat import lacks_v2_interfaces
from tests.integrations.engines import build, generate, mixed_params, runner_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("options", [engine_kwargs(), engine_kwargs(speculation=False)])
def test_v2_is_refused_and_v1_is_chosen(tiny_model, monkeypatch, options):
    if not lacks_v2_interfaces(vllm.__version_tuple__):
        llm = build(tiny_model, **options)
        assert type(runner_of(llm).sampler).__module__ == "rollout_spec.integrations.vllm_v2"
        return
    with pytest.raises(ValueError, match="rollout_spec before vLLM 0.26"):
        build(tiny_model, **options)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    llm = build(tiny_model, **options)
    assert runner_of(llm).rollout_spec is not None
    assert len(generate(llm, mixed_params(2, 1, max_tokens=8))) == 2
