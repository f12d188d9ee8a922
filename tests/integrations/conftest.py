"""Engines that several files compare with; each file has its own."""

from __future__ import annotations

import pytest

from rollout_spec import engine_kwargs


@pytest.fixture(scope="module")
def off(tiny_model):
    """An engine that drafts nothing and has the same noise."""
    from tests.integrations.engines import build  # brings vLLM

    return build(tiny_model, **engine_kwargs(speculation=False))
