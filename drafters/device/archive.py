"""Where the device drafter keeps ended rollouts: in a pool on the device, and as copies on the host."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.history.store import Rollout


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
    """A rollout on the host, or on its way there (`rollout_spec.history.store.EndedRollout`)."""

    problem_id: int
    order: int  # number of requests that started before it
    capacity: int  # size of `tokens` while the copy is under way
    tokens: Tensor  # int32: the end of the prompt and the output; after the output unused until it has arrived
    features: Tensor  # int64 [tokens, FEATURE_WORDS] of them, or [0, FEATURE_WORDS]
    fields: Tensor | None = None
    """int64 [3]: offset, length and prompt, as in the table of documents; None once the rollout has arrived."""
    copied: torch.cuda.Event | None = None
    """Recorded after the copy from the device; None where there is none."""
    num_context: int = 0
    """Tokens of the prompt; like the next, 0 until it has arrived."""
    num_sampled: int = 0

    def arrive(self, *, wait: bool) -> bool:
        """Copy what has arrived to pageable memory, without the unused end."""
        if self.fields is None:
            return True
        if self.copied is not None:
            if wait:
                self.copied.synchronize()
            elif not self.copied.query():
                return False
        _, length, self.num_context = self.fields.tolist()
        self.num_sampled = length - self.num_context
        self.tokens, self.features = self.tokens[:length].clone(), self.features[:length].clone()
        self.fields = None
        return True

    def read(self) -> Rollout:
        tokens, features = self.tokens.numpy(), self.features.numpy()
        of_output = features[self.num_context :] if features.size else None
        return Rollout(self.problem_id, tokens[: self.num_context], tokens[self.num_context :], of_output)
