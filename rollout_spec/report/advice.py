"""`rollout-spec doctor REPORT`: what to do about a run, by rules; and what one run did differently from another.

The numbers are those of `measures.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.report.explain import percent, table
from rollout_spec.report.measures import (
    MIN_STEPS,
    SizeGroup,
    acceptance_by_position,
    saving,
    size_groups,
    with_known_cost,
)

ENOUGH_STEPS = 200
"""With fewer steps nothing is advised but to generate more."""
HELD_UP = 2.0
"""Steps that took so many times as long as fast ones of their size were held up by other work."""
UNEQUAL = 1.3
"""Two runs whose steps without drafts differ by this factor did not have the same machine to themselves."""
LOSS = 0.95
"""Below this speedup drafts did not pay."""
LONG_DRAFTING = 0.15
"""Share of the time from which on drafting on the host is worth avoiding."""
FEW_WITH_HISTORY = 0.5
"""Share of requests with history below which drafts had little to come from."""
RARELY, OFTEN = 0.1, 0.5
"""Shares of verified tokens that were accepted: below the one drafts are too long, above the other too short."""


def advice(report: dict[str, Any]) -> str:
    """What to do about a run, as text."""
    return "What to do\n" + "\n".join(f"  - {line}" for line in _advice(report) or ["Nothing: leave it as it is."])


def _advice(report: dict[str, Any]) -> list[str]:
    stats, groups = report["stats"], size_groups(report)
    if stats["drafter_errors"]:
        return [
            "Look for the drafter's exception in the engine's log. Drafting stays off until the engine is built again."
        ]
    if not report["num_speculative_tokens"]:
        return ["This engine does not speculate. Compare it with one that does: rollout-spec doctor THIS OTHER"]
    num_steps = sum(group.steps for group in groups) if groups else stats["steps"]
    noise = _noise(report)
    if num_steps < ENOUGH_STEPS:
        return [f"Generate more: {num_steps} steps are too few to judge by, {ENOUGH_STEPS} are the least.", *noise]
    return [*noise, *_about_history(report), *([] if noise else _about_time(report, groups)), *_about_length(report)]


def _noise(report: dict[str, Any]) -> list[str]:
    """Of the sizes of step that other work held up the one that lost most time to it."""
    held_up = [g for g in size_groups(report) if g.steps >= MIN_STEPS and g.seconds > HELD_UP * g.typical]
    gained = saving(report)
    if not held_up and (gained is None or not gained.is_noisy):
        return []
    group = max(held_up or with_known_cost(size_groups(report)), key=lambda group: group.seconds - group.typical)
    return [
        f"Run it again on a quiet machine before believing any time: {group.steps:,} steps of {group.requests:.1f} "
        f"requests took {group.seconds:.1f} s, and {group.typical:.1f} s at the pace of fast ones. Other work held "
        "them up, or compilation; drafting is part of both times."
    ]


def _history_counts(report: dict[str, Any]) -> tuple[float, float]:
    """Requests, and of these the ones whose problem had history; 0 where a report does not say."""
    history = report.get("history", {})
    return history.get("requests", 0), history.get("requests_with_history", 0)


def _about_history(report: dict[str, Any]) -> Iterator[str]:
    requests, known = _history_counts(report)
    is_new = known < FEW_WITH_HISTORY * requests
    if is_new:
        yield (
            f"Wait an epoch: only {known:,} of {requests:,} requests had a prompt that the engine had seen before. "
            "Prompts that come again find what was said to them."
        )
        yield (
            "Group requests: sample each prompt several times in one engine, and where prompts of one problem differ "
            "give them the same problem_id."
        )
    if requests and not report["history"].get("folder") and (is_new or report.get("num_processes", 1) > 1):
        yield "Set history_dir: engines share what was said, and a run that resumes has what earlier ones said."


def _about_time(report: dict[str, Any], groups: list[SizeGroup]) -> Iterator[str]:
    seconds, gained = sum(group.seconds for group in groups), saving(report)
    requests, known_requests = _history_counts(report)
    if gained is not None and gained.speedup < LOSS and known_requests >= FEW_WITH_HISTORY * requests:
        yield (
            "Switch speculation off (speculation=False) and compare the two reports: with it these steps were only "
            f"{gained.speedup:.2f} times as fast as without drafts."
        )
    drafting = sum(group.draft_seconds for group in groups)
    if drafting > LONG_DRAFTING * seconds and not report["device"].endswith("CPU"):
        yield (
            f'Try drafter="device": {percent(drafting / seconds)} of the time went into drafting on the host, and it '
            "drafts on the GPU, where scheduling stays asynchronous. It needs vLLM's V2 runner."
        )


def _about_length(report: dict[str, Any]) -> Iterator[str]:
    """Advice on K, from what was verified at each position of the drafts."""
    rows, k = acceptance_by_position(report["stats"]), int(report["num_speculative_tokens"])
    verified = sum(n for _, n, _ in rows)
    good = max((position for position, _, share in rows if share >= RARELY), default=0)
    wasted = sum(n for position, n, _ in rows if position > good)
    # A budget verifies only what pays, and that may be accepted rarely where verifying costs next to nothing.
    if report["budget"] is None and wasted > RARELY * verified:
        yield (
            f"Lower num_speculative_tokens from {k} to {max(good, 1)}: {percent(wasted / verified)} of the verified "
            f"tokens came later in their drafts, and fewer than {percent(RARELY)} of these were accepted."
        )
    elif len(rows) == k < MAX_SPECULATIVE_TOKENS and rows[-1][1] >= ENOUGH_STEPS and rows[-1][2] >= OFTEN:
        yield (
            f"Raise num_speculative_tokens from {k} to {min(2 * k, MAX_SPECULATIVE_TOKENS)}: of {rows[-1][1]:,} drafts "
            f"of that length {percent(rows[-1][2])} were right to the end."
        )


def compare(reports: tuple[dict[str, Any], dict[str, Any]], names: tuple[str, str]) -> str:
    """How two runs differ, for example one with and one without speculation, as text.

    Args:
        reports: As `reading.read_report` returns them.
        names: What to call them.

    Raises:
        ValueError: a run has generated nothing.
    """
    lines = []
    for letter, name, report in zip("AB", names, reports, strict=True):
        if not report["stats"]["emitted_tokens"]:
            raise ValueError(f"{name}: nothing has been generated yet, so there is nothing to compare")
        k = report["num_speculative_tokens"]
        lines.append(f"{letter}: {name}, " + (f"up to {k} tokens per draft" if k else "without speculation"))
    for what in ("device", "versions"):
        if reports[0][what] != reports[1][what]:
            lines.append(f"They differ in {what}, so times say little of speculation.")
    what, pace = _pace(*reports)
    rows = [
        ["tokens", *(f"{report['stats']['emitted_tokens']:,}" for report in reports)],
        ["tokens per request and step", *(f"{report['stats']['tokens_per_step']:.2f}" for report in reports)],
        ["drafted tokens verified", *(f"{report['stats']['draft_tokens']:,}" for report in reports)],
        ["of these accepted", *(percent(report["stats"]["acceptance_rate"]) for report in reports)],
        [f"ms per token: {what}", *(f"{1e3 * seconds:.3f}" for seconds in pace)],
    ]
    parts = ["\n".join(lines), table(["", "A", "B"], rows)]
    shared = _shared_sizes(*reports)
    if shared:
        title = "ms per token by number of requests in a step, prompts apart"
        parts.append(f"{title}\n" + table(["requests", "A", "B", "B / A"], [_size_row(*pair) for pair in shared]))
    doubts = [f"{letter}: {line}" for letter, report in zip("AB", reports, strict=True) for line in _noise(report)]
    for letter, report in zip("AB", reports, strict=True):
        if report["stats"]["steps"] < ENOUGH_STEPS:
            doubts.append(f"{letter}: {report['stats']['steps']} steps are too few to judge by.")
    slower = [b.undrafted / a.undrafted for a, b in shared if a.undrafted * b.undrafted > 0]  # where both are known
    if slower and not 1 / UNEQUAL < median(slower) < UNEQUAL:
        doubts.append(
            f"Steps without drafts took {median(slower):.2f} times as long in B: the machine was not the same."
        )
    if min(pace) > 0:
        first, second = "AB" if pace[0] <= pace[1] else "BA"
        verdict = f"Per token {first} is {max(pace) / min(pace):.2f} times as fast as {second}"
        parts.append(verdict + (", but:\n" if doubts else ".") + "\n".join(f"  - {line}" for line in doubts))
    return "\n\n".join(parts)


def _pace(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, tuple[float, float]]:
    """(what was timed, seconds per token of both), by the most complete time that both reports have."""
    columns = [report.get("progress", {}) for report in (first, second)]
    waited = [sum(column.get("generation_seconds", ())) for column in columns]
    if all(waited):
        a, b = (time / max(sum(column["emitted_tokens"]), 1) for time, column in zip(waited, columns, strict=True))
        return "the trainer's waiting", (a, b)
    stats = first["stats"], second["stats"]
    if all(values["step_seconds"] for values in stats):
        a, b = (values["step_seconds"] / values["emitted_tokens"] for values in stats)
        return "whole steps", (a, b)
    a, b = ((values["forward_seconds"] + values["verify_seconds"]) / values["emitted_tokens"] for values in stats)
    return "forward passes and verification alone", (a, b)


def _shared_sizes(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[SizeGroup, SizeGroup]]:
    """The groups of steps that both runs have, most requests first."""
    a, b = ({math.floor(math.log2(max(group.requests, 1))): group for group in size_groups(r)} for r in (first, second))
    return [(a[octave], b[octave]) for octave in sorted(a.keys() & b.keys(), reverse=True)]


def _size_row(a: SizeGroup, b: SizeGroup) -> list[str]:
    times = 1e3 * a.seconds / a.tokens, 1e3 * b.seconds / b.tokens
    return [f"{a.requests:.1f} / {b.requests:.1f}", *(f"{time:.3f}" for time in times), f"{times[1] / times[0]:.2f}"]
