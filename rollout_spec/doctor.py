"""`rollout-spec doctor`: checks the installation, or explains on one page where a run's time went and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, get_args

import rollout_spec
from rollout_spec import installation
from rollout_spec.checks import shown
from rollout_spec.config import MAX_SPECULATIVE_TOKENS, plugin_fault
from rollout_spec.installation import INSTALL_VLLM, install
from rollout_spec.integrations.vllm.compat import check_version
from rollout_spec.integrations.vllm.config import VARIABLE, read_environment
from rollout_spec.stats import REPORT_FORMAT
from rollout_spec.types import VerifyMethod

REPORT_NAME = "rollout_spec.json"  # what a trainer's callback calls the report in its output folder
PACKAGES = (  # name, what needs it if it may be absent, what to do if it cannot be used
    ("numba", "", "reinstall rollout-spec"),
    ("pyarrow", f"history_dir and estimates need it: {install('history')}", f"reinstall it: {install('history')}"),
    ("torch", "engines need it, and vLLM brings it", INSTALL_VLLM),
    ("transformers", "engines need it, and vLLM brings it", "pip uninstall torchvision torchaudio torchcodec"),
    ("vllm", f"engines need it: {INSTALL_VLLM}", INSTALL_VLLM),
    ("trl", f"trainers need it: {install('trl')}", install("trl")),
)
ENOUGH_STEPS = 200  # fewer are too few to judge by
LONG_DRAFTING = 0.15  # share of the time from which on drafting on the host is worth avoiding
RARELY, OFTEN = 0.1, 0.5  # accepted shares: below the one drafts are too long, above the other too short


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("report", nargs="?", type=Path, help="a run's report, or the folder of the trainer that wrote it")
    one.add_argument("--device", action="store_true", help="check the kernels on this machine's GPU")


def run(args: Namespace) -> int:
    """Check or explain, and print. Returns the exit code: 1 if a check finds a fault, 2 for bad input."""
    if args.device:
        return check_device()
    if args.report is None:
        return check_installation()
    try:
        report = read_report(args.report)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    try:
        print(explain(report))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return _refuse(f"the report in {args.report} is damaged: {error!r}")
    return 0


def _refuse(reason: str) -> int:
    print("rollout-spec:", " ".join(reason.splitlines()), file=sys.stderr)
    return 2


def check_installation() -> int:
    """Print what is ok, what is a problem, and what is absent, which is no fault. Returns 1 if there is a problem."""
    verdicts = set()
    for verdict, line in look_around():
        verdicts.add(verdict)
        print(f"{verdict:8} {line}")
    print("There are problems." if "problem" in verdicts else "All is well.")
    return int("problem" in verdicts)


def look_around() -> Iterator[tuple[str, str]]:
    """(verdict, what was found and what to do) of all that speculation needs."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it is imported is no part of this
    yield "ok", f"rollout-spec {rollout_spec.__version__}, Python {sys.version.split()[0]}"
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    yield _tried(
        "vLLM's entry point", lambda: f"is {entries['rollout_spec'].load().__module__}", "reinstall rollout-spec"
    )
    fault = plugin_fault()
    yield "problem" if fault else "ok", fault or "vLLM loads the plugin"
    yield _tried(VARIABLE, lambda: f"is {'set' if read_environment() else 'not set'}", "correct it")
    folder = installation.find_folder()
    if folder is None:
        yield "problem", f"no folder can be written, so each process compiles the drafters anew: {installation.REMEDY}"
    else:
        yield "ok", f"compiled drafters are kept in {folder}"
    for package, needed_by, remedy in PACKAGES:
        if needed_by and importlib.util.find_spec(package) is None:
            yield "absent", f"{package}; {needed_by}"
            continue
        verdict, line = _tried(package, partial(_version_of, package), remedy)
        yield verdict, line
        if verdict == "problem":  # those that follow import it, and would be reported for its fault
            break


