"""What launching kernels takes the host."""

import pytest
import torch

from rollout_spec.launches import Launcher

triton = pytest.importorskip("triton")
tl = triton.language

ONE = tl.constexpr(1)


@triton.jit(do_not_specialize=["n"])
def _kernel(out_ptr, other_ptr, n, BLOCK: tl.constexpr):
    value = ONE + tl.program_id(0) + 10 * BLOCK + tl.where(n > 1000, 1000, 0)
    if other_ptr is not None:
        value += 100 + tl.load(other_ptr)
    tl.store(out_ptr + tl.program_id(0), value)


def test_variants_are_launched_as_triton_would():
    """A launcher's own look-up tells apart what Triton compiles anew: dtypes, alignment, constants, None and widths."""
    launcher, plain = Launcher(_kernel), _kernel
    whole, known = torch.zeros(64, dtype=torch.int32), []
    for turn in range(2):
        for tensor in (whole, whole[1:], whole.long(), whole.short()):
            for other in (None, whole, whole[1:]):
                for n, b in ((3, 1), (16, 2), (1, 3), (1 << 33, 1)):
                    expected, got = (torch.zeros_like(tensor) for _ in range(2))
                    expected, got = (t[1:] if tensor.data_ptr() % 16 else t for t in (expected, got))
                    plain[(2, 1)](expected, other, n, BLOCK=b, num_warps=1)
                    launcher[(2, 1)](got, other, n, BLOCK=b, num_warps=1)
                    assert expected.any()
                    assert torch.equal(expected, got), (turn, tensor.dtype, n, b)
        known.append(len(launcher._variants))
    assert known[0] == known[1], "the second turn has found all of them"


def test_tensors_that_16_does_not_divide_have_a_variant_of_their_own():
    """On a GPU the one for aligned tensors would end with a misaligned address."""
    launcher, whole = Launcher(_kernel), torch.zeros(64, dtype=torch.int32)
    for tensor in (whole, whole[1:]):
        launcher[(1,)](tensor, None, 1, BLOCK=1, num_warps=1)
    assert len(launcher._variants) == 2


def test_profilers_see_every_launch(monkeypatch):
    """They ask Triton to call them, and only its own way of launching does, with what they ask for."""
    launcher, out, launches = Launcher(_kernel), torch.zeros(4, dtype=torch.int32), []
    run = type(_kernel).run
    monkeypatch.setattr(type(_kernel), "run", lambda *args, **kwargs: launches.append(args) or run(*args, **kwargs))
    for is_profiled, expected in ((False, 1), (False, 1), (True, 2), (True, 3)):
        with monkeypatch.context() as patch:
            if is_profiled:
                patch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [lambda metadata: None])
            launcher[(1,)](out, None, 1, BLOCK=1)
        assert len(launches) == expected
