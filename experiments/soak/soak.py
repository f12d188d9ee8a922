"""A week in an hour: engines on the CPU, asked, interrupted and restarted at random, beside others without drafts.

    python -m experiments.soak.soak [--minutes 60] [--seed 0] [--kinds colocated served ...] [--out FILE]

Each kind of engine lives three times. The first life ends with SIGKILL; before the second its history folder is
damaged, and the second ends with SIGTERM or its like; the third has no folder. Everything that an engine is asked
follows from the seed: greedy, sampled and truncated requests, penalties, masks, grammars, stop strings, several samples
of a request, LoRA adapters that change, evaluation, tenants; prompts that are read in chunks, clients that leave,
preemption, pauses with requests in flight, new weights between and during requests, speculation switched off and on, a
history folder that vanishes.

Checked in each round:

- every rollout (tokens, text, log-probabilities, reason of its end) is that of an engine with `speculation=False`;
- counters are consistent, and no state of a request, no block of the key-value cache and no entry in the scheduler is
  left;
- an answer comes within minutes.

Reported at the end: how memory, open files and the time of a round, over that without speculation at the same moment,
change from round to round, with the error of the slope. Where something is wrong, the options that ask the same again
are printed.

A CPU's engine has no sleep mode, so nothing sleeps. The engine without speculation is of the same kind, with as many
ranks, and lives as long, so that its memory says what vLLM's own grows by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.rows import append, origin
from experiments.soak.checks import Compared, check_answer, compare_round, slope
from experiments.soak.colocated import Colocated
from experiments.soak.engines import Answer, Plan
from experiments.soak.served import Served
from experiments.soak.workload import Kind, Workload, write_adapters, write_model
from rollout_spec.history.partitions import path_of, problem_ids
from rollout_spec.history.storage import open_storage
from tests.integrations.draft_models import write_draft_model, write_eagle_head
from tests.interpreter import run_as_python

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
FEW_BLOCKS = {"num_gpu_blocks_override": 9}
"""One request of the model's length fits, so that even small rounds preempt."""
EMULATED = Kind(size=10, max_tokens=40, omits=("structured_outputs",) if run_as_python() else ())
"""Kernels of GPUs take their time on a CPU, and Triton's interpreter does not run vLLM's for grammars."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A kind of engine.

    Attributes:
        share: Of a soak's time.
        options: Fields of `RolloutSpecConfig` in each of its lives, on top of `history_dir`. The model of a
            `speculative_config` is a folder beside the policy.
    """

    engine: type[Colocated] | type[Served]
    kind: Kind
    share: float
    options: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


