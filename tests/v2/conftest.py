"""These tests need vLLM to see Triton from its first import on, so they have a process of their own.

Run them with VLLM_USE_V2_MODEL_RUNNER=1 pytest tests/v2, as `make test` does.
"""

from __future__ import annotations

import os

import pytest

from tests.interpreter import schedule_as_on_gpus, show_vllm_a_backend

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    show_vllm_a_backend()
    schedule_as_on_gpus()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Each costs the interpreter the same, however much it does."""
    from rollout_spec.drafters import device_kernels
    from rollout_spec.verify import kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "ROWS", 16)
        patch.setattr(kernel, "BLOCK", 32)
        patch.setattr(device_kernels, "TILE", 128)
        patch.setattr(device_kernels, "TARGET_PROGRAMS", 1)
        yield
