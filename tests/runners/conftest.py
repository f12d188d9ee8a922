"""As in tests/v2, vLLM must see Triton from its first import on where it shall use its V2 model runner."""

from __future__ import annotations

import os

from tests.interpreter import schedule_as_on_gpus, show_vllm_a_backend

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    show_vllm_a_backend()
    schedule_as_on_gpus()
    import vllm

    from rollout_spec.integrations.vllm.compat import lacks_v2_interfaces

    if lacks_v2_interfaces(vllm.__version_tuple__):
        collect_ignore_glob = ["test_*.py"]
