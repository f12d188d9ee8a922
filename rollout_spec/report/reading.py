"""A run's report, from a file or a server, and whether it is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollout_spec.checks import shown
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.files import read_json
from rollout_spec.report.stats import REPORT_FORMAT, ProgressPoint
from rollout_spec.types import CONFIDENCE_LIMITS

REPORT_NAME = "rollout_spec.json"
"""What a trainer's callback calls the report in its output folder."""
BY_BATCH = tuple(
    f"{name}_by_batch" for name in ("steps", "requests", "tokens", "draft_tokens", "seconds", "draft_seconds", "asked")
)
"""Counters of a report that are lists by number of requests in a step."""
STATS_NUMBERS = (
    "steps",
    "emitted_tokens",
    "draft_tokens",
    "tokens_per_step",
    "acceptance_rate",
    "drafter_errors",
    "forward_seconds",
    "verify_seconds",
    "draft_seconds",
    "step_seconds",
)
"""The other counters that a report must have."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report, or a server's answer to the command 'report', which has one per rank, all alike.

    Args:
        path: A trainer's output folder stands for the report in it.

    Raises:
        ValueError: it is not a report, or one of another format, or a field is missing or of the wrong type.
        OSError: the file cannot be read.
    """
    path = path / REPORT_NAME if path.is_dir() else path
    try:
        report = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is no report: {error}") from None
    results = report.get("results")
    return _checked(results[0] if isinstance(results, list) and results else report, path)


def ask_for_report(url: str) -> dict[str, Any]:
    """The report of a server that runs with VLLM_SERVER_DEV_MODE=1.

    Raises:
        ValueError: `url` is none, or the answer is no report.
        OSError: the server does not answer, or not to commands; the message says what it lacks.
        ImportError: requests is missing.
    """
    from rollout_spec.integrations.trainers.server import ServedEngine

    try:
        server = ServedEngine(url, RolloutSpecConfig(), "MODEL")
    except ValueError as error:
        raise ValueError(f"--url: {error}") from None
    try:
        report = server.collective_rpc("rollout_spec", ("report",))[0]
    except ImportError as error:
        raise ImportError(f"--url asks with requests ({error}): pip install requests") from error
    return _checked(report, url)


def _checked(report: Any, source: Path | str) -> dict[str, Any]:
    """A report, or ValueError that names its source."""
    if not isinstance(report, dict) or "format" not in report:
        raise ValueError(f"{source} is no report: write one with RolloutSpecGenerator, or the 'report' command")
    if report["format"] != REPORT_FORMAT:
        raise ValueError(f"{source} was written by another version of rollout-spec ({shown(report['format'])})")
    try:
        _check_fields(report)
    except ValueError as error:
        raise ValueError(f"{source} is damaged: {error}") from None
    return report


def _check_fields(report: dict[str, Any]) -> None:
    """Raise ValueError where a report lacks what `explain` reads."""
    _require(report, "", ("versions", "stats"), lambda value: isinstance(value, dict), "an object")
    _require(report, "", ("device",), lambda value: isinstance(value, str), "text")
    of_trainers = ("global_step", "num_processes") if "global_step" in report else ()
    _require(report, "", ("num_speculative_tokens", *of_trainers), _is_number, "a number")
    if "history" in report:  # not in those of older versions
        _require(report, "", ("history",), lambda value: isinstance(value, dict), "an object")
        counted = [name for name in ("requests", "requests_with_history") if name in report["history"]]
        _require(report["history"], "history.", counted, _is_number, "a number")
    _require(report, "", ("sources",), lambda value: isinstance(value, dict), "an object")
    _require(report["sources"], "sources.", report["sources"], lambda value: _are_numbers(value, 2), "two numbers")
    stats, position = report["stats"], ("drafted_per_position", "accepted_per_position")
    _require(stats, "stats.", STATS_NUMBERS, _is_number, "a number")
    _require(stats, "stats.", (*position, *BY_BATCH), _are_numbers, "a list of numbers")
    size = len(stats[BY_BATCH[0]])
    _require(stats, "stats.", BY_BATCH, lambda value: len(value) == size, f"{size} numbers")
    _require(report, "", ("budget",), lambda value: value is None or isinstance(value, dict), "an object or null")
    budget = report["budget"]
    if budget is not None:
        _require(budget, "budget.", ("undrafted", "drafted"), _is_curve, "two lists of as many numbers")
        _require(budget, "budget.", ("undrafted_of_sizes",), lambda value: _are_costs(value, size), f"{size} numbers")
        _require(budget, "budget.", ("reliability",), _is_reliability, f"{len(CONFIDENCE_LIMITS)} times three numbers")
    if "progress" in report:  # reports of older versions, and those that an engine gives, lack it
        _require(report, "", ("progress",), lambda value: isinstance(value, dict), "an object")
        progress, columns = report["progress"], ProgressPoint._fields
        _require(progress, "progress.", columns, _are_numbers, "a list of numbers")
        length = len(progress[columns[0]])
        _require(progress, "progress.", columns, lambda value: len(value) == length, f"{length} numbers")


def _require(
    values: dict[str, Any], owner: str, names: Iterable[str], is_right: Callable[[Any], bool], expected: str
) -> None:
    for name in names:
        if name not in values:
            raise ValueError(f"{owner}{name} is missing")
        if not is_right(values[name]):
            raise ValueError(f"{owner}{name} must be {expected}, got {shown(values[name])}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _are_numbers(value: Any, size: int | None = None) -> bool:
    return isinstance(value, list) and size in (None, len(value)) and all(map(_is_number, value))


def _are_costs(value: Any, size: int) -> bool:
    """None where a cost is not known."""
    return isinstance(value, list) and len(value) == size and all(n is None or _is_number(n) for n in value)


def _is_curve(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _are_numbers(value[0]) and _are_numbers(value[1], len(value[0]))


def _is_reliability(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(CONFIDENCE_LIMITS):
        return False
    return all(_are_numbers(row, 3) for row in value)
