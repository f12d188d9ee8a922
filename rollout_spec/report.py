"""What a run's report says: on one page, what speculation did and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollout_spec.checks import shown
from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.stats import REPORT_FORMAT

REPORT_NAME = "rollout_spec.json"  # what a trainer's callback calls the report in its output folder
ENOUGH_STEPS = 200  # fewer are too few to judge by
LOST = 0.01  # share of right tokens below which a model drafter has lost its weights
RARELY, OFTEN = 0.1, 0.5  # accepted shares: below the one drafts are too long, above the other too short


def read_report(path: Path) -> dict[str, Any]:
    """The report in a file or in a trainer's folder. Of a server's answer, with one for each rank, the first.

    Raises OSError if it cannot be read, ValueError if it is no report of this format.
    """
    try:
        report = json.loads((path / REPORT_NAME if path.is_dir() else path).read_bytes())
    except (ValueError, RecursionError) as error:  # no JSON, no text, or brackets without end
        raise ValueError(f"{path} is no JSON: {error}") from None
    results = report.get("results") if isinstance(report, dict) else None
    if isinstance(results, list) and results:
        report = results[0]
    if not isinstance(report, dict) or "format" not in report:
        raise ValueError(f"{path} has no report of rollout_spec")
    if report["format"] != REPORT_FORMAT:
        raise ValueError(f"{path} has a report of format {shown(report['format'])}, and {REPORT_FORMAT} is read here")
    return report


def summary(report: dict[str, Any]) -> str:
    """How speculation has done since the engine started, in one line."""
    stats = report["stats"]
    said = f"{stats['tokens_per_step']:.2f} tokens per request and step"
    if stats["drafter_errors"]:
        said += ", the drafter has raised and is off"
    if not stats["draft_tokens"]:
        return f"{said}, no draft verified"
    said += f", {stats['acceptance_rate']:.1%} of {stats['draft_tokens']:,} drafted tokens accepted"
    if (measured := report.get("measured")) is not None:
        times = f"{measured['speedup']:.2f} times as fast"
        if measured["speedup_low"] is not None:
            times += f" ({measured['speedup_low']:.2f} to {measured['speedup_high']:.2f})"
        count = measured["generations"]
        return f"{times} with drafts as without, by {count} comparison{'s' * (count > 1)}; {said}"
    every = report.get("compare_every", 0)  # in a trainer's reports only
    how = "RolloutSpecGenerator(compare_every=…) measures what that saves"
    return said if every == 0 else f"{said}; {how if every is None else 'what that saves is not known yet'}"


def explain(report: dict[str, Any]) -> str:
    """What speculation did for a run, and what to do about it, as one page of text."""
    stats = report["stats"]
    if not stats["steps"]:
        return "Nothing has been generated yet."
    made_by = [report["device"], *(f"{name} {version}" for name, version in report["versions"].items())]
    if "global_step" in report:
        made_by.append(f"up to step {report['global_step']}, process 1 of {report['num_processes']}")
    head = f"{', '.join(made_by)}\n{stats['emitted_tokens']:,} tokens in {stats['steps']:,} steps: {summary(report)}"
    reached, right = report["model_drafter"] or (0, 0)
    if reached:  # verified or not
        head += f"\nModel drafter: {right / reached:.1%} of the tokens that the target reached were right"
    advised = "\n  - ".join(["What to do", *(list(advice(report)) or ["Nothing: leave it as it is."])])
    return "\n\n".join(filter(None, [head, _positions(stats), _history(report["history"]), advised]))


def _history(history: dict[str, Any]) -> str:
    """What there is to draft from, in a line, and one on the folder if there is one; nothing where none is kept."""
    if "rollouts" not in history:
        return ""
    said = f"History: {history['rollouts']:,} rollouts, {history['tokens']:,} tokens. "
    said += f"{history['requests_with_history']:,} of {history['requests']:,} requests had a prompt that was in it"
    if folder := history["folder"]:
        said += f"\nIts folder: {folder['rollouts_read']:,} rollouts read, {folder['rollouts_written']:,} written, "
        said += f"{folder['rollouts_lost']:,} lost; {folder['files_refused']:,} files refused"
    return said


def _positions(stats: dict[str, Any]) -> str:
    """A table of verified tokens by their position in the draft; nothing if there were none."""
    lines = ["Verified tokens by position in the draft", f"  position  {'tokens':>13}  accepted"]
    counts = zip_longest(stats["drafted_per_position"], stats["accepted_per_position"], fillvalue=0)
    lines += [f"  {i:>8}  {n:>13,}  {accepted / n:>8.1%}" for i, (n, accepted) in enumerate(counts, 1)]
    return "\n".join(lines) if len(lines) > 2 else ""


def advice(report: dict[str, Any]) -> Iterator[str]:
    """What to do about a run, by rules."""
    stats = report["stats"]
    if stats["drafter_errors"]:
        yield "Look for the drafter's exception in the log. Drafting stays off until the engine is built again."
        return
    if not report["num_speculative_tokens"]:
        yield "This engine does not speculate."
        return
    reached, right = report["model_drafter"] or (0, 0)
    if reached >= ENOUGH_STEPS and right < LOST * reached:
        yield (
            "Load the model drafter's weights: hardly a token of it was right. vLLM discards them at sleep level 2 and "
            "does not load them again (vllm-project/vllm#52479): use llm.sleep(level=1), or load them after waking up."
        )
    if stats["steps"] < ENOUGH_STEPS:
        yield f"Generate more: {stats['steps']} steps are too few to judge by, {ENOUGH_STEPS} are the least."
        return
    history = report["history"]
    requests, num_met = history.get("requests", 0), history.get("requests_with_history", 0)
    is_new = num_met < requests / 2
    if is_new:
        yield f"Wait an epoch: only {num_met:,} of {requests:,} requests had a prompt that the engine had seen before."
        yield "Group requests: sample each prompt several times in one engine; give variants of it one problem_id."
    if requests and not history.get("folder") and (is_new or report.get("num_processes", 1) > 1):
        yield "Set history_dir: engines share what was said, and a run that resumes has what earlier ones said."
    if not stats["draft_tokens"] and not is_new:
        yield "No draft was verified: none was found, none was worth a step's time, or drafts were switched off."
    measured = report.get("measured")
    if measured is not None and measured["speedup_high"] is not None and measured["speedup_high"] < 1:
        yield f"Set speculation=False: generations were {measured['speedup']:.2f} times as fast with drafts."
    yield from _about_length(report)


def _about_length(report: dict[str, Any]) -> Iterator[str]:
    """Advice on K, from what was verified at each position of the drafts."""
    k, drafted = report["num_speculative_tokens"], report["stats"]["drafted_per_position"]
    accepted = report["stats"]["accepted_per_position"]
    shares = [right / n for right, n in zip_longest(accepted, drafted, fillvalue=0)]
    last_good = max((position for position, share in enumerate(shares, 1) if share >= RARELY), default=1)
    late = sum(drafted[last_good:]) / (sum(drafted) or 1)
    # Where only what pays is verified, that may be accepted rarely, as verifying may cost next to nothing.
    if not (report["has_budget"] or report["is_adaptive"]) and late > RARELY:
        yield f"Lower num_speculative_tokens to {last_good}: {late:.1%} of the verified tokens were later, few right."
    elif len(drafted) == k < MAX_SPECULATIVE_TOKENS and drafted[-1] >= ENOUGH_STEPS and shares[-1] >= OFTEN:
        more = min(2 * k, MAX_SPECULATIVE_TOKENS)
        yield f"Raise num_speculative_tokens to {more}: {shares[-1]:.1%} of {drafted[-1]:,} drafts of {k} were right."
