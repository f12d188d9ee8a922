"""`tests/both_runners.py` runs this folder with each of vLLM's model runners, and `test_*_v2.py` with V2 alone.

vLLM must see Triton from its first import on where it shall use V2, so that needs processes of its own.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.emulation import launch_few_programs, let_grammars_work, schedule_as_on_gpus, show_vllm_a_backend

IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
collect_ignore_glob = [] if IS_V2 else ["test_*_v2.py"]
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
elif IS_V2:
    show_vllm_a_backend()
    schedule_as_on_gpus()
    launch_few_programs()
    from rollout_spec.integrations.vllm import compat

    if compat.is_before(0, 27):
        let_grammars_work()
    if compat.is_v2_old():  # drafts are not cut, no model drafts beside history, and there are no own processors
        lacking = ("adaptive", "model_drafters", "drafter_weights", "own_processors")
        collect_ignore_glob = [f"test_{name}_v2.py" for name in lacking]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Every test of this folder starts engines, or what is as heavy."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("engine")
