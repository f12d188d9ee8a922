"""History that 1 to 1,024 engines share: traffic, requests, delays and tokens per step of one of them. **Simulated.**

    python -m experiments.history.simulate_fleet TRACES/rg_llama_math.parquet [--engines 1 2 8 64 1024] [--out FILE]
    python -m experiments.history.simulate_fleet --plot FILE.png --table FILE.jsonl

Recorded rollouts, three epochs of them (two of one policy, one of a later one), groups of 16. One engine is simulated
step by step: 64 requests at a time, 20 ms per step, our drafter, K = 8, a draft token is accepted where it is the
recorded one. The others are so far as they touch its problems: they write what they have said of these problems, before
and meanwhile, through the same code (`HistoryFolder`), and so does the engine itself, into a storage in memory that
counts requests. So bytes and requests are counted, and times are simulated. Each fleet serves 10^5 problems per epoch.

Routing: `sticky`, a problem's groups come to the same engine in each epoch, whose history holds its share of the
problems (8 million tokens hold 1,000 of them, so from 100 engines on); `groups`, whole groups to any engine;
`rollouts`, each rollout to any engine. Transport: `folder` (a shared file system) or `object store` (looked at
every five seconds). What is asked for arrives after 0.05 and 0.5 seconds. An engine's own problems are as many in each
fleet, so what it reads depends on the number of engines only up to a group's size, and rows beyond are the same runs.

Compared with
- one engine that knows all at once: all rollouts of the same problems grow in one drafter, and only the same requests
  are counted;
- before: every engine read all that others wrote, of which its memory (64 million tokens) holds the newest part, and
  which it took in at 4,096 tokens per step. 10^5 problems are 7.6 * 10^8 tokens per epoch, so nothing of the last epoch
  is left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.drafting.bench_draft import endless
from experiments.rows import append, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.history import folder as folder_module
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout
from rollout_spec.history.shards import Origin
from rollout_spec.integrations.vllm.engine_history import MAX_TOKENS_PER_STEP, STEPS_TO_TAKE
from rollout_spec.replay.traces import Problem, read_traces
from rollout_spec.types import Int32Array

GROUP, EPOCHS, BATCH, K = 16, 3, 64, 8
SECONDS_PER_STEP = 0.02
PROBLEMS = 100_000
"""Of the whole fleet, per epoch."""
READ_SECONDS = {"folder": 0.05, "object store": 0.5}
OURS = 16
"""Groups' worth of rollouts that the simulated engine serves per epoch."""
ROUTINGS, TRANSPORTS = ("sticky", "groups", "rollouts"), ("folder", "object store")
FEATURE_BYTES = np.random.default_rng(0).integers(-(2**63), 2**63, (4096, 4))
"""Signs of projections are nearly random bits, as these: they take as many bytes in a file."""


class CountingStorage:
    """A `ShardStorage` in memory, of which each engine has a view that counts its requests."""

    def __init__(self, files: defaultdict[str, dict[str, bytes]], counts: Counter[str], path: str = "") -> None:
        self._files, self.counts, self._path = files, counts, path

    def folder(self, path: str) -> CountingStorage:
        return CountingStorage(self._files, self.counts, f"{self._path}/{path}")

    def folders(self) -> list[str]:
        raise NotImplementedError("nothing here looks through the whole history")

    def sizes(self) -> dict[str, int]:
        self.counts["LIST"] += 1
        return {name: len(data) for name, data in self._files[self._path].items()}

    def read(self, name: str) -> bytes:
        self.counts["GET"] += 1
        if name not in self._files[self._path]:
            raise FileNotFoundError(name)
        data = self._files[self._path][name]
        self.counts["bytes in"] += len(data)
        return data

    def write(self, name: str, data: bytes) -> None:
        self.counts["PUT"] += 1
        self.counts["bytes out"] += len(data)
        self._files[self._path][name] = data

    def delete(self, name: str) -> None:
        self.counts["DELETE"] += 1
        self._files[self._path].pop(name, None)


class Job(NamedTuple):
    """A rollout that is to be sampled in some epoch."""

    problem: Problem
    problem_id: int
    prompt: Int32Array
    tokens: Int32Array

    def rollout(self, version: int) -> Rollout:
        """It, once it has ended."""
        features = FEATURE_BYTES[np.arange(self.tokens.size) % len(FEATURE_BYTES)]
        return Rollout(self.problem_id, version, self.prompt[-CONTEXT_TOKENS:], self.tokens, features)


