"""TRL's GRPO on the warmed-up model; every step's rollouts are generated three ways and recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.paired import GPU_MEMORY_UTILIZATION, PairedGenerator
from experiments.real_policy.recording import compute_features, row_of, write_rows
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
STEPS_FILE = "steps.jsonl"


def training_problems(prompts_per_task: int = PROMPTS_PER_TASK) -> list[Problem]:
    """The problems that GRPO trains on."""
    return [make_problem(task, STREAM, number) for task in TASKS for number in range(prompts_per_task)]


def steps_per_epoch(prompts_per_task: int) -> int:
    """GRPO steps of an epoch, in which each problem is sampled once; a rest that does not fill a step is left out."""
    return prompts_per_task * len(TASKS) // PROMPTS_PER_STEP


class RecordingGenerator(PairedGenerator):
    """Generates three ways, writes the rollouts with their features and a line about the step.

    Args:
        out_dir: Gets `rollouts/step-0000.parquet` and so on, and `steps.jsonl`.
        problems: By prompt token ids.
        tokenizer: Decodes rollouts for the reward.
        steps_per_epoch: Of the training.
        stock: See `PairedGenerator`.
        on_record: Called with each step's line.
        **options: See `RolloutSpecGenerator`.
    """

    def __init__(
        self,
        out_dir: Path,
        problems: dict[tuple[int, ...], Problem],
        tokenizer: Any,
        steps_per_epoch: int,
        stock: dict[str, Any],
        on_record: Callable[[dict[str, Any]], None],
        **options: Any,
    ) -> None:
        super().__init__(stock, self._keep_record, **options)
        self._folder = out_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._steps_file = out_dir / STEPS_FILE
        self._problems = problems
        self._tokenizer = tokenizer
        self._steps_per_epoch = steps_per_epoch
        self._report_line = on_record
        self._generating_seconds = 0.0
        self._recording_seconds = 0.0
        self._step_started = 0.0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate three ways, and take the time of it all: loading weights and recording, too."""
        started = time.perf_counter()
        outputs = super().generate(*args, **kwargs)
        self._generating_seconds = time.perf_counter() - started
        return outputs

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        super().on_step_begin(*args, **kwargs)
        self._step_started = time.perf_counter()

    def examine(self, outputs: Sequence[Any], sampling_params: Sequence[Any]) -> float:
        """Write the rollouts with their features, which come from float32 passes of the trainer's weights.

        Returns:
            Largest |engine - these passes| of the rollouts' log-probabilities.
        """
        started = time.perf_counter()
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
                row_of(
                    found,
                    prompt_id=prompt_id,
                    sample_id=ordinal % GROUP_SIZE,
                    epoch=self._step // self._steps_per_epoch,
                    step=self._step,
                    seed=params.seed,
                    temperature=TEMPERATURE,
                    reward=reward(prompt_id, self._tokenizer.decode(tokens, skip_special_tokens=True)),
                    prompt_tokens=prompts[ordinal],
                    completion_tokens=tokens,
                )
            )
        write_rows(rows, self._folder / f"step-{self._step:04d}.parquet")
        self._recording_seconds = time.perf_counter() - started
        return max(errors)

    def _keep_record(self, record: dict[str, Any]) -> None:
        """Write a step's line, once its reward is known."""
        everything = time.perf_counter() - self._step_started
        line = record | {
            "recording_seconds": self._recording_seconds,
            "training_seconds": everything - self._generating_seconds,
            # The first one of a process: caches fill, and the drafter has no history.
            "is_first": len(self.records) == 1,
        }
        with self._steps_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._report_line(line)


def read_steps(out_dir: Path) -> list[dict[str, Any]]:
    """The lines of `steps.jsonl`; of steps that a resumed run repeated, the last."""
    lines = [json.loads(line) for line in (out_dir / STEPS_FILE).read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def train(
    model_dir: Path,
    out_dir: Path,
    *,
    steps: int = STEPS,
    prompts_per_task: int = PROMPTS_PER_TASK,
    max_completion_tokens: int = MAX_COMPLETION_TOKENS,
    seed: int = 0,
    on_record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> None:
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
    problems = training_problems(prompts_per_task)
    epoch_steps = steps_per_epoch(prompts_per_task)
    engine = {"dtype": "float32", "enforce_eager": True, "use_tqdm_on_load": False}
    max_num_seqs = PROMPTS_PER_STEP * GROUP_SIZE

    generator = RecordingGenerator(
        out_dir,
        {tuple(prompt_token_ids(tokenizer, problem.question)): problem for problem in problems},
        tokenizer,
        epoch_steps,
        {"model": str(model_dir), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs, **engine},
        on_record,
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
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": problem.question}], "prompt_id": problem.prompt_id}
                for problem in problems
            ]
        ),
        args=GRPOConfig(
            output_dir=str(out_dir),
            use_cpu=True,
            bf16=True,  # of the training alone: both engines compute in float32
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=ROLLOUTS_PER_BACKWARD,
            gradient_accumulation_steps=max_num_seqs // ROLLOUTS_PER_BACKWARD,
            gradient_checkpointing=False,
            num_generations=GROUP_SIZE,
            max_completion_length=max_completion_tokens,
            temperature=TEMPERATURE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
            vllm_max_model_length=MAX_MODEL_LEN,
            logging_steps=1,
            save_steps=epoch_steps,
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[generator],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out_dir) if out_dir.exists() else None)