def _tried(what: str, check: Callable[[], str], remedy: str) -> tuple[str, str]:
    try:
        return "ok", f"{what} {check()}"
    except Exception as error:  # builds that do not fit each other fail in many ways
        return "problem", f"{what} cannot be used ({type(error).__name__}: {str(error)[:200]}): {remedy}"


def _version_of(package: str) -> str:
    """Import a package as far as engines and trainers do. Raises whatever keeps it from being used."""
    module = importlib.import_module(package)
    version = str(module.__version__)
    if package == "torch":
        return f"{version}, {module.cuda.get_device_name() if module.cuda.is_available() else 'no GPU'}"
    if package == "transformers":
        importlib.import_module("transformers.modeling_utils")
    if package == "vllm":
        assert module.LLM  # is imported by being asked for
        check_version(module.__version_tuple__, version)
    if package == "trl":
        release = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if release < (1, 16) and release != (1, 12):
            raise RuntimeError(f"{version} is not 1.16 or newer, nor 1.12, for PPOTrainer ({install('ppo')})")
    return version


def check_device(device: Any = None, vocab_size: int = 151_936) -> int:
    """Check the verifier's kernels on a GPU, as engines do at their start, by default for Qwen's vocabulary.

    Returns the exit code: 1 if something is wrong, 2 without a GPU.
    """
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if device is None and (torch is None or not torch.cuda.is_available()):
        return _refuse("torch finds no GPU on this machine, and on a CPU no kernels run")
    import triton

    from rollout_spec.verify import self_check

    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device
    print(f"{name}, Triton {triton.__version__}, torch {torch.__version__}")
    status = 0
    for method, dtype in product(get_args(VerifyMethod), (torch.bfloat16, torch.float16, torch.float32)):
        fault = self_check.find_fault(
            device, vocab_size=vocab_size, dtype=dtype, num_speculative_tokens=8, method=method
        )
        status |= fault is not None
        print(f"problem  {method}: {fault}" if fault else f"ok       {method}, {dtype}")
    return status


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
        if measured["low"] is not None:
            times += f" ({measured['low']:.2f} to {measured['high']:.2f})"
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
    parts = [head, _times(stats)]
    title = "Drafted tokens by where they came from, those that the target reached, verified or not"
    rows = [[name, f"{n:,}", f"{right / n:.1%}"] for name, (n, right) in report["sources"].items() if n]
    parts.append(_table(title, ["source", "tokens", "right"], rows))
    title = "Verified tokens by position in the draft"
    pairs = zip_longest(stats["drafted_per_position"], stats["accepted_per_position"], fillvalue=0)
    rows = [[f"{i}", f"{n:,}", f"{accepted / n:.1%}"] for i, (n, accepted) in enumerate(pairs, 1)]
    parts.append(_table(title, ["position", "tokens", "accepted"], rows))
    parts.append(_history(report.get("history") or {}))
    parts.append("\n  - ".join(["What to do", *(list(advice(report)) or ["Nothing: leave it as it is."])]))
    return "\n\n".join(filter(None, parts))


def _history(history: dict[str, Any]) -> str:
    """What there is to draft from, in a line, and one on the folder if there is one; nothing of an older report."""
    if "rollouts" not in history:
        return ""
    lines = [
        f"History: {history['rollouts']:,} rollouts, {history['tokens']:,} tokens. "
        f"{history['requests_with_history']:,} of {history['requests']:,} requests had a prompt that was in it"
    ]
    if folder := history["folder"]:
        lines.append(
            f"Its folder: {folder['rollouts_read']:,} rollouts read, {folder['rollouts_written']:,} written, "
            f"{folder['rollouts_lost']:,} lost; {folder['files_refused']:,} files refused"
        )
    return "\n".join(lines)