def groups_of(problem: Problem) -> list[list[Job]]:
    """A problem's rollouts of each epoch."""
    first, second = problem.rollouts[: len(problem.rollouts) // 2], problem.rollouts[len(problem.rollouts) // 2 :]
    parts = first[:GROUP], first[GROUP : 2 * GROUP], second[:GROUP]
    return [[Job(problem, problem.problem_id, r.prompt, r.tokens) for r in part] for part in parts]


class Engine:
    """One drafter and the requests that it serves, step by step."""

    def __init__(self) -> None:
        # Draft what words say: recordings have no features, and made-up ones would mislead it.
        self.drafter = build_drafter("history", max_draft_tokens=K, features=False)
        self.live: dict[str, tuple[Job, int]] = {}
        self.num_started = 0

    def start(self, job: Job) -> str:
        req_id = str(self.num_started)
        self.num_started += 1
        self.drafter.start_request(req_id, job.prompt, problem_id=job.problem_id)
        self.drafter.extend(req_id, job.tokens[:1])
        self.live[req_id] = job, 1
        return req_id

    def step(self) -> tuple[list[tuple[str, Job]], Counter[str]]:
        """(requests that have ended, tokens of each request that was live)."""
        req_ids = list(self.live)
        drafts = self.drafter.propose(req_ids, np.full(len(req_ids), K, np.int32))
        ended, said = [], Counter()
        for req_id, draft in zip(req_ids, drafts, strict=True):
            job, done = self.live[req_id]
            target = job.tokens[done : done + len(draft.token_ids) + 1]
            same = draft.token_ids[: target.size] == target[: len(draft.token_ids)]
            accepted = int(np.argmin(np.append(same, False)))
            new = target[: accepted + 1]
            if new.size:
                self.drafter.extend(req_id, new)
            said[req_id] = new.size
            if done + new.size >= job.tokens.size:
                self.drafter.stop_request(req_id)
                del self.live[req_id]
                ended.append((req_id, job))
            else:
                self.live[req_id] = job, done + new.size
        return ended, said


def work(recorded: Sequence[Problem], routing: str, engines: int) -> list[tuple[list[Job], list[Job]]]:
    """(our engine's rollouts, other engines' of the same problems and of those that will be ours) of each epoch."""
    shares = min(engines, GROUP) if routing == "rollouts" else 1
    problems = [problem for problem, _ in zip(endless(recorded), range(OURS * shares), strict=False)]
    epochs = []
    for epoch in range(EPOCHS):
        ours: list[Job] = []
        others: list[Job] = []
        for number, problem in enumerate(problems):
            group = groups_of(problem)[epoch]
            if routing == "rollouts":
                mine = [job for n, job in enumerate(group) if (n + epoch) % shares == 0]
            elif routing == "sticky" or engines == 1:
                mine = group
            else:  # another engine had it in the other epochs
                mine = group if number % EPOCHS == epoch else []
            ours += mine
            others += [job for job in group if not any(job is own for own in mine)]
        epochs.append((ours, others))
    return epochs


def simulate(
    epochs: Sequence[tuple[list[Job], list[Job]]], transport: str, before: float | None = None
) -> dict[str, Any]:
    """One engine's epochs.

    Args:
        before: As engines read before: the share of other engines' rollouts that an engine can take in. None: as now.
    """
    remote = transport == TRANSPORTS[1]
    seconds = folder_module.SECONDS_REMOTE if remote else folder_module.SECONDS_LOCAL
    steps_per_exchange = round(seconds / SECONDS_PER_STEP)
    files: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    counts: Counter[str] = Counter()

    def open_folder(counts: Counter[str]) -> HistoryFolder:
        folder = HistoryFolder("made-up", Origin(), max_bytes=1 << 50)
        folder._storage, folder._is_remote = CountingStorage(files, counts), remote  # type: ignore[assignment]
        return folder

    ours, theirs = open_folder(counts), open_folder(Counter())
    ours._next_check = theirs._next_check = math.inf  # whole histories are looked through by one engine of all
    engine, rng = Engine(), random.Random(0)
    live: Counter[int] = Counter()
    late: deque[tuple[int, Rollout]] = deque()
    steps_to_read = round(READ_SECONDS[transport] / SECONDS_PER_STEP)
    arriving: deque[tuple[int, list[Rollout]]] = deque()
    tokens, steps, waits, memory = [], [], [], 0
    num_steps = 0
    for epoch, (own, others) in enumerate(epochs):
        if epoch:
            engine.drafter.begin_policy_version(epoch)
        waiting, said, request_steps = deque(own), 0, 0
        problems = {job.problem_id for job in own}
        ends: list[tuple[int, Rollout]] = []  # of others, by step
        begins: dict[int, int] = {}
        while waiting or engine.live:
            while waiting and len(engine.live) < BATCH:
                job = waiting.popleft()
                live[job.problem_id] += 1
                if live[job.problem_id] == 1 and before is None:
                    ours.watch(job.problem_id, is_known=engine.drafter.knows(job.problem_id))
                    ours._read()  # the thread reads while the prompt is read
                if job.problem_id not in begins:  # its siblings elsewhere begin with it
                    begins[job.problem_id] = num_steps
                    for other in others:
                        if other.problem_id == job.problem_id:
                            took = int(other.tokens.size / 3 * rng.uniform(0.8, 1.25))
                            ends.append((num_steps + took, other.rollout(epoch)))
                    ends.sort(key=lambda end: end[0])
                engine.start(job)
            ended, emitted = engine.step()
            num_steps += 1
            said += sum(emitted.values())
            request_steps += len(emitted)
            for _, job in ended:
                live[job.problem_id] -= 1
                ours.add([job.rollout(epoch)])
                if not live[job.problem_id]:
                    ours.unwatch(job.problem_id)
            while ends and ends[0][0] <= num_steps:
                when, rollout = ends.pop(0)
                theirs.add([rollout])
                if before is not None:
                    late.append((when, rollout))
            if num_steps % steps_per_exchange == 0:
                theirs.exchange()
                ours.exchange() if before is None else ours._write()
            if before is None:
                some = ours.take(max(MAX_TOKENS_PER_STEP, ours.num_waiting_tokens // STEPS_TO_TAKE))
                arriving.append((num_steps + steps_to_read, some))
                took_in = []
                while arriving and arriving[0][0] <= num_steps:
                    took_in += arriving.popleft()[1]
            else:  # within two exchanges on average, as far as the engine can take it in
                took_in = []
                while late and late[0][0] + 2 * steps_per_exchange <= num_steps:
                    rollout = late.popleft()[1]
                    took_in += [rollout] if rng.random() < before else []
            if took_in:
                engine.drafter.add_rollouts([rollout._replace(features=None) for rollout in took_in])
                waits.append(sum(rollout.num_tokens for rollout in took_in))
        for _, rollout in ends:  # the other engines end, too
            theirs.add([rollout])
        theirs.exchange()
        ours.exchange() if before is None else ours._write()
        memory = max(memory, engine.drafter.memory_bytes())
        if before is not None:  # an epoch later nothing of it is left
            late.clear()
            engine = Engine()
        # Problems that will be ours were others' in this epoch.
        absent = {job.problem_id: [] for job in others if job.problem_id not in problems}
        for job in others:
            if job.problem_id in absent:
                absent[job.problem_id].append(job.rollout(epoch))
        for rollouts in absent.values():
            theirs.add(rollouts)
        theirs.exchange()
        tokens.append(said)
        steps.append(request_steps)
    elapsed = num_steps * SECONDS_PER_STEP
    return {
        "tokens_per_step": [round(t / s, 3) for t, s in zip(tokens, steps, strict=True)],
        "tokens_per_second": round(sum(tokens) / elapsed),
        "most_tokens_taken_in_a_step": max(waits, default=0),
        **{f"{name} per second": round(counts[name] / elapsed, 3) for name in ("LIST", "GET", "PUT", "DELETE")},
        **{f"{name} per token": round(counts[name] / sum(tokens), 2) for name in ("bytes in", "bytes out")},
        "drafter_bytes": memory,
    }


def know_all(epochs: Sequence[tuple[list[Job], list[Job]]]) -> list[float]:
    """Tokens per step of our rollouts, where all rollouts of their problems grow in one drafter."""
    engine, result = Engine(), []
    for epoch, (own, others) in enumerate(epochs):
        if epoch:
            engine.drafter.begin_policy_version(epoch)
        said = request_steps = 0
        counted: set[str] = set()
        waiting, begun = deque(own), set()
        num_own = 0
        siblings: dict[int, list[Job]] = {}
        for job in others:
            siblings.setdefault(job.problem_id, []).append(job)
        served = {job.problem_id for job in own}
        while waiting or num_own:
            while waiting and num_own < BATCH:
                job = waiting.popleft()
                if job.problem_id not in begun:
                    begun.add(job.problem_id)
                    for other in siblings.get(job.problem_id, []):
                        engine.start(other)
                counted.add(engine.start(job))
                num_own += 1
            ended, emitted = engine.step()
            said += sum(count for req_id, count in emitted.items() if req_id in counted)
            request_steps += sum(req_id in counted for req_id in emitted)
            num_own -= sum(req_id in counted for req_id, _ in ended)
        while engine.live:
            engine.step()
        for problem_id, jobs in siblings.items():
            if problem_id not in served:
                engine.drafter.add_rollouts([job.rollout(epoch)._replace(features=None) for job in jobs])
        result.append(round(said / request_steps, 3))
    return result


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bytes that one engine reads per token that it says, and its tokens per step, by the number of engines."""
    import matplotlib.pyplot as pyplot

    figure, (traffic, speed) = pyplot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    sent = {"sticky": "a problem to one engine", "groups": "whole groups to any", "rollouts": "each rollout to any"}
    for layout, routing in itertools.product(("by problem", "before"), ROUTINGS):
        wanted = (routing, layout, "folder")
        some = [r for r in rows if (r["routing"], r["layout"], r["transport"]) == wanted and r["engines"] > 1]
        engines, line = [row["engines"] for row in some], "-" if layout == "by problem" else ":"
        color = f"C{ROUTINGS.index(routing)}"
        label = sent[routing] if layout == "by problem" else f"{sent[routing]}, all read all"
        traffic.plot(engines, [row["bytes in per token"] for row in some], line, color=color, label=label)
        share = [100 * row["tokens_per_step"][-1] / row["all_at_once"][-1] for row in some]
        speed.plot(engines, share, line, color=color, label=label)
    for axes in (traffic, speed):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("engines")
        axes.grid(alpha=0.3)
    traffic.set_yscale("symlog", linthresh=10)
    traffic.set_ylim(bottom=-1)
    traffic.set_ylabel("bytes read per generated token")
    speed.set_ylabel("tokens per step in the third epoch,\n% of one engine's that sees all rollouts")
    figure.legend(*traffic.get_legend_handles_labels(), ncols=2, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Simulate every cell, print and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 8, 64, 1024])
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="rows to plot")
    parser.add_argument("--plot", type=Path, help="draw them")
    args = parser.parse_args()
    if args.plot:
        plot([json.loads(line) for line in args.table.read_text().splitlines()], args.plot)
        return
    recorded = [problem for problem in read_traces(args.traces) if len(problem.rollouts) >= 100]
    about = origin("simulated fleet", packages=["pyarrow"])
    for routing, transport in itertools.product(args.routings, args.transports):
        # Beyond a group's size an engine's own problems do not change with the number of engines.
        found: dict[int, tuple[Any, list[float], dict[str, Any]]] = {}
        for engines in args.engines:
            key = min(engines, GROUP) if routing == "rollouts" else min(engines, 2)
            if key not in found:
                epochs = work(recorded, routing, engines)
                found[key] = epochs, know_all(epochs), simulate(epochs, transport)
            epochs, all_at_once, now = found[key]
            fleet = engines * now["tokens_per_second"]
            then = simulate(epochs, transport, min(1.0, MAX_TOKENS_PER_STEP / SECONDS_PER_STEP / fleet))
            then["bytes in per token"] = round((engines - 1) * then["bytes out per token"], 2)
            for layout, result in (("by problem", now), ("before", then)):
                row = {
                    "benchmark": "history/fleet", "routing": routing, "engines": engines, "transport": transport,
                    "layout": layout, "all_at_once": all_at_once, **result,
                }  # fmt: skip
                append(args.out, {**row, **about})
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