SMALL = {"max_history_tokens": 20_000}
"""So little that history is full, and the oldest goes, early in a life."""
DRAFT_MODEL = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}
LIVES = (0.2, 0.4, 0.4)
"""Of a kind's time. Only the last two end in peace, and growth shows in many rounds."""
SETUPS = {
    "colocated": Setup(
        Colocated, Kind(adapters=True), 0.40,
        ({"budget": False, "drafter_options": {"min_survival": 0.0, **SMALL}},
         {"drafter": "suffix", "drafter_options": SMALL}, {"drafter_options": SMALL}),
        LORA,
    ),
    "served": Setup(
        Served, Kind(adapters=True), 0.18,
        ({"drafter_options": SMALL}, {"budget": False, "drafter_options": {"min_survival": 0.0, **SMALL}},
         {"drafter": "ngram", "drafter_options": SMALL}),
        LORA,
    ),
    "ranks": Setup(
        Colocated, Kind(), 0.18,
        ({"budget": False, "drafter_options": SMALL}, {"drafter_options": SMALL},
         {"drafter": "suffix", "drafter_options": SMALL}),
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    "model": Setup(
        Colocated, Kind(), 0.09,
        ({"speculative_config": DRAFT_MODEL, "budget": False, "drafter_options": SMALL},
         {"speculative_config": EAGLE, "drafter_options": SMALL},
         {"speculative_config": DRAFT_MODEL, "drafter_options": SMALL}),
    ),
    "device": Setup(
        Colocated, EMULATED, 0.09,
        3 * ({"drafter": "device", "drafter_options": {"max_resident_tokens": 4000, **SMALL}},),
        FEW_BLOCKS, V2,
    ),
    "v2": Setup(
        Colocated, EMULATED, 0.06,
        ({"budget": False, "drafter_options": SMALL}, {"drafter_options": SMALL},
         {"drafter": "ngram", "drafter_options": SMALL}),
        FEW_BLOCKS, V2,
    ),
}  # fmt: skip


class Soak:
    """All lives of one kind of engine."""

    def __init__(self, name: str, seed: int, folder: Path, model: Path) -> None:
        self._name, self._seed, self._folder = name, seed, folder
        self._setup = SETUPS[name]
        self._model = model
        self._history = folder / "history"
        self._rng = random.Random(f"{seed} {name} faults")
        self.workload = Workload(f"{seed} {name}", self._setup.kind)
        self.counts: Counter[str] = Counter()
        self.found = Compared()
        self.wrong: list[str] = []
        self.rounds: list[int] = []  # of each life
        self._engines: list[Colocated | Served] = []
        self.usage: dict[str, list[list[float]]] = {"memory": [], "reference_memory": [], "files": [], "time": []}

    def run(self, seconds: float, num_rounds: Sequence[float]) -> None:
        """Live three times, in so much time together, and in so many rounds each."""
        try:
            for life, share in enumerate(LIVES):
                self._live(life, seconds * share, num_rounds[life])
        except BaseException:
            for engine in self._engines:
                engine.stop(kill=True)
            raise

    def _start(self, options: dict[str, Any], name: str) -> Colocated | Served:
        environment = {**ENVIRONMENT, **self._setup.environment}
        plan = Plan(str(self._model), str(self._folder / f"{name}.log"), options, self._setup.arguments, environment)
        self._engines.append(self._setup.engine(plan))
        return self._engines[-1]

    def _live(self, life: int, seconds: float, num_rounds: float) -> None:
        options: dict[str, Any] = {"num_speculative_tokens": 4, **self._setup.options[life]}
        if drafter := options.get("speculative_config"):
            options["speculative_config"] = {**drafter, "model": str(self._model.parent / drafter["model"])}
        if life < 2:
            options |= {"history_dir": str(self._history), "max_history_dir_bytes": 1 << 20}
        num_damaged = self._damage() if life == 1 else 0
        reference = self._start({"speculation": False}, f"reference{life}")
        ours = self._start(options, f"life{life}")
        for engine in (reference, ours):
            engine.wait_until_ready()
        for values in self.usage.values():
            values.append([])
        self.rounds.append(0)
        before: dict[str, Any] = {}
        started = time.monotonic()
        while time.monotonic() - started < seconds and self.rounds[-1] < num_rounds:
            before = self._round(ours, reference, before)
            # Those that are damaged are refused once their problems are asked for, and each time that they are read.
            if self.rounds[-1] == 1 and before["folder"].get("shards_refused", 0) and not num_damaged:
                self.wrong.append(f"no shard was damaged: {before['folder']}")
        for name in ("rollouts_written", "rollouts_read", "rollouts_lost", "shards_refused"):
            self.counts[name] += int(before.get("folder", {}).get(name, 0))
        reference.stop()
        ours.stop(kill=life == 0)
        self.counts["killed" if life == 0 else "ended"] += 1

    def _round(self, ours: Any, reference: Any, before: dict[str, Any]) -> dict[str, Any]:
        round_ = self.workload.next_round()
        self.rounds[-1] += 1
        for engine in (ours, reference):
            engine.begin(round_)
        try:
            answer, plain = ours.end(), reference.end()
        except RuntimeError as error:
            (self._folder / f"round{round_.number}.json").write_text(json.dumps(dataclasses.asdict(round_)))
            raise SystemExit(f"{error}\n{self._again()}") from error
        found = compare_round(round_, answer, plain)
        wrong = [*found.differences, *check_answer(round_, answer, before)]
        if wrong:
            self.wrong += wrong
            record = self._folder / f"round{round_.number}.json"
            record.write_text(json.dumps([dataclasses.asdict(round_), _plain(answer), _plain(plain)]))
            print(*wrong, self._again(), f"see {record}", sep="\n", flush=True)
        self.found.rollouts += found.rollouts
        self.found.tokens += found.tokens
        self.found.ties += found.ties
        self.counts.update({"rounds": 1, "requests": len(round_.requests), **answer.events})
        for name in ("steps", "emitted_tokens", "accepted_tokens"):
            self.counts[name] += answer.stats[name] - before.get(name, 0)
        self.counts["adapters"] += sum(request.adapter is not None for request in round_.requests)
        self.counts["evaluation"] += sum(request.is_evaluation for request in round_.requests)
        self.usage["memory"][-1].append(answer.memory_bytes)
        self.usage["reference_memory"][-1].append(plain.memory_bytes)
        self.usage["files"][-1].append(answer.open_files)
        self.usage["time"][-1].append(answer.seconds / plain.seconds)
        for request in round_.requests:
            rollout = plain.rollouts.get((request.key, 0))
            if rollout is not None and request.adapter is None:
                self.workload.observe(request.prompt, rollout.token_ids)
        return {**answer.stats, "folder": answer.history.get("folder", {})}

    def _again(self) -> str:
        rounds = [*self.rounds, 0, 0][:3]
        options = f"--seed {self._seed} --kinds {self._name} --rounds {' '.join(map(str, rounds))}"
        return f"  again with {options}; logs: {self._folder}"

    def _damage(self) -> int:
        """Change a byte of one file of history, and cut another. Returns how many that are."""
        storage = open_storage(self._history)
        names = sorted(
            f"{folder}/{name}"
            for folder in map(path_of, problem_ids(storage))
            for name in storage.folder(folder).sizes()
        )
        for name, way in zip(self._rng.sample(names, min(2, len(names))), ("flip", "cut"), strict=False):
            path = self._history / name
            data = bytearray(path.read_bytes())
            place = self._rng.randrange(len(data))
            data[place] ^= 1 << self._rng.randrange(8)
            path.write_bytes(bytes(data) if way == "flip" else bytes(data[:place]))
            self.counts[f"shard_{way}"] += 1
        return min(2, len(names))

    def summary(self) -> dict[str, Any]:
        """What a row holds."""
        slopes = {name: [slope(values) for values in lives] for name, lives in self.usage.items()}
        return {
            **self.counts,
            "rounds_of_lives": self.rounds,
            "rollouts_compared": self.found.rollouts,
            "tokens_compared": self.found.tokens,
            "ties": self.found.ties,
            "wrong": len(self.wrong),
            "slopes_per_round": {
                name: [[_rounded(part) for part in pair] for pair in pairs] for name, pairs in slopes.items()
            },
            "at_end": {name: [values[-1] for values in lives if values] for name, lives in self.usage.items()},
        }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.3g}")


