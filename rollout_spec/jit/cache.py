"""Where compiled code is kept: a folder named by what it depends on. Does not import numba."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

MAX_AGE = 30 * 24 * 3600.0
"""Seconds after which the folder of another digest is removed if no process has used it."""
SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT")
REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"


@functools.cache
def digest() -> str:
    """Names our files and what else compiled code depends on."""
    package = Path(__file__).parents[1]
    known = hashlib.blake2b(digest_size=10)
    for name in sorted(glob.glob("**/*.py", root_dir=package, recursive=True)):  # follows a checkout's links
        known.update(name.encode() + Path(package, name).read_bytes())
    known.update(repr((np.__version__, [os.environ.get(name) for name in SETTINGS])).encode())
    return known.hexdigest()


@functools.cache
def find_folder() -> Path | None:
    """The folder for this digest, made if it is missing, in NUMBA_CACHE_DIR or the user's cache folder.

    None if neither can be written. Folders of other digests that have not been used for MAX_AGE are removed whenever
    one is made.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (os.environ.get("NUMBA_CACHE_DIR"), cache if os.path.isabs(cache) else None):  # no home: ~ stays
        if not parent:
            continue
        path = Path(parent, "rollout_spec", digest())
        try:
            is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        for other in path.parent.iterdir() if is_new else ():
            with contextlib.suppress(OSError):  # another process may be doing the same
                if time.time() - other.stat().st_mtime > MAX_AGE:
                    shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.utime(path)
        return path
    return None
