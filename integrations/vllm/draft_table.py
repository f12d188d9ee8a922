"""vLLM's table of drafts by slot, which the device drafter's kernel writes, so that vLLM need not copy them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DraftTable(torch.Tensor):
    """int64 [R, K], the same memory as vLLM's `RequestState.draft_tokens`.

    Each step vLLM writes the drafts that `propose` returns by the batch's slots, and gathers them again for grammars to
    check. Here the first does nothing for `WRITTEN`, and the second only what a step with grammars needs.

    Attributes:
        plain: The table as a tensor.
        is_checked: Whether a grammar will check this step's drafts.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: torch.Tensor
    is_checked: Callable[[], bool]

    @classmethod
    def around(cls, table: torch.Tensor, is_checked: Callable[[], bool]) -> DraftTable:
        """The table of vLLM."""
        made: DraftTable = table.as_subclass(cls)
        made.plain, made.is_checked = table, is_checked
        return made

    def __setitem__(self, index: Any, value: Any) -> None:
        if value is not WRITTEN:
            self.plain[index] = value

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if isinstance(rows, torch.Tensor) and not self.is_checked():
            return _Shape(rows.shape[0], self.plain.shape[1])[:, columns]
        return self.plain[index]


class _Shape:
    """In place of rows of drafts that nobody reads."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getitem__(self, index: tuple[slice, slice]) -> _Shape:
        """Of some columns. From vLLM 0.33 on they are taken later than the rows."""
        return _Shape(self.shape[0], len(range(self.shape[1])[index[1]]))


WRITTEN = torch.empty(0, 0, dtype=torch.int64)
"""Stands for drafts that are in the table."""
