"""Compiled functions and their cache: never stale, and not needed."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

import rollout_spec
from rollout_spec import installation, jit
from rollout_spec.jit import by_reference, njit

PACKAGE = Path(rollout_spec.__file__).parent
compiles = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")

PROBE = """
import json, sys
from unittest.mock import MagicMock
import numpy as np
for name in ("torch", "torch.nn", "torch.nn.functional"):
    sys.modules[name] = MagicMock()  # not needed here, and takes longer to import than all the rest
from rollout_spec.noise.host import finish_hashes
from rollout_spec.verify.cpu import _sample_row  # it calls the former
logits, words = np.arange(600, dtype=np.float32) / 100, np.arange(600, dtype=np.uint32)
hashes = np.zeros(512, np.uint32)
_sample_row(logits, np.float32(1), 7, words, hashes, np.zeros(512, np.int32))
compiled = [_sample_row, finish_hashes]
print(json.dumps({
    "value": hashes.sum().item(),
    "hits": sum(sum(f.stats.cache_hits.values()) for f in compiled),
    "misses": sum(sum(f.stats.cache_misses.values()) for f in compiled),
}))
"""


def start_probe(package=PACKAGE, **environment):
    environment = {**os.environ, "PYTHONPATH": str(package.parent), **environment}
    command = [sys.executable, "-c", PROBE]
    return subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.PIPE, text=True)


def result(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output)


def probe(**options):
    return result(start_probe(**options))


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


@pytest.mark.exhaustive
@compiles
def test_without_a_folder_that_can_be_written_every_process_compiles(tmp_path):
    nowhere = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": "/dev/null/cache"}
    lost = probe(**nowhere)
    assert lost["hits"] == 0
    assert lost["misses"] > 0
    kept = probe(**{**nowhere, "XDG_CACHE_HOME": str(tmp_path)})
    assert kept["value"] == lost["value"]
    assert kept["misses"] > 0


def double(x):
    return 2 * x


@compiles
def test_code_that_cannot_be_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "find_folder", lambda: tmp_path)

    compiled = njit(double)
    Path(compiled._cache.cache_path, "lock").mkdir()  # root may write to a folder of any mode
    assert compiled(7) == 14


@compiles
def test_damaged_code_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "find_folder", lambda: tmp_path)
    for _ in range(2):
        assert njit(double)(7) == 14
        kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert kept
        for path in kept:
            path.write_bytes(b"no pickle")


def test_no_other_module_compiles_with_a_cache_of_its_own():
    for path in {*PACKAGE.glob("**/*.py"), *PACKAGE.glob("drafters/**/*.py")} - {PACKAGE / "jit.py"}:
        assert not re.search(r"from numba import|\b(numba|nb)\.(n?jit|vectorize|guvectorize)\b", path.read_text()), path


class State(NamedTuple):
    table: Any
    number: Any


@njit
def change(state, at):
    state.values.table[at, 1] += state.values.number
    return state.values.table[at, 1]


def test_what_is_passed_by_reference_is_read_and_written_in_place():
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    before = sys.getrefcount(table)
    state = by_reference(State(table, 2**20))
    assert change(state, 1) == 6 + 2**20
    table[1, 1] = 0  # Python's writes are seen, too
    assert change(state, 1) == table[1, 1] == 2**20
    del state
    gc.collect()
    assert sys.getrefcount(table) == before, "arrays live as long as what refers to them, and no longer"


def test_the_digest_covers_files_of_every_depth(tmp_path, monkeypatch):
    """Also behind links, as a checkout has them."""
    files = [tmp_path / name for name in ("package/a.py", "package/b/c.py", "linked/d/e.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1")
    (tmp_path / "package" / "link").symlink_to(tmp_path / "linked")
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "package" / "installation.py"))
    seen = {installation.digest.__wrapped__()}
    for file in files:
        file.write_text("x = 2")
        seen.add(installation.digest.__wrapped__())
    assert len(seen) == 4
