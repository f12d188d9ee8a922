"""Numbers that follow from a run's report: `explain.py` writes them, `plot.py` draws them, `advice.py` judges by them.

A report is as `reading.read_report` returns it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.replay.cost import EngineCost
from rollout_spec.report.reading import BY_BATCH

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

    @property
    def without(self) -> float:
        """Seconds that the same tokens would have taken in steps without drafts."""
        return self.tokens / self.requests * self.undrafted

    @property
    def speedup(self) -> float:
        """Over steps without drafts; NaN if it is not known."""
        return self.without / self.seconds


def size_groups(report: dict[str, Any]) -> list[SizeGroup]:
    """The run's steps by their number of requests, most requests first; no sizes at which nothing was emitted."""
    columns = [report["stats"][name] for name in BY_BATCH]
    budget = report["budget"] or {}
    undrafted = budget.get("undrafted_of_sizes", [None] * len(columns[0]))
    found = []
    for steps, requests, tokens, drafted, seconds, draft_seconds, asked, cost in zip(*columns, undrafted, strict=True):
        if steps and tokens:
            known = math.nan if cost is None else cost
            found.append(SizeGroup(requests / steps, steps, tokens, drafted, seconds, draft_seconds, asked, known))
    return found[::-1]


def with_known_cost(groups: list[SizeGroup]) -> list[SizeGroup]:
    """Those whose steps' cost without drafts is known."""
    return [group for group in groups if not math.isnan(group.undrafted)]


class Saving(NamedTuple):
    """What speculation is estimated to have saved, in steps without prompts whose cost without drafts was measured."""

    seconds: float  # negative: it cost time
    compared: float  # seconds that these steps took

    @property
    def speedup(self) -> float:
        """Over steps without drafts."""
        return (self.compared + self.seconds) / self.compared

    def __str__(self) -> str:
        word = "saved" if self.seconds >= 0 else "cost"
        return f"{word} about {abs(self.seconds):.2f} s: {self.speedup:.2f} times as fast"


def saving(report: dict[str, Any]) -> Saving | None:
    """The estimate from a report; None where no such step was seen."""
    known = with_known_cost(size_groups(report))
    if not known:
        return None
    return Saving(sum(group.without - group.seconds for group in known), sum(group.seconds for group in known))


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
