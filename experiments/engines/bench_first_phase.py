"""The first rollout phase of fresh engines: how much it varies from start to start, beside stock vLLM.

    python -m experiments.engines.bench_first_phase --policy demo/policy-v1-seed0 [--starts 20] [--requests 1 16 64]

What a budget believes about the cost of steps it learns in the first of them, which are the slowest: kernels for a new
size are made then. Each start is a process of its own with one engine inside, which meets every problem for the first
time. The modes take turns, so that a busy minute of the machine meets all of them:

    stock       vLLM as it comes: its requests have no seeds
    default     our defaults
    words       the same without features (`signatures` and `distributions`)

The gate: `default` and `words` sample the same tokens. Reported by mode and number of requests that run at once: the
fastest, median and slowest start in microseconds per token, the slowest over the fastest, and the slowest over stock's
median; steps and drafted tokens of the fastest and the slowest start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.engine_process import run_again
from experiments.rows import append, origin
from rollout_spec.demo.run import ENVIRONMENT

MODES = ("stock", "default", "words")
MAX_TOKENS, MAX_MODEL_LEN = 384, 448
NUM_PROBLEMS, GROUP_SIZE = 8, 16
SEEDS_PER_START = 10_000


def run_start(args: argparse.Namespace) -> dict[str, Any]:
    """One engine's first phase, in this process."""
    import torch
    from vllm import LLM, SamplingParams

    from rollout_spec import engine_kwargs
    from rollout_spec.demo.task import make_problem, prompt_text

    mode, requests, start = args.only, args.requests[0], args.starts
    torch.set_num_threads(1)
    options = {"signatures": False, "distributions": False} if mode == "words" else {}
    ours = {} if mode == "stock" else engine_kwargs(drafter_options=options)
    llm = LLM(
        str(args.policy), dtype="float32", enforce_eager=True, disable_log_stats=True, max_num_seqs=requests,
        max_model_len=MAX_MODEL_LEN, gpu_memory_utilization=0.15, **ours,
    )  # fmt: skip
    rng = random.Random(0)
    problems = [prompt_text(make_problem(rng)) for _ in range(NUM_PROBLEMS if requests > 1 else 1)]
    prompts = [text for text in problems for _ in range(GROUP_SIZE)]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0,
            seed=None if mode == "stock" else SEEDS_PER_START * start + i,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    stats = {} if mode == "stock" else llm.collective_rpc("rollout_spec", args=("stats",))[0]
    return {
        "us_per_token": 1e6 * seconds / sum(map(len, tokens)),
        "steps": stats.get("steps"),
        "draft_tokens": stats.get("draft_tokens"),
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
    }


def summarise(found: list[dict[str, Any]], stock: list[float]) -> dict[str, Any]:
    """Of a cell's starts: see the module's docstring."""
    found = sorted(found, key=lambda start: start["us_per_token"])
    times = [start["us_per_token"] for start in found]
    return {
        "us_per_token": [round(value, 1) for value in times],
        "slowest_over_fastest": round(times[-1] / times[0], 3),
        "slowest_over_stock": round(times[-1] / float(np.median(stock)), 3),
        "steps": [found[0]["steps"], found[-1]["steps"]],
        "draft_tokens": [found[0]["draft_tokens"], found[-1]["draft_tokens"]],
    }


def main() -> None:
    """Start engines in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        args.result.write_text(json.dumps(run_start(args)))
        return
    about = origin()
    for requests in args.requests:
        found = defaultdict(list)
        for start in range(args.starts):
            for mode in args.modes:
                arguments = ["--policy", str(args.policy), "--only", mode, "--starts", str(start)]
                result = run_again(
                    "experiments.engines.bench_first_phase",
                    [*arguments, "--requests", str(requests)],
                    log=None,
                    environment=ENVIRONMENT,
                )
                if result is None:
                    raise SystemExit(f"start {start} of {mode} failed")
                found[mode].append(result)
            ours = {result["digest"] for mode in args.modes if mode != "stock" for result in [found[mode][-1]]}
            if len(ours) > 1:
                raise SystemExit(f"start {start} at {requests} requests: features changed what was sampled")
        stock = [result["us_per_token"] for result in found.get("stock", [])] or [float("nan")]
        for mode in args.modes:
            row = {"requests": requests, "mode": mode, "starts": args.starts, **summarise(found[mode], stock)}
            append(args.out, {"benchmark": "first phase", **row, **about})
            fastest, middle, slowest = np.percentile(row["us_per_token"], [0, 50, 100])
            print(
                f"{requests:3} requests, {mode:8} {fastest:.0f} / {middle:.0f} / {slowest:.0f} us per token, slowest / "
                f"fastest {row['slowest_over_fastest']}, / stock {row['slowest_over_stock']}, steps "
                f"{row['steps']}, drafted {row['draft_tokens']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
