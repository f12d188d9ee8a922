"""Thinking budgets in the V2 model runner, with drafts."""

from __future__ import annotations

import pytest

from rollout_spec import engine_kwargs
from tests.integrations.engines import PLAIN, build, generate, stats_of, verify_all
from tests.integrations.thinking import KINDS, num_used_up, requests_of, settings_of
from tests.v2.test_device_v2 import build_on_device

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("end", "begins"), KINDS)
def test_the_same_rollouts_as_without_drafts(tiny_model, end, begins):
    settings = settings_of(end)
    plain = build(tiny_model, **settings, **engine_kwargs(speculation=False))
    on_host = build(tiny_model, **settings, **verify_all(num_speculative_tokens=4))
    on_device = build_on_device(tiny_model, engine=settings)
    prompts, params = requests_of(begins, **PLAIN)
    expected = generate(plain, params, prompts)
    assert num_used_up(plain, prompts, params, expected) > 2
    for llm in (on_host, on_device):
        for _ in range(2):  # the second time history knows them
            outputs = generate(llm, params, prompts)
            assert [list(output.token_ids) for output in outputs] == [list(o.token_ids) for o in expected]
        assert stats_of(llm)["accepted_tokens"] > 0
