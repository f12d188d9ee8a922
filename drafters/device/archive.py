"""Where the device drafter keeps ended rollouts: in a pool on the device, and as copies on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ranges:
    """Allocates ranges of an array of fixed size, first fit; freed neighbours are joined. O(number of gaps) per call.

    Attributes:
        gaps: The free ranges (first element, size), in order.
    """

    def __init__(self, size: int) -> None:
        self.gaps: list[tuple[int, int]] = [(0, size)] if size else []

    def allocate(self, size: int) -> int | None:
        """Take a range of this size and return its first element; None if no gap is large enough."""
        for i, (start, free) in enumerate(self.gaps):
            if free >= size:
                self.gaps[i : i + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Free a range, which may be empty."""
        if not size:
            return
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
    order: int  # number of requests that started before it
    capacity: int  # size of `tokens` while the copy is under way
    tokens: Tensor  # int32: the end of the prompt and the output; after the output unused until `take_copy`
    features: Tensor  # int64 [tokens, FEATURE_WORDS] of them, or [0, FEATURE_WORDS]
    fields: Tensor  # int64 [3]: offset, length and prompt, as in the table of documents
    copied: torch.cuda.Event | None
    """Recorded after the copy from the device; None where there is none."""
    is_taken: bool = False
    """Whether `take_copy` has seen the copy arrive. One that ended elsewhere needs none."""

    def take_copy(self, *, wait: bool) -> bool:
        """Copy what has arrived to pageable memory, without the unused end. Returns whether it has arrived.

        Args:
            wait: Wait for the copy from the device.
        """
        if self.is_taken:
            return True
        if self.copied is not None:
            if wait:
                self.copied.synchronize()
            elif not self.copied.query():
                return False
        self.is_taken = True
        self.fields = self.fields.clone()
        length = int(self.fields[1])
        self.tokens, self.features = self.tokens[:length].clone(), self.features[:length].clone()
        return True

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """(tokens, their features, how many of them are prompt)."""
        self.take_copy(wait=True)
        return self.tokens.numpy(), self.features.numpy(), int(self.fields[2])


class Archive:
    """Copies of ended rollouts on the host, at most `max_tokens`. The oldest go first.

    Attributes:
        order: The rollouts, in the order in which they ended.
        num_tokens: Sum of their capacities.
    """

    def __init__(self, max_tokens: int) -> None:
        self.order: deque[Archived] = deque()
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._by_problem: dict[int, deque[Archived]] = {}
        self._copying: deque[Archived] = deque()
        self._recorded: list[Archived] | None = None  # None: nobody wants them

    def add(self, rollout: Archived) -> None:
        """Keep a rollout, whose copy may still be under way, and drop the oldest ones until the bound holds."""
        self._by_problem.setdefault(rollout.problem_id, deque()).append(rollout)
        self.order.append(rollout)
        if not rollout.is_taken:
            self._copying.append(rollout)
        self.num_tokens += rollout.capacity
        while self.num_tokens > self._max_tokens:
            oldest = self.order.popleft()
            self.num_tokens -= oldest.capacity
            of_problem = self._by_problem[oldest.problem_id]
            of_problem.popleft()
            if not of_problem:
                del self._by_problem[oldest.problem_id]

    def knows(self, problem_id: int) -> bool:
        """Whether there are rollouts of a problem."""
        return problem_id in self._by_problem

    def newest_first(self, problem_id: int) -> list[Archived]:
        """A problem's rollouts, the one whose request started last first."""
        return sorted(self._by_problem.get(problem_id, ()), key=lambda rollout: -rollout.order)

    def take_copies(self, *, wait: bool = False) -> None:
        """`take_copy` of the rollouts whose copies have arrived, or of all.

        Args:
            wait: Wait for the copies that are under way.
        """
        while self._copying and self._copying[0].take_copy(wait=wait):
            rollout = self._copying.popleft()
            if self._recorded is not None:
                self._recorded.append(rollout)

    def record(self) -> None:
        """From now on keep what arrives for `take_recorded`, but not what ended elsewhere."""
        if self._recorded is None:
            self._recorded = []

    def take_recorded(self, *, wait: bool = False) -> list[Archived]:
        """The rollouts whose copies have arrived since the last call; none before `record`.

        Args:
            wait: Wait for the copies that are under way.
        """
        self.take_copies(wait=wait)
        if self._recorded is None:
            return []
        recorded, self._recorded = self._recorded, []
        return recorded

    def check_integrity(self) -> None:
        """Check internal invariants; for tests. Raises AssertionError."""
        assert self.num_tokens == sum(rollout.capacity for rollout in self.order), "archived tokens"
