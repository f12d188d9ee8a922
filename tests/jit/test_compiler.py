"""Compiled functions and their cache: never stale, and not needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import rollout_spec
from rollout_spec.jit import compiler as jit
from rollout_spec.jit.cache import find_folder

PACKAGE = Path(rollout_spec.__file__).parent
compiles = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")

PROBE = """
import json, sys, tempfile
from unittest.mock import MagicMock
import numpy as np
if len(sys.argv) > 1:
    tempfile.tempdir = sys.argv[1]
sys.modules["torch"] = MagicMock()  # not needed here, and takes longer to import than all the rest
from rollout_spec.jit import compiler as jit
from rollout_spec.verify.cpu import _sample_row  # it calls compiled functions of noise/host.py
logits, words = np.arange(600, dtype=np.float32) / 100, np.arange(600, dtype=np.uint32)
hashes = np.zeros(512, np.uint32)
_sample_row(logits, np.float32(1), 7, words, hashes, np.zeros(512, np.int32))
compiled = jit.dispatchers()
print(json.dumps({
    "value": hashes.sum().item(),
    "hits": sum(sum(f.stats.cache_hits.values()) for f in compiled),
    "misses": sum(sum(f.stats.cache_misses.values()) for f in compiled),
}))
"""


def start_probe(*arguments, package=PACKAGE, **environment):
    environment = {**os.environ, "PYTHONPATH": str(package.parent), **environment}
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.PIPE, text=True)


def result(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output)


def probe(*arguments, **options):
    return result(start_probe(*arguments, **options))


@compiles
def test_code_is_compiled_once_and_again_when_a_function_that_it_calls_has_changed(tmp_path):
    package = tmp_path / "copy" / "rollout_spec"
    shutil.copytree(PACKAGE, package)
    options = {"package": package, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, second = map(result, [start_probe(**options) for _ in range(2)])  # at once, as ranks do
    assert first["misses"] + second["misses"] > 0
    assert first["value"] == second["value"]

    later = probe(**options)
    assert later["misses"] == 0
    assert later["hits"] > 0
    assert later["value"] == first["value"]

    callee = package / "noise/host.py"
    old, new = "h = np.uint32(h * np.uint32(FMIX1))", "h = np.uint32(h * np.uint32(FMIX2))"
    assert old in callee.read_text()
    callee.write_text(callee.read_text().replace(old, new))
    edited = probe(**options)
    assert edited["misses"] > 0
    assert edited["value"] != first["value"]


@compiles
def test_without_a_folder_that_can_be_written_every_process_compiles(tmp_path):
    nowhere = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": "/dev/null/cache"}
    lost = probe("/dev/null/tmp", **nowhere)
    assert lost["misses"] > 0
    assert lost["hits"] == 0
    kept = probe(tmp_path, **nowhere)
    assert kept["value"] == lost["value"]
    assert probe(tmp_path, **nowhere)["misses"] == 0


@compiles
def test_code_that_cannot_be_kept(tmp_path):
    @jit.njit(cache=False)
    def double(x):
        return 2 * x

    double._cache = jit._make_cache(double.py_func, tmp_path)
    Path(double._cache.cache_path, "lock").mkdir()  # root may write to a folder of any mode
    assert double(7) == 14


@compiles
def test_damaged_code_is_compiled_again(tmp_path):
    def double(x):
        return 2 * x

    for _ in range(2):
        compiled = jit.njit(cache=False)(double)
        compiled._cache = jit._make_cache(double, tmp_path)
        assert compiled(7) == 14
        kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert kept
        for path in kept:
            path.write_bytes(b"no pickle")


def test_no_other_module_compiles_with_a_cache_of_its_own():
    for path in {*PACKAGE.glob("*/**/*.py"), *PACKAGE.glob("drafters/**/*.py")} - {PACKAGE / "jit/compiler.py"}:
        assert not re.search(r"from numba import|\b(numba|nb)\.(n?jit|vectorize|guvectorize)\b", path.read_text()), path


@pytest.mark.parametrize("fault", ["others may write", "a link", "of another user"])
def test_a_temporary_folder_that_others_could_fill_is_not_used(monkeypatch, tmp_path, fault):
    for name, value in (("HOME", "/dev/null/x"), ("XDG_CACHE_HOME", ""), ("NUMBA_CACHE_DIR", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = tmp_path / f"rollout_spec-{os.getuid()}"
    if fault == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.mkdir(mode=0o700)
    if fault == "others may write":
        root.chmod(0o770)
    elif fault == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(root, 12345, 12345)
    assert find_folder.__wrapped__() is None
