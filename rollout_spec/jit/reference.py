"""Passes many arrays to a compiled function by one address.

What a compiled call unpacks costs more than small work: a named tuple of 55 arrays 8 to 10 us per call, a reference to
the same tuple 0.7. Inside, a reference is used like the tuple: `state.store.tokens`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.dispatcher import _dispatcher
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from rollout_spec.jit.compiler import njit

_types: dict[bytes, Any] = {}
"""By what numba tells types of arguments apart."""


class Reference:
    """A named tuple of arrays, numbers and other such tuples, which compiled functions may read by its fields.

    Its fields cannot be replaced, only the arrays' contents: make another one where an array has grown.

    Attributes:
        values: The tuple.
    """

    __slots__ = ("_buffer", "_numba_type_", "address", "values")

    def __init__(self, values: Any) -> None:
        self.values = values
        if numba.config.DISABLE_JIT:
            return
        key = _dispatcher.compute_fingerprint(values)
        if key not in _types:  # to find out costs half a millisecond
            _types[key] = _ReferenceType(numba.typeof(values))
        self._numba_type_ = _types[key]  # where numba looks for an object's type
        self._buffer = np.empty(_size(values), np.uint8)
        _pack(values, self._buffer)
        self.address = self._buffer.ctypes.data

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (self.values,)  # a copy has arrays of its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)


class _ReferenceType(types.Type):
    def __init__(self, target: Any) -> None:
        self.target = target
        super().__init__(f"Reference({target})")


@register_model(_ReferenceType)
class _ReferenceModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, manager[kind.target].get_data_type().as_pointer())


@unbox(_ReferenceType)
def _unbox(kind: Any, value: Any, context: Any) -> NativeValue:
    number = context.pyapi.object_getattr_string(value, "address")
    address = context.pyapi.long_as_voidptr(number)
    context.pyapi.decref(number)
    return NativeValue(context.builder.bitcast(address, context.context.get_value_type(kind)))


@infer_getattr
class _FieldTypes(AttributeTemplate):
    key = _ReferenceType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        target = kind.target
        return target.types[target.fields.index(name)] if name in target.fields else None


@lower_getattr_generic(_ReferenceType)
def _load_field(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    index = kind.target.fields.index(name)
    return context.unpack_value(builder, kind.target.types[index], cgutils.gep_inbounds(builder, value, 0, index))


@intrinsic
def _store(typing_context: Any, values: Any, buffer: Any) -> Any:
    """Write the tuple to the buffer, as compiled code keeps it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        data = context.make_array(signature.args[1])(context, builder, args[1]).data
        pointer = context.data_model_manager[kind].get_data_type().as_pointer()
        context.pack_value(builder, kind, args[0], builder.bitcast(data, pointer))
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(values, buffer), generate


@njit(allocates=False)
def _pack(values: Any, buffer: Any) -> int:
    return _store(values, buffer)  # type: ignore[no-any-return]


def _size(values: Any) -> int:
    """Bytes that are enough for a tuple: an array is at most seven words and two for each dimension."""
    if isinstance(values, tuple):
        return sum(map(_size, values))
    return 8 * (7 + 2 * values.ndim) if isinstance(values, np.ndarray) else 16
