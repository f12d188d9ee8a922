"""What launching kernels takes the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.launches import cdiv, next_power_of_2, trust_constants

triton = pytest.importorskip("triton")


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_sizes_are_those_that_triton_computes(a, b):
    assert cdiv(a, b) == triton.cdiv(a, b)
    assert next_power_of_2(b) == triton.next_power_of_2(b)


def test_the_constants_of_compiled_kernels_are_no_longer_compared():
    """A kernel that is not compiled yet has not been told which constants it uses."""
    compiled, other = (SimpleNamespace(hash=value, used_global_vals={"A": 1}) for value in ("abc", None))
    trust_constants(SimpleNamespace(compiled=compiled, other=other, unrelated=3))
    assert compiled.used_global_vals == {}
    assert other.used_global_vals == {"A": 1}


def test_triton_keeps_what_it_compares_where_we_look():
    kernel = pytest.importorskip("rollout_spec.verify.kernel")._scan_kernel
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    constants = dict(kernel.used_global_vals) if kernel.cache_key else {}
    assert kernel.hash is not None
    assert constants or kernel.used_global_vals == {}
    kernel.used_global_vals.update({("NONE", 0): (1, {})})
    trust_constants(SimpleNamespace(kernel=kernel))
    assert not kernel.used_global_vals
