"""What a history in an S3-compatible object store costs: requests by kind, their price, bytes, and how late it is.

    python -m experiments.history.bench_object_store [--modes whole spread real] [--engines 1 2 8] [--out FILE]

Each engine samples 5,000 tokens per second: groups of 16 rollouts of 250 to 750 tokens, with random features, of
`--live` problems per engine, from a pool of four times as many problems in rounds of random order. `whole`: an engine
samples whole groups. `spread`: each group is spread over all engines, so that each has a part of all live problems.

The store is Moto's server on this machine, which counts. In these modes time is simulated: clocks go on by a second at
a time, and requests take none of it. So `available_s` is what the history waits; a store adds its answers' time. The
first third is not measured. In `real`, nothing is simulated: two engines' threads run, each answer takes 50 ms more,
and 24 rollouts of as many problems end within a minute, for which the other engine waits since its beginning.

Gate: the store holds each rollout that was written once, and engines have not taken any twice.
Dollars are list prices of S3 Standard, as of 2025. DELETE is free, and so are bytes within a region.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from experiments.rows import append, origin, quantiles
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history import folder, problem, tidying
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Origin
from tests.history.object_store import ENVIRONMENT, ObjectStore

GROUP, TOKENS_PER_SECOND = 16, 5000
DOLLARS = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0}
RNG = np.random.default_rng(0)


def open_folder(bucket: str) -> folder.HistoryFolder:
    """As in an engine of its own: what s3fs remembers is not shared."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    return folder.HistoryFolder(f"s3://{bucket}/run", Origin("tokenizer", 1 << 20), max_bytes=1 << 40)


def make_rollout(number: int, problem_number: int) -> Rollout:
    """Of random tokens, the first of which says which it is."""
    tokens = RNG.integers(0, 1 << 20, RNG.integers(250, 750), np.int32)
    tokens[0] = number
    features = RNG.integers(-(2**63), 2**63 - 1, (tokens.size, FEATURE_WORDS))
    return Rollout(problem_number * 0x9E3779B97F4A7C15 % 2**64, 0, tokens[:32], tokens, features)


class Fleet:
    """Engines in simulated time. What is in `ended` and `taken` is a second by rollout."""

    def __init__(self, bucket: str, num_engines: int, live: int, mode: str) -> None:
        self.engines = [open_folder(bucket) for _ in range(num_engines)]
        self.ended: dict[int, int] = {}
        self.taken: list[dict[int, int]] = [{} for _ in self.engines]
        self._spread = num_engines if mode == "spread" else 1
        self._num_live = live * num_engines
        self._seconds_per_token = live * GROUP / TOKENS_PER_SECOND
        self._live: dict[int, list[tuple[int, float, Rollout]]] = {}  # by problem: (engine, when it ends, rollout)
        self._known: list[set[int]] = [set() for _ in self.engines]  # problems
        self._waiting: list[int] = []
        self._next_number = self._next_engine = 0

    def second(self, now: int) -> None:
        """End and begin what is due, as engines do, and what their threads do."""
        woken = set()
        for number, running in list(self._live.items()):
            for engine, _, rollout in (one for one in running if one[1] <= now):
                self.ended[int(rollout.tokens[0])] = now
                self.engines[engine].add([rollout])
            left = self._live[number] = [one for one in running if one[1] > now]
            for engine, _, rollout in running:
                if all(engine != other for other, *_ in left):
                    self.engines[engine].unwatch(rollout.problem_id)
            if not left:
                del self._live[number]
        while len(self._live) < self._num_live:
            woken |= self._begin(now)
        for engine, history in enumerate(self.engines):
            if engine in woken:
                history._read()
            if (now + engine) % folder.SECONDS_REMOTE == 0:
                history.exchange()
            for rollout in history.take():
                assert rollout.tokens[0] not in self.taken[engine], "taken twice"
                self.taken[engine][int(rollout.tokens[0])] = now

    def _begin(self, now: int) -> set[int]:
        if not self._waiting:
            self._waiting = random.sample(range(1, 4 * self._num_live + 1), 4 * self._num_live)
        number = next(number for number in self._waiting if number not in self._live)
        self._waiting.remove(number)
        running = self._live[number] = []
        for member in range(GROUP):
            engine = (self._next_engine + member % self._spread) % len(self.engines)
            rollout = make_rollout(self._next_number, number)
            self._next_number += 1
            speed = self._seconds_per_token if now else self._seconds_per_token * RNG.random()  # not all in step
            running.append((engine, now + rollout.tokens.size * speed, rollout))
            self.engines[engine].watch(rollout.problem_id, is_known=number in self._known[engine])
            self._known[engine].add(number)
        self._next_engine += 1
        return {engine for engine, *_ in running}


