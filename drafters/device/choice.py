"""Chooses, per request and step, between the draft of history and that of a model drafter.

Both drafts are made in every step, and the one is verified of which more tokens are expected to be accepted. How many
that is follows from what became of earlier drafts: history's confidence is calibrated by its drafter, and here are the
rates at which a model's drafted tokens were right, by their place in the draft, by the probability that the model gave
them, and by whether the request is sampled or greedy. Both drafts are compared with the tokens that the request kept,
whichever was verified, so that a drafter which is not chosen for a while can be chosen again.

The first kernel grades the model's last drafts by the tokens that the requests kept; history's are graded by its own
drafter. The second chooses. They are two launches because every choice must see the same counters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.drafters.device import kernels
from rollout_spec.launches import Launcher, next_power_of_2

POSITION_EDGES = tl.constexpr((0, 1, 3))
"""Places in a draft share counters up to these: the first token, the second, the next two, and all after them."""
NUM_POSITION_BINS = tl.constexpr(4)
NUM_PROBABILITY_BINS = tl.constexpr(8)
"""Bins of equal width for the model's probability of its token."""
PRIOR = tl.constexpr(8.0)
"""Prior trials of a bin, at the rate of the model's own probability."""
STEPS_PER_HALVING = 64
"""Halve full counters once in this many steps."""


@triton.jit(do_not_specialize=["all_token_ids_stride"])
def _grade_kernel(
    slots_ptr,  # int32 [B]
    num_sampled_ptr,  # int32 [B], tokens of the last step
    all_token_ids_ptr,  # `EngineSlots.token_ids`
    all_token_ids_stride,
    total_len_ptr,  # `EngineSlots.lengths`
    last_len_ptr,  # int32 [R]: how many there were when the model drafted
    last_ptr,  # int32 [R, M]: its draft
    cells_ptr,  # int32 [R, M]
    counts_ptr,  # int32 [cells, 2], added to
    M: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least M
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + tl.program_id(0)).to(tl.int32)
    start = tl.load(total_len_ptr + slot).to(tl.int32) - num_sampled
    # With another length the last draft was another request's, or from before a pause.
    num_said = tl.where(tl.load(last_len_ptr + slot) == start, num_sampled, 0)
    j = tl.arange(0, WIDTH)
    reached = (j < M) & (j < num_said)
    token = tl.load(all_token_ids_ptr + slot * all_token_ids_stride + start + j, mask=reached, other=-1)
    drafted = tl.load(last_ptr + slot * M + j, mask=reached, other=-1)
    reached &= drafted >= 0
    first_miss = tl.min(tl.where(reached & (drafted != token), j, WIDTH), 0)
    reached &= j <= first_miss
    cell = tl.load(cells_ptr + slot * M + j, mask=reached, other=0)
    tl.atomic_add(counts_ptr + cell * 2, 1, mask=reached, sem="relaxed")
    right = reached & (j < first_miss)
    tl.atomic_add(counts_ptr + cell * 2 + 1, 1, mask=right, sem="relaxed")


