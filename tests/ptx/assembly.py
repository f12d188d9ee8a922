"""Small PTX kernels for tests of the emulator itself."""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import Loaded
from tests.ptx.program import Program


def assemble(body: str, num_parameters: int = 1, num_warps: int = 1) -> Loaded:
    """A kernel `k` of 64-bit parameters. It has registers %p, %h (16 bits), %r (32) and %d (64) of any number."""
    parameters = ",\n".join(f"\t.param .u64 k_param_{n}" for n in range(num_parameters))
    registers = ".reg .pred %p<99>; .reg .b16 %h<99>; .reg .b32 %r<99>; .reg .b64 %d<99>;"
    return Loaded(Program(
        f".visible .entry k(\n{parameters}\n)\n.reqntid {32 * num_warps}\n{{\n{registers}\n{body}\nret;\n}}"
    ))  # fmt: skip


def launch(kernel: Loaded, *arrays: np.ndarray, blocks: int = 1, num_shared_bytes: int = 0) -> None:
    """Run blocks with the arrays' addresses as parameters."""
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    kernel.launch((blocks, 1, 1), num_shared_bytes, [array.ctypes.data for array in arrays], spans)
