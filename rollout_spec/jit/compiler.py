"""`njit` for this package: numba's, with a cache that notices every changed source and that is optional.

`jit_cache` says where compiled code is kept, and why numba's own cache is not enough.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba.core import caching, cgutils, codegen, compiler, types
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic

from rollout_spec.jit import cache

DIGEST_BYTES = 16

_dispatchers: list[Any] = []


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
        folder = _folder() if cache else None
        if folder is not None:
            compiled._cache = _Cache(function)  # what numba's enable_caching() does
    return compiled


def inlined(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function into each compiled function that calls it.

    It is optimised and turned into machine code there only, so that it takes a fraction of what `njit` takes. Python
    may call it, too, and then compiles it once more.

    Args:
        **options: `njit`'s and numba's.
    """
    if function is None:
        return functools.partial(inlined, **options)
    compiled = njit(
        function, cache=False, forceinline=True, no_cpython_wrapper=True, pipeline_class=_InlinedCompiler, **options
    )
    if isinstance(compiled, CPUDispatcher):
        compiled.__class__ = _Inlined
    return compiled


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


def dispatchers() -> list[Any]:
    """All functions that `njit` was given so far, as numba's dispatchers."""
    return list(_dispatchers)


@functools.cache
def _folder() -> Path | None:
    folder = cache.find_folder()
    if folder is None:
        _warn("no folder for compiled code can be written, so every process compiles the drafters again")
        return None
    if folder.is_temporary:
        _warn(f"compiled code is kept in {folder.path}, which may be gone after a restart")
    elif folder.passed_over is not None:
        _warn(f"compiled code is kept in {folder.path}, because {folder.passed_over} cannot be written")
    return folder.path


@functools.cache  # once per message
def _warn(message: str) -> None:
    warnings.warn(f"rollout_spec: {message}: {cache.REMEDY}", RuntimeWarning, stacklevel=2)


class _Inlined(CPUDispatcher):
    """A compiled function without a wrapper for Python; the first call from Python compiles one with it."""

    def __call__(self, *args: Any) -> Any:
        return self._callable(*args)

    @functools.cached_property
    def _callable(self) -> Any:
        return numba.njit(self.py_func)

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres  # numba would tell Python's calls where the code is


class _InlinedCompiler(compiler.Compiler):
    """numba's compiler, less the machine code."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.library = _InlinedCode(self.state.targetctx.codegen(), func.__qualname__)
        self.state.flags.no_compile = True
        result = super().compile_extra(func)._replace(entry_point=object())  # a key: calls of the function look it up
        self.state.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


class _InlinedCode(codegen.JITCodeLibrary):
    """Code that is linked into its callers', and optimised together with it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _Locator(caching._CacheLocator):
    """Tells numba where a function's code is kept, and what it depends on."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self._py_file = path  # numba's warnings name it
        self._function = function

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(_folder())

    def get_source_stamp(self) -> str:
        return cache.digest()

    def get_disambiguator(self) -> str:
        return f"{self._function.__module__}-{self._function.__code__.co_firstlineno}"


class _Results(caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(caching.FunctionCache):
    """numba's cache of one function; where files cannot be read or written, the function is compiled again.

    numba keeps an index of a function's signatures and processors, which processes that compile at once would change
    without a lock. Here every signature and processor has a file of its own.
    """

    _impl_class = _Results

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        self._select_file(sig, target_context.codegen())
        return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        self._select_file(sig, data.codegen)
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(f"compiled code cannot be kept ({error.strerror})")

    def _select_file(self, sig: Any, codegen: Any) -> None:
        key = hashlib.blake2b(repr(self._index_key(sig, codegen)).encode(), digest_size=16).hexdigest()
        self._cache_file = _CodeFile(Path(self.cache_path, f"{self._impl.filename_base}-{key}.nbc"))


class _CodeFile:
    """The code of one signature, after a digest of it and of the file's name: damaged code could crash the process.

    It takes the place of numba's `IndexDataCacheFile`, whose keys it does not need.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, key: Any) -> Any:
        """What was saved; None if there is nothing, or if it is damaged."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return pickle.loads(code) if digest == self._digest(code) else None

    def flush(self) -> None:
        """Forget what is there: the function is compiled anew."""
        self._path.unlink(missing_ok=True)

    def save(self, key: Any, data: Any) -> None:
        """Replace what is there. Other processes find the old code or the new, as a whole.

        Raises:
            OSError: it cannot be written.
        """
        code = caching.dumps(data)
        unfinished = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            unfinished.write_bytes(self._digest(code) + code)
            unfinished.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _digest(self, code: bytes) -> bytes:
        return hashlib.blake2b(self._path.name.encode() + code, digest_size=DIGEST_BYTES).digest()
