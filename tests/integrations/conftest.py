"""An engine that several files compare with."""

from __future__ import annotations

import pytest

from rollout_spec import engine_kwargs


@pytest.fixture(scope="session")
def off(tiny_model):
    """An engine that drafts nothing and has the same noise. No test changes it."""
    from tests.integrations.engines import build  # brings vLLM

    return build(tiny_model, **engine_kwargs(speculation=False))
