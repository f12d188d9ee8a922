"""`rollout-spec doctor`: checks the installation, or explains where a run's time went.

Without a file it checks what is installed, with `--device` the kernels on this machine's GPU. With a report, which a
trainer's callback writes, `llm.collective_rpc("rollout_spec", args=("report",))[0]` returns and a running server gives,
it says what speculation did for that run; `plot.py` draws it, `advice.py` says what to do, and what differs from
another run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.files import check_writable, write_whole
from rollout_spec.report.explain import explain
from rollout_spec.report.installation import check_installation
from rollout_spec.report.measures import engine_cost
from rollout_spec.report.reading import ask_for_report, read_report


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
