"""These tests need vLLM to see Triton from its first import on, so they have a process of their own.

`tests/integrations/test_v2.py` runs them; to run them alone: VLLM_USE_V2_MODEL_RUNNER=1 pytest tests/v2
"""

from __future__ import annotations

import os

from tests.interpreter import schedule_as_on_gpus, show_vllm_a_backend

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    show_vllm_a_backend()
    schedule_as_on_gpus()
else:
    collect_ignore = ["test_engine_v2.py", "test_device_v2.py"]
