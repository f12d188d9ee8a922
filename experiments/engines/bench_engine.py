"""What an engine step costs with speculation, by runner and drafter, after a correctness gate.

    python -m experiments.engines.bench_engine --shape 1.5b --batch 1 8 64 256 [--modes none off budget] [--out FILE]

Models have a real model's shape and made-up weights: a step costs what the real model's would, and the text is random.
Each mode (see build.py) has an engine in a process of its own, as in TRL's colocate mode; prompts, seeds and lengths
are the same. Besides build.py's modes:

    all-replay, budget-replay, device-replay
                every rollout is in the history already: each batch runs twice with the same seeds, and the second time
                is reported. This is the gain from perfect drafts; without `-replay` new text shows the cost of bad ones
    eagle-stock, eagle-history
                an EAGLE head of one layer, whose three tokens are nearly always wrong, in vLLM's own way and beside
                history: what a step costs more

Gates: every rollout has its length; with `off`, how many rollouts of ours differ from those without drafts, and from
which token on, is reported: in bf16 logits vary with the batch, except with vLLM's batch-invariant kernels
(`--batch-invariant`).

Reported: p20/p50/p80 of the time between two engine steps in milliseconds, and tokens per second, both also relative to
`none`. For `device`, `step / none` is also the number of tokens per step above which drafts of K tokens pay at that
batch size: with fewer, `num_speculative_tokens_per_batch_size` should say 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.build import (
    HEAD,
    OURS,
    SHAPES,
    Runs,
    add_arguments,
    build_engine,
    command,
    made_up_arguments,
    write_model,
)
from experiments.rows import append, origin, quantiles

REPLAY = "-replay"
MODES = (
    "none", "off", "ngram", "suffix", "all", "budget", "device",
    "all-replay", "budget-replay", "device-replay", "eagle-stock", "eagle-history",
)  # fmt: skip
WARM_UP_TOKENS = 16
EAGLE_TOKENS = 3


def build(args: argparse.Namespace, mode: str) -> Any:
    """The engine of a mode."""
    arguments = {"max_model_len": args.tokens + 128, "max_num_seqs": max(args.batch), **made_up_arguments(args, 300)}
    if mode.startswith("eagle"):
        head = {"method": "eagle", "model": str(Path(args.model, HEAD)), "num_speculative_tokens": EAGLE_TOKENS}
        kind = "model" if mode == "eagle-stock" else "budget"
        return build_engine(args.model, kind, EAGLE_TOKENS, options={"speculative_config": head}, **arguments)
    return build_engine(args.model, mode.removesuffix(REPLAY), args.k, **arguments)


def run_mode(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """One engine, all batch sizes. Runs in a process of its own."""
    from vllm import SamplingParams

    from rollout_spec.report.stats import SpeculationStats

    llm = build(args, mode)
    engine = llm.llm_engine
    runner = type(engine.model_executor.driver_worker.model_runner).__module__
    is_ours = mode.removesuffix(REPLAY) in OURS or mode == "eagle-history"
    vocab = SHAPES[args.shape][-1]
    step, times = engine.step, []

    def timed_step(*a: Any, **kw: Any) -> Any:
        times.append(time.perf_counter())
        return step(*a, **kw)

    engine.step = timed_step

    def generate(batch: int, tokens: int, salt: int) -> tuple[list[list[int]], float]:
        rng = np.random.default_rng(salt)
        prompts = [{"prompt_token_ids": rng.integers(3, vocab, 32).tolist()} for _ in range(max(1, batch // 8))]
        params = [
            SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=salt * 1000 + i, logprobs=0,
                           detokenize=False)
            for i in range(batch)
        ]  # fmt: skip
        times.clear()
        started = time.perf_counter()
        outputs = llm.generate([prompts[i % len(prompts)] for i in range(batch)], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], time.perf_counter() - started

    results = []
    for batch in args.batch:
        generate(batch, WARM_UP_TOKENS, 999)
        if mode.endswith(REPLAY):
            generate(batch, args.tokens, batch)
        before = command(llm, "stats") if is_ours else None
        rollouts, seconds = generate(batch, args.tokens, batch)
        result = {
            "mode": mode, "shape": args.shape, "batch": batch, "k": args.k, "tokens": args.tokens, "runner": runner,
            "async_scheduling": engine.vllm_config.scheduler_config.async_scheduling,
            "step_ms": quantiles(np.diff(times) * 1e3), "steps": len(times),
            "tokens_per_second": round(batch * args.tokens / seconds, 1),
            "rollouts": rollouts,
        }  # fmt: skip
        if before is not None:
            result["stats"] = SpeculationStats.between(before, command(llm, "stats")).to_dict()
        results.append(result)
    if mode.startswith("budget"):  # the measured cost curve, for `rollout-spec doctor` and its --engine-cost
        results[-1]["report"] = command(llm, "report")
    return results


def partings(rollouts: list[list[int]], others: list[list[int]]) -> tuple[int, float | None]:
    """(how many rollouts differ, the median of the first tokens that do)."""
    at = [
        next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        for a, b in zip(rollouts, others, strict=True)
        if a != b
    ]
    return len(at), float(np.median(at)) if at else None


def describe(result: dict[str, Any]) -> str:
    """A line of the table."""
    line = f"{result['shape']:>5} {result['batch']:5d} {result['mode']:13} {result['step_ms'][1]:13.2f} "
    line += f"{result.get('step_over_none', 0):8.2f} {result['tokens_per_second']:9.0f} "
    line += f"{result.get('tokens_per_second_over_none', 0):8.2f} "
    line += f"{result.get('stats', {}).get('acceptance_rate', 0):9.2f}"
    if "parted" in result:
        line += f"  {result['parted']} of {result['batch']} ({result['parted_at']})"
    return line


def main(argv: list[str] | None = None) -> None:
    """Run all modes and print a table."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runner", choices=("v1", "v2"), help="vLLM's model runner; default: as vLLM chooses")
    parser.add_argument("--batch-invariant", action="store_true")
    add_arguments(parser, MODES)
    args = parser.parse_args(argv)
    if args.only:
        args.result.write_text(json.dumps(run_mode(args, args.only)))
        return
    import torch

    about = origin(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    environment = {"VLLM_BATCH_INVARIANT": "1"} if args.batch_invariant else {}
    if args.runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
    print("shape batch mode          step ms (p50)   / none  tokens/s   / none  accepted  parted from off (at)")
    baseline: dict[int, dict[str, Any]] = {}
    undrafted: dict[int, list[list[int]]] = {}
    runs = Runs("experiments.engines.bench_engine", argv, args.logs, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.shape, Path(folder))  # one folder, so that vLLM compiles the model once
        for mode in sorted(args.modes, key=MODES.index):
            name = f"engine_{args.shape}_{mode}"
            for result in runs.run(name, "--only", mode, "--model", folder, environment=environment) or []:
                batch, rollouts = result["batch"], result.pop("rollouts")
                if any(len(rollout) != args.tokens for rollout in rollouts):
                    raise SystemExit(f"gate: {mode}: a rollout does not have {args.tokens} tokens")
                if mode == "none":
                    baseline[batch] = result
                if mode == "off":
                    undrafted[batch] = rollouts
                base = baseline.get(batch)
                if base is not None:
                    result["step_over_none"] = round(result["step_ms"][1] / base["step_ms"][1], 3)
                    result["tokens_per_second_over_none"] = round(
                        result["tokens_per_second"] / base["tokens_per_second"], 3
                    )
                if batch in undrafted and "stats" in result:
                    result["parted"], result["parted_at"] = partings(rollouts, undrafted[batch])
                result["batch_invariant"] = args.batch_invariant
                append(args.out, {"benchmark": "engine", **result, **about})
                print(describe(result), flush=True)
    runs.finish()


if __name__ == "__main__":
    main()
