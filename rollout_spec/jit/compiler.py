"""`njit` for this package: numba's, whose cache also notices changes in functions that the cached one calls.

numba's cache looks at the file of the cached function only. So its folder is named by a digest of all our files and of
the settings that change the code. numba itself tells versions of numba, of Python and processors apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, cgutils, types
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic

MAX_AGE = 30 * 24 * 3600.0
"""Seconds after which the folder of another digest is removed if no process has used it."""
SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_OPT")
REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that can be written"

_dispatchers: list[Any] = []


class Folder(NamedTuple):
    """Where compiled code is kept."""

    path: Path
    is_temporary: bool
    """Whether it may be gone after a restart."""


def njit(
    function: Callable[..., Any] | None = None, *, cache: bool = True, allocates: bool = True, **options: Any
) -> Any:
    """Compile a function when it is first called. Use it as `@njit` or as `@njit(nogil=True)`.

    Args:
        cache: Whether to keep the code for later processes.
        allocates: Whether the function may make arrays. False leaves reference counting out of it and of what it
            calls, which halves the time to compile; the caller then allocates its buffers.
        **options: numba's.

    Returns:
        numba's dispatcher; the function itself under NUMBA_DISABLE_JIT=1.
    """
    if function is None:
        return functools.partial(njit, cache=cache, allocates=allocates, **options)
    if not allocates:
        options["_nrt"] = False
    # The wrapper by which C code could call it is not needed, and takes as long to compile as the one for Python.
    compiled = numba.njit(no_cfunc_wrapper=True, **options)(function)
    if isinstance(compiled, CPUDispatcher):
        _dispatchers.append(compiled)
        folder = find_folder() if cache else None
        if folder is not None:
            compiled._cache = _make_cache(function, folder.path)  # as numba's enable_caching() does
    return compiled


def _make_cache(function: Callable[..., Any], folder: Path) -> _Cache:
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        return _Cache(function)
    finally:
        numba.config.CACHE_DIR = before


class _Cache(caching.FunctionCache):
    """numba's, with one writer at a time: two at once could give two signatures' code the same file."""

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError), open(Path(self.cache_path, "lock"), "w") as lock:  # e.g. the disk is full
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(sig, data)


def dispatchers() -> list[Any]:
    """All functions that `njit` was given so far, as numba's dispatchers."""
    return list(_dispatchers)


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """`prefetch(array, i)`: load a C-contiguous array's i-th element, counted flat, while other code goes on.

    Nothing is checked, as loading from outside of the array does no harm.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, number(0), number(3), number(1)])  # to read, into all levels, data
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch: Any = (lambda array, index: None) if numba.config.DISABLE_JIT else intrinsic(_prefetch)


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
