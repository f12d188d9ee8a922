"""What is installed: how to install what is missing, versions, and where compiled code is kept. Imports no numba."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import numpy as np

SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT")
REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"


def install(*extras: str) -> str:
    """The command that installs extras of ours, for messages. It also works with an editable install."""
    return f"pip install 'rollout-spec[{','.join(extras)}]'"


INSTALL_VLLM = f"{install('vllm')}, on a CPU `make install-cpu` in a clone of the repository"
"""The same of vLLM, whose CPU build no extra can bring."""


@functools.cache  # reads files
def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def digest() -> str:
    """Names our files and what else compiled code depends on."""
    package = Path(__file__).parent
    found = hashlib.blake2b(digest_size=10)
    for name in sorted(glob.glob("**/*.py", root_dir=package, recursive=True)):  # follows a checkout's links
        found.update(name.encode() + Path(package, name).read_bytes())
    found.update(repr((np.__version__, [os.environ.get(name) for name in SETTINGS])).encode())
    return found.hexdigest()


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
