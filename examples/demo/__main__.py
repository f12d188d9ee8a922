"""Train a small policy with GRPO on a CPU, and time its rollouts with stock vLLM and with speculation.

    make demo    # or, where '.[demo]' and vLLM are installed, python -m examples.demo

The policy is warm-started first, which takes three minutes or so on two cores, and kept in OUT for later runs. OUT also
gets report.json and report.png. Each step's rollouts are also sampled by our engine with speculation off and compared,
as speculation must not change them. Stock vLLM's cannot be compared: its random numbers are others.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo import ENVIRONMENT, task
from rollout_spec.installation import INSTALL_VLLM, install

NUM_PROBLEMS, GROUP_SIZE, BATCH_SIZE, MAX_MODEL_LEN = 12, 8, 16, 448
PACKAGES = ("rollout_spec", "matplotlib", "torch", "transformers", "datasets", "trl", "vllm")


def main() -> None:
    """Warm-start the policy, train it, and report."""
    parser = ArgumentParser("python -m examples.demo", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the report goes (default: demo)")
    parser.add_argument("--steps", type=int, default=24, help="GRPO steps (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and rollouts (default: 0)")
    parser.add_argument("--own-off", action="store_true", help="show the times of our engine without speculation, too")
    args = parser.parse_args()
    if args.steps < 2 or not 0 <= args.seed < 2**32:
        parser.error("--steps must be at least 2, as the first one is not timed, and --seed fit in 32 bits")
    ways = ("stock", "off", "on") if args.own_off else ("stock", "on")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out: {error}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:  # TRL would take one of four, which another training may have or take meanwhile
        free.bind(("", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    try:  # all of them now, as the warm start takes minutes
        versions = {name: importlib.import_module(name).__version__ for name in PACKAGES}
    except ImportError as error:
        parser.error(f"the demo needs more packages ({error}): {install('demo')}, and vLLM: {INSTALL_VLLM}")

    import torch

    from examples.demo import policy, report

    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    policy_dir = args.out / f"policy-v1-seed{args.seed}"  # raise v1 when the task, the policy or the warm start changes
    if not policy_dir.exists():
        print("Policy: supervised warm start, which takes three minutes or so on two cores ...", flush=True)
        torch.set_num_threads(os.cpu_count() or 1)
        policy.warm_start(policy_dir, seed=args.seed)
    print(f"Policy: warm-started, in {policy_dir}", flush=True)
    torch.set_num_threads(1)
    generator = train(policy_dir, args, lambda record: report.print_row(record, ways))
    summary = report.make_report(generator, time.perf_counter() - started)
    machine = f"{os.uname().machine}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    summary["provenance"] = {"versions": versions, "machine": machine}
    (args.out / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    report.plot_report(summary, ways, args.out / "report.png")
    report.print_summary(summary, ways)
    print(f"Report: {args.out / 'report.json'}, plot: {args.out / 'report.png'}")


def train(policy_dir: Path, args: Namespace, on_record: Callable[[dict[str, Any]], None]) -> Any:
    """GRPO with TRL. Returns the `PairedGenerator`, which holds the records."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.demo.paired import GPU_MEMORY_UTILIZATION, PairedGenerator

    rng = random.Random(args.seed)
    problems: dict[str, None] = {}  # a dict keeps the order and drops repeats
    while len(problems) < NUM_PROBLEMS:
        problems[task.make_prompt(rng)] = None
    print("Starting the engines. The first time this compiles the drafters, for some 15 seconds ...", flush=True)
    engine = {"dtype": "float32", "enforce_eager": True, "use_tqdm_on_load": False}
    generator = PairedGenerator(
        {"model": str(policy_dir), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": BATCH_SIZE, **engine},
        on_record,
        llm_kwargs=engine,
        num_speculative_tokens=8,
    )
    config = GRPOConfig(
        output_dir=str(args.out / "trainer"), max_steps=args.steps, seed=args.seed, use_cpu=True, bf16=False,
        per_device_train_batch_size=BATCH_SIZE, gradient_accumulation_steps=1, num_generations=GROUP_SIZE,
        max_completion_length=384, temperature=1.0, learning_rate=2e-4, lr_scheduler_type="constant", beta=0.0,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        vllm_max_model_length=MAX_MODEL_LEN, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy_dir, dtype="float32"),
        reward_funcs=lambda prompts, completions, **_: list(map(task.reward, prompts, completions)),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(problems)}),
        processing_class=AutoTokenizer.from_pretrained(policy_dir, padding_side="left"),
        callbacks=[generator],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return generator


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