def simulate(store: ObjectStore, bucket: str, num_engines: int, live: int, mode: str, seconds: int) -> dict[str, Any]:
    """Requests, bytes and times of a mode, once all that was written is known to be there."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0], perf_counter=time.perf_counter)
    with contextlib.ExitStack() as patched:
        for module in (folder, problem, tidying):
            patched.enter_context(mock.patch.object(module, "time", clock))
        fleet = Fleet(bucket, num_engines, live, mode)
        for second in range(seconds):
            if second == seconds // 3:
                before, bytes_before = store.kinds, store.num_bytes.copy()
            now[0] = float(second)
            fleet.second(second)
        kinds, num_bytes = store.kinds - before, store.num_bytes - bytes_before
        for engine in fleet.engines:
            engine._write_last()
    found = [int(rollout.tokens[0]) for rollout in open_folder(bucket).load(10**9)]
    assert sorted(found) == sorted(fleet.ended), "the store does not hold each rollout once"
    minutes = (seconds - seconds // 3) / 60 * num_engines
    per_minute = {kind: round(number / minutes, 1) for kind, number in sorted(kinds.items())}
    waits = [at - fleet.ended[number] for taken in fleet.taken for number, at in taken.items()]
    waits = [wait for wait in waits if wait <= 60]  # others are of an earlier round, read when the problem came again
    return {
        "simulated_s": seconds,
        "per_engine_minute": per_minute,
        "dollars_per_engine_hour": round(60 * sum(DOLLARS[kind] * number for kind, number in per_minute.items()), 3),
        "bytes_per_engine_s": {way: round(number / minutes / 60) for way, number in num_bytes.items()},
        "rollouts_ended": len(fleet.ended),
        "available_s": quantiles(waits) if waits else None,
    }


def run_in_real_time(store: ObjectStore, bucket: str) -> dict[str, Any]:
    """Seconds from a rollout's end in one engine until another can take it."""
    one, two = open_folder(bucket), open_folder(bucket)
    store.seconds_per_answer = 0.05
    rollouts = [make_rollout(number, number + 1) for number in range(24)]
    one.start()
    two.start()
    for rollout in rollouts:
        two.watch(rollout.problem_id, is_known=False)
    started = time.monotonic()
    ends = started + np.sort(RNG.random(len(rollouts))) * 60
    taken: dict[int, float] = {}
    due = 0
    while len(taken) < len(rollouts) and time.monotonic() < started + 180:
        while due < len(ends) and ends[due] <= time.monotonic():
            one.add([rollouts[due]])
            due += 1
        for rollout in two.take():
            assert rollout.tokens[0] not in taken, "taken twice"
            taken[int(rollout.tokens[0])] = time.monotonic()
        time.sleep(0.005)
    assert len(taken) == len(rollouts), "some never came"
    one.close()
    two.close()
    store.seconds_per_answer = 0.0
    waits = [taken[number] - end for number, end in enumerate(ends)]
    return {"available_s": quantiles(waits), "longest_s": round(float(max(waits)), 2), "answer_s": 0.05}


def main() -> None:
    """Measure each mode with each number of engines and of live problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("whole", "spread", "real"), default=["whole", "spread", "real"])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--live", type=int, nargs="+", default=[16, 64], help="problems per engine")
    parser.add_argument("--seconds", type=int, default=90, help="that are simulated")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    store = ObjectStore()
    atexit.register(store.close)
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=store.endpoint)
    import fsspec

    cases = [(mode, number, live) for mode in args.modes if mode != "real" for number in args.engines
             for live in args.live if mode == "whole" or number > 1]  # fmt: skip
    for mode, number, live in cases + [("real", 2, 0)] * ("real" in args.modes):
        random.seed(0)
        bucket = f"{mode}-{number}-{live}"
        fsspec.filesystem("s3").mkdir(bucket)
        started = time.perf_counter()
        if mode == "real":
            row = run_in_real_time(store, bucket)
        else:
            row = simulate(store, bucket, number, live, mode, args.seconds)
        row = {"benchmark": "object_store", "mode": mode, "engines": number, "live_problems": live, **row}
        print({**row, "took_s": round(time.perf_counter() - started)}, flush=True)
        append(args.out, {**row, **origin(packages=["pyarrow", "fsspec", "s3fs", "moto"])})


if __name__ == "__main__":
    main()
