"""`rollout-spec history`: recordings become history, and a folder of history can be looked at, pruned and exported.

This module imports nothing that takes long, so that `--help` does not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.checks import shown
from rollout_spec.files import writing
from rollout_spec.imports import install

if TYPE_CHECKING:
    from rollout_spec.history.contents import Contents
    from rollout_spec.history.recordings import Bad
    from rollout_spec.history.shards import Origin
    from rollout_spec.history.storage import ShardStorage

FORMATS = ("auto", "trl", "verl", "jsonl", "traces")
MAX_ERRORS = 20
"""Lines that could not be imported are named up to so many."""
SHOWN_TOKENS = 24
"""Tokens of a rollout that `show` prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands and their options."""
    commands = parser.add_subparsers(dest="history_command", required=True)
    add = commands.add_parser("import", help="add recorded rollouts: Parquet of TRL, JSONL of verl and others")
    add.add_argument("files", nargs="+", type=Path, metavar="FILE")
    add.add_argument("--into", required=True, metavar="DIR", help="folder of the history, or a URL that fsspec knows")
    add.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="the model's tokenizer; text needs it")
    add.add_argument("--format", choices=FORMATS, default="auto")
    add.add_argument("--version", type=int, metavar="N", help="policy version (default: each rollout's step, or 0)")
    add.add_argument("--again", action="store_true", help="also what was imported before; nothing is in history twice")
    bad = add.add_mutually_exclusive_group()
    bad.add_argument("--strict", action="store_true", help="write nothing if there is a line that cannot be used")
    bad.add_argument(
        "--lenient", action="store_true", help="do not exit with 1 where more lines are left out than are imported"
    )
    stats = commands.add_parser("stats", help="how much a history holds, and what it is of")
    stats.add_argument("dir", metavar="DIR")
    stats.add_argument("--json", action="store_true")
    show = commands.add_parser("show", help="the problems with most rollouts, or the rollouts of one")
    show.add_argument("dir", metavar="DIR")
    show.add_argument("--problem", type=_problem, metavar="ID")
    show.add_argument("--tokenizer", metavar="NAME_OR_PATH", help="to show text instead of token ids")
    show.add_argument("--limit", type=int, default=20, metavar="N", help="lines (default: 20)")
    prune = commands.add_parser("prune", help="remove rollouts, the oldest first")
    prune.add_argument("dir", metavar="DIR")
    prune.add_argument("--max-bytes", type=_num_bytes, metavar="SIZE", help="what may stay, for example 2GB")
    prune.add_argument("--keep-versions", type=int, metavar="N", help="policy versions that stay")
    prune.add_argument("--problem", type=_problem, metavar="ID", help="the problem whose rollouts go")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    prune.add_argument("--yes", action="store_true", help="even if nothing is left")
    convert = commands.add_parser("convert", help="make usable what an earlier version of rollout-spec has written")
    convert.add_argument("dir", metavar="DIR")
    export = commands.add_parser("export", help="write a history to one file")
    export.add_argument("dir", metavar="DIR")
    export.add_argument(
        "file", type=Path, metavar="FILE", help=".jsonl, which import reads, or .parquet, which `replay` reads"
    )


def _problem(text: str) -> int:
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id of a problem: up to 16 hexadecimal digits, as `show` has")
    return int(text, 16)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 500MB or 2GB")
    size = float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")
    if size >= 2**63:
        raise argparse.ArgumentTypeError(f"{shown(text)} does not fit in 64 bits")
    return int(size)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code; 2, with one line on stderr, for bad input; 1 for mostly bad lines."""
    commands = {
        "import": _import,
        "stats": _stats,
        "show": _show,
        "prune": _prune,
        "convert": _convert,
        "export": _export,
    }
    try:
        try:
            import pyarrow  # noqa: F401
            import tqdm  # noqa: F401
        except ImportError as error:
            raise ImportError(f"history needs pyarrow and tqdm ({error}): {install('history')}") from error
        return commands[args.history_command](args)
    except BrokenPipeError:
        raise  # of whoever reads what is printed, and no fault of a file
    except (ImportError, OSError, ValueError) as error:
        print(f"rollout-spec history: {error}", file=sys.stderr)
        return 2


