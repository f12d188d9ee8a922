"""What speculation did for a run, as text, from the run's report.

A report is as `reading.read_report` returns it.
"""

from __future__ import annotations

import math
from typing import Any

from rollout_spec.replay.cost import EngineCost
from rollout_spec.report.measures import (
    MIN_STEPS,
    SizeGroup,
    acceptance_by_position,
    acceptance_by_source,
    engine_cost,
    saving,
    size_groups,
    time_parts,
    with_known_cost,
)
from rollout_spec.types import CONFIDENCE_LIMITS


def summary(report: dict[str, Any]) -> str:
    """How speculation has done since the engine started, in one line."""
    stats, gained = report["stats"], saving(report)
    line = f"{stats['tokens_per_step']:.2f} tokens per request and step"
    if not stats["draft_tokens"]:
        return f"{line}, no draft verified"
    line += f", {percent(stats['acceptance_rate'])} of {stats['draft_tokens']:,} drafted tokens accepted"
    if gained is None:
        return f"{line}; what that saved is not measured here"
    if gained.is_noisy:
        return f"{line}; what that saved {gained}"
    share = percent(gained.took / stats["step_seconds"])
    return f"{line}; by estimate, for {share} of the time, it {gained} as steps of this engine without drafts"


def headline(report: dict[str, Any]) -> str:
    """Where a run was made and what it generated, in two lines; in one if it has generated nothing."""
    stats = report["stats"]
    if not stats["steps"]:
        return "Nothing has been generated yet."
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    head = f"{report['device']}; {versions}\n"
    if "global_step" in report:
        head += f"Up to step {report['global_step']}"
        head += f", the first of {report['num_processes']} processes" if report["num_processes"] > 1 else ""
        head += ": "
    return head + (
        f"{stats['emitted_tokens']:,} tokens in {stats['steps']:,} engine steps, {stats['tokens_per_step']:.2f} per "
        f"request and step; {stats['draft_tokens']:,} drafted tokens verified, {percent(stats['acceptance_rate'])} "
        "accepted"
    )


def explain(report: dict[str, Any]) -> str:
    """What speculation did for a run, as text."""
    stats, parts = report["stats"], [headline(report)]
    if not stats["steps"]:
        return parts[0]
    if stats["drafter_errors"]:
        parts.append("The drafter raised and was switched off: see the engine's log.")
    parts.append(_time_split(stats))
    if stats["draft_tokens"]:
        parts += [_acceptance_by_source(report["sources"]), _acceptance_by_position(stats)]
    if report["budget"] is not None:
        parts += [_calibration(report["budget"]["reliability"]), _curves(report["budget"])]
    if groups := size_groups(report):
        parts += [_table_by_size(groups), _limits(report)]
    else:
        parts.append(why_no_sizes(report))
    return "\n\n".join(part for part in parts if part)


def why_no_sizes(report: dict[str, Any]) -> str:
    """Why a report has no steps by their number of requests; empty for an engine without speculation."""
    if report["stats"]["step_seconds"]:
        return "No step without prompts was seen: what speculation saved is not known."
    if report["num_speculative_tokens"]:
        return "What each step costs was not seen: the drafter lives on the device, or was switched off."
    return ""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join("  " + line for line in lines)


def _time_split(stats: dict[str, Any]) -> str:
    parts, title = time_parts(stats), "Where the time of a step goes"
    if "drafting" not in parts:
        title = "Where the time goes that was seen: drafting, scheduling and other is not"
    total = sum(parts.values())
    if not total:
        return ""
    rows = [[name, f"{seconds:.2f}", percent(seconds / total)] for name, seconds in parts.items()]
    return f"{title}\n" + table(["", "seconds", "share"], rows)


def _acceptance_by_source(sources: dict[str, list[int]]) -> str:
    rows = [[name, f"{n:,}", percent(share)] for name, n, share in acceptance_by_source(sources)]
    title = "Drafted tokens by where they came from, those that the target reached, verified or not"
    return f"{title}\n" + table(["source", "tokens", "right"], rows) if rows else ""


def _acceptance_by_position(stats: dict[str, Any]) -> str:
    rows = [[f"{position}", f"{n:,}", percent(share)] for position, n, share in acceptance_by_position(stats)]
    return "Verified tokens by position in the draft\n" + table(["position", "tokens", "accepted"], rows)


def _calibration(reliability: list[list[float]]) -> str:
    rows, gap, total = [], 0.0, 0.0
    for (verified, said, seen), limit in zip(reliability, CONFIDENCE_LIMITS, strict=True):
        if verified:
            rows.append([f"{limit:.2f}", f"{verified:.0f}", percent(said), percent(seen)])
            gap, total = gap + verified * abs(said - seen), total + verified
    if not rows:
        return ""
    verified_tokens = table(["up to", "verified", "drafter said", "accepted"], rows)
    return (
        "Calibration: how sure the drafter was of tokens that were verified of late, and how many were accepted\n"
        f"{verified_tokens}\n  off by {100 * gap / total:.1f} points on average, which budgets correct"
    )


