"""Where compiled code is kept: a folder named by what it depends on. Does not import numba."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

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
    """The folder for this digest, made in NUMBA_CACHE_DIR or the user's cache folder. None: neither can be written."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (os.environ.get("NUMBA_CACHE_DIR"), cache if os.path.isabs(cache) else None):  # no home: ~ stays
        if not parent:
            continue
        path = Path(parent, "rollout_spec", digest())
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        return path
    return None
