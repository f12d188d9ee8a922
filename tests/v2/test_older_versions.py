"""vLLM 0.24 and 0.25: engines run in V1, and V2 is refused by name."""

from __future__ import annotations

import pytest
import vllm

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm.compat import lacks_v2_interfaces
from tests.integrations.engines import build, runner_of

pytestmark = pytest.mark.engine

BOTH = (engine_kwargs(), engine_kwargs(speculation=False))


def test_v2_is_refused_where_it_does_not_fit_and_v1_is_chosen(tiny_model, monkeypatch):
    if not lacks_v2_interfaces(vllm.__version_tuple__):
        for options in BOTH:
            sampler = runner_of(build(tiny_model, **options)).sampler
            assert type(sampler).__module__ == "rollout_spec.integrations.vllm.runner_v2"
        return
    for options in BOTH:  # before any engine is built: from then on vLLM remembers its environment
        with pytest.raises(ValueError, match="rollout_spec before vLLM 0.26"):
            build(tiny_model, **options)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    for options in BOTH:
        adapter = runner_of(build(tiny_model, **options)).rollout_spec
        assert type(adapter).__module__ == "rollout_spec.integrations.vllm.runner_v1"
