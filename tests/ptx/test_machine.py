"""Lanes that diverge, blocks, barriers, bounds and races in the emulator, in small kernels of hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest

from tests.interpreter import run_as_python
from tests.ptx.assembly import assemble, launch
from tests.ptx.machine import Fault, changed_settings

pytestmark = pytest.mark.skipif(run_as_python(), reason="needs a C compiler")

THREAD = """
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %laneid;
ld.param.b64 %d1, [k_param_0]; mad.wide.u32 %d2, %r1, 4, %d1;
shl.b32 %r8, %r1, 2;
"""
"""%r1: thread, %r2: block, %r3: lane, %d1: the array, %d2: the thread's word of it, %r8: its bytes in shared memory."""
ORDERS = [{"seed": seed, "check_races": True} for seed in range(4)]


def run(body, *arrays, warps=1, **options):
    return launch(assemble(THREAD + body, len(arrays), warps), *arrays, **options)


def test_lanes_wait_for_those_that_a_collective_names():
    """Halves of a warp that have parted reduce by themselves, and together where both come to one instruction."""
    out = np.zeros(32, np.uint32)
    body = """
        setp.lt.u32 %p1, %r3, 16;
        @%p1 bra $L__first;
        redux.sync.add.s32 %r5, %r3, {upper};
        bra.uni $L__end;
        $L__first:
        redux.sync.add.s32 %r5, %r3, {lower};
        $L__end:
        st.global.b32 [%d2], %r5;
        """
    run(body.format(lower=0xFFFF, upper=0xFFFF0000), out)
    assert out.tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16
    with pytest.raises(Fault, match="different instructions"):
        run(body.format(lower=-1, upper=-1), out)


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [("redux.sync.add.s32 %r5, %r3, -1", "different instructions"), ("bar.sync 0", "not all lanes"),
     ("shfl.sync.bfly.b32 %r5, %r3, 16, 31, 0xffff", "does not take part")],
)  # fmt: skip
def test_some_lanes_cannot_synchronise_for_all(instruction, kind):
    with pytest.raises(Fault, match=kind):
        run(f"setp.lt.u32 %p1, %r3, 16; @%p1 {instruction};", np.zeros(32, np.uint32), warps=2)


EXCHANGE = """
    st.shared.b32 [%r8], %r1;
    {barrier}
    xor.b32 %r9, %r8, {other};
    ld.shared.b32 %r5, [%r9];
    st.global.b32 [%d2], %r5;
"""


@pytest.mark.parametrize("settings", ORDERS)
def test_barriers_order_a_blocks_warps(settings):
    out = np.zeros(64, np.uint32)
    with changed_settings(**settings):
        run(EXCHANGE.format(barrier="bar.sync 0;", other=128), out, warps=2, num_shared_bytes=256)
        assert out.tolist() == [thread ^ 32 for thread in range(64)]
        with pytest.raises(Fault, match="race within a block"):
            run(EXCHANGE.format(barrier="", other=128), out, warps=2, num_shared_bytes=256)


def test_a_warps_barrier_orders_its_lanes():
    out = np.zeros(32, np.uint32)
    with changed_settings(check_races=True):
        run(EXCHANGE.format(barrier="bar.warp.sync -1;", other=4), out, num_shared_bytes=128)
        assert out.tolist() == [lane ^ 1 for lane in range(32)]
        with pytest.raises(Fault, match="race within a warp"):
            run(EXCHANGE.format(barrier="", other=4), out, num_shared_bytes=128)
        with pytest.raises(Fault, match="before it was written"):
            run("ld.shared.b32 %r5, [%r8];", out, num_shared_bytes=128)


@pytest.mark.parametrize("settings", ORDERS)
def test_races_in_global_memory(settings):
    """Between blocks nothing orders stores of different values; equal ones, and atomic additions, are none."""
    out = np.zeros(32, np.uint32)
    with changed_settings(**settings):
        for body in (
            "st.global.b32 [%d2], %r2;",
            "ld.global.b32 %r5, [%d2]; add.s32 %r5, %r5, %r2; st.global.b32 [%d2], %r5;",
        ):
            with pytest.raises(Fault, match="race between blocks"):
                run(body, out, blocks=3)
        with pytest.raises(Fault, match="race within a warp"):
            run("st.global.b32 [%d1], %r3;", out)
        run("st.global.b32 [%d2], 7;", out, blocks=3)
        run("red.global.gpu.relaxed.add.u32 [%d1+4], 1;", out, blocks=3)
        assert out.tolist() == [7, 103, *[7] * 30]
        with pytest.raises(Fault, match="race between blocks"):
            run("ld.global.b32 %r5, [%d2]; red.global.gpu.relaxed.add.u32 [%d1], 1;", out, blocks=2)


def test_addresses_are_checked():
    out = np.zeros(32, np.uint32)
    for body, kind in (
        ("st.global.b32 [%d2+4], %r1;", "outside of every tensor"),
        ("ld.global.b32 %r5, [%d1+-4];", "outside of every tensor"),
        ("ld.global.b32 %r5, [%d1+2];", "misaligned"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r9}, [%d1+8];", "misaligned"),
        ("st.shared.b32 [%r8+4], %r1;", "outside of shared"),
    ):
        with pytest.raises(Fault, match=kind):
            run(body, out, num_shared_bytes=128)


def test_a_kernel_that_never_ends():
    with changed_settings(limit=1000), pytest.raises(Fault, match="too many instructions"):
        run("$L__loop: bra.uni $L__loop;", np.zeros(32, np.uint32))
