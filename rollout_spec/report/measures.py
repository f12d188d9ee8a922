"""Numbers that follow from a run's report: `explain.py` writes them, `plot.py` draws them, `advice.py` judges by them.

A report is as `reading.read_report` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.replay.cost import EngineCost
from rollout_spec.report.reading import BY_BATCH

NOISY = 1.5
"""Steps that took so many times as long as fast ones of their size were held up by other work."""
MIN_STEPS = 8
"""A size group with fewer steps is not taken for the best rate of tokens per second: it may be chance."""


class SizeGroup(NamedTuple):
    """Steps with a similar number of requests, by powers of two; see `SpeculationStats.steps_by_batch`."""

    requests: float  # in a step, on average
    steps: int
    tokens: int
    draft_tokens: int
    seconds: float
    draft_seconds: float
    asked: int  # steps in which the drafter was asked
    undrafted: float  # seconds of such a step without drafts; NaN if it is not known
    typical: float  # seconds of as many fast steps like them, and of their drafting; NaN if it is not known

    @property
    def without(self) -> float:
        """Seconds of the same tokens in fast steps without drafts."""
        return self.tokens / self.requests * self.undrafted

    @property
    def speedup(self) -> float:
        """Of fast steps over fast steps without drafts; NaN if it is not known."""
        return self.without / self.typical

    @property
    def is_noisy(self) -> bool:
        """See `is_noisy`. Where nothing was verified, drafts cannot have changed a step's time."""
        return self.draft_tokens > 0 and is_noisy(self.seconds, self.typical, self.without)


def is_noisy(took: float, typical: float, without: float) -> bool:
    """Whether other work changed the time of some steps, and by more than drafts did. False where one is not known.

    Args:
        took: Seconds that they took.
        typical: That fast steps like them take.
        without: That fast steps without drafts take for the same tokens.
    """
    return took / typical > max(NOISY, without / typical, typical / without)


def size_groups(report: dict[str, Any]) -> list[SizeGroup]:
    """The run's steps by their number of requests, most requests first; no sizes at which nothing was emitted."""
    columns = [report["stats"][name] for name in BY_BATCH]
    budget = report["budget"] or {}
    undrafted = budget.get("undrafted_of_sizes", [None] * len(columns[0]))
    found = []
    for steps, requests, tokens, drafted, seconds, draft_seconds, asked, cost in zip(*columns, undrafted, strict=True):
        if steps and tokens:
            known = math.nan if cost is None else cost
            step = _typical_step(budget, requests / steps, drafted / steps, known)
            typical = steps * step + draft_seconds
            counts = steps, tokens, drafted, seconds, draft_seconds, asked
            found.append(SizeGroup(requests / steps, *counts, known, typical))
    return found[::-1]


def _typical_step(budget: Mapping[str, Any], requests: float, drafted: float, undrafted: float) -> float:
    """Seconds of a step without drafting, from the costs that the budget measured; NaN if they are not known.

    Both costs, with and without drafts, are those of fast steps (`StepCost`), so that they can be compared.
    """
    if not drafted:
        return undrafted
    sizes, seconds = budget.get("drafted", ((), ()))
    tokens = requests + drafted
    if not len(sizes) or not sizes[0] / 2 <= tokens <= 2 * sizes[-1]:
        return math.nan
    return float(np.interp(tokens, sizes, seconds))


def with_known_cost(groups: list[SizeGroup]) -> list[SizeGroup]:
    """Those of which it is known what their steps cost, with drafts and without."""
    return [group for group in groups if not math.isnan(group.speedup)]


