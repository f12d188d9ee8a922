"""A driver for Triton that runs compiled kernels on the CPU: their binary is the PTX, and a launch emulates it."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from pathlib import Path

import torch

from tests.ptx.machine import Fault, Loaded
from tests.ptx.program import Program

_loaded: dict[bytes, Loaded] = {}
launched: dict[str, set[Loaded]] = {}
"""The variants of each kernel that were launched so far; tests clear it."""


def on_launch(name: str, tensors: list[torch.Tensor]) -> list[tuple[int, int, bool]]:
    """Told of each kernel and its tensors, says which bytes other streams use meanwhile: `streams.py` replaces it."""
    return []


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor's first address and the one behind its last element."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _bits(kind: str, value) -> int:
    """A scalar argument of Triton's type `kind` as the kernel finds it."""
    if kind == "fp32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if kind == "fp64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    return int(value) & (1 << int(kind.lstrip("iu"))) - 1


def _ptx_of(binary: bytes) -> Path:
    """Where the PTX of machine code is kept."""
    return Path(os.environ["TRITON_CACHE_DIR"]) / f"{hashlib.sha256(binary).hexdigest()}.ptx"


class _Launcher:
    """Called by Triton with a launch's arguments."""

    def __init__(self, source, metadata) -> None:
        self.kinds = list(source.signature.values())
        self.num_shared_bytes = metadata.shared
        # Where addresses are themselves read from memory, as vLLM's kernels do, those of the arguments say nothing.
        self.is_ours = source.fn.fn.__module__.startswith(("rollout_spec", "tests"))
        if metadata.global_scratch_size:
            raise NotImplementedError(f"{source.name} wants scratch memory")

    def __call__(self, x, y, z, stream, function: Loaded, packed, metadata, enter_hook, exit_hook, *args) -> None:
        if not x * y * z:
            return
        if self.is_ours and (lines := function.program.contracted_exchanges):
            where = "; ".join(map(function.program.where, lines))
            raise Fault(f"{function.program.name}: lanes get different sums from a contracted butterfly: {where}")
        values, tensors = [], []
        for kind, value in zip(self.kinds, args, strict=True):
            if isinstance(value, torch.Tensor) and kind != "constexpr":
                values.append(value.data_ptr())
                tensors.append(value)
            elif kind != "constexpr":
                values.append(_bits(kind, value))
        launched.setdefault(function.program.name, set()).add(function)
        spans = [extent(tensor) for tensor in tensors] if self.is_ours else ()
        claims = on_launch(function.program.name, tensors)
        function.launch((x, y, z), self.num_shared_bytes, values, spans, claims)


class _Utils:
    def load_binary(self, name, binary, shared, device):
        if binary not in _loaded:
            source = _ptx_of(binary).read_bytes() if binary.startswith(b"\x7fELF") else binary
            _loaded[binary] = Loaded(Program(source.decode()))
        return 1, _loaded[binary], 32, 0, 1024

    def get_device_properties(self, device):
        """Of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def unload_module(self, module):
        """Nothing to do."""


class Driver:
    """Triton's driver of the emulated GPU."""

    launcher_cls = _Launcher

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, _Utils()

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        """There is one."""

    def get_current_stream(self, device):
        return 0

    def is_active(self):
        return True

    def get_active_torch_device(self):
        return torch.device("cpu")


def emulate(capability: int = 90, *, fills_cache: bool = False) -> None:
    """From now on, launches on CPU tensors run the PTX that Triton compiles for GPUs of this capability.

    Args:
        fills_cache: Leave machine code in Triton's cache, as a GPU would, and its PTX beside it.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITCallable, JITFunction

    make_cubin, version = CUDABackend.make_cubin, CUDABackend.hash

    def make_cubin_and_remember(self, source, *args):
        binary = make_cubin(self, source, *args)
        _ptx_of(binary).write_text(source)
        return binary

    if fills_cache:
        CUDABackend.make_cubin = make_cubin_and_remember
    else:  # the cache keeps binaries apart by what the backend says of itself
        CUDABackend.hash = lambda self: f"{version(self)}-emulated"
        CUDABackend.make_cubin = lambda self, source, *args: source.encode()
    triton.runtime.driver.set_active(Driver(capability))
    run = JITFunction.run

    def run_again_with_changed_constants(self, *args, **kwargs):
        try:
            return run(self, *args, **kwargs)
        except RuntimeError as error:
            if "has changed since we compiled" not in str(error):
                raise
        # Tests change constants that kernels read. The garbage collector does not list functions from before an engine
        # in this process froze its heap, so they are looked up in their modules.
        for module in list(sys.modules.values()):
            for function in list(getattr(module, "__dict__", {}).values()):
                if isinstance(function, JITCallable):
                    function.hash, function.used_global_vals = None, {}
                    getattr(function, "device_caches", {}).clear()
        return run(self, *args, **kwargs)

    JITFunction.run = run_again_with_changed_constants
