"""vLLM's own drafters with a model in the V1 runner, drawing their tokens with the target's noise.

vLLM's runner goes on to call its drafter, which keeps its KV cache as ever. Only the choice of each drafted token is
replaced, and how many are drafted. Once vLLM has recorded a step's tokens, `RunnerAdapterV1` joins these drafts
with those of history, per request and of any length, and leaves the result where vLLM looks for its drafter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.model.choice import ModelDrafts
from rollout_spec.integrations.vllm.configuration import has_model_drafter
from rollout_spec.integrations.vllm.device_io import HostCopy
from rollout_spec.integrations.vllm.ranks import broadcasting_from_first_rank
from rollout_spec.verify.draw import draw


class _Noise(NamedTuple):
    """What decides a step's drafts, of all requests of the batch."""

    temperature: torch.Tensor  # float32 [B]
    seeds: torch.Tensor  # int64 [B]
    positions: torch.Tensor  # int64 [B], input positions of the target's next rows


class ModelDrafter:
    """One of vLLM's drafters with a model, whose choices are replaced.

    Attributes:
        num_model_tokens: How many tokens it drafts.
        wants_model: Says for a number of requests whether the model shall draft; otherwise it only makes its first
            pass, so that its KV cache has no gaps.

    Args:
        proposer: vLLM's `EagleProposer` or `DraftModelProposer`, or one that is derived from the same class.
        runner: The `GPUModelRunner` that calls it.
    """

    def __init__(self, proposer: Any, runner: Any, config: RolloutSpecConfig) -> None:
        self.wants_model: Callable[[int], bool] = lambda num_requests: True
        self.num_model_tokens = config.num_model_draft_tokens
        self._is_coupled = config.verify == "sample"
        self._proposer = proposer
        self._runner = runner
        self._noise: _Noise | None = None
        self._probabilities: list[torch.Tensor] = []  # of the tokens drafted so far
        self._copy: HostCopy | None = None
        # Engines that share experts must make equally many passes in every step, also those without requests.
        self._always_drafts = runner.vllm_config.parallel_config.data_parallel_size > 1
        proposer.num_speculative_tokens = self.num_model_tokens  # of its dummy runs
        # Ranks round sums differently, and must choose the same draft.
        self._from_first_rank = broadcasting_from_first_rank(runner.vllm_config, runner.device)
        self._propose, proposer.propose = proposer.propose, self.propose
        if self._is_coupled:
            proposer._sample_draft_tokens = self._draw

    def begin_step(self, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
        """Called when a step has sampled, before the model drafts; see `_Noise`."""
        self._noise, self._copy = _Noise(temperature, seeds, positions), None

    def propose(self, *args: Any, num_speculative_tokens: int, **kwargs: Any) -> torch.Tensor:
        """vLLM's `propose`: token ids [B, tokens], of at most so many tokens as the model shall draft."""
        self._probabilities = []
        wanted = self._always_drafts or self.wants_model(len(self._runner.input_batch.req_ids))
        limit = min(num_speculative_tokens, self.num_model_tokens) if wanted else 0
        tokens: torch.Tensor = self._propose(*args, num_speculative_tokens=limit, **kwargs)
        if limit == 0:
            return tokens
        if self._is_coupled and self._probabilities:
            probabilities = torch.stack(self._probabilities, 1)
        else:
            probabilities = torch.ones_like(tokens, dtype=torch.float32)
        both = self._from_first_rank(torch.stack((tokens.long(), probabilities.view(torch.int32).long())))
        self._copy = HostCopy((both[0], both[1]))
        return tokens

    def take(self, num_requests: int) -> ModelDrafts | None:
        """What was drafted in this step for all requests of the batch; None if nothing was. Waits for the device."""
        copy, self._copy = self._copy, None
        if copy is None:
            return None
        tokens, probabilities = copy.read()
        shape = num_requests, tokens.size // num_requests
        values = probabilities.astype(np.int32).view(np.float32)
        return ModelDrafts(tokens.astype(np.int32).reshape(shape), values.reshape(shape))

    def _draw(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """In place of vLLM's `_sample_draft_tokens`: (token ids [B], no probabilities for vLLM)."""
        assert self._noise is not None
        logits = self._proposer.model.compute_logits(hidden_states)
        temperature, seeds, positions = self._noise
        tokens, probabilities = draw(logits, temperature, seeds, positions + len(self._probabilities))
        self._probabilities.append(probabilities)
        return tokens, None


def find_model_drafter(runner: Any, config: RolloutSpecConfig) -> ModelDrafter | None:
    """The runner's drafter with a model, taken over; None if it has none."""
    if not config.speculation or not has_model_drafter(runner.vllm_config):
        return None
    drafter = getattr(runner, "drafter", None)  # only the last pipeline rank has one
    return None if drafter is None else ModelDrafter(drafter, runner, config)
