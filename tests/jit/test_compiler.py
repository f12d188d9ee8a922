"""Compiled functions and their cache: never stale, and not needed."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numba
import pytest

import rollout_spec
from rollout_spec.jit import cache
from rollout_spec.jit import compiler as jit

PACKAGE = Path(rollout_spec.__file__).parent
INTERPRETED = bool(numba.config.DISABLE_JIT)

PROBE = """
import json, sys, tempfile, warnings
from unittest.mock import MagicMock
import numpy as np
if len(sys.argv) > 1:
    tempfile.tempdir = sys.argv[1]
sys.modules["torch"] = MagicMock()  # not needed here, and takes longer to import than all the rest
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from rollout_spec.jit import compiler as jit
    from rollout_spec.noise.torch import _uniform32_nb  # it calls compiled functions of noise/host.py
    hashes, uniforms = np.empty(3, np.uint32), np.empty((1, 3), np.float32)
    _uniform32_nb(np.array([1]), np.array([2]), np.arange(3, dtype=np.uint32)[None], 0, hashes, uniforms)
    value = uniforms.sum().item()
compiled = jit.dispatchers()
print(json.dumps({
    "value": value,
    "hits": sum(sum(f.stats.cache_hits.values()) for f in compiled),
    "misses": sum(sum(f.stats.cache_misses.values()) for f in compiled),
    "warnings": [str(w.message) for w in caught if "rollout_spec" in str(w.message)],
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


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_code_is_compiled_once_and_again_when_a_function_that_it_calls_has_changed(tmp_path):
    package = tmp_path / "copy" / "rollout_spec"
    shutil.copytree(PACKAGE, package)
    options = {"package": package, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    at_once = [start_probe(**options) for _ in range(2)]
    first, second = map(result, at_once)
    assert first["misses"] + second["misses"] > 0, "one of them may find all that the other has compiled"
    assert first["value"] == second["value"]
    assert not first["warnings"] + second["warnings"]

    later = probe(**options)
    assert later["misses"] == 0
    assert later["hits"] > 0
    assert later["value"] == first["value"]

    for file in (tmp_path / "cache").rglob("*.nbc"):  # cut off by a crash
        os.truncate(file, file.stat().st_size // 2)
    assert probe(**options)["value"] == first["value"]
    assert probe(**options)["misses"] == 0

    callee = package / "noise/host.py"
    old, new = "low = (np.float32(np.int32(h & np.uint32(0xFFFF)))", "low = (np.float32(np.int32(h & np.uint32(0xFFF)))"
    assert old in callee.read_text()
    callee.write_text(callee.read_text().replace(old, new))
    edited = probe(**options)
    assert edited["misses"] > 0
    assert edited["value"] != first["value"]


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_without_a_folder_that_can_be_written_one_warning_names_the_remedy(tmp_path):
    nowhere = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": "/dev/null/cache"}
    lost = probe("/dev/null/tmp", **nowhere)
    assert lost["misses"] > 0
    assert lost["hits"] == 0
    (warning,) = lost["warnings"]
    assert "NUMBA_CACHE_DIR" in warning
    kept = probe(tmp_path, **nowhere)
    assert kept["value"] == lost["value"]
    (warning,) = kept["warnings"]
    assert "may be gone after a restart: set the environment variable NUMBA_CACHE_DIR" in warning
    assert probe(tmp_path, **nowhere)["misses"] == 0


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_a_chosen_folder_that_cannot_be_written_is_told(tmp_path):
    (warning,) = probe(tmp_path, HOME=str(tmp_path / "home"), XDG_CACHE_HOME="", NUMBA_CACHE_DIR="/dev/null/x")[
        "warnings"
    ]
    assert "because /dev/null/x cannot be written" in warning


def _modules() -> set[Path]:
    """All files of ours; two folders are links in a checkout, which `rglob` does not follow."""
    linked = [path for folder in ("drafters", "integrations") for path in (PACKAGE / folder).glob("**/*.py")]
    return {*PACKAGE.rglob("*.py"), *linked}


def test_no_other_module_compiles_with_a_cache_of_its_own():
    for path in _modules() - {PACKAGE / "jit/compiler.py"}:
        assert not re.search(r"from numba import|\b(numba|nb)\.(n?jit|vectorize|guvectorize)\b", path.read_text()), path


def _imports(source: Path) -> set[Path]:
    """The files of ours that a file imports when it is imported."""
    found = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rollout_spec":
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            paths = [PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names if "." in name]
            found |= {path for path in paths if path.is_file()}
    return found


def test_the_digest_covers_all_that_is_compiled():
    needed = {
        path
        for path in _modules()
        if re.search("^from rollout_spec.jit.compiler import (inlined|njit)", path.read_text(), re.M)
    }
    waiting = list(needed)
    while waiting:
        more = _imports(waiting.pop()) - needed
        needed |= more
        waiting += more
    where_it_is_kept = {"imports.py", "jit/cache.py"}  # and not what is in it
    assert sorted({str(path.relative_to(PACKAGE)) for path in needed} - where_it_is_kept) == list(cache.SOURCES)


@pytest.mark.parametrize("name", ["NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT"])
def test_settings_of_the_compiler_have_code_of_their_own(monkeypatch, name):
    digests = set()
    for value in ("0", "1"):
        monkeypatch.setenv(name, value)
        digests.add(cache.digest.__wrapped__())
    assert len(digests) == 2


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No folder but those of `tmp_path` can be chosen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return monkeypatch


find_folder = cache.find_folder.__wrapped__


def test_folders_are_tried_in_order(environment, tmp_path):
    digest = cache.digest()
    environment.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_folder() == (tmp_path / "chosen/rollout_spec" / digest, False, None)
    environment.setenv("NUMBA_CACHE_DIR", "/dev/null/x")
    assert find_folder() == (tmp_path / "xdg/rollout_spec" / digest, False, Path("/dev/null/x"))
    environment.delenv("NUMBA_CACHE_DIR")
    environment.delenv("XDG_CACHE_HOME")
    assert find_folder() == (tmp_path / "home/.cache/rollout_spec" / digest, False, None)
    environment.setenv("HOME", "/dev/null/x")
    temporary = tmp_path / f"tmp/rollout_spec-{os.getuid()}"
    assert find_folder() == (temporary / digest, True, None)
    assert temporary.stat().st_mode & 0o777 == 0o700
    environment.setattr(tempfile, "tempdir", "/dev/null/x")
    assert find_folder() is None


@pytest.mark.parametrize("fault", ["others may write", "a link", "of another user"])
def test_a_temporary_folder_that_others_could_fill_is_not_used(environment, tmp_path, fault):
    environment.setenv("HOME", "/dev/null/x")
    root = tmp_path / f"tmp/rollout_spec-{os.getuid()}"
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
    assert find_folder() is None


def test_folders_that_nobody_has_used_for_long_are_removed(environment, tmp_path):
    root = tmp_path / "home/.cache/rollout_spec"
    old, recent = root / "old", root / "recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
        (folder / "code.nbc").write_text("")
    past = time.time() - cache.MAX_AGE - 60
    os.utime(old, (past, past))
    used = find_folder().path
    assert sorted(root.iterdir()) == sorted((recent, used))
    os.utime(used, (past, past))
    assert find_folder().path.stat().st_mtime > past + 60, "a folder in use stays young"


@jit.inlined
def _double(x):
    return 2 * x


@jit.njit(cache=False, nogil=True)  # code from the cache of an earlier run would leave _double uncompiled
def _quadruple(x):
    return _double(_double(x))


def test_inlined_functions_are_called_from_python_too():
    assert _quadruple(3) == 12
    assert _double(3) == 6
    assert pickle.loads(pickle.dumps(_quadruple))(4) == 16
    if INTERPRETED:
        assert jit.dispatchers() == []
    else:
        assert {_double, _quadruple} <= set(jit.dispatchers())


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_inlined_functions_have_no_machine_code_of_their_own():
    assert _quadruple(3.0) == 12.0
    for function, expected in ((_double, False), (_quadruple, True)):
        result = function.overloads[numba.float64,]
        engine = result.library.codegen._engine
        assert engine.is_symbol_defined(result.fndesc.llvm_func_name) == expected
