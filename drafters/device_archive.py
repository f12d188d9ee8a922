"""Where the device drafter keeps rollouts that ended: places in its pool on the device, and copies on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Pool:
    """Places in an array of fixed size: first fit, neighbours joined. O(number of gaps) per call."""

    def __init__(self, size: int) -> None:
        self.gaps: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def num_free(self) -> int:
        """Elements of all gaps together."""
        return sum(size for _, size in self.gaps)

    def allocate(self, size: int) -> int | None:
        """First element of a place of this size; None where there is none."""
        for i, (start, free) in enumerate(self.gaps):
            if free >= size:
                self.gaps[i : i + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Give a place back."""
        i = bisect_left(self.gaps, (start, size))
        if i < len(self.gaps) and start + size == self.gaps[i][0]:
            size += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == start:
            start, size = self.gaps[i - 1][0], size + self.gaps.pop(i - 1)[1]
            i -= 1
        self.gaps.insert(i, (start, size))


@dataclass(slots=True)
class Archived:
    """A rollout on the host."""

    problem_id: int
    order: int
    capacity: int
    tokens: Tensor  # int32, the prompt's end and what was said; with unused room behind until the copy is taken
    fields: Tensor  # int64 [4], its row in the table of documents
    copied: torch.cuda.Event | None
    """None: the copy was taken."""

    def take_copy(self, *, wait: bool) -> bool:
        """Move what has arrived out of the memory that the device writes to. Returns whether it has."""
        if self.copied is not None:
            if wait:
                self.copied.synchronize()
            elif not self.copied.query():
                return False
            self.copied = None
        self.fields = self.fields.clone()
        self.tokens = self.tokens[: int(self.fields[1])].clone()
        return True

    def read(self) -> tuple[NDArray[np.int32], int, int]:
        """(tokens, of these context only, policy version)."""
        self.take_copy(wait=True)
        _, _, prompt_length, version = self.fields.tolist()
        return self.tokens.numpy(), prompt_length, version


class Archive:
    """Copies of ended rollouts on the host, at most `max_tokens`. The oldest go first.

    Attributes:
        order: All of them, in the order in which they ended.
        num_tokens: Their places' tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self.order: deque[Archived] = deque()
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._by_problem: dict[int, deque[Archived]] = {}
        self._copying: deque[Archived] = deque()

    def add(self, rollout: Archived) -> None:
        """Keep a rollout whose copy may still be under way."""
        self._by_problem.setdefault(rollout.problem_id, deque()).append(rollout)
        self.order.append(rollout)
        self._copying.append(rollout)
        self.num_tokens += rollout.capacity
        while self.num_tokens > self._max_tokens:
            oldest = self.order.popleft()
            self.num_tokens -= oldest.capacity
            of_problem = self._by_problem[oldest.problem_id]
            of_problem.popleft()
            if not of_problem:
                del self._by_problem[oldest.problem_id]

    def newest_first(self, problem_id: int) -> list[Archived]:
        """A problem's rollouts, the one whose request started last first."""
        return sorted(self._by_problem.get(problem_id, ()), key=lambda rollout: -rollout.order)

    def take_copies(self) -> None:
        """Move the copies that have arrived out of the memory that the device writes to. Does not wait."""
        while self._copying and self._copying[0].take_copy(wait=False):
            self._copying.popleft()

    def check_integrity(self) -> None:
        """Check internal invariants; for tests. Raises AssertionError."""
        assert self.num_tokens == sum(rollout.capacity for rollout in self.order), "archived tokens"


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that does not wait for the device."""
    is_cuda = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=is_cuda).copy_(tensor, non_blocking=is_cuda)