def _curves(budget: dict[str, Any]) -> str:
    undrafted, drafted = (dict(zip(*budget[name], strict=True)) for name in ("undrafted", "drafted"))
    rows = [
        [f"{n:.0f}", *(f"{1e3 * curve[n]:.2f}" if n in curve else "" for curve in (undrafted, drafted))]
        for n in sorted({*undrafted, *drafted})
    ]
    heads = ["tokens", "without drafts", "with drafts"]
    title = "What a step of so many tokens costs, in ms, of late, without drafting"
    return f"{title}\n" + table(heads, rows) if rows else ""


def _table_by_size(groups: list[SizeGroup]) -> str:
    rows = []
    for group in groups:
        per_request = group.steps * group.requests
        known = not math.isnan(group.speedup)
        rows.append(
            [
                f"{group.requests:.1f}",
                f"{group.steps:,}",
                f"{group.draft_tokens / per_request:.2f}",
                f"{group.tokens / per_request:.2f}",
                f"{group.seconds:.2f}",
                f"{group.typical:.2f}" if known else "?",
                f"{group.without:.2f}" if known else "?",
                ("noise" if group.is_noisy else f"{group.speedup:.2f}") if known else "?",
            ]
        )
    heads = ["requests", "steps", "verified", "emitted", "seconds", "quiet", "without", "speedup"]
    return (
        "By number of requests in a step, prompts apart\n"
        f"{table(heads, rows)}\n"
        "  verified, emitted: tokens per request and step. quiet: seconds if all had been as fast as the fastest\n"
        "  tenth. without: seconds of the same tokens in such steps without drafts; '?' where none was measured.\n"
        "  speedup: without / quiet; 'noise' where other work cost more than drafts changed"
    )


def _limits(report: dict[str, Any]) -> str:
    """What speculation gained, and upper bounds on what single improvements would gain."""
    groups, stats = size_groups(report), report["stats"]
    seconds = sum(group.seconds for group in groups)
    known = with_known_cost(groups)
    lines = []
    gained = saving(report)
    if gained is not None:
        share = f"{percent(gained.took / stats['step_seconds'])} of the time"
        lines.append(
            f"What speculation saved where it is known, {share}, {gained}."
            if gained.is_noisy
            else f"Where it is known, {share}, speculation {gained}\n"
            "as this engine's steps without drafts. Without speculation an engine may also schedule asynchronously\n"
            "and run full CUDA graphs, which only a run with speculation=False can tell."
        )
    if report["budget"] is None:
        lines.append("No budget: no step without drafts is taken to compare with.")
    gains = {"drafting took no time": sum(group.draft_seconds for group in groups)}
    if len(known) == len(groups):
        gains["drafted tokens cost nothing to verify"] = sum(
            max(group.typical - group.draft_seconds - group.steps * group.undrafted, 0.0) for group in known
        )
    try:
        cost = engine_cost(report)
    except ValueError:
        pass
    else:
        best = sum(_seconds_if_all_accepted(group, cost, report["num_speculative_tokens"]) for group in groups)
        gains[f"all drafts were right, up to {report['num_speculative_tokens']} tokens"] = max(seconds - best, 0.0)
    # With known lengths, drafts could be shared out so that all rollouts end together, at the best group's rate.
    rates = [group.seconds / group.tokens for group in groups if group.steps >= MIN_STEPS]
    if rates:
        gain = seconds - min(rates) * sum(group.tokens for group in groups)
        gains["lengths were known and all rollouts ended together"] = max(gain, 0.0)
    lines.append(f"What limits these steps, {percent(seconds / stats['step_seconds'])} of the time, at most: if")
    most = max(gains.values())
    for name, gain in gains.items():
        speedup = seconds / max(seconds - gain, 1e-9)
        mark = "  <- the most" if gain == most > 0 else ""
        lines.append(f"  {name}: {gain:.2f} s less, {speedup:.2f} times as fast{mark}")
    return "\n".join(lines)


def _seconds_if_all_accepted(group: SizeGroup, cost: EngineCost, k: int) -> float:
    """Seconds of a group's tokens if all drafts were accepted, each of the best length up to `k`."""
    drafting = cost.drafted_seconds + cost.draft_call_seconds + cost.draft_seconds * group.requests
    per_token = [(cost.step(group.requests * (1 + n)) + drafting * (n > 0)) / (1 + n) for n in range(k + 1)]
    return group.tokens / group.requests * min(per_token)