@triton.jit(do_not_specialize=["model_stride", "probabilities_stride", "num_model"])
def _choose_kernel(
    slots_ptr,  # int32 [B]
    num_sampled_ptr,  # int32 [B]; 0, as for prompts not yet read to their end: nothing was drafted
    total_len_ptr,  # int32 [R]
    temperature_ptr,  # float32 [R]
    history_ptr,  # int64 [B, K]
    history_rates_ptr,  # float32 [B, K]
    model_ptr,  # int64 [B, num_model]
    model_stride,
    probabilities_ptr,  # float32 [B, num_model]
    probabilities_stride,
    num_model,
    counts_ptr,  # int32 [cells, 2]
    last_len_ptr,  # int32 [R], written, and all below
    last_ptr,  # int32 [R, M]
    cells_ptr,  # int32 [R, M]
    drafts_ptr,  # int64 [B, K]
    rates_ptr,  # float32 [B, K]
    is_model_ptr,  # int32 [B]
    K: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    j = tl.arange(0, WIDTH)
    is_drafted = j < tl.where(tl.load(num_sampled_ptr + row) > 0, num_model, 0)
    token = tl.load(model_ptr + row * model_stride + tl.minimum(j, tl.maximum(num_model - 1, 0)))
    p = tl.load(probabilities_ptr + row * probabilities_stride + j, mask=is_drafted, other=0.0)
    position_bin = tl.zeros([WIDTH], tl.int32)
    for n in tl.static_range(NUM_POSITION_BINS - 1):
        position_bin += (j > POSITION_EDGES[n]).to(tl.int32)
    probability_bin = tl.minimum((p * NUM_PROBABILITY_BINS).to(tl.int32), NUM_PROBABILITY_BINS - 1)
    is_sampled = (tl.load(temperature_ptr + slot) > 0.0).to(tl.int32)
    cell = (is_sampled * NUM_POSITION_BINS + position_bin) * NUM_PROBABILITY_BINS + probability_bin
    reached = tl.load(counts_ptr + cell * 2, mask=is_drafted, other=0).to(tl.float32)
    right = tl.load(counts_ptr + cell * 2 + 1, mask=is_drafted, other=0).to(tl.float32)
    rate = tl.where(is_drafted, (right + PRIOR * p) / (reached + PRIOR), 0.0)
    history_rate = tl.load(history_rates_ptr + row * K + j, mask=j < K, other=0.0)
    by_model = tl.sum(tl.cumprod(rate, 0), 0)
    by_history = tl.sum(tl.cumprod(history_rate, 0), 0)
    is_model = by_model > by_history
    tl.store(is_model_ptr + row, is_model.to(tl.int32))
    drafts = tl.where(is_model, token, tl.load(history_ptr + row * K + j, mask=j < K, other=0))
    tl.store(drafts_ptr + row * K + j, drafts, mask=j < K)
    tl.store(rates_ptr + row * K + j, tl.where(is_model, rate, history_rate), mask=j < K)
    tl.store(last_ptr + slot * M + j, tl.where(is_drafted, token, -1).to(tl.int32), mask=j < M)
    tl.store(cells_ptr + slot * M + j, cell, mask=j < M)
    tl.store(last_len_ptr + slot, tl.load(total_len_ptr + slot).to(tl.int32))


_launch_grade, _launch_choose = Launcher(_grade_kernel), Launcher(_choose_kernel)


class DeviceChoice:
    """Chooses between drafts for the requests of one engine, told apart by slot.

    Args:
        max_requests: Slots of the engine, R.
        num_history_tokens: K, the longest draft.
        num_model_tokens: M, the most tokens that the model drafts, at most K.
        device: Where the drafts are.
    """

    def __init__(self, max_requests: int, num_history_tokens: int, num_model_tokens: int, device: torch.device) -> None:
        def new(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.counts = new(2 * NUM_POSITION_BINS.value * NUM_PROBABILITY_BINS.value, 2)
        self._last = new(max_requests) - 1, new(max_requests, num_model_tokens), new(max_requests, num_model_tokens)
        self._k, self._m = num_history_tokens, num_model_tokens
        self._num_steps = 0

    def choose(
        self,
        slots: Tensor,
        num_sampled: Tensor,
        engine: kernels.EngineSlots,
        history: tuple[Tensor, Tensor],
        model: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Learn what became of the model's last drafts, and choose the better of two new ones for each request.

        Args:
            slots: int32 [B], the batch's slots.
            num_sampled: int32 [B], tokens of the last step; 0: the model drafted nothing.
            history: (tokens int64 [B, K], rates float32 [>= B, K]), as from `DeviceDrafter.propose`.
            model: (tokens int64 [B, up to M], probabilities float32 [>= B, >= as many]: the
                model's own, of each token once it is reached).

        Returns:
            (drafts int64 [B, K], rates float32 [B, K]: the estimated probability that each is accepted once reached,
            is_model int32 [B]: whether the draft is the model's). Positions after a model's draft repeat its last token
            and have rate 0.
        """
        tokens, probabilities = model
        batch, num_model = slots.shape[0], tokens.shape[1]
        texts = engine.token_ids, engine.token_ids.stride(0), engine.lengths
        _launch_grade[(batch,)](
            slots, num_sampled, *texts, *self._last, self.counts, M=self._m, WIDTH=next_power_of_2(self._m), num_warps=1
        )
        chosen = (
            torch.empty(batch, self._k, dtype=torch.int64, device=slots.device),
            torch.empty(batch, self._k, dtype=torch.float32, device=slots.device),
            torch.empty(batch, dtype=torch.int32, device=slots.device),
        )
        # Without a draft of the model's something is read as one, but nothing follows from it.
        of_model = tokens if num_model else history[0], tokens.stride(0), probabilities, probabilities.stride(0)
        arguments = slots, num_sampled, engine.lengths, engine.temperature, *history, *of_model, num_model, self.counts
        _launch_choose[(batch,)](
            *arguments, *self._last, *chosen, K=self._k, M=self._m, WIDTH=next_power_of_2(self._k), num_warps=1
        )
        self._num_steps += 1
        if self._num_steps % STEPS_PER_HALVING == 0:
            kernels.halve_full(self.counts)
        return chosen

    def model_counts(self) -> tuple[int, int]:
        """(drafted tokens of the model that were reached, those that were right), older ones discounted.

        Waits for the device.
        """
        reached, right = self.counts.sum(0).tolist()
        return reached, right