def _plain(answer: Answer) -> Any:
    return {f"{key}/{index}": dataclasses.asdict(rollout) for (key, index), rollout in answer.rollouts.items()}


def main() -> int:
    """Run the soak, print a table, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--rounds", type=int, nargs=3, default=[sys.maxsize] * 3, help="at most, in each life")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))  # stays if anything is wrong
    model = folder / "models" / "policy"
    write_model(model)
    write_adapters(model.parent)
    write_draft_model(model, model.parent / DRAFT_MODEL["model"])
    write_eagle_head(model, model.parent / EAGLE["model"])
    shares = sum(SETUPS[name].share for name in args.kinds)
    num_wrong = 0
    for name in args.kinds:
        (folder / name).mkdir()
        soak = Soak(name, args.seed, folder / name, model)
        started = time.monotonic()
        soak.run(60 * args.minutes * SETUPS[name].share / shares, args.rounds)
        row = {
            "benchmark": "soak", "kind": name, "seed": args.seed,
            "minutes": round((time.monotonic() - started) / 60, 1), **soak.summary(), **origin(),
        }  # fmt: skip
        append(args.out, row)
        print(json.dumps({key: value for key, value in row.items() if key not in ("argv", "versions", "git")}))
        num_wrong += len(soak.wrong)
    if not num_wrong:
        shutil.rmtree(folder)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
