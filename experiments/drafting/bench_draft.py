"""Our drafters and other people's (`peers.py`) on recorded rollouts, in one process.

    python -m experiments.drafting.bench_draft TRACES_DIR [--sections quality cost] [--out FILE.jsonl]

- quality: tokens per step and drafted tokens per step, K = 16, per-problem history, in the four replay regimes.
  `ours at Arctic's count` is ours at the lowest threshold with which it drafts no more than Arctic. `device` is the
  device drafter's reference; `bench_device.py` times the kernels.
- cost: microseconds per request-step of index and draft at batch 64 with a warm history, drafters alternating and
  repeated; bytes per history token; seconds to build a million tokens.

The gate of every section: each drafter emits the same recorded tokens, and ours passes its integrity check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.drafting import peers
from experiments.drafting.regimes import REGIMES, Regime, ReplayResult, replay
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.estimate.recorded import RecordedTarget, Rollout, add_rollout, by_problem
from rollout_spec.loop import Decoder

K = 16
BATCH = 64
SECTIONS = ("quality", "cost")


class Recorded(NamedTuple):
    """A set of recorded rollouts, and how much of it is replayed."""

    prompts: int
    samples: int


SETS = {
    "rg_llama_math": Recorded(24, 16),
    "rg_qwen3b": Recorded(120, 3),
    "codet_codegen16b": Recorded(115, 16),
    "tot_text_gpt4": Recorded(30, 10),
    "tau_airline_gpt4o": Recorded(35, 4),
    "r1v_grpo_log": Recorded(300, 8),
}

ours = partial(build_drafter, max_draft_tokens=K)
HAS_ARCTIC = peers.find_arctic() is not None
ARCTIC: dict[str, Callable[[], Drafter]] = {
    "Arctic": peers.ArcticSuffix,
    "Arctic loose": partial(peers.ArcticSuffix, factor=4.0, offset=4.0, min_probability=0.0),
}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "vLLM n-gram": partial(peers.VllmNgram, K),
    **(ARCTIC if HAS_ARCTIC else {}),
    "ours, no limit": partial(ours, "suffix", min_survival=0.0),
    "ours": partial(ours, "suffix"),
    "ours, shared, no limit": partial(ours, "suffix", shared=True, min_survival=0.0),
    "ours, shared": partial(ours, "suffix", shared=True),
    "ours, n-gram": partial(ours, "ngram"),
    "device, no limit": partial(peers.ReferenceDrafter, max_draft_tokens=K),
}


class Bench:
    """Runs replays, checks them, and writes rows."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._about = origin()

    def row(self, section: str, **figures: Any) -> None:
        """Keep one row."""
        append(self._out, {"benchmark": f"draft/{section}", **figures, **self._about})

    def replay(self, problems: list[list[Rollout]], drafter: Drafter, regime: Regime, **kwargs: Any) -> ReplayResult:
        """Replay, and check the drafter afterwards."""
        result = replay(problems, drafter, regime, **{"num_speculative_tokens": K, "batch": BATCH, **kwargs})
        drafter.check_integrity()
        return result


def load(directory: Path, name: str, scale: float) -> tuple[list[list[Rollout]], dict[str, int]]:
    """A set's problems, and replay's limit on samples."""
    prompts, samples = SETS.get(name, Recorded(100, 16))
    problems = by_problem(read_traces(directory / f"{name}.parquet"))[: max(1, round(prompts * scale))]
    return problems, {"max_samples": samples}


def drafted(result: ReplayResult) -> float:
    """Drafted tokens per step."""
    return result.draft_tokens / max(result.request_steps, 1)


# -- sections --------------------------------------------------------------------------------------------------------


