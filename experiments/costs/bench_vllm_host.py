"""What a step of vLLM without speculation costs the host, besides launching kernels: for the simulator's cost curves.

    python -m experiments.costs.bench_vllm_host --out FILE

A Llama with random weights generates on the CPU, and what vLLM does around its forward pass is timed: scheduling
(`schedule`), input preparation (`states`, `inputs`), taking the sampled tokens in (`update`) and making outputs of them
(`output`), in one process as where TRL builds the engine. None of these depends on the model. Reported: p20/p50/p80 of
microseconds per step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.engines.build import ENVIRONMENT, SHAPES, build_engine, write_model
from experiments.rows import append, origin, quantiles

SKIPPED_STEPS = 8
"""The first steps read prompts."""


class Clock:
    """The microseconds that calls take, by part of a step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Measure calls of a method from now on."""
        method: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments, **keywords)
            self.times[part].append(1e6 * (time.perf_counter() - started))
            return result

        setattr(owner, name, call)


def main() -> None:
    """Measure every batch and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # One thread, as other threads' waiting for busy cores is not vLLM's work.
    os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"})
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # on a CPU V2 prepares inputs with emulated kernels
    from vllm import SamplingParams

    SHAPES["least"] = (2, 64, 128, 2, 1, 512)
    with tempfile.TemporaryDirectory() as folder:
        write_model("least", Path(folder))
        llm = build_engine(
            folder, "none", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=max(args.batch),
            max_model_len=1024, num_gpu_blocks_override=16 * max(args.batch), logprobs_mode="processed_logprobs",
        )  # fmt: skip
    engine, clock = llm.llm_engine, Clock()
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    clock.watch("schedule", core.scheduler, "schedule")
    clock.watch("states", runner, "_update_states")
    clock.watch("inputs", runner, "_prepare_inputs")
    clock.watch("update", core.scheduler, "update_from_output")
    clock.watch("output", engine.output_processor, "process_outputs")
    params = SamplingParams(temperature=1.0, logprobs=0, max_tokens=args.steps + SKIPPED_STEPS, ignore_eos=True)
    about = origin()
    for batch in args.batch:
        clock.times.clear()
        llm.generate([{"prompt_token_ids": [3 + i % 400] * 32} for i in range(batch)], params, use_tqdm=False)
        steps = {part: values[SKIPPED_STEPS:-1] for part, values in clock.times.items()}
        parts = {part: quantiles(values) for part, values in steps.items()}
        whole = quantiles([sum(values) for values in zip(*steps.values(), strict=True)])
        row = {"benchmark": "host/vllm", "batch": batch, "us_per_step": whole, "parts_us": parts, "steps": args.steps}
        append(args.out, {**row, **about})
        print(batch, whole, {part: p50 for part, (_, p50, _) in parts.items()}, flush=True)


if __name__ == "__main__":
    main()
