"""What an engine step costs with speculation, by runner and drafter, after a correctness gate.

    python -m experiments.engines.bench_engine --shape 1.5b --batch 1 8 64 256 [--modes none off budget] [--out FILE]

Models have a real model's shape and dummy weights: a step costs what the real model's would, and the text is random.
Each mode runs in a process of its own with the engine inside, as in TRL's colocate mode, all with the same prompts,
seeds and lengths:

    none        vLLM without speculation: the V2 runner with asynchronous scheduling, the default and the baseline
    off         the same engine with our sampler in place of vLLM's (`speculation=False`)
    ngram       vLLM's prompt lookup
    suffix      vLLM's suffix decoding, where arctic-inference is installed
    v1, v2      ours with the drafter on the host, in either runner, on new text, all verified: the cost of bad drafts
    budget      the same with a budget, in the runner that vLLM chooses
    device      ours with the drafter on the device and asynchronous scheduling, on new text: the cost of bad drafts
    v1-replay, v2-replay, budget-replay, device-replay
                ours when every rollout is in the history already (each batch runs twice with the same seeds, the
                second time is reported): the gain from perfect drafts
    eagle-stock, eagle-alone, eagle-history
                an EAGLE head of one layer with made-up weights, whose three tokens are nearly always wrong, in vLLM's
                own way, drawn with the target's noise, and beside history: what a step costs more

Reported: p20/p50/p80 of the time between two engine steps in milliseconds, tokens per second, both also relative to
`none`, and for ours how many rollouts differ from those of `off` and from which token on: in bf16 logits vary with the
batch, except with vLLM's batch-invariant kernels (`--batch-invariant`). For `device`, `step / none` is also the number
of tokens per step above which drafts of K tokens pay at that batch size: with fewer,
`num_speculative_tokens_per_batch_size` should say 0.
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

from experiments.engines.engine_process import HEAD, SHAPES, TimeBudget, add_arguments, log_file, run_again, write_model
from experiments.rows import append, origin, quantiles

MODES = (
    "none", "off", "ngram", "suffix", "v1", "v2", "budget", "device",
    "v1-replay", "v2-replay", "budget-replay", "device-replay",
    "eagle-stock", "eagle-alone", "eagle-history",
)  # fmt: skip
WARM_UP_TOKENS = 16
EAGLE_TOKENS = 3


def engine_arguments(mode: str, k: int, model: str) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for a mode, with the model in this folder."""
    from rollout_spec import engine_kwargs

    if mode == "none":
        return {}
    if mode == "off":
        return engine_kwargs(speculation=False)
    if mode == "ngram":
        return {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4},
        }
    if mode == "suffix":
        return {"speculative_config": {"method": "suffix", "num_speculative_tokens": k}}
    if mode.startswith("eagle"):
        head = {"method": "eagle", "model": str(Path(model, HEAD)), "num_speculative_tokens": EAGLE_TOKENS}
        if mode == "eagle-stock":
            return {"speculative_config": head}
        return engine_kwargs(speculative_config=head, drafter="none" if mode == "eagle-alone" else "auto")
    if mode.startswith("device"):
        return engine_kwargs(num_speculative_tokens=k, drafter="device")
    return engine_kwargs(num_speculative_tokens=k, budget=mode.startswith("budget"))


def run_mode(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """One engine, all batch sizes. Runs in a process of its own."""
    import torch
    from vllm import LLM, SamplingParams

    from rollout_spec.report.stats import SpeculationStats

    llm = LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.tokens + 128,
        max_num_seqs=max(args.batch),
        enforce_eager=args.eager,
        logprobs_mode="processed_logprobs",
        seed=0,
        **({"gpu_memory_utilization": 0.8} if torch.cuda.is_available() else {"num_gpu_blocks_override": 300}),
        **engine_arguments(mode, args.k, args.model),
    )
    engine = llm.llm_engine
    runner = type(engine.model_executor.driver_worker.model_runner).__module__
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

    def stats() -> Any:
        return llm.collective_rpc("rollout_spec", args=("stats",))[0] if ours else None

    ours = mode not in ("none", "ngram", "suffix", "eagle-stock")
    results = []
    for batch in args.batch:
        generate(batch, WARM_UP_TOKENS, 999)
        if mode.endswith("-replay"):
            generate(batch, args.tokens, batch)
        before = stats()
        rollouts, seconds = generate(batch, args.tokens, batch)
        result = {
            "mode": mode, "shape": args.shape, "batch": batch, "k": args.k, "tokens": args.tokens, "runner": runner,
            "async_scheduling": engine.vllm_config.scheduler_config.async_scheduling,
            "step_ms": quantiles(np.diff(times) * 1e3), "steps": len(times),
            "tokens_per_second": round(batch * args.tokens / seconds, 1),
            "rollouts": rollouts,
        }  # fmt: skip
        if ours:
            result["stats"] = SpeculationStats.between(before, stats()).to_dict()
        results.append(result)
    if mode.startswith("budget"):  # the measured cost curve, for `rollout-spec doctor` and its --engine-cost
        results[-1]["report"] = llm.collective_rpc("rollout_spec", args=("report",))[0]
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
    parser.add_argument("--batch-invariant", action="store_true")
    add_arguments(parser, MODES)
    args = parser.parse_args(argv)
    if args.only:
        args.result.write_text(json.dumps(run_mode(args, args.only)))
        return
    import torch

    about = origin(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    print("shape batch mode          step ms (p50)   / none  tokens/s   / none  accepted  parted from off (at)")
    baseline: dict[int, dict[str, Any]] = {}
    undrafted: dict[int, list[list[int]]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.shape, Path(folder))  # one folder, so that vLLM compiles the model once
        budget = TimeBudget(args.seconds)
        for mode in sorted(args.modes, key=MODES.index):
            environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if mode.startswith("v1") else {}
            if args.batch_invariant:
                environment["VLLM_BATCH_INVARIANT"] = "1"
            with budget.run(f"engine_{args.shape}_{mode}") as left:
                if left is None:
                    continue
                log = log_file(args.logs, f"engine_{args.shape}_{mode}")
                results = run_again(
                    "experiments.engines.bench_engine",
                    [*argv, "--only", mode, "--model", folder],
                    log=log,
                    environment=environment,
                    timeout=left,
                )
            if results is None:
                failed.append(mode)
            for result in results or []:
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
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
