"""`njit` for this package: numba's, whose cache also notices changes in functions that the cached one calls.

numba's cache looks at the file of the cached function only. So its folder is named by a digest of all our files and of
the settings that change the code. numba itself tells versions of numba, of Python and processors apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
from numba.core import caching, types
from numba.core.registry import CPUDispatcher
from numba.experimental import structref

from rollout_spec.installation import find_folder


def njit(function: Callable[..., Any] | None = None, *, allocates: bool = True, **options: Any) -> Any:
    """Compile a function when it is first called. Use it as `@njit` or as `@njit(nogil=True)`.

    Args:
        allocates: Whether the function may make arrays. False leaves reference counting out of it and of what it
            calls, which halves the time to compile; the caller then allocates its buffers.
        **options: numba's.

    Returns:
        numba's dispatcher; the function itself under NUMBA_DISABLE_JIT=1.
    """
    if function is None:
        return functools.partial(njit, allocates=allocates, **options)
    if not allocates:
        options["_nrt"] = False
    # The wrapper by which C code could call it is not needed, and takes as long to compile as the one for Python.
    compiled = numba.njit(no_cfunc_wrapper=True, **options)(function)
    folder = find_folder()
    if folder is not None and isinstance(compiled, CPUDispatcher):
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            compiled._cache = _Cache(function)  # as numba's enable_caching() does
        finally:
            numba.config.CACHE_DIR = before
    return compiled


class _Cache(caching.FunctionCache):
    """numba's, locked: two writers at once could give two signatures' code the same file, and a reader the wrong one.

    What cannot be read is compiled again: files may be damaged, and signatures may name types of other programs.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with contextlib.suppress(OSError), self._lock():
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # unpickling raises whatever the bytes lead to
                self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError), self._lock():  # e.g. the disk is full
            super().save_overload(sig, data)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with open(Path(self.cache_path, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@structref.register
class _ReferenceType(types.StructRef):
    pass


class _Reference(structref.StructRefProxy):  # type: ignore[misc]
    __slots__ = ()


structref.define_proxy(_Reference, _ReferenceType, ["values"])


@njit
def _by_reference(values: Any) -> Any:
    return _Reference(values)


by_reference: Any = (lambda values: SimpleNamespace(values=values)) if numba.config.DISABLE_JIT else _by_reference
"""`by_reference(values)`: pass a tuple of arrays, numbers and tuples to compiled functions by one pointer.

They read it as `reference.values`, and must be allowed to allocate. To unpack 55 arrays takes 8 to 10 us per call, a
reference to them 0.7. Make another one where an array has grown.
"""
