"""Checks of what users pass: each raises an error that names the argument, what was expected and what came.

A value of the wrong type raises TypeError, one out of range ValueError. NumPy's scalars count as Python's, as sizes are
often computed with NumPy; they are returned as Python's, which JSON can hold. Bools are no numbers, and arrays and
tensors no scalars.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INT = 2**63 - 1
_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 80


def shown(value: object) -> str:
    """A value for an error message, cut where it is long."""
    return _repr.repr(value)


def shown_array(value: Any) -> str:
    """Dtype and shape of an array for an error message; other values as they are."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {list(value.shape)}"
    return shown(value)


def integer(name: str, value: object, least: int = -MAX_INT - 1, most: int = MAX_INT) -> int:
    """An int from `least` to `most`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    number = int(value)
    if least <= number <= most:
        return number
    if most < MAX_INT:
        expected = f"be from {least} to {most}"
    elif -MAX_INT <= least > number:
        expected = f"be at least {least}"
    else:
        expected = "fit in 64 bits"
    raise ValueError(f"{name} must {expected}, got {shown(number)}")


def number(name: str, value: object, is_right: Callable[[float], bool], expected: str) -> float:
    """A float for which `is_right` holds, as `expected` says it. An int counts as one."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not is_right(float(value)):
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    return float(value)


def num_bytes(name: str, value: object, least: int = 1) -> int:
    """An int, also from a size such as "2GB"."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kMGT]?)B?", value)
        if not match:
            raise ValueError(f"{name} {shown(value)} is no size, such as 500MB or 2GB")
        value = int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))
    return integer(name, value, least)


def integers(name: str, values: object, size: int) -> NDArray[np.int64]:
    """int64 [size] of so many integers, from a list or an array."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths, tensors on a device
        raise TypeError(f"{name} must be {size} integers, got {shown(values)}") from None
    if array.shape != (size,):
        raise ValueError(f"{name} must have shape [{size}], got {shown_array(array)}")
    if array.dtype.kind not in "iu" and size:  # an empty list has no kind
        raise TypeError(f"{name} must be {size} integers, got {shown_array(array)}")
    if array.dtype == np.uint64 and array.max(initial=0) > MAX_INT:
        raise ValueError(f"{name} must fit in 64 bits, got {array.max()}")
    return array.astype(np.int64)


def switch(name: str, value: object) -> bool:
    """A bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {shown(value)}")
    return bool(value)


def choice(name: str, value: object, choices: Iterable[str]) -> str:
    """One of several strings."""
    known = tuple(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {known}, got {shown(value)}")
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {shown(value)}{did_you_mean(value, known)}")
    return str(value)


def plain(name: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of a mapping that JSON can hold: of dicts and lists, with Python's numbers in place of NumPy's scalars.

    Raises:
        TypeError: it is no mapping with strings as keys, or holds something that JSON cannot.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must have strings as keys, got {shown(key)}")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(value), default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} must be plain data, as JSON can hold, got {shown(value)}: {error}") from error
    return copied


def _plain(value: Any) -> Any:
    """A dict or a list for other mappings and sequences, such as those of configuration libraries."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{shown(value)} is not")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    near = difflib.get_close_matches(str(value), tuple(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """Of an error's message; its type's name if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
