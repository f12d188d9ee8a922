"""Speculation in TRL's PPOTrainer, which TRL had up to 1.12.0: `PPOTrainer(..., callbacks=[RolloutSpecGenerator()])`.

PPOTrainer has no vLLM engine. All its generations come from one function of its module, which uses transformers and
returns logits. `hook` gives each trainer that has a `RolloutSpecGenerator` an engine and lets that function ask it.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from trl.trainer.utils import ensure_master_addr_port
from vllm import LLM, SamplingParams

from rollout_spec.integrations.trainers.trl import RolloutSpecGenerator, generator_of

_rollouts: weakref.WeakValueDictionary[int, PPORollouts] = weakref.WeakValueDictionary()
"""By the id of their policy. Their trainers keep them."""


def hook(module: Any) -> None:
    """Let the trainers of `trl.experimental.ppo.ppo_trainer` that have a `RolloutSpecGenerator` generate with vLLM."""
    construct, generate = module.PPOTrainer.__init__, module.batch_generation
    complete = module.PPOTrainer.generate_completions

    @functools.wraps(construct)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        construct(trainer, *args, **kwargs)
        generator = generator_of(trainer)
        if generator is not None:
            rollouts = _rollouts[id(trainer.policy_model)] = PPORollouts(trainer, generator)
            trainer.add_callback(rollouts)

    @functools.wraps(generate)
    def batch_generation(model: Any, queries: Any, batch_size: int, pad_token_id: int, generation_config: Any) -> Any:
        rollouts = _rollouts.get(id(model))  # which keep their policy, so that no other model has its id
        if rollouts is None:
            return generate(model, queries, batch_size, pad_token_id, generation_config)
        return rollouts.generate(queries, pad_token_id, generation_config)

    @functools.wraps(complete)
    def generate_completions(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        generator = generator_of(trainer)
        if generator is None:
            return complete(trainer, *args, **kwargs)
        generator.evaluating = True  # PPOTrainer leaves its policy in training mode
        try:
            return complete(trainer, *args, **kwargs)
        finally:
            generator.evaluating = False

    module.PPOTrainer.__init__ = init
    module.PPOTrainer.generate_completions = generate_completions
    module.batch_generation = batch_generation


class PPORollouts(TrainerCallback):
    """The rollouts of one PPOTrainer, from an engine in each of its processes."""

    def __init__(self, trainer: Any, generator: RolloutSpecGenerator) -> None:
        self.policy = trainer.policy_model
        self._trainer, self._generator = trainer, generator
        self._step: int | None = None  # at which the engine got its weights
        args, accelerator = trainer.args, trainer.accelerator
        if trainer.is_peft_model or trainer.is_fsdp_enabled:
            raise ValueError("RolloutSpecGenerator takes PPOTrainer's weights without PEFT and without FSDP only")
        if generator.engine_kwargs({}).get("tensor_parallel_size", 1) > 1:
            raise ValueError("each process of PPOTrainer has an engine of its own: leave out tensor_parallel_size")
        rank, local_rank = accelerator.process_index, accelerator.local_process_index
        autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
        generator.begin_run(seed=args.seed, replica=rank, model=self.policy, autocast_dtype=autocast)
        # vLLM's "external_launcher" takes the process's place from the environment, and keeps the model in the process.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(accelerator.num_processes))
        ensure_master_addr_port()
        generator.build_engine(
            LLM.__init__,
            object.__new__(LLM),
            model=self.policy.name_or_path,
            dtype=autocast or str(self.policy.dtype).removeprefix("torch."),
            gpu_memory_utilization=0.3,  # the models that are trained need the rest
            max_num_seqs=args.local_batch_size,
            max_num_batched_tokens=4096,
            distributed_executor_backend="external_launcher",
            seed=trainer.local_seed,  # vLLM seeds the process
            logprobs_mode="processed_logprobs",  # at the sampling temperature, as PPOTrainer computes them, too
        )
        torch.manual_seed(trainer.local_seed)  # as PPOTrainer's constructor left it

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a training, whose steps count from 0 again."""
        self._step = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise a RuntimeError if the step's rollouts did not come from the engine."""
        if self._step != state.global_step - 1:
            raise RuntimeError("the rollouts did not come from the engine: train() must ask batch_generation for them")

    def generate(self, queries: torch.Tensor, pad_token_id: int, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the engine for what `batch_generation` returns. It gets the policy's weights first, once per step.

        Args:
            queries: int64 [B, L], padded with `pad_token_id`, which PPOTrainer's forward pass masks wherever it is.
            config: transformers' `GenerationConfig`.

        Returns:
            (queries and padded responses, int64 [B, L + T]; logits of the responses, float32 [B, T, vocabulary]).
        """
        llm, step = self._generator.llm, self._trainer.state.global_step
        if step != self._step:
            self._generator.begin_step(step)
            model = llm.llm_engine.model_executor.driver_worker.model_runner.model
            model.load_weights((name, parameter.data) for name, parameter in self.policy.named_parameters())
            llm.reset_prefix_cache()
            self._step = step
        # As in transformers, the policy's own settings decide what the call leaves open.
        asked = {**self.policy.generation_config.to_diff_dict(), **config.to_diff_dict()}
        stop = asked.get("eos_token_id", [])  # PPOTrainer's stop token; without one, rollouts go on after an end
        params = SamplingParams(
            temperature=asked.get("temperature", 1.0) if asked.get("do_sample") else 0.0,
            **{name: asked[name] for name in ("top_p", "min_p", "repetition_penalty") if name in asked},
            top_k=int(asked.get("top_k", 50) or 0),  # transformers' default is 50
            max_tokens=config.max_new_tokens,
            stop_token_ids=[stop] if isinstance(stop, int) else stop,
            ignore_eos=True,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": query[query != pad_token_id].tolist()} for query in queries]
        longest = llm.llm_engine.vllm_config.model_config.max_model_len - config.max_new_tokens
        if any(len(prompt["prompt_token_ids"]) > longest for prompt in prompts):
            raise ValueError(f"max_model_len leaves {longest} tokens for a query, too few: raise it in llm_kwargs")
        completions = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        scores = [[entry[t].logprob for entry, t in zip(c.logprobs, c.token_ids, strict=True)] for c in completions]
        responses = pad_sequence([torch.tensor(list(c.token_ids)) for c in completions], True, pad_token_id)
        responses = responses.to(queries.device)
        logprobs = pad_sequence([torch.tensor(row) for row in scores], True).to(queries.device)
        return torch.cat((queries, responses), 1), logits_from(logprobs, responses, self.policy.config.vocab_size)


def logits_from(logprobs: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits, float32 [B, T, vocab_size], whose log-softmax at `token_ids` [B, T] is `logprobs`, float32 [B, T].

    One other token gets the rest of the probability: PPOTrainer reads the log-softmax at `token_ids` and nothing else.
    """
    logprobs = logprobs.clamp(max=0.0)  # rounding may have put them above
    logits = torch.full((*token_ids.shape, vocab_size), -math.inf, device=logprobs.device)
    logits.scatter_(-1, token_ids[..., None], logprobs[..., None])
    rest = torch.log(-torch.expm1(logprobs))
    return logits.scatter_(-1, ((token_ids + 1) % vocab_size)[..., None], rest[..., None])
