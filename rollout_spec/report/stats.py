"""Counters of one engine's speculation, and how they grew over a training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

REPORT_FORMAT = 2
"""Version of the reports that `rollout-spec doctor` reads."""

MAX_PROGRESS_POINTS = 1000
"""Above this, neighbouring points of `Progress` are added up: a report stays small however long the run is."""


@dataclass(slots=True)
class SpeculationStats:
    """What happened since the engine started. All fields only grow.

    Attributes:
        steps: Engine steps in which our verifier sampled.
        request_steps: Requests summed over those steps.
        num_drafts: Request-steps with at least one drafted token.
        draft_tokens, accepted_tokens: Verified and accepted drafted tokens.
        emitted_tokens: Tokens that requests got, accepted ones included. Only a drafter on the host knows where they
            end; without one, or while it is switched off, what was sampled past the end counts, too. With
            `history_dir`, so does what vLLM samples past a stop string once all requests of the batch are complete.
        drafter_errors: Exceptions that the drafter raised; the first one switches it off.
        draft_seconds: Time on the host for learning outcomes, drafting, and deciding how much is verified.
        index_seconds: Time on the host for indexing what was sampled while the device computed.
        forward_seconds, verify_seconds: Time of the target's forward passes and of verification, on the device.
        step_seconds: Time of whole steps, scheduling included; 0 without a drafter on the host, which sees them end.
        drafted_per_position, accepted_per_position: Verified and accepted tokens by position in the draft.
        steps_by_batch, requests_by_batch, draft_tokens_by_batch, tokens_by_batch, seconds_by_batch, asked_by_batch,
            draft_seconds_by_batch: By floor(log2) of a step's number of requests: the steps in which no prompt was read
            and some request had been in an earlier step; their requests, verified draft tokens, emitted tokens and
            seconds; how many of them drafted, and the seconds that took.
    """

    steps: int = 0
    request_steps: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    drafter_errors: int = 0
    draft_seconds: float = 0.0
    index_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    steps_by_batch: list[int] = field(default_factory=list)
    requests_by_batch: list[int] = field(default_factory=list)
    draft_tokens_by_batch: list[int] = field(default_factory=list)
    tokens_by_batch: list[int] = field(default_factory=list)
    seconds_by_batch: list[float] = field(default_factory=list)
    asked_by_batch: list[int] = field(default_factory=list)
    draft_seconds_by_batch: list[float] = field(default_factory=list)

    @property
    def rejected_tokens(self) -> int:
        """Drafted tokens that were verified and not accepted."""
        return self.draft_tokens - self.accepted_tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / drafts: tokens per draft, the recovered or bonus token included."""
        return 1 + self.accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per request-step, steps without a draft included."""
        return self.emitted_tokens / self.request_steps if self.request_steps else 0.0

    def record(self, num_draft_tokens: ArrayLike, num_accepted: ArrayLike) -> None:
        """Count one step's outcome: integers [B], one entry per request that our verifier sampled."""
        drafted, accepted = (np.asarray(values).tolist() for values in (num_draft_tokens, num_accepted))
        self.steps += 1
        self.request_steps += len(drafted)
        self.num_drafts += len(drafted) - drafted.count(0)
        self.draft_tokens += _count_positions(drafted, self.drafted_per_position)
        num_accepted_tokens = _count_positions(accepted, self.accepted_per_position)
        self.accepted_tokens += num_accepted_tokens
        self.emitted_tokens += num_accepted_tokens + len(accepted)

    def record_time(
        self,
        seconds: float,
        *,
        num_requests: int,
        draft_tokens: int,
        tokens: int,
        draft_seconds: float,
        reads_prompts: bool,
    ) -> None:
        """Count the time of one step, in which `num_requests` emitted `tokens`. `draft_seconds` 0: it did not draft."""
        self.step_seconds += seconds
        if reads_prompts:
            return
        octave = num_requests.bit_length() - 1
        for counts, value in (
            (self.steps_by_batch, 1),
            (self.requests_by_batch, num_requests),
            (self.draft_tokens_by_batch, draft_tokens),
            (self.tokens_by_batch, tokens),
            (self.seconds_by_batch, seconds),
            (self.asked_by_batch, draft_seconds > 0),
            (self.draft_seconds_by_batch, draft_seconds),
        ):
            if octave >= len(counts):
                counts.extend([0] * (octave + 1 - len(counts)))
            counts[octave] += value  # type: ignore[assignment]

    @classmethod
    def between(cls, earlier: Mapping[str, Any], later: Mapping[str, Any]) -> SpeculationStats:
        """What happened between two `to_dict` results of one engine."""
        differences: dict[str, Any] = {}
        for name in cls.__slots__:
            old, new = earlier[name], later[name]
            if isinstance(new, list):
                old = old + [0] * (len(new) - len(old))
                differences[name] = [b - a for a, b in zip(old, new, strict=True)]
            else:
                differences[name] = new - old
        return cls(**differences)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """What happened in two intervals together."""
        sums: dict[str, Any] = {}
        for name in self.__slots__:
            a, b = getattr(self, name), getattr(other, name)
            sums[name] = [x + y for x, y in zip_longest(a, b, fillvalue=0)] if isinstance(a, list) else a + b
        return SpeculationStats(**sums)

    def to_dict(self) -> dict[str, Any]:
        """Counters and derived rates as plain data."""
        counters = {name: getattr(self, name) for name in self.__slots__}
        return {
            **{name: list(value) if isinstance(value, list) else value for name, value in counters.items()},
            "rejected_tokens": self.rejected_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_step": self.tokens_per_step,
        }


