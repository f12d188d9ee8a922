"""The emulator's race and bounds detectors detect, in small kernels of hand-written PTX."""

import numpy as np
import pytest

from tests.ptx.machine import Fault, Loaded, changed_settings
from tests.ptx.program import Program

THREAD = """
mov.u32 %r1, %tid.x;
ld.param.b64 %d1, [k_param_0]; mad.wide.u32 %d2, %r1, 4, %d1;
shl.b32 %r8, %r1, 2;
"""
"""%r1: thread, %d1: the array, %d2: the thread's word of it, %r8: its bytes in shared memory."""


def run(body, array, num_warps=1):
    """Run a kernel of one block, which has four bytes of shared memory for each thread."""
    registers = ".reg .pred %p<99>; .reg .b32 %r<99>; .reg .b64 %d<99>;"
    kernel = Loaded(Program(
        ".visible .entry k(\n\t.param .u64 k_param_0\n)\n"
        f".reqntid {32 * num_warps}\n{{\n{registers}\n{THREAD + body}\nret;\n}}"
    ))  # fmt: skip
    address = array.ctypes.data
    kernel.launch((1, 1, 1), 128 * num_warps, [address], [(address, address + array.nbytes)])


@pytest.mark.parametrize("seed", range(4))
def test_barriers_order_a_blocks_warps(seed):
    body = """
        st.shared.b32 [%r8], %r1;
        {barrier}
        xor.b32 %r9, %r8, 128;
        ld.shared.b32 %r5, [%r9];
        st.global.b32 [%d2], %r5;
        """
    out = np.zeros(64, np.uint32)
    with changed_settings(seed=seed, check_races=True):
        run(body.format(barrier="bar.sync 0;"), out, num_warps=2)
        assert out.tolist() == [thread ^ 32 for thread in range(64)]
        with pytest.raises(Fault, match="race within a block"):
            run(body.format(barrier=""), out, num_warps=2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("st.global.b32 [%d2+4], %r1;", "outside of every tensor"),
        ("ld.global.b32 %r5, [%d1+-4];", "outside of every tensor"),
        ("ld.global.b32 %r5, [%d1+2];", "misaligned"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r9}, [%d1+8];", "misaligned"),
        ("st.shared.b32 [%r8+4], %r1;", "outside of shared"),
    ],
)
def test_addresses_are_checked(body, kind):
    with pytest.raises(Fault, match=kind):
        run(body, np.zeros(32, np.uint32))
