"""Kernels with a bug planted: a changed copy of a module, or a program without one of its barriers."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

from tests.ptx import driver
from tests.ptx.machine import Loaded
from tests.ptx.program import CONTROL

_numbers = itertools.count()


def changed_copy(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """A copy of a module with all places of `old` changed, as Triton compiles kernels from files."""
    text = Path(module.__file__).read_text()
    assert old in text, "the mutation no longer fits"
    path = folder / f"{Path(module.__file__).stem}_{next(_numbers)}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"tests.ptx.changed.{path.stem}", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def barriers_of(kernel: str) -> list[tuple[Loaded, int]]:
    """(program, instruction) of each barrier in the variants of a kernel that are in `driver.launched`."""
    barriers = CONTROL["bar.sync"], CONTROL["bar.warp.sync"]
    return [
        (loaded, at)
        for loaded in driver.launched[kernel]
        for at in np.isin(loaded.code["control"], barriers).nonzero()[0]
    ]


@contextmanager
def without_instruction(loaded: Loaded, at: int) -> Iterator[None]:
    """Branches to the next one instead."""
    before = loaded.code[at].copy()
    loaded.code[at]["control"], loaded.code[at]["target"] = CONTROL["bra"], at + 1
    try:
        yield
    finally:
        loaded.code[at] = before
