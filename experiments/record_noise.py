"""Records how much longer the same work takes while other processes are busy, for `simulate_noise.py`.

    python experiments/record_noise.py OUT.npz [--steps 6000] [--threads 1]

The work is a small network's forward pass in torch, which takes a few milliseconds, like a small model's step. By
default it runs on one thread; with one per core, each pass waits for the slowest thread, which can take many times as
long. It is repeated alone, beside bursts of one other process, and beside bursts of one process per core. OUT.npz holds
an array for each of the three, int16 [steps]: each repetition's time in percent of the fifth percentile of those alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
import torch

BURST_SECONDS = (0.1, 2.0)
"""Shortest and longest burst; the pause after it is one to three times as long."""


def disturb(seed: int, num_processes: int) -> None:
    """Work in bursts until killed."""
    rng = random.Random(seed)  # the same in all processes of a recording: their bursts coincide
    while True:
        burst = rng.uniform(*BURST_SECONDS)
        until = time.monotonic() + burst
        while time.monotonic() < until:
            np.sort(np.random.default_rng(0).random(20_000))
        time.sleep(burst * rng.uniform(1, 3))


def record(steps: int) -> np.ndarray:
    """Seconds of each step, float64 [steps]."""
    torch.manual_seed(0)
    layers = [torch.randn(512, 512) for _ in range(12)]
    hidden = torch.randn(64, 512)
    seconds = np.empty(steps)
    for i in range(steps):
        started = time.perf_counter()
        state = hidden
        for layer in layers:
            state = torch.tanh(state @ layer / 22.6)
        seconds[i] = time.perf_counter() - started
    return seconds


def main() -> None:
    """Record the three and print their quantiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record(200)
    recorded = {}
    for name, busy in (("alone", 0), ("one core", 1), ("every core", os.cpu_count() or 1)):
        others = [multiprocessing.Process(target=disturb, args=(7, busy), daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        recorded[name] = record(args.steps)
        for other in others:
            other.terminate()
            other.join()
    unit = np.percentile(recorded["alone"], 5)
    for name, seconds in recorded.items():
        quantiles = np.percentile(seconds / unit, [5, 25, 50, 75, 95, 99.9]).round(2)
        print(f"{name}: {unit * 1e3:.2f} ms x {quantiles.tolist()} (p5 p25 p50 p75 p95 p99.9)")
    percent = {name: np.minimum(seconds / unit * 100, 32_000).astype(np.int16) for name, seconds in recorded.items()}
    np.savez_compressed(args.out, **percent)


if __name__ == "__main__":
    main()