def _times(stats: dict[str, Any]) -> str:
    """How long a step takes, and for whom it waits, in a line."""
    if not stats["timed_steps"]:
        return ""
    milliseconds = 1e3 * stats["step_seconds"] / stats["timed_steps"]
    line = f"A step takes {milliseconds:.1f} ms, of which the model and verification take "
    line += f"{stats['device_seconds'] / stats['step_seconds']:.0%} and the host's other work the rest"
    return line + (f", drafting {_share_of_drafting(stats):.0%}" if stats["draft_seconds"] else "")


def _share_of_drafting(stats: dict[str, Any]) -> float:
    """Of a step's time, what the host takes to draft."""
    per_step = stats["step_seconds"] / (stats["timed_steps"] or 1)
    return stats["draft_seconds"] / stats["steps"] / per_step if per_step else 0.0


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    """A table under its title; nothing without rows."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(["", *(cell.rjust(n) for cell, n in zip(row, widths, strict=True))]) for row in [heads, *rows]]
    return "\n".join([title, *lines]) if rows else ""


def advice(report: dict[str, Any]) -> Iterator[str]:
    """What to do about a run, by rules."""
    stats = report["stats"]
    if stats["drafter_errors"]:
        yield "Look for the drafter's exception in the log. Drafting stays off until the engine is built again."
        return
    if not report["num_speculative_tokens"]:
        yield "This engine does not speculate. Compare its ms per token with those of one that does."
        return
    if stats["steps"] < ENOUGH_STEPS:
        yield f"Generate more: {stats['steps']} steps are too few to judge by, {ENOUGH_STEPS} are the least."
        return
    history = report.get("history", {})
    requests, known = history.get("requests", 0), history.get("requests_with_history", 0)
    is_new = known < requests / 2
    if is_new:
        yield f"Wait an epoch: only {known:,} of {requests:,} requests had a prompt that the engine had seen before."
        yield "Group requests: sample each prompt several times in one engine; give variants of it one problem_id."
    if requests and not history.get("folder") and (is_new or report.get("num_processes", 1) > 1):
        yield "Set history_dir: engines share what was said, and a run that resumes has what earlier ones said."
    if not stats["draft_tokens"] and not is_new:
        yield "No draft was verified: none was found, none was worth a step's time, or drafts were switched off."
    measured = report.get("measured")
    if measured is not None and measured["high"] is not None and measured["high"] < 1:
        yield f"Set speculation=False: generations were {measured['speedup']:.2f} times as fast with drafts."
    drafting = _share_of_drafting(stats)
    if drafting > LONG_DRAFTING and not report["device"].endswith("CPU"):
        yield f'Try drafter="device", in the V2 runner: drafting on the host took {drafting:.1%} of the time.'
    yield from _about_length(report)


def _about_length(report: dict[str, Any]) -> Iterator[str]:
    """Advice on K, from what was verified at each position of the drafts."""
    k, drafted = report["num_speculative_tokens"], report["stats"]["drafted_per_position"]
    pairs = zip_longest(report["stats"]["accepted_per_position"], drafted, fillvalue=0)
    shares = [accepted / n for accepted, n in pairs]
    last_good = max((position for position, share in enumerate(shares, 1) if share >= RARELY), default=1)
    late = sum(drafted[last_good:]) / (sum(drafted) or 1)
    # Where only what pays is verified, that may be accepted rarely, as verifying may cost next to nothing.
    if not (report["has_budget"] or report["is_adaptive"]) and late > RARELY:
        yield f"Lower num_speculative_tokens to {last_good}: {late:.1%} of the verified tokens were later, few right."
    elif len(drafted) == k < MAX_SPECULATIVE_TOKENS and drafted[-1] >= ENOUGH_STEPS and shares[-1] >= OFTEN:
        more = min(2 * k, MAX_SPECULATIVE_TOKENS)
        yield f"Raise num_speculative_tokens to {more}: {shares[-1]:.1%} of {drafted[-1]:,} drafts of {k} were right."
