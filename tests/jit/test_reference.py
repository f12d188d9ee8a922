"""References: what a compiled function reads through one is what the tuple holds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError

from rollout_spec.jit.compiler import njit
from rollout_spec.jit.reference import Reference

INTERPRETED = bool(numba.config.DISABLE_JIT)


class Inner(NamedTuple):
    cube: Any
    number: Any
    empty: Any


class Outer(NamedTuple):
    flags: Any
    inner: Any
    is_on: Any
    share: Any
    table: Any
    other: Any
    words: Any


def a_tuple(size=3):
    """Arrays of one to three dimensions and several dtypes, one of them not contiguous; numbers; tuples of these."""
    inner = Inner(np.arange(24, dtype=np.float32).reshape(2, 3, 4), 2**40, np.zeros((0, 5)))
    return Outer(
        np.arange(size) % 2 == 1,
        inner,
        True,
        0.25,
        np.arange(4 * size, dtype=np.int32).reshape(size, 4)[:, ::2],
        inner._replace(cube=-inner.cube, number=-1),
        np.full(size, 2**63 + 1, np.uint64),
    )


@njit(allocates=False)
def _sum(array):
    total = 0.0
    for value in array.flat:
        total += value
    return total


@njit(allocates=False, cache=False)
def _read(state, out):
    out[0], out[1], out[2] = state.is_on, state.share, state.inner.number
    out[3], out[4] = _sum(state.table), state.table.shape[0]
    inner = state.inner
    out[5], out[6], out[7] = inner.cube[1, 2, 3], inner.empty.shape[1], inner.empty.size
    out[8], out[9] = state.other.cube[1, 2, 3], state.other.number
    out[10], out[11] = state.flags[1], state.words[state.words.size - 1] - np.uint64(2**63)


@njit(allocates=False, cache=False)
def _write(state, at, value):
    state.table[at, 1] = value
    state.inner.cube[at] = value
    state.flags[at] = not state.flags[at]
    return state.table[at, 1] if state.is_on else -1


@njit(allocates=False, cache=False)
def _through(state, other, out):
    """Both references and None are arguments like others, and may be handed on."""
    if other is None:
        _read(state, out)
        return 0
    return np.int64(_write(other, 0, 7)) + state.inner.number


def read(state):
    out = np.full(12, np.nan)
    _read(state, out)
    return out.tolist()


def expected(values):
    inner, other = values.inner, values.other
    return [
        values.is_on, values.share, inner.number, values.table.sum(), len(values.table), inner.cube[1, 2, 3], 5, 0,
        other.cube[1, 2, 3], other.number, values.flags[1], 1,
    ]  # fmt: skip


def test_fields_are_read_and_written_in_place():
    values = a_tuple()
    state = Reference(values)
    assert read(state) == expected(values)
    assert state.values is values
    assert state.inner.cube is values.inner.cube, "Python reads the tuple itself"
    flag = bool(values.flags[1])
    assert _write(state, 1, 9) == 9
    assert (values.table[1].tolist(), values.table[2, 1]) == ([4, 9], 10)
    assert (values.inner.cube[1] == 9).all()
    assert (values.other.cube[1] != 9).all()
    assert values.flags[1] != flag
    values.table[0, 0] = -5  # Python's writes are seen, too
    assert read(state) == expected(values)


def test_references_are_arguments_like_others():
    first, second, out = Reference(a_tuple()), Reference(a_tuple(5)), np.zeros(12)
    assert _through(first, None, out) == 0
    assert out.tolist() == expected(first.values)
    assert _through(first, second, out) == 7 + 2**40
    assert (first.values.table[0, 1], second.values.table[0, 1]) == (2, 7)


def test_an_array_that_has_grown_needs_another_reference():
    values = a_tuple()
    old = Reference(values)
    grown = values._replace(table=np.ones((100, 2), np.int32))
    assert read(Reference(grown)) == expected(grown)
    assert read(old) == expected(values)


def test_arrays_live_as_long_as_their_reference_and_no_longer():
    counts = np.arange(10.0)
    before = sys.getrefcount(counts)
    state = Reference(Inner(np.zeros((2, 3, 4), np.float32), 1, counts))
    values = Reference(a_tuple()._replace(inner=state.values))
    held = sys.getrefcount(counts)
    assert held > before
    for _ in range(100):
        _write(values, 0, 1)
    gc.collect()
    assert sys.getrefcount(counts) == held, "calls leave reference counts alone"
    del state, values
    gc.collect()
    assert sys.getrefcount(counts) == before


def test_many_references_do_not_mix():
    """Each has memory of its own, that of dropped ones is used again."""
    states = [Reference(a_tuple(size)) for size in range(2, 60)]
    for state in states[::2]:
        state.values.table[:] = -1
    states = states[1::2] + [Reference(a_tuple(2)) for _ in range(30)]
    for state in states:
        assert read(state) == expected(state.values)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_one_compiled_function_serves_all_references_to_like_tuples():
    read(Reference(a_tuple()))
    before = len(_read.signatures)
    read(Reference(a_tuple(7)))
    assert len(_read.signatures) == before


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_a_field_that_is_not_there_is_told_when_it_is_compiled():
    @njit(allocates=False, cache=False)
    def wrong(state):
        return state.inner.no_such_field

    with pytest.raises(TypingError, match="no_such_field"):
        wrong(Reference(a_tuple()))
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = Reference(a_tuple()).no_such_field


@pytest.mark.skipif(INTERPRETED, reason="is what this test starts")
def test_interpreted_code_reads_the_same():
    code = "from tests.jit.test_reference import *; print(read(Reference(a_tuple())))"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == str([float(value) for value in expected(a_tuple())]).split()


class Swapped(NamedTuple):
    empty: Any
    number: Any
    cube: Any


def test_tuples_of_like_fields_with_other_names_are_told_apart():
    @njit(allocates=False, cache=False)
    def middle(state):
        return state.cube[1, 1]

    one, two = np.arange(4.0).reshape(2, 2), -np.arange(4.0).reshape(2, 2)
    for kind, expected in ((Inner, 3), (Swapped, -3), (Inner, 3)):
        state = Reference(kind(one, 1, two))
        assert middle(state) == expected
        assert middle(Reference(kind(one, 1, two))) == expected
        del state
