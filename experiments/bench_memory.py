"""What the drafter's memory costs: microseconds per request and step by the tokens of history, on one core.

    python experiments/bench_memory.py [--tokens 100000 1000000 10000000] [--no-prefetch] --out FILE

A history of made-up rollouts: sixteen per problem, each its text with one token in ten replaced. 256 requests of 32
problems drawn at random are live for 40 steps of three tokens, whatever is accepted, then others: the more history
there is, the less of what is visited lies in the processor's cache. `--no-prefetch` leaves out the instructions by
which a walk loads the nodes that come next (`suffix.py`), and compiles into a folder of its own.

Reported: p20/p50/p80 over the steps, after the first of each 40.
"""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rows import append, origin, quantiles

ROLLOUTS, LENGTH, VOCAB_SIZE, REPLACED = 16, 500, 2000, 0.1
REQUESTS, PROBLEMS, STEPS, TOKENS_PER_STEP, K = 256, 32, 40, 3, 8


def without_prefetch() -> None:
    """Compile walks without their prefetch instructions. Called before the drafters are imported."""
    folder = tempfile.TemporaryDirectory()  # what is compiled here must not be used elsewhere
    atexit.register(folder.cleanup)
    os.environ["NUMBA_CACHE_DIR"] = folder.name
    from rollout_spec.jit import compiler as jit

    @jit.njit(cache=False, allocates=False)
    def prefetch(array: Any, index: Any) -> None:
        pass

    jit.prefetch = prefetch


def rollout(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A problem's text with some tokens replaced, int32 [LENGTH]."""
    replaced = rng.random(LENGTH) < REPLACED
    return np.where(replaced, rng.integers(0, VOCAB_SIZE, LENGTH), text).astype(np.int32)


def measure(num_tokens: int, phases: int, rng: np.random.Generator) -> dict[str, Any]:
    """Figures for a history of `num_tokens`."""
    from rollout_spec.drafters import build_drafter

    drafter: Any = build_drafter("suffix", max_draft_tokens=K, max_history_tokens=2 * num_tokens, num_threads=1)
    texts = [rng.zipf(1.3, LENGTH) % VOCAB_SIZE for _ in range(max(num_tokens // (ROLLOUTS * LENGTH), PROBLEMS))]
    for turn in range(ROLLOUTS):  # a problem's rollouts lie apart, as those of different epochs do
        for problem, text in enumerate(texts):
            drafter.start_request("h", [problem], problem_id=problem)
            drafter.extend("h", rollout(text, rng))
            drafter.stop_request("h")
        drafter.begin_policy_version(turn + 1)
    index_us, propose_us, drafted, accepted = [], [], 0, 0
    for phase in range(phases):
        problems = rng.choice(len(texts), PROBLEMS, replace=False).repeat(REQUESTS // PROBLEMS)
        names = [f"{phase}/{i}" for i in range(REQUESTS)]
        says = [rollout(texts[problem], rng) for problem in problems]
        for name, problem in zip(names, problems.tolist(), strict=True):
            drafter.start_request(name, [problem], problem_id=problem, seed=0)
        rows = np.array([drafter.row_of(name) for name in names])
        starts = np.arange(REQUESTS + 1) * TOKENS_PER_STEP
        target_starts = np.arange(REQUESTS + 1) * (K + 1)
        for step in range(STEPS):
            tokens = np.concatenate([s[step * TOKENS_PER_STEP : (step + 1) * TOKENS_PER_STEP] for s in says])
            drafter.extend_batch(rows, tokens, starts)
            started = time.perf_counter()
            drafter.update_index()
            indexed = time.perf_counter()
            drafts = drafter.propose_batch(rows, np.full(REQUESTS, K))
            ended = time.perf_counter()
            said = (step + 1) * TOKENS_PER_STEP
            targets = np.stack([s[said : said + K + 1] for s in says]).astype(np.int64)
            is_right = (drafts.token_ids == targets[:, :K]) & (np.arange(K) < drafts.lengths[:, None])
            num_accepted = np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
            drafter.observe_batch(rows, targets.ravel(), target_starts, num_accepted)
            drafted, accepted = drafted + int(drafts.lengths.sum()), accepted + int(num_accepted.sum())
            if step:
                index_us.append((indexed - started) * 1e6 / REQUESTS)
                propose_us.append((ended - indexed) * 1e6 / REQUESTS)
        for name in names:
            drafter.stop_request(name, keep=False)
    return {
        "index_us_per_request": quantiles(index_us),
        "propose_us_per_request": quantiles(propose_us),
        "drafted_per_request": round(drafted / (phases * STEPS * REQUESTS), 2),
        "accepted_per_request": round(accepted / (phases * STEPS * REQUESTS), 2),
        "bytes": drafter.memory_bytes(),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--phases", type=int, default=6, help="times 40 steps")
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    if args.no_prefetch:
        without_prefetch()
    print("tokens of history  index us/request p20    p50    p80  propose us/request p20    p50    p80  drafted  right")
    for num_tokens in args.tokens:
        figures = measure(num_tokens, args.phases, np.random.default_rng(0))
        about = {"benchmark": "memory", "tokens": num_tokens, "prefetch": not args.no_prefetch}
        append(args.out, {**about, **figures, **origin()})
        index, propose = figures["index_us_per_request"], figures["propose_us_per_request"]
        print(
            f"{num_tokens:17,d}  {index[0]:20.2f} {index[1]:6.2f} {index[2]:6.2f}"
            f"  {propose[0]:22.2f} {propose[1]:6.2f} {propose[2]:6.2f}"
            f"  {figures['drafted_per_request']:7.2f}  {figures['accepted_per_request']:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