def _import(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from rollout_spec.history.importers import Converter, import_recordings
    from rollout_spec.history.recordings import Recording
    from rollout_spec.history.storage import open_storage

    if args.version is not None and not 0 <= args.version < 2**31:
        raise ValueError(f"--version must be in [0, 2**31), got {args.version}")
    storage = open_storage(args.into)
    storage.sizes()  # raises if it is no folder
    recordings = [Recording(path, args.format) for path in args.files]
    tokenizer, origin = load_tokenizer(args.tokenizer)
    converter = Converter(tokenizer, args.version)
    for recording in recordings:
        converter.check(recording)
    num_bad = 0

    def on_bad(path: Path, bad: Bad) -> None:
        nonlocal num_bad
        num_bad += 1
        if num_bad <= MAX_ERRORS:
            tqdm.write(f"{path}:{bad.where}: {bad.reason}", file=sys.stderr)

    def walk(storage: ShardStorage | None, **callbacks: Any) -> Any:
        total = sum(recording.num_bytes for recording in recordings)
        done = {recording.path: 0 for recording in recordings}
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:

            def on_batch(recording: Recording) -> None:
                done[recording.path] = recording.position
                bar.update(sum(done.values()) - bar.n)

            return import_recordings(
                recordings, converter, storage, origin, again=args.again, on_batch=on_batch, **callbacks
            )

    if args.strict and walk(None, on_bad=on_bad).bad:
        raise ValueError(f"nothing was imported: {num_bad:,} lines cannot be used")
    report = walk(storage, on_bad=on_bad)
    if num_bad > MAX_ERRORS:
        print(f"... and {num_bad - MAX_ERRORS:,} more lines", file=sys.stderr)
    for path in report.known:
        print(f"{path}: already imported (--again imports what has been pruned since)")
    if not report.rollouts:
        if report.known:
            return 0
        raise ValueError(f"nothing was imported: {num_bad:,} lines cannot be used" if num_bad else "no rollouts found")
    print(
        f"{report.rollouts:,} rollouts of {len(report.problems):,} problems, {report.tokens:,} tokens "
        f"({report.tokens / report.seconds:,.0f} per second), {report.num_bytes / report.tokens:.2f} bytes per token"
        + (f"; {report.bad:,} lines left out" if report.bad else "")
    )
    if report.bad > report.rollouts and not args.lenient:
        print(
            f"rollout-spec history: {report.bad:,} of {report.bad + report.rollouts:,} lines cannot be used, and the "
            "others were imported: name the right --format or --tokenizer, or say --lenient if that is meant",
            file=sys.stderr,
        )
        return 1
    return 0


def load_tokenizer(name: str | None) -> tuple[Any, Origin]:
    """(a tokenizer of transformers, the origin of rollouts with it); None and one that fits everything without a name.

    Raises:
        ValueError: there is no such tokenizer.
        ImportError: transformers is missing.
    """
    from rollout_spec.history.shards import Origin
    from rollout_spec.history.text import fingerprint

    if name is None:
        return None, Origin()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"text needs transformers ({error}): pip install transformers") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever damaged files raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"--tokenizer {name}: {reason}") from error
    return tokenizer, Origin(tokenizer=fingerprint(tokenizer.get_vocab()), model=name)


def _open(url: str, problem_id: int | None = None) -> tuple[ShardStorage, Contents]:
    from rollout_spec.history.contents import Contents
    from rollout_spec.history.partitions import shards_of_earlier_versions
    from rollout_spec.history.storage import open_storage

    storage = open_storage(url)
    contents = Contents(storage, problem_id)
    earlier = shards_of_earlier_versions(storage)
    if earlier:
        message = f"{url}: {len(earlier):,} shards are of an earlier version: `rollout-spec history convert {url}`"
        if not len(contents):
            raise ValueError(message)
        print(message, file=sys.stderr)
    if not len(contents):
        of = "" if problem_id is None else f" of problem {problem_id:016x}"
        raise ValueError(f"{url}: there is no history{of} here")
    return storage, contents


def _convert(args: argparse.Namespace) -> int:
    from rollout_spec.history.partitions import shards_of_earlier_versions, write_rollouts
    from rollout_spec.history.shards import Origin, ShardError, read_shard
    from rollout_spec.history.storage import open_storage

    storage = open_storage(args.dir)
    names = shards_of_earlier_versions(storage)
    refused: dict[str, str] = {}
    num_rollouts, problems = 0, set[int]()
    for name in sorted(names):
        try:
            info, entries = read_shard(storage, name, Origin())
        except ShardError as error:
            refused[name] = str(error)
            continue
        write_rollouts(storage, entries, info.origin)
        storage.delete(name)
        num_rollouts += len(entries)
        problems.update(entry.rollout.problem_id for entry in entries)
    _print_refused(refused)
    print(f"{len(names) - len(refused):,} shards: {num_rollouts:,} rollouts of {len(problems):,} problems")
    return 0


