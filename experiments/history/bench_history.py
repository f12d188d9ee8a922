"""What an engine with `history_dir` does when it starts, for `--tokens` and ten times as many.

    python -m experiments.history.bench_history --tokenizer NAME_OR_PATH --out FILE

Rollouts are made of real text, the source files of Python's standard library, in slices of 500 tokens: sixteen to a
prompt, which is a slice too.

Reported, once each: seconds to read the folder, and to index it in the drafter; bytes per token on disk and in memory,
with what the target saw at each token (random bits here, which nothing compresses) and without. Gate: the drafter holds
all of it.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from experiments.engines.build import WORDS_ALONE
from experiments.rows import append, make_parser, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history.folder import HistoryFolder, Origin
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout

SAMPLES, LENGTH = 16, 500


Texts = Sequence[tuple[list[int], list[int]]]
"""Prompt and completion of each rollout."""


def real_texts(num_tokens: int, tokenizer: Any) -> Texts:
    """Rollouts of about so many tokens."""
    wanted = num_tokens * (1 + 1 / SAMPLES)
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            tokens += tokenizer.encode(path.read_text(errors="replace"), add_special_tokens=False)
        if len(tokens) >= wanted:
            break
    slices = [tokens[i : i + LENGTH] for i in range(0, int(wanted), LENGTH)]
    prompts, completions = slices[:: SAMPLES + 1], [s for i, s in enumerate(slices) if i % (SAMPLES + 1)]
    return [(prompts[i // SAMPLES], completion) for i, completion in enumerate(completions)]


def measure_start(args: argparse.Namespace, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A row for each size, drafter and whether there are features."""
    sources = real_texts(args.tokens, tokenizer)
    for times, has_features in ((1, False), (1, True), (10, False), (10, True)):
        with tempfile.TemporaryDirectory() as folder:
            num_tokens, num_bytes = write_history(folder, sources, times, len(tokenizer), has_features=has_features)
            for name, drafter in drafters(num_tokens, has_features=has_features):
                started = time.perf_counter()
                rollouts = HistoryFolder(folder, Origin()).load(2 * num_tokens)
                read = time.perf_counter()
                before = drafter.memory_bytes()
                drafter.add_rollouts(rollouts)
                indexed = time.perf_counter()
                if drafter.history_summary()["tokens"] != num_tokens:
                    raise SystemExit(f"{name} holds {drafter.history_summary()} and not {num_tokens} tokens")
                yield {
                    "measurement": "start",
                    "drafter": name,
                    "tokens": num_tokens,
                    "features": has_features,
                    "read_seconds": round(read - started, 2),
                    "index_seconds": round(indexed - read, 2),
                    "disk_bytes_per_token": round(num_bytes / num_tokens, 2),
                    "memory_bytes_per_token": round((drafter.memory_bytes() - before) / num_tokens, 1),
                }


def write_history(folder: str, texts: Texts, times: int, vocab_size: int, *, has_features: bool) -> tuple[int, int]:
    """Write the texts so many times, as different problems with other tokens. Returns (tokens, bytes on disk)."""
    rng, history, num_tokens = np.random.default_rng(0), HistoryFolder(folder, Origin()), 0
    for part in range(times):
        problems: defaultdict[int, list[Rollout]] = defaultdict(list)
        for prompt, completion in texts:
            # Another alphabet for each part, so that their texts have as much in common as different texts do.
            context, tokens = ((np.array(ids, np.int32) + 31 * part) % vocab_size for ids in (prompt, completion))
            features = rng.integers(-(2**62), 2**62, (tokens.size, FEATURE_WORDS)) if has_features else None
            rollout = Rollout(problem_of_prompt(context), part, context[-CONTEXT_TOKENS:], tokens, features)
            problems[rollout.problem_id].append(rollout)
            num_tokens += tokens.size
        for rollouts in problems.values():
            history.write(rollouts)
    return num_tokens, history.stats.bytes_written


def drafters(num_tokens: int, *, has_features: bool) -> Iterator[tuple[str, Any]]:
    """The drafters with room for the history. Compiled code is ready."""
    room = {"max_history_tokens": 2 * num_tokens, **({} if has_features else WORDS_ALONE)}
    for name in ("history", "suffix", "ngram"):
        ready: Any = build_drafter(name, **room)
        ready.add_rollouts([Rollout(0, 0, np.zeros(3, np.int32), np.arange(900, dtype=np.int32) % 30)])
        yield name, build_drafter(name, **room)
    yield (
        "device",
        DeviceDrafter(max_requests=1, max_model_len=16, device=torch.device("cpu"), max_resident_tokens=16, **room),
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", required=True, metavar="NAME_OR_PATH")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, model_max_length=10**9)
    for row in measure_start(args, tokenizer):
        append(args.out, {"benchmark": "history", **row, **origin(packages=("pyarrow", "transformers"))})
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
