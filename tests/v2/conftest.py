"""These tests need vLLM to see Triton from its first import on, so they have a process of their own.

Run them with VLLM_USE_V2_MODEL_RUNNER=1 pytest tests/v2, as `make test` does.
"""

from __future__ import annotations

import os

import pytest

from rollout_spec.integrations.vllm.compat import lacks_v2_interfaces
from tests.interpreter import schedule_as_on_gpus, show_vllm_a_backend

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    show_vllm_a_backend()
    schedule_as_on_gpus()
    import vllm

    if lacks_v2_interfaces(vllm.__version_tuple__):
        collect_ignore_glob = ["test_*_v2.py"]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def stock(tiny_model):
    """vLLM's own engine, where it samples with the same noise as ours.

    Before 0.31 it does not, and its own noise cannot be interpreted: there it is ours without drafts.
    """
    from rollout_spec import engine_kwargs
    from tests.integrations.engines import build

    has_our_noise = tuple(vllm.__version_tuple__[:2]) >= (0, 31)
    return build(tiny_model, **({} if has_our_noise else engine_kwargs(speculation=False)))


@pytest.fixture(scope="session", autouse=True)
def few_programs():
    """Each costs the interpreter the same, however much it does."""
    from rollout_spec.drafters.device import kernels
    from rollout_spec.verify import kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "ROWS", 16)
        patch.setattr(kernel, "BLOCK", 32)
        patch.setattr(kernels, "TILE", 128)
        patch.setattr(kernels, "TARGET_PROGRAMS", 1)
        yield
