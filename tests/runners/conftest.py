"""`tests/both_runners.py` runs this folder with each of vLLM's model runners, and `test_*_v2.py` with V2 alone.

vLLM must see Triton from its first import on where it shall use V2, so that needs processes of its own.
"""

from __future__ import annotations

import os

import pytest

from tests.emulation import schedule_as_on_gpus, show_vllm_a_backend

IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
collect_ignore_glob = [] if IS_V2 else ["test_*_v2.py"]
if IS_V2:
    show_vllm_a_backend()
    schedule_as_on_gpus()
    import vllm

    from rollout_spec.integrations.vllm.compat import is_v2_too_old

    if is_v2_too_old(vllm.__version_tuple__):
        collect_ignore_glob = ["test_[!r]*.py"]  # what remains shows that V2 is refused


@pytest.fixture(scope="session", autouse=IS_V2)
def few_programs():
    """Each costs the emulator the same, however much it does. Texts move often as they grow."""
    from rollout_spec.drafters.device import drafter, kernels
    from rollout_spec.verify import kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "ROWS", 16)
        patch.setattr(kernel, "BLOCK", 32)
        patch.setattr(drafter, "MORE_ROOM", 8)
        patch.setattr(kernels, "TILE", 128)
        patch.setattr(kernels, "TARGET_PROGRAMS", 1)
        yield