def quality(bench: Bench, directory: Path, names: Sequence[str], scale: float, drafters: Sequence[str]) -> None:
    """Print tokens per step, and in brackets drafted tokens per step."""
    with_arctic = HAS_ARCTIC and "Arctic" in drafters
    columns = [*drafters, "ours at Arctic's count"] if with_arctic else drafters
    print("| set | regime | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for name in names:
        problems, limits = load(directory, name, scale)
        for regime in REGIMES:
            if regime == "epoch" and min(map(len, problems)) < 2:
                continue
            results = {}
            for label in drafters:
                results[label] = bench.replay(problems, DRAFTERS[label](), regime, **limits)
            if with_arctic:
                results["ours at Arctic's count"] = at_count(bench, problems, regime, limits, results["Arctic"])
            totals = {result.emitted_tokens for result in results.values()}
            assert len(totals) == 1, f"drafters emitted different numbers of tokens: {totals}"
            for label, result in results.items():
                reliability = result.reliability.round(1).tolist()
                bench.row(
                    "quality", set=name, regime=regime, drafter=label, **result.to_dict(), reliability=reliability
                )
            cells = [f"{r.emitted_tokens / r.request_steps:.3f} ({drafted(r):.1f})" for r in results.values()]
            print(f"| {name} | {regime} | " + " | ".join(cells) + " |", flush=True)


def at_count(bench: Bench, problems: list[list[Rollout]], regime: Regime, limits: Any, peer: ReplayResult) -> Any:
    """Ours at the lowest threshold with which it drafts no more than the peer, bisected to 1/128."""
    low, high, best = 0.0, 1.0, None
    for _ in range(7):
        threshold = (low + high) / 2
        result = bench.replay(problems, ours("suffix", min_survival=threshold), regime, **limits)
        if drafted(result) <= drafted(peer):
            high, best = threshold, result
        else:
            low = threshold
    assert best is not None, "no threshold is high enough"
    return best


def cost(bench: Bench, directory: Path, names: Sequence[str], repeats: int) -> None:
    """Microseconds per request-step, drafters alternating."""
    print("| set | drafter | index µs | draft µs | both | of Arctic's | drafted | bytes per token | build s / 1M |")
    print("|---|---|---|---|---|---|---|---|---|")
    timed = {k: v for k, v in DRAFTERS.items() if not k.startswith("device")}
    for name in names:
        problems, limits = load(directory, name, 1.0)
        history, live = warm(problems[: 1 + 2 * BATCH // limits["max_samples"]])
        tokens = sum(r.token_ids.size for p in history for r in p) + sum(p[0].prompt_token_ids.size for p in history)
        runs: dict[str, list[dict[str, Any]]] = {label: [] for label in timed}
        for _ in range(repeats + 1):  # the first one compiles
            for label, make in timed.items():
                seconds, drafter = build(make, history)
                size = drafter.memory_bytes()
                row = replay_steadily(live, drafter, BATCH).to_dict()
                row["build_seconds_per_million_tokens"] = 1e6 * seconds / tokens
                row["history_tokens"], row["bytes_per_history_token"] = tokens, size / tokens
                runs[label].append(row)
        medians = {
            label: {
                key: float(np.median([row[key] for row in rows[1:]])) for key in rows[0] if key.startswith(COST_FIELDS)
            }
            for label, rows in runs.items()
        }
        for label, m in medians.items():
            both = m["index_us_per_request_step"] + m["draft_us_per_request_step"]
            share = ""
            if HAS_ARCTIC:
                a = medians["Arctic"]
                share = f"{both / (a['index_us_per_request_step'] + a['draft_us_per_request_step']):.2f}"
            print(
                f"| {name} | {label} | {m['index_us_per_request_step']:.1f} | {m['draft_us_per_request_step']:.1f} "
                f"| {both:.1f} | {share} | {m['drafted_per_step']:.1f} | {m['bytes_per_history_token']:.0f} "
                f"| {m['build_seconds_per_million_tokens']:.2f} |",
                flush=True,
            )
            bench.row("cost", set=name, drafter=label, batch=BATCH, repeats=repeats, **m)


COST_FIELDS = ("index_us", "draft_us", "bytes", "build", "drafted", "history", "tokens_per_step", "request_steps")


def replay_steadily(rollouts: Sequence[Rollout], drafter: Drafter, batch: int) -> ReplayResult:
    """Replay with a full batch throughout: continuous batching that ends when fewer rollouts are left."""
    target, result = RecordedTarget(), ReplayResult()
    decoder = Decoder(drafter, target, K, knows_noise=False)
    waiting = list(reversed(rollouts))
    while len(decoder.live) + len(waiting) >= batch:
        while len(decoder.live) < batch:
            decoder.start(target.request(waiting.pop()))
        result.add(decoder.step(), decoder, target)
        target.settle(decoder)
    result.index_seconds = decoder.index_seconds
    return result


def warm(problems: list[list[Rollout]]) -> tuple[list[list[Rollout]], list[Rollout]]:
    """(history: the first half of each problem's rollouts; requests: the others, shuffled)."""
    history = [problem[: len(problem) // 2] for problem in problems]
    live = [r for problem in problems for r in problem[len(problem) // 2 :] if r.token_ids.size > 1]
    order = np.random.default_rng(0).permutation(len(live))
    return history, [live[i] for i in order]


def build(make: Callable[[], Drafter], history: Sequence[Sequence[Rollout]]) -> tuple[float, Drafter]:
    """(seconds to build it, a drafter that holds the history)."""
    drafter = make()
    started = time.perf_counter()
    for problem in history:
        for rollout in problem:
            add_rollout(drafter, rollout._replace(features=None))
    drafter.begin_policy_version(1)
    return time.perf_counter() - started, drafter


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, help="directory of Parquet files of recorded rollouts")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=list(DRAFTERS), help="for quality")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts, for quality")
    parser.add_argument("--repeats", type=int, default=5, help="of the cost section")
    args = parser.parse_args(argv)
    if not HAS_ARCTIC:
        print("Arctic Inference cannot be imported: left out (see peers.find_arctic)")
    bench = Bench(args.out)
    if "quality" in args.sections:
        quality(bench, args.traces, args.sets, args.scale, args.drafters)
    if "cost" in args.sections:
        cost(
            bench,
            args.traces,
            [name for name in args.sets if name in ("rg_llama_math", "codet_codegen16b")],
            args.repeats,
        )


if __name__ == "__main__":
    main()
