"""Races that the emulator finds and that change nothing, each with the reason why."""

from __future__ import annotations

from typing import NamedTuple


class Benign(NamedTuple):
    """Accesses by these lines of a kernel."""

    kernel: str
    kind: str
    lines: tuple[str, ...]
    """How the lines of Python begin."""
    reason: str


_READ_FIRST = "Every lane loads it, and lane 0 stores the new value after collectives that need what the lanes loaded."
BENIGN = (
    Benign(
        "_extend_kernel",
        "race within a warp",
        ("length = tl.load(documents_ptr + LENGTH)", "tl.store(documents_ptr + LENGTH"),
        _READ_FIRST,
    ),
    Benign(
        "_extend_kernel",
        "race within a warp",
        ("num_drafted = tl.where(length > 0, tl.load(num_drafted_ptr", "tl.store(num_drafted_ptr"),
        _READ_FIRST,
    ),
    Benign(
        "_lengthen_kernel",
        "race within a warp",
        ("length = tl.load(documents_ptr + LENGTH)", "tl.store(documents_ptr + LENGTH"),
        _READ_FIRST,
    ),
)
