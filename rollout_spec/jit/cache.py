"""Where compiled code is kept: a folder named by what it depends on. Does not import numba."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_AGE = 30 * 24 * 3600.0
"""Seconds after which the folder of another digest is removed if no process has used it."""
SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT")
REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"


class Folder(NamedTuple):
    """Where compiled code is kept."""

    path: Path
    is_temporary: bool
    """Whether it may be gone after a restart."""


@functools.cache
def digest() -> str:
    """Names our files and what else compiled code depends on."""
    package = Path(__file__).parents[1]
    known = hashlib.blake2b(digest_size=10)
    for name in sorted(glob.glob("**/*.py", root_dir=package, recursive=True)):  # follows a checkout's links
        known.update(name.encode() + Path(package, name).read_bytes())
    known.update(repr((np.__version__, [os.environ.get(name) for name in SETTINGS])).encode())
    return known.hexdigest()


def _roots() -> Iterator[tuple[Path, bool]]:
    """Folders for the digests' folders, best first, and whether they are temporary."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen, "rollout_spec"), False
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):  # a process may have no home
        yield Path(cache, "rollout_spec"), False
    with contextlib.suppress(FileNotFoundError):  # raised if no temporary folder can be written
        yield Path(tempfile.gettempdir(), f"rollout_spec-{os.getuid()}"), True


@functools.cache
def find_folder() -> Folder | None:
    """The folder for this digest, made if it is missing; None if no folder can be written.

    In this order: `$NUMBA_CACHE_DIR/rollout_spec`, the user's cache folder, a temporary folder that only the user can
    write to. Folders of other digests that have not been used for MAX_AGE are removed whenever one is made.
    """
    for root, is_temporary in _roots():
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
        for other in root.iterdir() if is_new else ():
            with contextlib.suppress(OSError):  # another process may be doing the same
                if time.time() - other.stat().st_mtime > MAX_AGE:
                    shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.utime(path)
        return Folder(path, is_temporary)
    return None


def _is_private(root: Path) -> bool:
    """Whether only this user can put files there: code in a cache is executed, and anybody can write to /tmp."""
    status = root.lstat()
    return status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
