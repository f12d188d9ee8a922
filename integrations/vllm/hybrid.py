"""vLLM's own drafters with a model (draft models, EAGLE heads, MTP layers), beside history.

Such a drafter is configured as in vLLM, by `speculative_config`. It keeps its KV cache as ever, but draws its tokens
with the target's noise, and a step verifies for each request the draft of which more is expected to be accepted.

In every step the model drafts, then the device drafter; kernels compare both last drafts with the sampled tokens, and
choose. Nothing waits for the device, and scheduling stays asynchronous.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout_spec.drafters.device.choice import DeviceChoice
from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.engine_v2 import EngineV2
from rollout_spec.integrations.vllm.ranks import broadcasting_from_first_rank
from rollout_spec.verify import kernel
from rollout_spec.verify.api import draw


def make_model_speculator(inner: Any) -> Any:
    """`inner`, vLLM's speculator, as a `ModelSpeculator` that is still an instance of its class: vLLM's runner asks."""
    joint: Any = type(f"Coupled{type(inner).__name__}", (ModelSpeculator, type(inner)), {})
    speculator = joint.__new__(joint)
    speculator.__dict__ = inner.__dict__
    return speculator


class ModelSpeculator:
    """What is put before the class of vLLM's speculator.

    Attributes:
        num_speculative_tokens: K, the most tokens drafted per request and step.
        num_speculative_steps: vLLM's name for how many tokens the model drafts.
        draft_token_confidence_probs: float32 [B, K], for vLLM's adaptive verification.
    """

    def attach(self, engine: EngineV2) -> None:
        """Called when the engine is made, in place of a constructor."""
        config, device = engine.config, engine.confidences.device
        assert engine.session is not None
        self._engine, self._session = engine, engine.session
        self.num_speculative_tokens = config.max_draft_tokens
        self.num_speculative_steps = config.num_model_draft_tokens
        self._has_room = self.num_speculative_steps < self.num_speculative_tokens
        self._probabilities = torch.ones_like(engine.confidences)
        self.draft_token_confidence_probs = engine.confidences
        num_slots, k = engine.confidences.shape
        self._choice = DeviceChoice(num_slots, k, self.num_speculative_steps, device)
        self._session.choice = self._choice
        # Ranks round sums differently, and must choose the same draft, and cut it after as many tokens.
        self._from_first_rank = broadcasting_from_first_rank(engine._runner.vllm_config, device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """As vLLM's, with K + 1 tokens per request, as the target has, in the first of the model's passes."""
        num_model = self.num_speculative_steps
        self.num_speculative_steps = self.num_speculative_tokens
        try:
            super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
        finally:
            self.num_speculative_steps = num_model
        compat.limit_draft_graphs(self, num_model)

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: Any,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """Draw the next drafted token of each request, int64 [B]. May be captured in a CUDA graph.

        Args:
            hidden_states: float [B, hidden size].
            positions: Not used: releases of vLLM differ in what they mean.
            idx_mapping: int32 [B], each request's index; -1 for padding.
            temperature, seeds: float32 and int64 [requests], by index.
            draft_step: int64 scalar on the device, how many tokens have been drafted.
            draft_logits: Not used: always None.
            spec_step_idx: From vLLM 0.32 on the step as a number, by which some models choose their module.
        """
        if self._engine.config.verify != "sample":
            step = compat.draft_step_argument(self, spec_step_idx)
            return super().sample_draft(  # type: ignore[misc,no-any-return]
                hidden_states, positions, idx_mapping, temperature, seeds, draft_step, draft_logits, **step
            )
        logits = compat.draft_logits_of(self, hidden_states, spec_step_idx)
        index = idx_mapping.clamp(min=0).long()
        next_positions = self._engine.slots().lengths[index].long() - 1 + draft_step
        noise = temperature[index], seeds[index], next_positions
        tokens, probabilities = draw(logits, *noise, verify_rows=kernel.verify_rows)
        self._probabilities[: tokens.shape[0]].index_copy_(1, draft_step.view(1), probabilities[:, None])
        return tokens

    def observe_verification(self, *args: Any) -> None:
        """Nothing to do: `_choice` keeps our estimates of acceptance."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft for the next step: int64 [B, K]. See vLLM for the arguments."""
        num_model = self.num_speculative_steps
        if "num_speculative_tokens" in kwargs:  # from vLLM 0.32 on: as many as the next step will verify
            num_model = kwargs["num_speculative_tokens"] = min(num_model, kwargs["num_speculative_tokens"])
        state = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, *args
        model = super().propose(*state, dummy_run=dummy_run, **kwargs)  # type: ignore[misc]
        num_requests, slots, engine = input_batch.num_reqs, input_batch.idx_mapping, self._engine
        if dummy_run or engine.warming_up:  # nothing is sampled; compiles what will be called
            num_sampled = torch.zeros(num_requests, dtype=torch.int32, device=slots.device)
            num_given = self.num_speculative_steps if self._has_room else 0
            history = engine.propose_made_up(input_batch, num_given_tokens=num_given)
        else:
            history = engine.draft(input_batch, num_sampled) or engine.no_drafts(num_requests)
        if not self._session.enabled:
            self.draft_token_confidence_probs[:num_requests] = 0
            return history[0]
        drafts, rates = map(self._from_first_rank, self._choose(slots, num_sampled, history, model[:, :num_model]))
        self.draft_token_confidence_probs[:num_requests] = rates
        return drafts

    def _choose(
        self,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
        history: tuple[torch.Tensor, torch.Tensor],
        model: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The better draft for each request and its rates, int64 and float32 [B, K].

        A model's draft that has room is continued by history.

        Args:
            history: Its drafts and their rates, int64 and float32 [B, K].
            model: int64 [B, M].
        """
        of_slots, num_model = self._engine.slots(), model.shape[1]
        of_model = model, self._probabilities
        drafts, rates, is_model = self._choice.choose(slots, num_sampled, of_slots, history, of_model)
        # By `num_speculative_tokens_per_batch_size` a step may verify fewer tokens than the model can draft.
        if self._has_room and num_model == self.num_speculative_steps:
            rest = self._session.drafter.continue_drafts(slots, is_model, model, of_slots)
            for values, continued in zip((drafts, rates), rest, strict=True):
                values[:, num_model:] = torch.where(is_model[:, None] > 0, continued, values[:, num_model:])
        return drafts, rates
