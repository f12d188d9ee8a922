"""Small PTX kernels for tests of the emulator itself."""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import Loaded
from tests.ptx.opcodes import BITS
from tests.ptx.program import Program

DTYPES = {
    "b8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "b32": np.uint32,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip


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


def _letter(kind: str) -> str:
    return {1: "p", 8: "h", 16: "h", 32: "r", 64: "d"}[BITS[kind]]


def evaluate(statements: str, outputs: str, *inputs: tuple[str, np.ndarray]) -> list[np.ndarray]:
    """Run statements in as many lanes as the inputs have values.

    Args:
        statements: PTX in which `{0}`, `{1}`, ... are the registers of outputs, then inputs.
        outputs: kinds of the outputs, with blanks between.
        inputs: (kind, values); kind "pred" with booleans.
    """
    size = inputs[0][1].size
    assert size % 32 == 0
    kinds = outputs.split()
    arrays = [np.zeros(size, DTYPES.get(kind, np.uint32)) for kind in kinds]
    body, registers = "mov.u32 %r90, %tid.x; mov.u32 %r91, %ctaid.x; mad.lo.s32 %r92, %r91, 32, %r90;\n", []
    for n, kind in enumerate(kinds):
        registers.append(f"%{_letter(kind)}{n}")
    for n, (kind, values) in enumerate(inputs, len(kinds)):
        is_predicate = kind == "pred"
        arrays.append(np.ascontiguousarray(values.astype(np.uint32) if is_predicate else values))
        size_of = arrays[-1].itemsize
        registers.append(f"%{_letter(kind)}{n}")
        body += f"ld.param.b64 %d90, [k_param_{n}]; mad.wide.s32 %d91, %r92, {size_of}, %d90;\n"
        if is_predicate:
            body += f"ld.global.b32 %r93, [%d91]; setp.ne.b32 {registers[-1]}, %r93, 0;\n"
        else:
            body += f"ld.global.b{8 * size_of} {registers[-1]}, [%d91];\n"
    body += statements.format(*registers) + "\n"
    for n, kind in enumerate(kinds):
        size_of = arrays[n].itemsize
        body += f"ld.param.b64 %d90, [k_param_{n}]; mad.wide.s32 %d91, %r92, {size_of}, %d90;\n"
        if kind == "pred":
            body += f"selp.b32 %r93, 1, 0, {registers[n]}; st.global.b32 [%d91], %r93;\n"
        else:
            body += f"st.global.b{8 * size_of} [%d91], {registers[n]};\n"
    launch(assemble(body, len(arrays)), *arrays, blocks=size // 32)
    return arrays[: len(kinds)]
