"""What launching kernels takes the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.launches import cdiv, freeze_constants, next_power_of_2

triton = pytest.importorskip("triton")
tl = triton.language

ONE = tl.constexpr(1)


@triton.jit
def _kernel(out_ptr):
    tl.store(out_ptr, ONE)


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_sizes_are_those_that_triton_computes(a, b):
    assert cdiv(a, b) == triton.cdiv(a, b)
    assert next_power_of_2(b) == triton.next_power_of_2(b)


def test_the_constants_of_launched_kernels_are_no_longer_compared():
    """Those of a function that kernels call, and of a kernel that has only been read, stay."""
    assert _kernel.cache_key
    assert [name for name, _ in _kernel.used_global_vals] == ["ONE"], "where Triton keeps what it compares"
    module = SimpleNamespace(_kernel=_kernel, unrelated=3)
    freeze_constants(module)
    assert _kernel.used_global_vals
    _kernel.device_caches[0][0]["a variant"] = object()  # as after a launch
    freeze_constants(module)
    assert not _kernel.used_global_vals
