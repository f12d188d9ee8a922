"""Rollouts of saved policies at several temperatures in bfloat16, with speculation off and on, recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.demo.paired import GPU_MEMORY_UTILIZATION, first_difference
from experiments.engines.build import build_engine, command
from experiments.real_policy.grpo import MAX_MODEL_LEN, NUM_SPECULATIVE_TOKENS
from experiments.real_policy.recording import compute_features, row_of, write_rows
from experiments.real_policy.tasks import TASKS, Problem, reward
from experiments.real_policy.warm_up import prompt_token_ids
from rollout_spec.noise.host import derive_seed
from rollout_spec.stats import SpeculationStats

PROMPTS_PER_TASK = 2
MAX_NUM_SEQS = 24


class SampleSet(NamedTuple):
    """What is sampled of each prompt."""

    step: int
    """The policy's: weight updates."""
    temperature: float
    num_samples: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"samples-step{self.step:04d}-t{self.temperature:g}"


def sampled_problems(problems: list[Problem]) -> list[Problem]:
    """The first few problems of each task that are not held."""
    chosen = []
    for task in TASKS:
        chosen += [problem for problem in problems if problem.task == task and not problem.held][:PROMPTS_PER_TASK]
    return chosen


def sample(
    model_dir: Path, out_dir: Path, what: SampleSet, problems: list[Problem], max_completion_tokens: int
) -> dict[str, Any]:
    """Write OUT_DIR/<name>.parquet, and how rollouts with speculation on differ from those without to <name>.json.

    The rollouts that are kept are those without speculation. Their features come from a float32 pass of the same
    weights, so that near ties may be decided otherwise than by the top log-probabilities and the noise.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams

    # All drafts are verified: in bfloat16 it is the number of tokens in a step that changes its logits.
    llm = build_engine(
        model_dir, "all", NUM_SPECULATIVE_TOKENS, dtype="bfloat16", max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS, gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    requests = [(problem, number) for problem in problems for number in range(what.num_samples)]
    prompts = [prompt_token_ids(tokenizer, problem.question) for problem, _ in requests]
    params = [
        SamplingParams(
            temperature=what.temperature,
            max_tokens=max_completion_tokens,
            seed=derive_seed("real_policy", what.step, what.temperature.hex(), problem.prompt_id, number),
        )
        for problem, number in requests
    ]
    rollouts = {}
    for speculation in (False, True):
        command(llm, "set_enabled", speculation)
        before = command(llm, "stats")
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        rollouts[speculation] = [list(output.outputs[0].token_ids) for output in outputs]
    stats = SpeculationStats.between(before, command(llm, "stats"))

    differences = [first_difference(*pair) for pair in zip(rollouts[False], rollouts[True], strict=True)]
    positions = sorted(position for position in differences if position is not None)
    compared = sum(
        len(tokens) if position is None else position + 1
        for tokens, position in zip(rollouts[False], differences, strict=True)
    )
    result = {
        "step": what.step,
        "temperature": what.temperature,
        "rollouts": len(requests),
        "identical": len(requests) - len(positions),
        "first_differences": positions,
        "differences_per_token": len(positions) / compared,
        "tokens_per_step": stats.tokens_per_step,
    }
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    features = compute_features(model, prompts, rollouts[False], what.temperature)
    rows = [
        row_of(
            found,
            prompt_id=problem.prompt_id,
            sample_id=number,
            epoch=0,
            step=what.step,
            seed=p.seed,
            temperature=what.temperature,
            reward=reward(problem.prompt_id, tokenizer.decode(tokens, skip_special_tokens=True)),
            prompt_tokens=prompt,
            completion_tokens=tokens,
        )
        for (problem, number), p, prompt, tokens, found in zip(
            requests, params, prompts, rollouts[False], features, strict=True
        )
    ]
    (out_dir / f"{what.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    write_rows(rows, out_dir / f"{what.name}.parquet")  # last: its presence says that the set is complete
    return result
