"""Whole engines, side by side: stock vLLM, its own drafters, and ours with good, useless and no drafts.

    python -m experiments.engines.bench_engines POLICY_DIR [--batch 1 8 16 64] [--epochs 3] [--pairs 12] [--out FILE]

POLICY_DIR is a policy that `make demo` or, with `--prompts real-policy`, `make real-policy` made. Engines in one
process take turns on the same prompts. A pair of turns has prompts of its own: the demo's are new, those of the real
policy come from the few that it was trained on, so most have been met before. With `--epochs` its prompts come again,
with other noise, so that earlier epochs are to later ones what they are in training, but for new weights.

    stock       vLLM without speculation and without our sampler, its requests without seeds, which are slow there
    ngram, suffix
               vLLM's own drafters, verified by its own code, requests without seeds; `suffix` needs Arctic Inference,
               see `find_arctic` in drafting/peers.py
    off        ours with speculation switched off: the same noise, no drafter
    ours       the default drafter under its budget
    idle       a drafter that never drafts: what it costs the engine to call one
    wrong      a drafter that always drafts K tokens with high confidence, all of them wrong

Gate: in float32 at least 98 % of the rollouts of ours are those of `off`, where two tokens that are equally good but
for rounding may change places; in bfloat16, where logits vary with the number of tokens in a step, how many are the
same is reported. Reported by epoch: time per token of the first of `--engines` over that of each, median over turns
with a 95 % bootstrap interval.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo import ENVIRONMENT
from experiments.drafting.peers import StatelessDrafter
from experiments.engines.build import OURS, build_engine, command
from experiments.rows import append, make_parser, origin
from rollout_spec.drafters.base import Tokens
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Draft, Int32Array

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

K = 8
MAX_TOKENS = 160
GROUP_SIZE = 16
LEAST_REQUESTS = 8
"""Of a turn, in batches one after the other."""


class Idle(StatelessDrafter):
    """Never drafts."""

    def start_request(self, req_id: str, prompt_token_ids: Tokens, **kwargs: Any) -> None:
        pass

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        pass

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        return [Draft(np.zeros(0, np.int32), np.zeros(0, np.float32)) for _ in req_ids]

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        pass


class Wrong(Idle):
    """Drafts the padding token with confidence 0.9, which the policy never samples."""

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        return [Draft(np.zeros(size, np.int32), np.full(size, 0.9, np.float32)) for size in max_tokens]


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("none", {}),
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "off": ("off", {}),
    "ours": ("budget", {}),
    "idle": ("budget", {"drafter": "experiments.engines.bench_engines.Idle"}),
    "wrong": ("budget", {"drafter": "experiments.engines.bench_engines.Wrong"}),
}
"""(mode, options of `build_engine`)."""
REFERENCE = "off"
PICKED = ("stock", "ngram", "suffix", "off", "ours")
"""Those that a user could pick."""


def demo_prompts(policy: Path) -> Callable[[random.Random, int], list[Any]]:
    """Fresh problems of the demo's task."""
    from examples.demo.task import make_prompt

    return lambda rng, count: [make_prompt(rng) for _ in range(count)]


def real_prompts(policy: Path) -> Callable[[random.Random, int], list[Any]]:
    """Problems that the real policy was trained on."""
    from transformers import AutoTokenizer

    from experiments.real_policy.grpo import training_problems
    from experiments.real_policy.warm_up import prompt_token_ids

    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [{"prompt_token_ids": prompt_token_ids(tokenizer, problem.question)} for problem in training_problems()]
    return lambda rng, count: rng.sample(prompts, count)


PROMPTS = {"demo": demo_prompts, "real-policy": real_prompts}


def one_turn(
    llm: Any, make_prompts: Callable[[random.Random, int], list[Any]], batch: int, groups: int,
    seeds: tuple[int, int], *, is_seeded: bool = True,
) -> tuple[float, list[list[int]]]:  # fmt: skip
    """(seconds per token, rollouts) of one rollout phase: `groups` times `batch` requests, GROUP_SIZE per prompt.

    Args:
        seeds: Of the prompts, and of the noise where requests have seeds.
        is_seeded: Whether requests have seeds.
    """
    from vllm import SamplingParams

    group = min(GROUP_SIZE, batch)
    different = make_prompts(random.Random(seeds[0]), groups * batch // group)
    prompts = [prompt for prompt in different for _ in range(group)]
    noise = [seeds[1] * 10_000 + i if is_seeded else None for i in range(len(prompts))]
    params = [SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=n, detokenize=False) for n in noise]
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