class Saving(NamedTuple):
    """What speculation is estimated to have saved, in steps without prompts whose cost without drafts was measured."""

    without: float  # seconds of the same tokens in fast steps without drafts
    typical: float  # of as many fast steps like these
    took: float  # of these

    @property
    def speedup(self) -> float:
        """Over steps without drafts."""
        return self.without / self.typical

    @property
    def is_noisy(self) -> bool:
        """See `is_noisy`."""
        return is_noisy(self.took, self.typical, self.without)

    def __str__(self) -> str:
        if self.is_noisy:
            return (
                f"is too noisy to say: steps took {self.took / self.typical:.1f} times as long as fast ones of their "
                "size, and drafts changed less"
            )
        word = "saved" if self.speedup >= 1 else "cost"
        return f"{word} about {abs(self.without - self.typical):.2f} s: {self.speedup:.2f} times as fast"


def saving(report: dict[str, Any]) -> Saving | None:
    """The estimate from a report; None where no such step was seen."""
    known = with_known_cost(size_groups(report))
    if not known:
        return None
    return Saving(*(sum(times) for times in zip(*((g.without, g.typical, g.seconds) for g in known), strict=True)))


def time_parts(stats: dict[str, Any]) -> dict[str, float]:
    """Seconds of all steps by what they were spent on. Where no step was seen to end, "drafting" and the rest lack."""
    parts = {
        "target's forward pass": stats["forward_seconds"],
        "verification": stats["verify_seconds"],
    }
    if stats["step_seconds"]:  # only a drafter on the host sees steps end
        parts["drafting"] = stats["draft_seconds"]
        parts["scheduling and other"] = stats["step_seconds"] - sum(parts.values())
    return parts


def acceptance_by_source(sources: dict[str, list[int]]) -> list[tuple[str, int, float]]:
    """(source, its drafted tokens that the target reached, verified or not; the share that was right)."""
    return [(name, n, right / n) for name, (n, right) in sources.items() if n]


def acceptance_by_position(stats: dict[str, Any]) -> list[tuple[int, int, float]]:
    """(position in the draft, from 1; verified tokens there; the share that was accepted)."""
    accepted = stats["accepted_per_position"]
    pairs = zip(stats["drafted_per_position"], accepted + [0] * 128, strict=False)
    return [(position, n, hits / n) for position, (n, hits) in enumerate(pairs, 1)]


def engine_cost(report: dict[str, Any]) -> EngineCost:
    """The measured curve, for `replay --engine-cost`.

    Raises:
        ValueError: too little was measured.
    """
    if report["budget"] is None:
        raise ValueError("the run had no budget, which measures costs: it had budget=False, or drafted on the device")
    (tokens, seconds), (more_tokens, more_seconds) = (
        tuple(np.array(values, np.float64) for values in report["budget"][name]) for name in ("undrafted", "drafted")
    )
    if tokens.size < 2:
        raise ValueError("fewer than two sizes of steps without drafts were measured: generate more")
    price = 0.0
    if more_tokens.size:
        shared = (more_tokens >= tokens[0]) & (more_tokens <= tokens[-1])
        if not shared.any():
            raise ValueError("no size of step was measured with and without drafts: generate more")
        # What drafts cost however many they are.
        price = max(float(np.median(more_seconds[shared] - np.interp(more_tokens[shared], tokens, seconds))), 0.0)
        beyond = more_tokens > tokens[-1]
        tokens = np.concatenate((tokens, more_tokens[beyond]))
        seconds = np.maximum.accumulate(np.concatenate((seconds, more_seconds[beyond] - price)))
    per_request, per_call = _draft_cost(size_groups(report))
    return EngineCost(report["device"], tokens, seconds, price, per_request, per_call)


def _draft_cost(groups: list[SizeGroup]) -> tuple[float, float]:
    """Seconds that drafting takes per request and per call, by weighted least squares over the size groups."""
    asked = [group for group in groups if group.asked]
    if not asked:
        return 0.0, 0.0
    requests = np.array([group.requests for group in asked])
    seconds = np.array([group.draft_seconds / group.asked for group in asked])
    weight = np.sqrt([group.asked for group in asked])
    if len(asked) > 1:
        slope, constant = np.polyfit(requests, seconds, 1, w=weight)
        if slope >= 0 and constant >= 0:
            return float(slope), float(constant)
    return float(np.average(seconds / requests, weights=weight**2)), 0.0