def _stats(args: argparse.Namespace) -> int:
    from rollout_spec.history.contents import summarize

    summary = summarize(_open(args.dir)[1])
    figures = summary.to_dict()
    if args.json:
        print(json.dumps(figures, indent=1))
        return 0
    per_token = f", {figures['bytes_per_token']:.2f} per token" if summary.tokens else ""
    print(f"{summary.rollouts:,} rollouts of {len(summary.problems):,} problems, {summary.tokens:,} tokens")
    print(f"{summary.rollouts_with_features:,} rollouts have what the target saw at each token")
    print(f"{summary.shards:,} shards of {summary.num_bytes:,} bytes{per_token}")
    for origin, count in summary.origins.items():
        known = [f"{name} {value}" for name, value in origin._asdict().items() if value is not None]
        print(f"{count:,} shards of {', '.join(known) or 'unknown origin'}")
    if summary.versions:
        print(f"versions {min(summary.versions)} to {max(summary.versions)}")
        print(f"{'version':>10} {'rollouts':>10} {'tokens':>12}")
        for version, (rollouts, tokens) in sorted(summary.versions.items(), reverse=True):
            print(f"{version:10} {rollouts:10,} {tokens:12,}")
    _print_refused(summary.refused)
    return 0


def _print_refused(refused: dict[str, str]) -> None:
    for name, reason in sorted(refused.items()):
        print(f"{name} cannot be used: {reason}", file=sys.stderr)


def _show(args: argparse.Namespace) -> int:
    from rollout_spec.history.contents import each_once, summarize

    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    _, contents = _open(args.dir, args.problem)
    tokenizer, _ = load_tokenizer(args.tokenizer)
    if args.problem is None:
        summary = summarize(contents)
        print(f"{'problem':16} {'rollouts':>10}")
        for problem_id, count in summary.problems.most_common(args.limit):
            print(f"{problem_id:016x} {count:10,}")
        _print_refused(summary.refused)
        return 0
    rollouts = list(each_once(contents))
    _print_refused(contents.refused)
    if not rollouts:
        raise ValueError(f"{args.dir}: no rollouts of problem {args.problem:016x}")
    rollouts.sort(key=lambda rollout: rollout.version, reverse=True)
    print(f"{len(rollouts):,} rollouts{', found by the text of their prompt' if rollouts[0].by_text else ''}")
    print(f"{'version':>10} {'tokens':>8} {'reward':>8}  begins with")
    for rollout in rollouts[: args.limit]:
        first = rollout.tokens[:SHOWN_TOKENS].tolist()
        text = " ".join(map(str, first)) if tokenizer is None else json.dumps(tokenizer.decode(first))
        reward = "-" if rollout.reward is None else f"{rollout.reward:.3g}"
        print(f"{rollout.version:10} {rollout.tokens.size:8,} {reward:>8}  {text}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    from rollout_spec.history.contents import Contents, plan_pruning, prune

    if args.max_bytes is None and args.keep_versions is None and args.problem is None:
        raise ValueError("prune needs --max-bytes, --keep-versions or --problem")
    if args.keep_versions is not None and args.keep_versions < 1:
        raise ValueError(f"--keep-versions must be at least 1, got {args.keep_versions}")
    limits = {"max_bytes": args.max_bytes, "keep_versions": args.keep_versions, "problem_id": args.problem}
    storage, _ = _open(args.dir, args.problem)
    with storage.tidying() as is_ours:
        if not is_ours and not args.dry_run:
            raise ValueError(f"{args.dir}: another process removes shards; try again")
        contents = Contents(storage)
        pruning = plan_pruning(contents, **limits)
        _print_refused(contents.refused)
        what = f"{pruning.rollouts:,} rollouts, {pruning.tokens:,} tokens, about {pruning.num_bytes:,} bytes"
        if args.dry_run:
            print(f"would remove {what}")
            return 0
        if pruning.is_all and pruning.rollouts and not args.yes:
            raise ValueError(f"nothing would be left of {args.dir} ({what}): say --yes if that is meant")
        prune(storage, pruning)
    print(f"removed {what}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from rollout_spec.history.contents import each_once, export_lines, export_traces

    if args.file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{args.file}: the name must end in .jsonl or .parquet")
    _, contents = _open(args.dir)
    with writing(args.file) as unfinished:
        if args.file.suffix == ".jsonl":
            count, note = export_lines(each_once(contents), unfinished), ""
        else:
            count, num_isolated, has_features = export_traces(contents, unfinished)
            note = "" if has_features else ", without what the target saw: some rollouts have none of it"
            if num_isolated:
                note += f"; {num_isolated:,} of requests with a cache_salt are left out"
    _print_refused(contents.refused)
    print(f"{args.file}: {count:,} rollouts{note}")
    return 0