class Cell:
    """What an engine did at a batch size in an epoch, over all pairs."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.identical = 0
        self.rollouts = 0
        self.stats: list[SpeculationStats] = []

    def row(self, baseline: Cell) -> dict[str, Any]:
        """Its figures, per request and step but for the speedup; `host_us` is drafting on the host."""
        ratio, low, high = interval(np.array(baseline.times) / np.array(self.times))
        row: dict[str, Any] = {"speedup": round(ratio, 4), "interval": [round(low, 4), round(high, 4)]}
        if self.stats:
            steps = max(sum(one.request_steps for one in self.stats), 1)
            row |= {
                "identical": self.identical, "rollouts": self.rollouts,
                "tokens_per_step": round(sum(one.emitted_tokens for one in self.stats) / steps, 3),
                "drafted_per_step": round(sum(one.draft_tokens for one in self.stats) / steps, 3),
                "host_us": round(1e6 * sum(one.draft_seconds for one in self.stats) / steps, 1),
            }  # fmt: skip
        return row


def main() -> None:
    """Take turns and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(PICKED))
    parser.add_argument("--prompts", choices=PROMPTS, default="demo")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    ours = [name for name in args.engines if ENGINES[name][0] in OURS]
    if REFERENCE not in ours:
        parser.error(f"--engines needs {REFERENCE!r}, with which rollouts are compared")
    about = origin()
    sizes = {"max_num_seqs": max(args.batch), "max_model_len": 512, "num_gpu_blocks_override": 1200}
    engines = {}
    for name in args.engines:
        mode, options = ENGINES[name]
        engines[name] = build_engine(args.policy, mode, K, options=options, dtype=args.dtype, **sizes)
    make_prompts = PROMPTS[args.prompts](args.policy)
    baseline = args.engines[0]

    def turn(name: str, batch: int, pair: int, epoch: int, cell: Cell) -> list[list[int]]:
        groups, prompts = max(1, LEAST_REQUESTS // batch), 1000 * batch + pair
        llm, is_ours = engines[name], name in ours
        before = command(llm, "stats") if is_ours else {}
        seeds = prompts, 100 * prompts + epoch
        seconds, rollouts = one_turn(llm, make_prompts, batch, groups, seeds, is_seeded=is_ours)
        cell.times.append(seconds)
        if is_ours:
            cell.stats.append(SpeculationStats.between(before, command(llm, "stats")))
        return rollouts

    print(f"batch epoch   engine            {baseline} / engine (95 %)     identical   tokens per step (drafted)")
    for batch in args.batch:
        for name in engines:
            turn(name, batch, 999, 0, Cell())  # compiles, and teaches budgets the cost of this size
        cells = {(epoch, name): Cell() for epoch in range(args.epochs) for name in engines}
        for pair in range(args.pairs):
            order = random.Random(pair).sample(list(engines), len(engines))
            for epoch in range(args.epochs):
                rollouts = {name: turn(name, batch, pair, epoch, cells[epoch, name]) for name in order}
                for name in ours:
                    cell, mine = cells[epoch, name], rollouts[name]
                    cell.identical += sum(a == b for a, b in zip(mine, rollouts[REFERENCE], strict=True))
                    cell.rollouts += len(mine)
        for (_, name), cell in cells.items():
            if args.dtype == "float32" and name in ours and cell.identical < 0.98 * cell.rollouts:
                raise SystemExit(f"gate: {name}: only {cell.identical} of {cell.rollouts} are {REFERENCE!r}'s rollouts")
        for (epoch, name), cell in cells.items():
            row = cell.row(cells[epoch, baseline])
            line = f"{batch:5d} {epoch:5d}   {name:17} {row['speedup']:.3f} ({row['interval']})"
            if name in ours:
                line += f"  {row['identical']}/{row['rollouts']}  {row['tokens_per_step']} ({row['drafted_per_step']})"
            about_cell = {
                "policy": args.prompts, "dtype": args.dtype, "batch": batch, "epochs": args.epochs, "epoch": epoch,
                "engine": name, "k": K, "pairs": args.pairs, "baseline": baseline,
            }  # fmt: skip
            append(args.out, {"benchmark": "engines", **about_cell, **row, **about})
            print(line, flush=True)


if __name__ == "__main__":
    main()
