"""TRL's GRPO on the warmed-up model; every step's rollouts are generated three ways and recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.paired import GPU_MEMORY_UTILIZATION, WAYS, PairedGenerator
from experiments.real_policy.recording import compute_features, write_rows
from experiments.real_policy.tasks import TASKS, Problem, make_problem, reward
from experiments.real_policy.warm_up import prompt_token_ids

STEPS = 40
PROMPTS_PER_TASK = 6
PROMPTS_PER_STEP = 3
GROUP_SIZE = 8
ROLLOUTS_PER_BACKWARD = 8
MAX_COMPLETION_TOKENS = 128
MAX_MODEL_LEN = 448
TEMPERATURE = 1.0
LEARNING_RATE = 3e-5
STREAM = 1_000_000
"""The seed of the problems. Problem n of stream s is made with seed s + n, so streams must lie far apart."""
NUM_SPECULATIVE_TOKENS = 8
STEPS_PER_EPOCH = PROMPTS_PER_TASK * len(TASKS) // PROMPTS_PER_STEP
"""In an epoch each problem is sampled once."""
STEPS_FILE = "steps.jsonl"


def training_problems() -> list[Problem]:
    """The problems that GRPO trains on."""
    return [make_problem(task, STREAM, number) for task in TASKS for number in range(PROMPTS_PER_TASK)]


class RecordingGenerator(PairedGenerator):
    """Generates three ways, writes the rollouts with their features and a line about the step.

    Args:
        out_dir: Gets `rollouts/step-0000.parquet` and so on, and `steps.jsonl`.
        problems: By prompt token ids.
        tokenizer: Decodes rollouts for the reward.
        stock: See `PairedGenerator`.
        **options: See `RolloutSpecGenerator`.
    """

    def __init__(
        self, out_dir: Path, problems: dict[tuple[int, ...], Problem], tokenizer: Any, stock: dict[str, Any],
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(stock, self._keep_record, **options)
        self._folder = out_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._steps_file = out_dir / STEPS_FILE
        self._problems = problems
        self._tokenizer = tokenizer

    def examine(self, outputs: Sequence[Any], sampling_params: Sequence[Any]) -> float:
        """Write the rollouts with their features, which come from float32 passes of the trainer's weights.

        Returns:
            Largest |engine - these passes| of the rollouts' log-probabilities.
        """
        prompts = [list(output.prompt_token_ids) for output in outputs]
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        features = compute_features(self.model, prompts, completions, TEMPERATURE)
        errors, rows = [], []
        for ordinal, (output, params, found) in enumerate(zip(outputs, sampling_params, features, strict=True)):
            tokens, scored = completions[ordinal], output.outputs[0].logprobs
            engine = torch.tensor([entry[token].logprob for entry, token in zip(scored, tokens, strict=True)])
            errors.append(float((engine - torch.from_numpy(found.logprobs)).abs().max()))
            prompt_id = self._problems[tuple(prompts[ordinal])].prompt_id
            rows.append(
                {
                    "prompt_id": prompt_id, "sample_id": ordinal % GROUP_SIZE, "epoch": self._step // STEPS_PER_EPOCH,
                    "step": self._step, "seed": params.seed, "temperature": TEMPERATURE,
                    "reward": reward(prompt_id, self._tokenizer.decode(tokens, skip_special_tokens=True)),
                    "prompt_tokens": prompts[ordinal], "completion_tokens": tokens,
                }
            )  # fmt: skip
        write_rows(rows, features, self._folder / f"step-{self._step:04d}.parquet")
        return max(errors)

    def _keep_record(self, record: dict[str, Any]) -> None:
        """Write a step's line, once its reward is known, and print it."""
        # The first step of a process: caches fill, and the drafter has no history.
        line = record | {"is_first": len(self.records) == 1}
        with self._steps_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{line['step']:4d}", *(f"{line['seconds'][way]:7.1f}" for way in WAYS),
            f"{line['identical']:6d}/{line['rollouts']:<4d} {line['tokens_per_step']:9.2f} {line['reward']:10.3f}",
            flush=True,
        )  # fmt: skip


def read_steps(out_dir: Path) -> list[dict[str, Any]]:
    """The lines of `steps.jsonl`; of steps that a resumed run repeated, the last."""
    lines = [json.loads(line) for line in (out_dir / STEPS_FILE).read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def train(model_dir: Path, out_dir: Path, steps: int) -> None:
    """Train, from the last checkpoint in `out_dir` if there is one.

    Args:
        model_dir: The warmed-up policy.
        out_dir: Gets TRL's checkpoints (one per epoch, and the last), rollouts and `steps.jsonl`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    problems = training_problems()
    engine = {"dtype": "float32", "enforce_eager": True, "use_tqdm_on_load": False}
    max_num_seqs = PROMPTS_PER_STEP * GROUP_SIZE

    generator = RecordingGenerator(
        out_dir,
        {tuple(prompt_token_ids(tokenizer, problem.question)): problem for problem in problems},
        tokenizer,
        {"model": str(model_dir), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs, **engine},
        llm_kwargs=engine,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
    )

    def correct(completions: list[Any], prompt_id: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [reward(*pair) for pair in zip(prompt_id, texts, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=correct,
        train_dataset=Dataset.from_list([
            {"prompt": [{"role": "user", "content": problem.question}], "prompt_id": problem.prompt_id}
            for problem in problems
        ]),
        args=GRPOConfig(  # bf16 of the training alone: both engines compute in float32
            output_dir=str(out_dir), use_cpu=True, bf16=True, seed=0, max_steps=steps,
            per_device_train_batch_size=ROLLOUTS_PER_BACKWARD,
            gradient_accumulation_steps=max_num_seqs // ROLLOUTS_PER_BACKWARD, gradient_checkpointing=False,
            num_generations=GROUP_SIZE, max_completion_length=MAX_COMPLETION_TOKENS, temperature=TEMPERATURE,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=0.0, use_vllm=True, vllm_mode="colocate",
            vllm_gpu_memory_utilization=GPU_MEMORY_UTILIZATION, vllm_max_model_length=MAX_MODEL_LEN, logging_steps=1,
            save_steps=STEPS_PER_EPOCH, report_to="none", disable_tqdm=True,
        ),
        callbacks=[generator],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    print("step  stock s   off s    on s  identical  tokens/step  reward")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out_dir) if out_dir.exists() else None)
