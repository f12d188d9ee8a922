"""Where the machine code of compiled functions is kept between processes. Does not import numba.

numba's own cache notices when the file of a cached function changes, but not when another file does from which that
function calls or takes a constant. So all our compiled functions share a folder whose name is a digest of everything
that they are compiled from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollout_spec.imports import installed_versions

SOURCES = (
    "budget/decide.py",
    "budget/estimates.py",
    "checks.py",
    "drafters/host/index.py",
    "drafters/host/lookahead.py",
    "drafters/host/ngram.py",
    "drafters/host/requests.py",
    "drafters/host/step.py",
    "drafters/host/store.py",
    "drafters/host/suffix.py",
    "drafters/host/vote.py",
    "drafters/host/voting.py",
    "drafters/model/choice.py",
    "features/format.py",
    "features/torch.py",
    "jit/compiler.py",
    "jit/reference.py",
    "noise/host.py",
    "noise/torch.py",
    "types.py",
    "verify/cpu.py",
    "verify/layout.py",
    "verify/reference.py",
)
"""The modules that define compiled functions, and those of ours that they import."""
COMPILERS = ("numba", "llvmlite", "numpy")
SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT")
"""Environment variables that change the code and that numba's cache does not look at."""
MAX_AGE = 30 * 24 * 3600.0
"""Seconds after which the folder of another digest is removed if no process has used it."""

REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"


@functools.cache
def digest() -> str:
    """Names the sources, versions and settings that compiled code depends on. numba itself tells processors apart."""
    package = Path(__file__).parents[1]
    known = hashlib.blake2b(digest_size=10)
    for name in SOURCES:
        source = package / name
        known.update(source.read_bytes() if source.exists() else b"")
    versions = (platform.python_version(), *installed_versions(COMPILERS).items())
    known.update(repr((versions, [os.environ.get(name) for name in SETTINGS])).encode())
    return known.hexdigest()


class Folder(NamedTuple):
    """Where compiled code is kept."""

    path: Path
    is_temporary: bool
    """Whether it may be gone after a restart."""
    passed_over: Path | None = None
    """NUMBA_CACHE_DIR, where it is set and cannot be written."""


def _candidates() -> Iterator[Folder]:
    """Folders to keep code in, best first."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Folder(Path(chosen, "rollout_spec"), False)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):  # a process may have no home
        yield Folder(Path(cache, "rollout_spec"), False)
    with contextlib.suppress(FileNotFoundError):  # raised if no temporary folder can be written
        user = os.getuid() if hasattr(os, "getuid") else "user"
        yield Folder(Path(tempfile.gettempdir(), f"rollout_spec-{user}"), True)


@functools.cache
def find_folder() -> Folder | None:
    """The folder for this digest, made if it is missing; None if no folder can be written.

    In this order: `$NUMBA_CACHE_DIR/rollout_spec`, the user's cache folder, a temporary folder that only the user can
    write to. Folders of other digests that have not been used for MAX_AGE are removed whenever one is made.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    for root, is_temporary, _ in _candidates():
        path = root / digest()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_temporary and not _is_private(root):
                continue
            is_new = not path.exists()
            path.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        if is_new:
            _remove_unused(root)
        with contextlib.suppress(OSError):
            os.utime(path)
        passed_over = Path(chosen) if chosen and Path(chosen) not in path.parents else None
        return Folder(path, is_temporary, passed_over)
    return None


def _is_private(root: Path) -> bool:
    """Whether only this user can put files there: code in a cache is executed, and anybody can write to /tmp."""
    status = root.lstat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return is_own and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077


def _remove_unused(root: Path) -> None:
    """Remove other digests' folders that are older than MAX_AGE. Another process may be doing the same."""
    for other in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > MAX_AGE:
                shutil.rmtree(other, ignore_errors=True)
