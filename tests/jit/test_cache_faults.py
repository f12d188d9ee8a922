"""Compiled code that is damaged, foreign, or cannot be kept: the function is compiled again, and says the same."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import warnings
from pathlib import Path

import numba
import pytest

from rollout_spec.jit import compiler as jit

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where code is kept in this test."""
    monkeypatch.setattr(jit, "_folder", lambda: tmp_path)
    monkeypatch.setattr(jit, "_dispatchers", [])
    jit._warn.cache_clear()
    return tmp_path


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def code_of(function):
    """Call a function as a new process would. Returns whether its code was there."""
    compiled = jit.njit(function)
    assert compiled(7) == function(7)
    return bool(compiled.stats.cache_hits)


def the_file(folder):
    (file,) = folder.iterdir()
    return file


def flip(data):
    rng = random.Random(len(data))
    for _ in range(12):
        at = rng.randrange(len(data))
        yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


DAMAGES = {
    "cut": lambda data: [data[:n] for n in (0, 1, 15, 16, 17, len(data) // 2, len(data) - 1)],
    "a page that was never written": lambda data: [data[:n] + bytes(4096) + data[n + 4096 :] for n in (0, 512, 2048)],
    "garbage": lambda data: [b"garbage", b"\x80\x05garbage.", random.Random(0).randbytes(len(data))],
    "bits": flip,
    "another pickle": lambda data: [b"\x80\x04N.", b"\x80\x04]\x94.", data[:16] + b"\x80\x04K\x01."],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_code_is_compiled_again(folder, damage):
    assert not code_of(double)
    file = the_file(folder)
    whole = file.read_bytes()
    for data in DAMAGES[damage](whole):
        file.write_bytes(data)
        assert not code_of(double)
        assert code_of(double), "what was damaged has been replaced"
        assert file == the_file(folder)


def test_a_function_can_be_compiled_anew(folder):
    code_of(double)
    compiled = jit.njit(double)
    assert compiled(7) == 14
    compiled.recompile()
    assert compiled(7) == 14


def test_another_functions_code_is_not_called(folder):
    code_of(double)
    own = the_file(folder)
    code_of(triple)
    (other,) = set(folder.iterdir()) - {own}
    shutil.copy(own, other)
    assert not code_of(triple)


def test_a_file_that_cannot_be_read(folder, monkeypatch):
    code_of(double)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda self: os.close(-1))  # OSError
        assert not code_of(double)
    assert code_of(double)


@contextlib.contextmanager
def files_of_at_most(size):
    """Longer files are written in part, then writing fails: the kernel does to them what a quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_code_for_which_there_is_no_room(folder):
    with warnings.catch_warnings(record=True) as caught, files_of_at_most(100):
        warnings.simplefilter("always")
        assert not code_of(double)
        assert not code_of(triple)
    (warning,) = caught
    assert "compiled code cannot be kept (File too large): set the environment variable" in str(warning.message)
    assert list(folder.iterdir()) == []
    assert not code_of(double)
    assert code_of(double)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(("options", "reason"), [("size=4k", "No space left"), ("size=1m,ro", "Read-only file system")])
def test_a_full_and_a_read_only_file_system(folder, monkeypatch, options, reason):
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        monkeypatch.setattr(jit, "_folder", lambda: disk)
        with pytest.warns(RuntimeWarning, match=reason):
            assert not code_of(double)
        assert not code_of(double)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_goes_away(folder):
    shutil.rmtree(folder)
    assert not code_of(double)
    assert code_of(double)


def test_a_folder_in_the_place_of_a_file(folder):
    code_of(double)
    file = the_file(folder)
    file.unlink()
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="compiled code cannot be kept"):
        assert not code_of(double)
    assert [file] == list(folder.iterdir())
