"""`rollout-spec history`: logs of rollouts become history, and what a folder holds is counted and pruned."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.checks import first_line, num_bytes
from rollout_spec.installation import install

if TYPE_CHECKING:  # what a command imports takes long, and `--help` does not need it
    from rollout_spec.history.folder import Found, HistoryFolder
    from rollout_spec.history.store import Rollout

BATCH_TOKENS = 4_000_000
"""So many tokens are read before they are written, a file for each problem and step."""
MAX_BAD = 20
"""Lines that cannot be used are named up to so many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands and their options."""
    commands = parser.add_subparsers(dest="history_command", required=True)
    add = commands.add_parser("import", help="add rollouts: JSONL of token ids, TRL's or verl's logs")
    add.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSONL, or Parquet as TRL and verl log it")
    add.add_argument("--into", required=True, metavar="DIR", help="folder of the history, or a URL that fsspec knows")
    add.add_argument(
        "--tokenizer", required=True, metavar="NAME_OR_PATH", help="the model's; token ids must be its own"
    )
    add.add_argument("--version", type=_step, metavar="N", help="their step (default: each line's own, or 0)")
    stats = commands.add_parser("stats", help="how much a history holds")
    prune = commands.add_parser("prune", help="remove rollouts, the oldest first")
    prune.add_argument("--max-bytes", required=True, type=_num_bytes, metavar="SIZE", help="what may stay, such as 2GB")
    for command in (stats, prune):
        command.add_argument("dir", metavar="DIR", help="folder of the history, or a URL")


def _step(text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text) or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer in [0, 2^31)")
    return int(text)


def _num_bytes(text: str) -> int:
    try:
        return num_bytes("SIZE", text, least=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code; 2, with one line on stderr, for bad input."""
    commands = {"import": _import, "stats": _stats, "prune": _prune}
    try:
        if not all(map(find_spec, ("pyarrow", "fsspec"))):
            raise ImportError(f"history needs pyarrow and fsspec: {install('history')}")
        commands[args.history_command](args)
        return 0
    except BrokenPipeError:
        raise  # of whoever reads what is printed, and no fault of a file
    except (ImportError, OSError, ValueError) as error:
        print(f"rollout-spec history: {error}", file=sys.stderr)
        return 2


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers. Raises ValueError if there is none, ImportError without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"a tokenizer needs transformers ({error}): pip install transformers") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever damaged files raise
        raise ValueError(f"--tokenizer {name}: {first_line(error)}") from error


def _import(args: argparse.Namespace) -> None:
    from rollout_spec.history.folder import HistoryFolder, Origin, fingerprint
    from rollout_spec.history.logs import Copies, read

    for path in args.files:  # a misspelt name, before anything is written
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory: name its files")
        path.stat()
    tokenizer = load_tokenizer(args.tokenizer)
    origin = Origin(tokenizer=fingerprint(tokenizer.get_vocab()), vocab_size=len(tokenizer), model=args.tokenizer)
    folder = HistoryFolder(args.into, origin)
    there = _files_of(folder)
    copies, totals, problems = Copies(), Counter[str](), set[int]()

    def leave_out(path: Path, number: int, reason: str) -> None:
        totals["bad"] += 1
        if totals["bad"] <= MAX_BAD:
            print(f"{path}:{number}: {reason}", file=sys.stderr)

    def write(steps: dict[int, dict[int, list[Rollout]]]) -> None:
        for _, step in sorted(steps.items()):
            copied = copies.find({problem: [rollout.tokens for rollout in group] for problem, group in step.items()})
            problems.update(step)
            for problem, group in step.items():
                if problem in copied:
                    continue
                file = folder.write(group)
                if file.path in there:
                    totals["there"] += len(group)
                else:
                    tokens = sum(rollout.tokens.size for rollout in group)
                    totals.update(rollouts=len(group), tokens=tokens, bytes=file.size)

    for path in args.files:
        steps: dict[int, dict[int, list[Rollout]]] = {}
        num_tokens = 0
        try:
            for rollout, _ in read(path, tokenizer, partial(leave_out, path), step=args.version):
                steps.setdefault(rollout.order, {}).setdefault(rollout.problem_id, []).append(rollout)
                num_tokens += rollout.num_tokens
                if num_tokens > BATCH_TOKENS:
                    write(steps)
                    steps, num_tokens = {}, 0
        except OSError as error:
            leave_out(path, 1, str(error))
        write(steps)
    if totals["bad"] > MAX_BAD:
        print(f"... and {totals['bad'] - MAX_BAD:,} more", file=sys.stderr)
    if not problems:
        raise ValueError("nothing was imported")
    print(
        f"{totals['rollouts']:,} rollouts of {len(problems):,} problems, {totals['tokens']:,} tokens, "
        f"{totals['bytes']:,} bytes; {totals['there']:,} were there already, {copies.num_dropped:,} are copies, "
        f"{totals['bad']:,} lines left out"
    )


def _files_of(folder: HistoryFolder) -> set[str]:
    """Paths of the files in a folder. Raises ValueError where they are of another tokenizer."""
    from rollout_spec.history.folder import OtherOriginError

    def refuse(path: str, error: Exception) -> None:  # one that is damaged says nothing
        if isinstance(error, OtherOriginError):
            raise ValueError(f"{folder.url} cannot take these rollouts: {path}: {error}") from error

    next(folder.all_rollouts(refuse), None)
    return {file.path for file in folder.files()}


def _open(url: str) -> tuple[HistoryFolder, list[Found]]:
    """A folder with history, and its files. Raises ValueError where there are none."""
    from rollout_spec.history.folder import HistoryFolder, Origin

    folder = HistoryFolder(url, Origin())
    files = list(folder.files())
    if not files:
        raise ValueError(f"{url}: there is no history here")
    return folder, files


def _stats(args: argparse.Namespace) -> None:
    from rollout_spec.history.store import FIRST_TIME

    folder, files = _open(args.dir)
    num_tokens, orders = 0, list[int]()
    for rollout in folder.all_rollouts(lambda path, why: print(f"{path} cannot be used: {why}", file=sys.stderr)):
        num_tokens += rollout.tokens.size
        orders.append(rollout.order)
    print(
        f"{len(orders):,} rollouts of {len({file.problem_id for file in files}):,} problems, {num_tokens:,} "
        f"tokens; {len(files):,} files of {sum(file.size for file in files):,} bytes"
    )
    times = [time.strftime("%Y-%m-%d %H:%M", time.localtime(order)) for order in sorted(orders) if order >= FIRST_TIME]
    print(
        f"{len(orders) - len(times):,} imported or of rollout_spec 0.3"
        + (f", {len(times):,} sampled from {times[0]} to {times[-1]}" if times else "")
    )


def _prune(args: argparse.Namespace) -> None:
    folder, files = _open(args.dir)
    gone = folder.prune(args.max_bytes)
    print(f"removed {len(gone):,} of {len(files):,} files, {sum(file.size for file in gone):,} bytes")
