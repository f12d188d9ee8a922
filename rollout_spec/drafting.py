"""Drafts for a batch of requests, step by step: the host's side of speculation, around any engine.

vLLM's model runners, `loop.py` and the tests run this same code. The engine gives each step's tokens where it keeps
them, and gets the drafts of the next step. What a step does is in `drafters/host/step.py`.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.drafters.base import BatchDrafter, Drafter, as_batch_drafter
from rollout_spec.drafters.host import step
from rollout_spec.drafters.host.requests import UNLIMITED
from rollout_spec.drafters.host.step import Learned, Sampled, StepOptions
from rollout_spec.types import Drafts

NO_COST = np.zeros(0)
"""For `decide` where there is no budget: all of each draft is verified."""


class Drafting:
    """A drafter and its budget. For each step call `learn`, then `draft`.

    Attributes:
        drafter: Names the requests' rows, in `drafter.table`.
        is_batched: Whether the drafter is one for batches (`BatchDrafter`), and not one that is called one by one.
        budget: Decides how much of each draft is verified. None: all of it.
        wants_rejected_targets: Whether what the target samples after a rejected draft is of use to the drafter.
        num_asked: For how many requests the drafter was asked in this step.
        seconds: What that took, the budget's decision included.

    Args:
        num_speculative_tokens: K, the most tokens drafted per request and step.
        max_model_len: Most tokens of a request, prompt and output.
        vocab_size: Of the target; other tokens cannot be verified.
        max_step_tokens: Most tokens of a step, drafts included, which only a budget heeds.
        index_late: Index tokens in the drafter's `update_index`, not in `learn`: drafts find them a step later.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_speculative_tokens: int,
        *,
        max_model_len: int,
        vocab_size: int,
        max_step_tokens: int = UNLIMITED,
        budget: Budget | None = None,
        index_late: bool = False,
    ) -> None:
        self.drafter: BatchDrafter = as_batch_drafter(drafter, num_speculative_tokens)
        self.is_batched = self.drafter is drafter
        self.budget = budget
        self.wants_rejected_targets = bool(getattr(self.drafter, "wants_rejected_targets", False))
        self.num_asked, self.seconds = 0, 0.0
        self._num_speculative_tokens = num_speculative_tokens
        self._vocab_size, self._max_step_tokens = vocab_size, max_step_tokens
        self._options = StepOptions(num_speculative_tokens, max_model_len, not index_late)

    def learn(self, sampled: Sampled, targets: NDArray[np.int64] | None = None) -> Learned:
        """Learn what a step sampled; see `BatchDrafter.learn_step`.

        Raises:
            Exception: what the drafter raises, here and in `draft`.
        """
        learned = self.drafter.learn_step(sampled, targets, self._options)
        if self.budget is not None and not self.is_batched:
            self.budget.observe_drafts(learned.expected, learned.num_accepted)
        return learned

    def draft(self, rows: NDArray[np.int64], limits: NDArray[np.int64], *, num_tokens: int) -> Drafts:
        """Draft for the next step, where that pays.

        Args:
            rows: int64 [B], the requests.
            limits: int64 [B], see `Learned`.
            num_tokens: Tokens that the next step computes without drafts: one per request, and those of prompts.

        Returns:
            Drafts [B, K], cut to what is worth verifying.

        Raises:
            ValueError: the drafter, which may be a user's own, proposes drafts that cannot be verified.
        """
        chosen = np.flatnonzero(limits)
        drafts = self.no_drafts(rows.size)
        is_wanted = chosen.size > 0 and (self.budget is None or self.budget.wants_drafts(num_tokens))
        self.num_asked, self.seconds = chosen.size if is_wanted else 0, 0.0
        if not is_wanted:
            return drafts
        started = time.perf_counter()
        if chosen.size < rows.size:
            rows, limits = rows[chosen], limits[chosen]
        self.drafter.propose_rows(rows, limits)
        trust, value, cost = 1.0, 0.0, NO_COST
        if self.budget is not None:
            most = min(drafts.token_ids.size, self._max_step_tokens - num_tokens)
            value, cost = self.budget.costs(rows.size, num_tokens, max(most, 0))
            trust = self.budget.trust
        are_valid, gain = step.decide(
            self.drafter.table.reference, rows, limits, chosen, self._vocab_size, trust, value, cost, *drafts
        )
        if not are_valid:
            lengths, tokens, confidence = (field[rows].tolist() for field in self.drafter.table.arrays.history[:3])
            raise ValueError(
                f"drafts cannot be verified: {lengths} tokens where {limits.tolist()} were asked for, {tokens} in a "
                f"vocabulary of {self._vocab_size}, or {confidence} as their probabilities"
            )
        if self.budget is not None:
            self.budget.note(rows.size, gain)
        self.seconds = time.perf_counter() - started
        return drafts

    def no_drafts(self, size: int) -> Drafts:
        """Empty drafts for `size` requests."""
        shape = (size, self._num_speculative_tokens)
        return Drafts(np.zeros(shape, np.int32), np.zeros(size, np.int64))
