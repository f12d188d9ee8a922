"""How soon an engine sees another one's rollouts, and what that costs, by where the folder is; and with Redis instead.

    PYTHONPATH=experiments python experiments/bench_exchange.py [--folders /dev/shm /tmp] [--redis] [--out FILE]

Each round gives one writer as many rollouts as a group has, with features, and waits until a reader in another process
has them. With `--redis` the same bytes also go through a Redis server, which must be installed (`redis-server`, and the
Python package `redis`): it could take the place of the files, but not of encoding and decoding. All times are of this
machine's disk and memory; the reader looks every quarter of a second, so a rollout is underway for 0.1 to 0.5 s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, decode, encode
from rollout_spec.history.storage import LocalStorage
from rows import append, origin, quantiles


def rollouts_of(rng: np.random.Generator, number: int, size: int) -> list[Rollout]:
    """Rollouts of one problem, with features."""
    return [
        Rollout(
            7, 1, np.zeros(32, np.int32), rng.integers(0, 50_000, size).astype(np.int32),
            rng.integers(-(2**62), 2**62, (size, FEATURE_WORDS)),
        )
        for _ in range(number)
    ]  # fmt: skip


def read(folder: str, pipe: Any) -> None:
    """Say how many rollouts have come, whenever some have, until something is said here."""
    history = HistoryFolder(folder, Origin(), max_bytes=1 << 30)
    history.load(1)
    history.start()
    pipe.send(0)
    while not pipe.poll(0.001):
        if received := history.take():
            pipe.send(len(received))
    pipe.send(history.stats.to_dict())


def time_folder(folder: str, rounds: int, group: int, size: int) -> dict[str, Any]:
    """Seconds from `add` in one process to `take` in another, and what both threads took."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read, args=(folder, theirs))
    reader.start()
    ours.recv()
    history, rng, seconds = HistoryFolder(folder, Origin(), max_bytes=1 << 30), np.random.default_rng(0), []
    history.start()
    for _ in range(rounds):
        some = rollouts_of(rng, group, size)
        time.sleep(float(rng.random()) * 0.3)
        started, count = time.perf_counter(), 0
        history.add(some)
        while count < group:
            count += ours.recv()
        seconds.append(time.perf_counter() - started)
    history.close()
    ours.send(None)
    stats = ours.recv()
    reader.join()
    return {
        "seconds_underway": quantiles(seconds),
        "longest_seconds": round(max(seconds), 2),
        "written_mbytes": round(history.stats.bytes_written / 1e6, 2),
        "writer_seconds_per_mbyte": round(history.stats.seconds / history.stats.bytes_written * 1e6, 4),
        "reader_seconds_per_mbyte": round(stats["seconds"] / stats["bytes_read"] * 1e6, 4),
    }


def time_parts(folder: str, rounds: int, group: int, size: int, port: int | None) -> dict[str, Any]:
    """Milliseconds to encode, to write, to read and to decode a shard; with a port through Redis."""
    rng, times = np.random.default_rng(0), []
    storage: Any = LocalStorage(Path(folder))
    if port is not None:
        import redis

        client = redis.Redis(port=port)
    for number in range(rounds):
        entries = [Entry(1, number, rollout) for rollout in rollouts_of(rng, group, size)]
        marks = [time.perf_counter()]
        data = encode(entries, Origin())
        marks.append(time.perf_counter())
        if port is None:
            storage.write("v0000000001-x.parquet", data)
        else:
            client.set("shard", data)
        marks.append(time.perf_counter())
        data = storage.read("v0000000001-x.parquet") if port is None else client.get("shard")
        marks.append(time.perf_counter())
        decode(data, Origin())
        marks.append(time.perf_counter())
        times.append(np.diff(marks) * 1e3)
    parts = zip(("encode", "write", "read", "decode"), np.array(times).T, strict=True)
    return {f"{name}_ms": quantiles(values) for name, values in parts}


def main() -> None:
    """Measure the folders, and Redis if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", default=["/dev/shm", "/tmp"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--size", type=int, default=1000, help="tokens of a rollout")
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = {"benchmark": "exchange", "group": args.group, "tokens": args.size, "rounds": args.rounds}
    for parent in args.folders:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            measured = time_folder(folder, args.rounds, args.group, args.size)
            parts = time_parts(folder, args.rounds, args.group, args.size, None)
        print(parent, measured, parts, flush=True)
        append(args.out, {**about, "through": parent, **measured, **parts, **origin(packages=["pyarrow"])})
    if args.redis:
        port = 26379
        with subprocess.Popen(["redis-server", "--port", str(port), "--save", ""], stdout=subprocess.DEVNULL) as server:
            time.sleep(2)
            parts = time_parts("", args.rounds, args.group, args.size, port)
            server.terminate()
        print("redis", parts)
        append(args.out, {**about, "through": "redis", **parts, **origin(packages=["pyarrow", "redis"])})


if __name__ == "__main__":
    main()
