"""vLLM's drafters with a model beside history in the V2 model runner, all kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from rollout_spec import engine_kwargs
from tests.integrations.draft_models import model_drafters
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    generate,
    mixed_params,
    prompts_of,
    stats_of,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


def build_beside(drafters, method, *, k=4, model_tokens=2, engine=None, **settings):
    target, spec = drafters[method]
    options = {} if settings.get("drafter") == "none" else {"drafter_options": {"max_resident_tokens": 4096}}
    arguments = engine_kwargs(
        num_speculative_tokens=k,
        speculative_config={**spec, "num_speculative_tokens": model_tokens},
        **options,
        **settings,
    )
    return build(target, **{"max_num_seqs": 6, **arguments, **(engine or {})})


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
@pytest.mark.parametrize("settings", [{}, {"drafter": "none", "k": 2}])
def test_same_rollouts_as_stock_vllm(drafters, stock, reference_model, method, settings):
    llm = build_beside(drafters, method, **settings)
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)
    for seed in (1, 2):
        params = mixed_params(6, seed, max_tokens=10, logprobs=0, **PLAIN)
        prompts = prompts_of(params)
        assert_same(generate(llm, params, prompts), generate(stock, params, prompts), prompts, params, reference_model)
    s = stats_of(llm)
    print(
        method,
        settings,
        {k: s[k] for k in ("request_steps", "emitted_tokens", "draft_tokens", "accepted_tokens", "tokens_per_step")},
        llm.collective_rpc("rollout_spec", args=("report",))[0]["sources"],
    )
