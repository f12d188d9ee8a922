"""TRL trainers of the tiny model, and a callback that generates everything twice."""

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_spec import RolloutSpecGenerator
from rollout_spec.integrations.vllm.requests import without_history
from tests.integrations.engines import every_draft

FP32 = {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 300}
ENGINES = []
"""Keeps every trainer's engine alive; see `tests.integrations.engines.ENGINES`."""


def reward_short(completions, **_):
    """A reward that depends on what is said; in a module of its own, for trainers that reward in another process."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [1 - len(text.split()) / 24 + ("w1" in text) for text in texts]


class Compared(RolloutSpecGenerator):
    """Generates every batch again with drafting switched off, which must give the same tokens and log-probabilities.

    Attributes:
        generations: Per call of the engine, its sampling parameters and outputs.
    """

    def __init__(self, **options):
        super().__init__(**{"llm_kwargs": FP32, "budget": False, **every_draft(4), **options})
        self.generations = []

    def generate(self, prompts, sampling_params, *args, **kwargs):
        outputs = super().generate(prompts, sampling_params, *args, **kwargs)
        self.enabled = False
        plain = [params.clone() for params in sampling_params]
        for params in plain:  # what is sampled again leaves no history
            params.extra_args = without_history(params.extra_args)
        again = super().generate(prompts, plain, *args, **kwargs)
        self.enabled = True
        for ours, plain in zip(outputs, again, strict=True):
            for a, b in zip(ours.outputs, plain.outputs, strict=True):
                assert list(a.token_ids) == list(b.token_ids)
                if a.logprobs is not None:
                    for x, y in zip(a.logprobs, b.logprobs, strict=True):
                        assert x.keys() == y.keys()
                        assert all(abs(x[token].logprob - y[token].logprob) < 1e-4 for token in x)
        self.generations.append((sampling_params, outputs))
        return outputs

    @property
    def rollouts(self):
        """Tokens of every rollout, in the order in which they were asked for."""
        return [
            list(completion.token_ids)
            for _, outputs in self.generations
            for output in outputs
            for completion in output.outputs
        ]


def make_trainer(model_path, tmp_path, callbacks, trainer=None, config=None, arguments=None, **kwargs):
    """A trainer with two prompts.

    Args:
        trainer, config: None: those of GRPO, which TRL 1.12 cannot import with every vLLM that its PPO runs with.
        arguments: More of the trainer's, by name; in place of ours where both are given. None removes ours.
        **kwargs: Fields of its configuration, likewise.
    """
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-2,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    ours = {
        "model": AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        "reward_funcs": reward_short,
        "train_dataset": Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"]}),
    }
    arguments, fields = (
        {name: value for name, value in given.items() if value is not None}
        for given in ({**ours, **(arguments or {})}, {**defaults, **kwargs})
    )
    trainer, config = trainer or trl.GRPOTrainer, config or trl.GRPOConfig
    made = trainer(args=config(**fields), callbacks=callbacks, **arguments)
    ENGINES.extend(callback.llm for callback in callbacks if isinstance(callback, RolloutSpecGenerator))
    return made
