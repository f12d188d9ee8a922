"""The demo: warm-start a small policy, train it with GRPO, and time its rollouts without and with speculation."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from rollout_spec.checks import integer
from rollout_spec.imports import INSTALL_VLLM, command_line, install

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the trainer's engine runs in its process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # a second thread does not help so small a model
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
NUM_PROBLEMS = 12
PROMPTS_PER_STEP = 2
GROUP_SIZE = 8
MAX_COMPLETION_TOKENS = 384
MAX_MODEL_LEN = 448
NUM_SPECULATIVE_TOKENS = 8
MIN_SURVIVAL = 0.05
"""Drafts end where survival falls below this; replaces the drafter's default of 0.01."""
POLICY_VERSION = 1
"""Part of the cache's name: raise it when the task, the policy or the warm start changes."""


def run_demo(out_dir: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """Run everything and write `report.json`, `report.png` and `rollouts.png` to `out_dir`.

    Args:
        out_dir: Made when missing; the warm-started policy is cached in it.
        steps: GRPO steps; an epoch has `NUM_PROBLEMS / PROMPTS_PER_STEP`.
        seed: Decides problems, weights and rollouts.

    Returns:
        The report.

    Raises:
        ImportError: an optional dependency is missing; the message names the extra.
        ValueError: `steps` is less than 2: the first step is warm-up and is not timed. Or `seed` does not fit in 32
            bits, as NumPy's must.
        TypeError: `steps` or `seed` is no int.
    """
    if integer("steps", steps) < 2:
        raise ValueError(f"steps must be at least 2 (the first one is not timed), got {steps}")
    integer("seed", seed, 0, 2**32 - 1)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        # All that is needed later, too, as a run takes minutes; what is imported fastest comes first.
        from rich.console import Console  # isort: skip
        import matplotlib  # noqa: F401  # isort: skip
        import transformers  # noqa: F401  # isort: skip
        import datasets  # noqa: F401  # isort: skip
        import trl  # noqa: F401  # isort: skip
        import vllm  # noqa: F401  # isort: skip
    except ImportError as error:
        remedy = f"{install('demo')}, and vLLM: {INSTALL_VLLM}"
        raise ImportError(f"the demo needs more packages ({error}): {remedy}") from error

    from rollout_spec.demo.report import make_report, plot_report, plot_rollouts, print_summary

    console = Console(width=max(100, Console().width))
    started = time.perf_counter()
    out_dir.mkdir(parents=True, exist_ok=True)
    policy_dir = out_dir / f"policy-v{POLICY_VERSION}-seed{seed}"
    _warm_start(policy_dir, seed, console)
    generator = _train(policy_dir, out_dir, steps, seed, console)
    report = make_report(generator, seconds=time.perf_counter() - started)
    report["provenance"] = _provenance()
    (out_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plot_report(report, out_dir / "report.png")
    plot_rollouts(report, out_dir / "rollouts.png")
    print_summary(report, console)
    console.print(f"Report: {out_dir / 'report.json'}, plot: {out_dir / 'report.png'}")
    return report


def _warm_start(policy_dir: Path, seed: int, console: Any) -> None:
    """Train and save the policy unless it is cached. The folder is renamed into place when it is complete."""
    import torch
    import transformers
    from rich.progress import Progress

    from rollout_spec.demo.warm_start import STEPS, warm_start

    if policy_dir.exists():
        console.print(f"Policy: warm start cached in {policy_dir}")
        return
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    unfinished = policy_dir.with_suffix(".tmp")
    console.print("Policy: supervised warm start, which takes three minutes or so on two cores ...")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Warm start (supervised)", total=STEPS)

        def show(step: int, loss: float) -> None:
            progress.update(task, completed=step)
            if not console.is_terminal and step % (STEPS // 10) == 0:  # a file or a pipe, where no bar is drawn
                console.print(f"  step {step} of {STEPS}, loss {loss:.3f}")

        stats = warm_start(unfinished, seed=seed, progress=show)
    torch.set_num_threads(threads)
    unfinished.rename(policy_dir)
    console.print(
        f"Policy: {stats['parameters'] / 1e3:.0f}k parameters, warm-started on {stats['tokens'] / 1e6:.1f}M tokens in "
        f"{stats['seconds']:.0f} s, loss {stats['loss']:.3f}"
    )


def _train(policy_dir: Path, out_dir: Path, steps: int, seed: int, console: Any) -> Any:
    """GRPO with TRL. Returns the generator, which holds the records."""
    import functools
    import logging
    import random
    import warnings

    import torch
    from datasets import Dataset
    from rich.progress import Progress
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rollout_spec.demo import task as countdown
    from rollout_spec.demo.paired import GPU_MEMORY_UTILIZATION, PairedGenerator, build_stock_engine
    from rollout_spec.demo.report import format_row, table_header

    warnings.filterwarnings("ignore")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    problems: dict[str, None] = {}  # a dict keeps the order and drops repeats
    while len(problems) < NUM_PROBLEMS:
        problems[countdown.prompt_text(countdown.make_problem(rng))] = None

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [countdown.reward(*pair) for pair in zip(prompts, completions, strict=True)]

    engine = {"dtype": "float32", "enforce_eager": True, "use_tqdm_on_load": False}

    console.print("Starting the engines: TRL's with rollout_spec, and a stock one to compare with. The first time this")
    console.print("compiles the drafters, which takes some 15 seconds ...")
    progress = Progress(console=console, transient=True)
    bar = progress.add_task("GRPO", total=steps)

    def on_record(record: Any) -> None:
        if record.step == 0:
            progress.console.print(table_header())
        progress.console.print(format_row(record), highlight=False)
        progress.advance(bar)

    generator = PairedGenerator(
        functools.partial(build_stock_engine, policy_dir, MAX_MODEL_LEN, PROMPTS_PER_STEP * GROUP_SIZE, **engine),
        on_record,
        llm_kwargs=engine,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        drafter_options={"min_survival": MIN_SURVIVAL},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(policy_dir, padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": list(problems)}),
        args=GRPOConfig(
            output_dir=str(out_dir / "trainer"),
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * GROUP_SIZE,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_COMPLETION_TOKENS,
            temperature=1.0,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
            vllm_max_model_length=MAX_MODEL_LEN,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[generator],
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    with progress:
        trainer.train()
    return generator


def _provenance() -> dict[str, Any]:
    """What produced the report."""
    import torch
    import transformers
    import trl
    import vllm

    import rollout_spec

    return {
        "argv": command_line(),
        "versions": {
            "rollout_spec": rollout_spec.__version__,
            "vllm": vllm.__version__,
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
