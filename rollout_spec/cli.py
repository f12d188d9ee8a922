"""The `rollout-spec` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_spec import __version__, doctor
from rollout_spec.files import check_writable
from rollout_spec.history import command as history
from rollout_spec.replay import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 1 where `doctor` finds a fault, or `history import` leaves out most lines; 2 for bad input, with one line on
    stderr; after Ctrl-C, or where nobody reads on what is printed, what a shell gives to a command that was ended by
    the signal.
    """
    status = 0
    try:
        status = _run(argv)
        print(end="", flush=True)
    except BrokenPipeError:
        _end_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full disk, also of what is printed
        _end_output()
        if not status:  # otherwise something was said already
            print(f"rollout-spec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rollout-spec: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _end_output() -> None:
    """Write what is left in the buffer of stdout. If that fails, it goes nowhere: Python tries again at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="rollout-spec", description="Lossless speculation for RL rollouts.")
    parser.add_argument("--version", action="version", version=f"rollout-spec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small policy with GRPO, without and with speculation")
    demo.add_argument("--out", type=Path, default=Path("demo"), help="where the report goes (default: demo)")
    demo.add_argument("--steps", type=int, default=24, help="GRPO steps (default: 24)")
    demo.add_argument("--seed", type=int, default=0, help="of problems, weights and rollouts (default: 0)")
    arguments.add_arguments(
        commands.add_parser("replay", help="replay recorded rollouts through a drafter, without a model")
    )
    doctor.add_arguments(
        commands.add_parser("doctor", help="check the installation, or explain where a run's time goes")
    )
    history.add_arguments(commands.add_parser("history", help="import rollouts as history, look at it, prune it"))
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor.run(args)
    if args.command == "history":
        return history.run(args)
    # Imported late: they need numba, whose import takes long.
    if args.command == "replay":
        from rollout_spec.replay import command

        return command.run(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        check_writable(args.out / "report.json")
    except OSError as error:
        print(f"rollout-spec: --out: {error}", file=sys.stderr)
        return 2

    from rollout_spec.demo.run import run_demo

    try:
        run_demo(args.out, steps=args.steps, seed=args.seed)
    except (ImportError, ValueError) as error:
        print(f"rollout-spec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
