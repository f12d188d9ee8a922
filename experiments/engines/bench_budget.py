"""Budgets in a real engine: what they lose where drafts are useless, and what they gain where drafts are good.

    python -m experiments.engines.bench_budget POLICY_DIR [--batch 1 8 16 64] [--pairs 12] [--out FILE]

POLICY_DIR is a policy that `make demo` or, with `--prompts real-policy`, `make real-policy` made. Engines in one
process take turns on the same prompts and seeds. The demo's prompts are new in each turn; those of the real policy come
from the few that it was trained on, so that earlier turns are to later ones what earlier epochs are in training.

    stock       vLLM without speculation and without our sampler, its requests without seeds, which are slow there
    off        speculation switched off: the same noise, no drafter
    idle       a drafter that never drafts: what it costs the engine to call one
    wrong      a drafter that always drafts K tokens with high confidence, all of them wrong
    wrong, no budget
               the same, all of it verified
    ours       the default drafter under its budget
    ours, no budget
               all of its drafts verified

Gate: in float32 the rollouts of all engines but `stock` are the same; in bfloat16, where logits vary with the number of
tokens in a step, how many are the same is reported. Reported: time per token of the first of `--engines` over that of
each, median over turns with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.drafting.peers import StatelessDrafter
from experiments.engines.build import build_engine, command
from experiments.rows import append, origin
from rollout_spec.demo.run import ENVIRONMENT
from rollout_spec.drafters.host import step
from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.drafters.host.step import Learned, Sampled
from rollout_spec.jit.reference import Reference
from rollout_spec.report.stats import SpeculationStats

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

K = 8
MAX_TOKENS = 160
GROUP_SIZE = 16


class Idle(StatelessDrafter):
    """Never drafts."""

    def __init__(self) -> None:
        self.table = RequestTable(K)
        self._rows: dict[str, int] = {}

    def start_request(self, req_id: str, prompt_token_ids: Any, **kwargs: Any) -> None:
        self._rows[req_id] = self.table.start(len(prompt_token_ids))

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        self.table.stop(self._rows.pop(req_id))

    def row_of(self, req_id: str) -> int:
        return self._rows[req_id]

    def learn_step(self, sampled: Sampled, targets: Any, options: Reference, step_number: int) -> Learned:
        return step.learn_without_text(self.table, sampled, options, step_number)

    def update_index(self) -> None:
        pass

    def propose_rows(self, rows: Any, room: Any) -> None:
        pass


class Wrong(Idle):
    """Drafts the padding token with confidence 0.9, which the policy never samples."""

    def propose_rows(self, rows: Any, room: Any) -> None:
        drafts = self.table.arrays.history
        drafts.tokens[rows], drafts.confidence[rows], drafts.lengths[rows] = 0, 0.9, np.maximum(room, 0)


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("none", {}),
    "off": ("off", {}),
    "idle": ("budget", {"drafter": "experiments.engines.bench_budget.Idle"}),
    "wrong": ("budget", {"drafter": "experiments.engines.bench_budget.Wrong"}),
    "wrong, no budget": ("all", {"drafter": "experiments.engines.bench_budget.Wrong"}),
    "ours": ("budget", {}),
    "ours, no budget": ("all", {}),
}
"""(mode, options of `build_engine`)."""


def demo_prompts(policy: Path) -> Callable[[random.Random, int], list[Any]]:
    """Fresh problems of the demo's task."""
    from rollout_spec.demo.task import make_problem, prompt_text

    return lambda rng, count: [prompt_text(make_problem(rng)) for _ in range(count)]


def real_prompts(policy: Path) -> Callable[[random.Random, int], list[Any]]:
    """Problems that the real policy was trained on, the held ones left out."""
    from transformers import AutoTokenizer

    from experiments.real_policy.grpo import training_problems
    from experiments.real_policy.warm_up import prompt_token_ids

    tokenizer = AutoTokenizer.from_pretrained(policy)
    questions = [problem.question for problem in training_problems() if not problem.held]
    prompts = [{"prompt_token_ids": prompt_token_ids(tokenizer, question)} for question in questions]
    return lambda rng, count: rng.sample(prompts, count)


PROMPTS = {"demo": demo_prompts, "real-policy": real_prompts}


