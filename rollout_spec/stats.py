"""Counters of one engine's speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

REPORT_FORMAT = 6  # version of the reports that `rollout-spec doctor` reads


@dataclass(slots=True)
class SpeculationStats:
    """What happened since the engine started. All fields only grow.

    Attributes:
        steps, request_steps: Engine steps in which our verifier sampled, and the requests of each, summed.
        num_drafts: Request-steps with at least one drafted token.
        draft_tokens, accepted_tokens: Verified and accepted drafted tokens.
        emitted_tokens: Tokens that requests got, accepted ones included. Only a drafter on the host knows where they
            end; without one, or once it has raised, what was sampled past the end counts, too, and what was past a
            stop string always does.
        drafter_errors: Exceptions that the drafter raised; the first one switches it off.
        draft_seconds: Time on the host for learning outcomes, drafting, and deciding how much is verified.
        drafted_per_position, accepted_per_position: Verified and accepted tokens by position in the draft.
    """

    steps: int = 0
    request_steps: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    drafter_errors: int = 0
    draft_seconds: float = 0.0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / drafts: tokens per draft, the recovered or bonus token included."""
        return 1 + self.accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per request-step, steps without a draft included."""
        return self.emitted_tokens / self.request_steps if self.request_steps else 0.0

    def record(self, num_draft_tokens: ArrayLike, num_accepted: ArrayLike) -> None:
        """Count one step's outcome: integers [B], one entry per request that our verifier sampled."""
        drafted, accepted = np.asarray(num_draft_tokens, np.int64), np.asarray(num_accepted, np.int64)
        self.steps += 1
        self.request_steps += drafted.size
        self.num_drafts += int(np.count_nonzero(drafted))
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())
        self.emitted_tokens += int(accepted.sum()) + accepted.size
        _add_positions(self.drafted_per_position, drafted)
        _add_positions(self.accepted_per_position, accepted)

    @classmethod
    def between(cls, earlier: Mapping[str, Any], later: Mapping[str, Any]) -> SpeculationStats:
        """What happened between two `to_dict` results of one engine."""
        return cls(**{name: _difference(later[name], earlier[name]) for name in cls.__slots__})

    def to_dict(self) -> dict[str, Any]:
        """Counters and derived rates as plain data."""
        return {
            **asdict(self),
            "rejected_tokens": self.draft_tokens - self.accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_step": self.tokens_per_step,
        }


def _add_positions(counts: list[int], lengths: NDArray[np.int64]) -> None:
    """Add to the j-th count how many of the lengths are above j."""
    longer = np.bincount(lengths)[:0:-1].cumsum()[::-1].tolist()
    counts.extend([0] * (len(longer) - len(counts)))
    for position, number in enumerate(longer):
        counts[position] += number


def _difference(later: Any, earlier: Any) -> Any:
    """Of numbers, or entry by entry of lists, the later of which may be longer."""
    if isinstance(later, list):
        return [x - y for x, y in zip_longest(later, earlier, fillvalue=0)]
    return later - earlier
