"""A week in an hour: engines on the CPU, asked, interrupted and restarted at random, beside others without drafts.

    python -m experiments.soak.soak [--minutes 60] [--seed 0] [--kinds colocated served ...] [--out FILE]

Each kind of engine lives three times. The first life ends with SIGKILL, and the second begins with its history folder;
the third has none. What an engine is asked follows from the seed: greedy, sampled and truncated requests, penalties,
stop strings, several samples of a request, LoRA adapters, prompts that continue earlier rollouts. Weights change after
rounds, requests are preempted, speculation is switched off and on, the history folder vanishes; behind a server clients
come and leave, and this happens meanwhile.

In each round every rollout (tokens, text, log-probabilities, reason of its end) must be that of an engine with
`speculation=False`, nothing may be left of requests, and an answer must come within minutes. Reported at the end: how
memory changes from round to round, with the error of the slope, also that of the engine without speculation.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.processes import Child
from experiments.rows import append, make_parser, origin
from experiments.soak.engines import ANSWER_SECONDS, Answer, Plan, Rollout, start
from experiments.soak.workload import Request, Round, Workload, logits_of, write_adapters
from rollout_spec.drafters.registry import HISTORY_DRAFTER
from rollout_spec.noise.host import gumbel
from tests.conftest import VOCAB_SIZE, write_tiny_model

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SMALL = {"max_history_tokens": 20_000}
"""So little that history is full, and the oldest goes, early in a life."""
ARGUMENTS = {"shared": True, "max_draft_tokens": 4, "min_survival": 0.0, **SMALL}
EVERY_DRAFT = {"budget": False, "drafter": HISTORY_DRAFTER, "drafter_options": ARGUMENTS}
BUDGET = {"drafter_options": SMALL}
SUFFIX, NGRAM = {"drafter": "suffix", **BUDGET}, {"drafter": "ngram", **BUDGET}
DEVICE = {"drafter": "device", "drafter_options": {"max_resident_tokens": 4000}}
LIVES = (0.2, 0.4, 0.4)
"""Of a kind's time."""
ROUNDING, CLOSE, NEAR = 1e-5, 1e-3, 2e-3
"""Logits vary by about 1e-6 with the batch: two tokens whose perturbed logits are CLOSE may change places, also to be
kept or not by truncation if their logits differ by ROUNDING, and a log-probability may differ by NEAR."""
KINDS: dict[str, tuple[float, tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "colocated": (0.3, (EVERY_DRAFT, SUFFIX, BUDGET), LORA),
    "served": (0.3, (BUDGET, EVERY_DRAFT, NGRAM), LORA),
    "ranks": (0.25, (EVERY_DRAFT, BUDGET, SUFFIX), RANKS),
    "device": (0.15, tuple({**DEVICE, "sub_steps": n} for n in (4, 2, None)), {}),
}
"""Share of a soak's time, options of each life, and arguments of the engine."""


class Soak:
    """All lives of one kind of engine."""

    def __init__(self, name: str, seed: int, folder: Path, model: Path) -> None:
        self._name, self._seed, self._folder, self._model = name, seed, folder, model
        _, self._options, self._arguments = KINDS[name]
        # Kernels of GPUs are emulated, and take their time.
        self._workload = Workload(f"{seed} {name}", is_small=name == "device", has_adapters=self._arguments == LORA)
        self.counts: Counter[str] = Counter()
        self.num_wrong = 0
        self.rounds: list[int] = []
        self.memory: list[list[tuple[int, int]]] = []

    def run(self, seconds: float, num_rounds: Sequence[int]) -> None:
        """Live three times, in so much time together, and in so many rounds each."""
        try:
            for life, share in enumerate(LIVES):
                self._live(life, seconds * share, num_rounds[life])
        except BaseException:
            print(self._again(), flush=True)
            raise

    def _live(self, life: int, seconds: float, num_rounds: int) -> None:
        options = {"num_speculative_tokens": 4, **self._options[life]}
        if life < 2:
            options |= {"history_dir": str(self._folder / "history"), "max_history_dir_bytes": 1 << 20}
        kind, arguments = self._name, self._arguments
        plain, ours = (
            Plan(kind, self._model, self._folder / f"{name}{life}.log", of_config, arguments)
            for name, of_config in (("reference", {"speculation": False}), ("life", options))
        )
        with start(plain) as reference, start(ours) as engine:
            for child in (reference, engine):
                child.answer(ANSWER_SECONDS)
            self.rounds.append(0)
            self.memory.append([])
            stats, ends = {}, time.monotonic() + seconds
            while (time.monotonic() < ends or not self.rounds[-1]) and self.rounds[-1] < num_rounds:
                stats = self._round(reference, engine)
            self.counts.update({name: stats[name] for name in ("steps", "emitted_tokens", "accepted_tokens")})
            reference.stop()
            if life:  # the first one is killed
                engine.stop()

    def _round(self, reference: Child, engine: Child) -> dict[str, Any]:
        round_ = self._workload.next_round()
        self.rounds[-1] += 1
        for child in (reference, engine):
            child.send(round_)
        plain, ours = (child.answer(ANSWER_SECONDS) for child in (reference, engine))
        wrong = [] if max(ours.live) <= 1 else [f"state of requests is left: {ours.live}"]  # the last one's may be
        if ours.stats["drafter_errors"]:
            wrong.append("the drafter has raised")
        for request in round_.requests:
            wrong += self._compare(round_, request, ours, plain)
            self._workload.observe(request.prompt, plain.rollouts[request.key, 0].token_ids)
        if wrong:
            self.num_wrong += len(wrong)
            print(*wrong, self._again(), sep="\n", flush=True)
        self.counts.update({"rounds": 1, "requests": len(round_.requests), **ours.events})
        self.memory[-1].append((ours.memory_bytes, plain.memory_bytes))
        return ours.stats

    def _compare(self, round_: Round, request: Request, ours: Answer, plain: Answer) -> list[str]:
        wrong = []
        for index in range(request.params["n"]):
            a, b = (answer.rollouts[request.key, index] for answer in (ours, plain))
            at = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
            both = min(len(a.token_ids), len(b.token_ids)) if at is None else at
            self.counts.update(rollouts_compared=1, tokens_compared=both)
            name = f"round {self.rounds[-1]}, {request.key}/{index}"
            for i, token in enumerate(a.token_ids[:both]):
                if not math.isclose(a.top[i][token], b.top[i][token], abs_tol=NEAR):
                    wrong.append(f"{name}: log-probability of token {i}: {a.top[i][token]}, {b.top[i][token]}")
                    break
            if at is not None and (
                is_tie(request, index, at, a.token_ids[at], b) or self._decides_rounding(round_, request, at, a, b)
            ):
                self.counts["ties"] += 1
            elif at is not None:
                wrong.append(f"{name}: token {at} is {a.token_ids[at]} instead of {b.token_ids[at]}")
            elif request.leave_after is None and (a.text, a.finish_reason) != (b.text, b.finish_reason):
                wrong.append(f"{name}: {a} instead of {b}")
        return wrong

    def _decides_rounding(self, round_: Round, request: Request, at: int, a: Rollout, b: Rollout) -> bool:
        """Whether truncation kept one of two tokens whose logits differ by rounding, each engine another one."""
        token, other = a.token_ids[at], b.token_ids[at]
        truncates = request.params.keys() & {"top_k", "top_p", "min_p"}
        if not truncates or request.adapter is not None or b.top[at].get(token, -np.inf) > -np.inf:
            return False
        logits = logits_of(self._model, round_.version, [*request.prompt, *b.token_ids[:at]])
        return bool(abs(logits[token] - logits[other]) < ROUNDING)

    def _again(self) -> str:
        rounds = " ".join(map(str, [*self.rounds, 0, 0][:3]))
        return f"  again with --seed {self._seed} --kinds {self._name} --rounds {rounds}; logs: {self._folder}"

    def summary(self) -> dict[str, Any]:
        """What a row holds."""
        slopes = [[slope(values) for values in zip(*life, strict=True)] for life in self.memory]
        return {
            **self.counts, "wrong": self.num_wrong, "rounds_of_lives": self.rounds,
            "slopes_per_round": {"memory": [of[0] for of in slopes], "reference_memory": [of[1] for of in slopes]},
        }  # fmt: skip


def is_tie(request: Request, index: int, at: int, token: int, plain: Rollout) -> bool:
    """Whether another token was as good as that of the engine without speculation, but for rounding."""
    values = np.array([plain.top[at].get(one, -np.inf) for one in range(VOCAB_SIZE)])
    if request.params["temperature"] > 0:
        position = len(request.prompt) + at - 1
        values = values + gumbel(request.params["seed"] + index, position, np.arange(VOCAB_SIZE))
    return bool(values.max() - values[token] < CLOSE)


def slope(values: Sequence[float]) -> tuple[float, float] | None:
    """(mean change per value, its standard error) of a line through evenly spaced values, without the first third.

    The error is that of means of ten blocks, nearly independent where single values are not. None: too few values.
    """
    rest = np.asarray(values[len(values) // 3 :], float)
    if rest.size < 20:
        return None
    blocks = [block.mean() for block in np.array_split(rest, 10)]
    fitted, covariance = np.polyfit(np.arange(10) * rest.size / 10, blocks, 1, cov=True)
    return float(fitted[0]), math.sqrt(covariance[0, 0])


def main() -> int:
    """Run the soak, print a row for each kind, and return 1 if anything was wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, nargs=3, default=[sys.maxsize] * 3, help="at most, in each life")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))  # stays if anything is wrong
    model = folder / "models" / "policy"
    write_tiny_model(model)
    write_adapters(model)
    shares = sum(KINDS[name][0] for name in args.kinds)
    num_wrong = 0
    for name in args.kinds:
        (folder / name).mkdir()
        soak, started = Soak(name, args.seed, folder / name, model), time.monotonic()
        soak.run(60 * args.minutes * KINDS[name][0] / shares, args.rounds)
        minutes = round((time.monotonic() - started) / 60, 1)
        row = {"benchmark": "soak", "kind": name, "seed": args.seed, "minutes": minutes, **soak.summary()}
        append(args.out, {**row, **origin()})
        print(json.dumps(row), flush=True)
        num_wrong += soak.num_wrong
    if not num_wrong:
        shutil.rmtree(folder)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
