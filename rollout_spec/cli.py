"""The `rollout-spec` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_spec import __version__, doctor
from rollout_spec.history import command as history


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 1 where `doctor` finds a fault; 2 for bad input, with one line on stderr; after Ctrl-C, or where nobody reads on
    what is printed, what a shell gives to a command that was ended by the signal.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("rollout-spec: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # nobody reads what is printed, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest again at its exit
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"rollout-spec: {error}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="rollout-spec", description="Lossless speculation for RL rollouts.")
    parser.add_argument("--version", action="version", version=f"rollout-spec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser("estimate", help="what drafts would gain, by recorded rollouts and step times")
    estimate.add_argument(
        "paths", nargs="+", metavar="PATH", help="a folder of history, or files that `history import` reads"
    )
    estimate.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="the model's tokenizer; text needs it")
    estimate.add_argument("--vllm", default="0.31", metavar="VERSION", help="its release (0.31, as all newer ones)")
    estimate.add_argument(
        "--drafter", choices=("device", "host"), default="device", help="where drafts are made (device)"
    )
    estimate.add_argument("--gpu", choices=("h100", "h200", "a100"), help="which GPU it is")
    estimate.add_argument("--model", help="a size such as 7b, a config.json, or a name in the file of --step-times")
    estimate.add_argument("--step-times", type=Path, metavar="CSV", help="measured step times instead of estimates")
    estimate.add_argument("--requests", type=int, nargs="+", default=[64], metavar="N", help="most at a time (64)")
    estimate.add_argument(
        "-k", "--num-speculative-tokens", type=int, default=8, metavar="K", help="most draft tokens (8)"
    )
    estimate.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    doctor.add_arguments(
        commands.add_parser("doctor", help="check the installation, or explain where a run's time goes")
    )
    history.add_arguments(commands.add_parser("history", help="import rollouts as history, look at it, prune it"))
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor.run(args)
    if args.command == "history":
        return history.run(args)
    from rollout_spec.estimate.command import run  # needs numba, whose import takes long

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
