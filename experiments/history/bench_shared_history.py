"""Engines that share their history: tokens per step of engines alone, sharing a folder, and of one engine.

    python -m experiments.history.bench_shared_history [--policy demo/policy-v1-seed0] [--engines 2] [--out FILE]

Each engine has a process of its own, on the demo's policy, which `make demo` trains first. Groups of rollouts of the
same problems are generated with the same seeds in all modes, so all sample the same rollouts: that is the gate.

    epoch 0   every group is split: each engine gets its share of the rollouts
    epoch 1   each engine gets its share of the prompts, whole groups
    epoch 2   each engine gets prompts that another one had

Between batches there is a pause, as while a trainer trains, in which shared rollouts are written (`--pause`); an engine
reads those of others when it is asked for their problem. Printed and written: tokens per request-step by epoch, what
went through the folder, and the longest that a step spent on history (milliseconds). All drafts are verified
(`budget=False`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from typing import Any

from examples.demo import ENVIRONMENT
from examples.demo.policy import build_tokenizer
from examples.demo.task import make_prompt
from experiments.engines.build import build_engine, command
from experiments.rows import append, make_parser, origin
from rollout_spec.noise.host import derive_seed

MODES = ("alone", "shared", "one")
MAX_TOKENS = 384


def prompts_of(number: int) -> list[list[int]]:
    rng, tokenizer, prompts = random.Random("bench_shared_history"), build_tokenizer(), {}
    while len(prompts) < number:
        prompts[make_prompt(rng)] = None
    return [tokenizer.encode(prompt) for prompt in prompts]


def run_engine(pipe: Any, policy: str, history_dir: str | None) -> None:
    """Answer (prompt, seed) lists with (digests of the rollouts, tokens, request-steps) until None comes."""
    from vllm import SamplingParams

    llm = build_engine(policy, "all", options={"history_dir": history_dir}, max_model_len=448, max_num_seqs=32)
    session = llm.llm_engine.model_executor.driver_worker.worker.model_runner.rollout_spec.session
    exchange, longest = session.exchange_history, [0.0]

    def timed() -> None:
        started = time.perf_counter()
        exchange()
        longest[0] = max(longest[0], time.perf_counter() - started)

    session.exchange_history = timed
    while (batch := pipe.recv()) is not None:
        before = command(llm, "stats")
        params = [SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed) for _, seed in batch]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in batch], params, use_tqdm=False)
        after = command(llm, "stats")
        counted = [after[name] - before[name] for name in ("emitted_tokens", "request_steps")]
        pipe.send(([tuple(output.outputs[0].token_ids) for output in outputs], *counted))
    pipe.send((command(llm, "history")["folder"], round(1e3 * longest[0], 2)))


def shares(mode: str, engines: int, epoch: int, batch: list[int], group: int) -> list[list[tuple[int, int]]]:
    """(problem, member) of each engine."""
    every = [(problem, member) for problem in batch for member in range(group)]
    if mode == "one":
        return [every]
    if epoch == 0:
        return [[pair for pair in every if pair[1] % engines == number] for number in range(engines)]
    return [[pair for pair in every if (pair[0] + epoch) % engines == number] for number in range(engines)]


def run_mode(mode: str, args: argparse.Namespace, history_dir: str | None) -> dict[str, Any]:
    """Tokens and request-steps by epoch, all rollouts, and what went through the folder."""
    context = multiprocessing.get_context("spawn")
    engines = []
    for _ in range(1 if mode == "one" else args.engines):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_engine, args=(theirs, args.policy, history_dir))
        process.start()
        engines.append((ours, process))
    prompts = prompts_of(args.problems)
    rollouts: dict[tuple[int, int, int], tuple[int, ...]] = {}
    counts = []
    for epoch in range(args.epochs):
        tokens = steps = 0
        for first in range(0, args.problems, args.engines):
            some = list(range(first, min(first + args.engines, args.problems)))
            batches = shares(mode, args.engines, epoch, some, args.group)
            for (pipe, _), batch in zip(engines, batches, strict=True):
                pipe.send([(prompts[p], derive_seed("bench_shared_history", epoch, p, m)) for p, m in batch])
            for (pipe, _), batch in zip(engines, batches, strict=True):
                texts, num_tokens, num_steps = pipe.recv()
                rollouts.update({(epoch, *pair): text for pair, text in zip(batch, texts, strict=True)})
                tokens, steps = tokens + num_tokens, steps + num_steps
            time.sleep(args.pause)
        counts.append((tokens, steps))
        print(f"{mode}, epoch {epoch}: {tokens / steps:.3f} tokens per step", flush=True)
    folders = []
    for pipe, process in engines:
        pipe.send(None)
        folders.append(pipe.recv())
        process.join()
    folders, longest = zip(*folders, strict=True)
    return {"counts": counts, "rollouts": rollouts, "folders": folders, "longest_ms": longest}


def main() -> None:
    """Run the modes, check that they sampled the same, and write rows."""
    parser = make_parser(__doc__)
    parser.add_argument("--policy", default="demo/policy-v1-seed0")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between batches")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    results = {}
    for mode in args.modes:
        with tempfile.TemporaryDirectory() as folder:
            results[mode] = run_mode(mode, args, folder if mode == "shared" else None)
    first = results[args.modes[0]]["rollouts"]
    for mode, result in results.items():
        same = sum(result["rollouts"][key] == text for key, text in first.items())
        row = {
            "benchmark": "shared_history",
            "mode": mode,
            "problems": args.problems,
            "group": args.group,
            "engines": args.engines,
            "tokens_per_step": [round(tokens / steps, 3) for tokens, steps in result["counts"]],
            "tokens": [tokens for tokens, _ in result["counts"]],
            "same_rollouts": f"{same} of {len(first)}",
            "folders": result["folders"],
            "longest_exchange_ms": result["longest_ms"],
            **origin(packages=["pyarrow"]),
        }
        append(args.out, row)
        print(f"{mode}: {row['tokens_per_step']} tokens per step, {row['same_rollouts']} rollouts the same")
        if same < 0.99 * len(first):  # the engine's logits vary by rounding with the batch
            raise SystemExit("the modes sampled other rollouts")


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main()