def one_turn(
    llm: Any,
    make_prompts: Callable[[random.Random, int], list[Any]],
    batch: int,
    groups: int,
    seed: int,
    *,
    is_seeded: bool = True,
) -> tuple[float, list[list[int]]]:
    """(seconds per token, rollouts) of one rollout phase: `groups` times `batch` requests, GROUP_SIZE per prompt.

    Args:
        seed: Decides the prompts, and the noise where requests have seeds.
        is_seeded: Whether requests have seeds.
    """
    from vllm import SamplingParams

    group = min(GROUP_SIZE, batch)
    different = make_prompts(random.Random(seed), groups * batch // group)
    prompts = [prompt for prompt in different for _ in range(group)]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=MAX_TOKENS, seed=seed * 10_000 + i if is_seeded else None, detokenize=False
        )
        for i in range(len(prompts))
    ]
    outputs, seconds = [], 0.0
    for start in range(0, len(prompts), batch):
        started = time.perf_counter()
        got = llm.generate(prompts[start : start + batch], params[start : start + batch], use_tqdm=False)
        seconds += time.perf_counter() - started
        outputs += [list(output.outputs[0].token_ids) for output in got]
    return seconds / sum(map(len, outputs)), outputs


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, ratios.size)), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    """Take turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--prompts", choices=PROMPTS, default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8, help="in each turn, where the batch is smaller")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if all(name == "stock" for name in args.engines):
        parser.error("--engines needs one of ours")
    about = origin()
    sizes = {"max_num_seqs": max(args.batch), "max_model_len": 512, "num_gpu_blocks_override": 1200}
    engines = {}
    for name in args.engines:
        mode, options = ENGINES[name]
        engines[name] = build_engine(args.policy, mode, K, options=options, dtype=args.dtype, **sizes)
    make_prompts = PROMPTS[args.prompts](args.policy)
    reference = next(name for name in args.engines if name != "stock")
    baseline = args.engines[0]

    def turn(name: str, batch: int, number: int) -> tuple[float, list[list[int]]]:
        groups, seed = max(1, args.requests // batch), 1000 * batch + number
        return one_turn(engines[name], make_prompts, batch, groups, seed, is_seeded=name != "stock")

    print(f"batch   engine            {baseline} / engine (95 %)     identical   tokens per step")
    for batch in args.batch:
        times: dict[str, list[float]] = {name: [] for name in engines}
        identical = {name: [0, 0] for name in engines}
        for name in engines:
            turn(name, batch, 999)  # compiles, and teaches budgets the cost of this size
        before = {name: command(llm, "stats") for name, llm in engines.items() if name != "stock"}
        for pair in range(args.pairs):
            order = list(engines)[pair % len(engines) :] + list(engines)[: pair % len(engines)]
            rollouts = {}
            for name in order:
                seconds, rollouts[name] = turn(name, batch, pair)
                times[name].append(seconds)
            for name, mine in rollouts.items():
                identical[name][0] += sum(a == b for a, b in zip(mine, rollouts[reference], strict=True))
                identical[name][1] += len(mine)
        for name, llm in engines.items():
            ratio, low, high = interval(np.array(times[baseline]) / np.array(times[name]))
            same, total = identical[name]
            row = {
                "policy": args.prompts, "dtype": args.dtype, "batch": batch, "engine": name, "k": K,
                "pairs": args.pairs, "baseline": baseline, "speedup": round(ratio, 4),
                "interval": [round(low, 4), round(high, 4)],
            }  # fmt: skip
            line = f"{batch:5d}   {name:17} {ratio:.3f} ({low:.3f}-{high:.3f})"
            if name != "stock":
                if args.dtype == "float32" and same < 0.98 * total:
                    raise SystemExit(f"gate: {name}: only {same} of {total} rollouts are those without speculation")
                new = SpeculationStats.between(before[name], command(llm, "stats"))
                per_step, drafted = new.tokens_per_step, new.draft_tokens / max(new.request_steps, 1)
                row |= {
                    "identical": same, "rollouts": total, "tokens_per_step": round(per_step, 3),
                    "drafted_per_step": round(drafted, 3),
                }  # fmt: skip
                line += f"      {same}/{total}    {per_step:.2f} ({drafted:.1f})"
            append(args.out, {"benchmark": "budget/engine", **row, **about})
            print(line, flush=True)


if __name__ == "__main__":
    main()
