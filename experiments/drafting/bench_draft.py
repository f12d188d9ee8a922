"""Our drafters and other people's (`peers.py`) on recorded rollouts, in one process.

    python -m experiments.drafting.bench_draft TRACES_DIR [--sections quality memory] [--out FILE.jsonl]

- quality: tokens per step and drafted tokens per step, K = 16, per-problem history, in the four replay regimes.
  "ours" is `"suffix"`, "ours, shared" `"history"`; "device" is the device drafter's reference in NumPy.
- memory: bytes per token of history, without features.

The gate: each drafter emits the same recorded tokens, and ours passes its integrity check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.drafting import peers
from experiments.drafting.regimes import REGIMES, ReplayResult, replay
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.phases import RecordedRollout, add_rollout, by_problem
from tests.drafters.device.reference import ReferenceDrafter

K = 16
BATCH = 64
SECTIONS = ("quality", "memory")


class Recorded(NamedTuple):
    """A set of recorded rollouts, and how much of it is replayed."""

    prompts: int
    samples: int


SETS = {
    "rg_llama_math": Recorded(24, 16), "rg_qwen3b": Recorded(120, 3), "codet_codegen16b": Recorded(115, 16),
    "tot_text_gpt4": Recorded(30, 10), "tau_airline_gpt4o": Recorded(35, 4), "r1v_grpo_log": Recorded(300, 8),
}  # fmt: skip
MEMORY_PROBLEMS = 9
"""Of rg_llama_math, of whose rollouts the first half is kept: 300,000 tokens."""

ours = partial(build_drafter, max_draft_tokens=K)
HAS_ARCTIC = peers.find_arctic() is not None
OURS: dict[str, Callable[[], Any]] = {
    "ours": partial(ours, "suffix"),
    "ours, shared": partial(ours, "suffix", shared=True),
    "ours, n-gram": partial(ours, "ngram"),
}
DRAFTERS: dict[str, Callable[[], Any]] = {
    "vLLM n-gram": partial(peers.VllmNgram, K),
    **({"Arctic": peers.ArcticSuffix} if HAS_ARCTIC else {}),
    **OURS,
    "ours, shared, no limit": partial(ours, "suffix", shared=True, min_survival=0.0),
    "device, no limit": partial(ReferenceDrafter, max_draft_tokens=K),
}


def load(directory: Path, name: str) -> list[list[RecordedRollout]]:
    """A set's problems."""
    return by_problem(read_traces(directory / f"{name}.parquet"))


def quality(
    problems: list[list[RecordedRollout]], samples: int, drafters: Sequence[str], **row: Any
) -> list[dict[str, Any]]:
    """A row for each regime and drafter. Prints tokens per step, and in brackets drafted tokens per step."""
    rows = []
    for regime in REGIMES:
        if regime == "epoch" and min(map(len, problems)) < 2:
            continue
        results: dict[str, ReplayResult] = {}
        for label in drafters:
            drafter = DRAFTERS[label]()
            results[label] = replay(
                problems, drafter, regime, num_speculative_tokens=K, batch=BATCH, max_samples=samples
            )
            drafter.check_integrity()
        totals = {result.emitted_tokens for result in results.values()}
        assert len(totals) == 1, f"drafters emitted different numbers of tokens: {totals}"
        for label, result in results.items():
            rates = {"tokens_per_step": result.tokens_per_step, "drafted_per_step": result.drafted_per_step}
            rows.append({"benchmark": "draft/quality", **row, "regime": regime, "drafter": label, **rates})
        cells = [f"{result.tokens_per_step:.3f} ({result.drafted_per_step:.1f})" for result in results.values()]
        print("|", " | ".join([*row.values(), regime, *cells]), "|", flush=True)
    return rows


def memory(problems: list[list[RecordedRollout]], name: str) -> dict[str, Any]:
    """A row: bytes that a drafter takes for each token of history."""
    drafter, tokens = OURS[name](), 0
    for problem in problems:
        tokens += problem[0].prompt_token_ids.size
        for rollout in problem[: len(problem) // 2]:
            add_rollout(drafter, rollout._replace(features=None))
            tokens += rollout.token_ids.size
    drafter.check_integrity()
    row = {"drafter": name, "history_tokens": tokens, "bytes_per_history_token": drafter.memory_bytes() / tokens}
    print(*row.values())
    return {"benchmark": "draft/memory", "set": "rg_llama_math", **row}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections, print tables and write rows."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, help="directory of Parquet files of recorded rollouts")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS), help="for quality")
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=list(DRAFTERS), help="for quality")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts, for quality")
    args = parser.parse_args(argv)
    about = origin()
    if not HAS_ARCTIC:
        print("Arctic Inference cannot be imported: left out (see peers.find_arctic)")
    if "quality" in args.sections:
        print("| set | regime |", " | ".join(args.drafters), "|")
        print("|---|---|" + "---|" * len(args.drafters))
        for name in args.sets:
            problems = load(args.traces, name)[: max(1, round(SETS[name].prompts * args.scale))]
            for row in quality(problems, SETS[name].samples, args.drafters, set=name):
                append(args.out, {**row, **about})
    if "memory" in args.sections:
        problems = load(args.traces, "rg_llama_math")[:MEMORY_PROBLEMS]
        for name in OURS:
            append(args.out, {**memory(problems, name), **about})


if __name__ == "__main__":
    main()