class ProgressPoint(NamedTuple):
    """What an engine generated for the training in one or several successive logs."""

    global_step: int
    """Training steps up to the last of these logs."""
    num_logs: int
    request_steps: int
    emitted_tokens: int
    draft_tokens: int
    accepted_tokens: int
    """These four as the fields of `SpeculationStats`."""
    generation_seconds: float
    """How long the trainer waited for rollouts; 0 where a server generates them, which nobody waits for."""

    def joined(self, later: ProgressPoint) -> ProgressPoint:
        """One point for this one and the next."""
        sums: list[Any] = [a + b for a, b in zip(self[1:], later[1:], strict=True)]
        return ProgressPoint(later.global_step, *sums)


class Progress:
    """A series of points over a training, of bounded length.

    When there are too many, each two neighbours are added up, and from then on a point covers twice as many logs. So
    nothing is left out of the sums, and all points but the last cover as many logs.

    Args:
        points: What an earlier part of the training wrote.
    """

    def __init__(self, points: Iterable[ProgressPoint] = ()) -> None:
        self.points = list(points)
        self._logs_per_point = max((point.num_logs for point in self.points), default=1)

    def add(self, global_step: int, new: SpeculationStats, generation_seconds: float) -> None:
        """Add a log.

        Args:
            global_step: Training steps so far.
            new: What happened since the last log.
            generation_seconds: How long the trainer waited for rollouts since then.
        """
        counts = new.request_steps, new.emitted_tokens, new.draft_tokens, new.accepted_tokens
        point = ProgressPoint(global_step, 1, *counts, generation_seconds)
        if self.points and self.points[-1].num_logs < self._logs_per_point:
            self.points[-1] = self.points[-1].joined(point)
        else:
            self.points.append(point)
        if len(self.points) > MAX_PROGRESS_POINTS:
            self._logs_per_point *= 2
            last = self.points[-1:] if len(self.points) % 2 else []
            pairs = zip(self.points[0::2], self.points[1::2], strict=False)
            self.points = [first.joined(second) for first, second in pairs] + last

    def to_dict(self) -> dict[str, list[float]]:
        """Plain data: by the names of `ProgressPoint`, one number per point."""
        return {name: [point[i] for point in self.points] for i, name in enumerate(ProgressPoint._fields)}

    @classmethod
    def from_dict(cls, columns: Mapping[str, list[Any]], *, up_to: float = math.inf) -> Progress:
        """What `to_dict` gave, without points after the training step `up_to`."""
        points = map(ProgressPoint._make, zip(*(columns[name] for name in ProgressPoint._fields), strict=True))
        return cls(point for point in points if point.global_step <= up_to)


def _count_positions(lengths: list[int], counts: list[int]) -> int:
    """Add to counts[j] how many of the lengths exceed j. Returns their sum."""
    by_length = [0] * (max(lengths, default=0) + 1)
    for length in lengths:
        by_length[length] += 1
    counts += [0] * (len(by_length) - 1 - len(counts))
    total = longer = 0
    for position in range(len(by_length) - 2, -1, -1):
        longer += by_length[position + 1]
        counts[position] += longer
        total += longer
    return total
