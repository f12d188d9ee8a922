"""How vLLM's adaptive verification cuts drafts, with little of the host's time: `Cutting`, and one kernel.

vLLM's `AdaptiveVerificationManager` decides on the host how many draft tokens a step verifies, by confidences that are
one step old, and on the device which. The host's part goes through dictionaries of requests five times; the device's is
a dozen operations, one of them compiled by PyTorch, and two uploads. In a step in which every request has a whole draft
and no prompt, as nearly all are, the host needs no dictionary. `_cut_kernel` does the device's part, and writes what
vLLM would upload and compute afterwards: where each request's tokens and rows begin, and whose each row is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from rollout_spec.integrations.vllm import compat
from rollout_spec.launches import Launcher, next_power_of_2
from rollout_spec.schedule import MEASURED_CONTEXT, best_cut
from rollout_spec.transfers import host_buffer, upload

ABOVE_ONE = tl.constexpr(0x3F800001)
"""The bits of the next float32 above 1, so more than those of any probability."""
REQUESTS_PER_WARP = 32


@triton.jit(do_not_specialize=["num_requests", "budget", "num_tokens", "num_slots"])
def _cut_kernel(
    slots_ptr,  # integer [B]
    drafts_ptr,  # int32 [B]: draft tokens of each request
    others_ptr,  # int32 [B]: its other tokens
    confidences_ptr,  # float32 [R, K], by slot
    starts_ptr,  # int32 [R + 1], written: each request's first row of logits, then N
    query_start_ptr,  # int32 [R + 1], written: each request's first token, then how many there are
    request_ptr,  # integer [N], written: the slot of each row
    place_ptr,  # int32 [N], written: the row's place among its request's
    num_requests,
    budget,  # draft tokens that stay, at most all
    num_tokens,  # so many are left in the step
    num_slots,  # R
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, more than K
    REQUESTS: tl.constexpr,  # power of two, at least B
):
    """Keep the draft tokens that are likeliest to be reached and right. One program.

    A draft token's probability is at most that of the one before it. Of equal ones the first requests' stay, and of a
    request the first, so what stays begins each draft.
    """
    i, j = tl.arange(0, REQUESTS), tl.arange(0, WIDTH)[None, :]
    is_request = i < num_requests
    slot = tl.load(slots_ptr + i, mask=is_request, other=0).to(tl.int64)
    drafts = tl.load(drafts_ptr + i, mask=is_request, other=0)
    others = tl.load(others_ptr + i, mask=is_request, other=0)
    key, survival = tl.full([REQUESTS, WIDTH], -1, tl.int32), tl.full([REQUESTS], 1.0, tl.float32)
    for place in tl.static_range(K):
        is_draft = place < drafts
        survival *= tl.load(confidences_ptr + slot * K + place, mask=is_draft, other=0.0)
        bits = survival.to(tl.int32, bitcast=True)  # numbers that are not negative sort as their bits
        key = tl.where((j == place) & is_draft[:, None], bits[:, None], key)
    low, high = tl.zeros([], tl.int32), tl.full([], ABOVE_ONE, tl.int32)
    while high - low > 1:  # as many as the budget, or more, are at least `low`
        middle = (low + high) // 2
        is_enough = tl.sum(tl.sum((key >= middle).to(tl.int32), 1), 0) >= budget
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    num_above, num_equal = tl.sum((key > low).to(tl.int32), 1), tl.sum((key == low).to(tl.int32), 1)
    left = budget - tl.sum(num_above, 0)
    kept = num_above + tl.minimum(tl.maximum(left - (tl.cumsum(num_equal, 0) - num_equal), 0), num_equal)

    rows, tokens = tl.where(is_request, kept + 1, 0), tl.where(is_request, kept + others, 0)
    first_row = tl.cumsum(rows, 0) - rows
    tl.store(starts_ptr + i, first_row, mask=is_request)
    tl.store(starts_ptr + num_requests, tl.sum(rows, 0))
    tl.store(query_start_ptr + i, tl.cumsum(tokens, 0) - tokens, mask=is_request)
    for first in range(num_requests, num_slots + 1, REQUESTS):
        tl.store(query_start_ptr + first + i, num_tokens, mask=first + i <= num_slots)
    row, is_row = first_row[:, None] + j, j < rows[:, None]
    request = tl.broadcast_to(slot.to(request_ptr.dtype.element_ty)[:, None], [REQUESTS, WIDTH])
    tl.store(request_ptr + row, request, mask=is_row)
    tl.store(place_ptr + row, tl.broadcast_to(j, [REQUESTS, WIDTH]), mask=is_row)


_launch_cut = Launcher(_cut_kernel)


class Cut:
    """The device's part: which draft tokens of a step are verified.

    Args:
        confidences: float32 [R, K], the probability that each is right once it is reached, by slot.
        query_start: int32 [R + 1], written.

    Attributes:
        request, place: integer and int32 [R (K + 1)], written: vLLM's `expanded_idx_mapping` and
            `expanded_local_pos`.
    """

    def __init__(self, confidences: Tensor, query_start: Tensor) -> None:
        self._confidences, self._query_start, device = confidences, query_start, confidences.device
        num_slots, k = confidences.shape
        self._starts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.request, self.place = (
            torch.zeros(num_slots * (k + 1), dtype=torch.int32, device=device) for _ in range(2)
        )
        self._scheduled: NDArray[np.int32] = np.zeros((2, 0), np.int32)
        self._uploaded: Sequence[Tensor] = ()
        self._num_other_tokens = 0

    def __call__(self, slots: Tensor, scheduled: NDArray[np.int32], budget: int) -> Tensor:
        """One launch, and an upload if `scheduled` is another than in the last step.

        Args:
            slots: integer [B].
            scheduled: int32 [2, B], draft tokens and other tokens of each request.
            budget: Draft tokens that stay.

        Returns:
            int32 [B + 1]: each request's first row of logits, then N. Overwritten in the next step.
        """
        if not np.array_equal(scheduled, self._scheduled):
            self._scheduled, device = scheduled.copy(), self._confidences.device
            self._uploaded = [upload(numbers.copy(), device) for numbers in scheduled]
            self._num_other_tokens = int(scheduled[1].sum())
        if self.request.dtype != slots.dtype:  # int64 from vLLM 0.32 on, whose own kernels get these next
            self.request = self.request.to(slots.dtype)
        self.again(slots, budget)
        return self._starts[: scheduled.shape[1] + 1]

    def again(self, slots: Tensor, budget: int) -> None:
        """One launch for the next forward pass of the same requests."""
        num_requests, (num_slots, k) = slots.shape[0], self._confidences.shape
        most_requests = next_power_of_2(num_slots)
        _launch_cut[(1,)](
            slots,
            *self._uploaded,
            self._confidences,
            self._starts,
            self._query_start,
            self.request,
            self.place,
            num_requests,
            budget,
            self._num_other_tokens + budget,
            num_slots,
            K=k,
            WIDTH=next_power_of_2(k + 1),
            REQUESTS=most_requests,
            num_warps=max(1, min(16, most_requests // REQUESTS_PER_WARP)),
        )


class Cutting(AdaptiveVerificationManager):
    """vLLM's manager with the same decisions.

    Args:
        manager: vLLM's, which this replaces.
        is_drafting: Whether there are drafts for the next step.
        is_last_pass: Whether no further forward pass of the step follows.
    """

    cost_tables: Any
    _stale_idx: int
    _batch_budget: Any

    def __init__(self, manager: Any, is_drafting: Callable[[], bool], is_last_pass: Callable[[], bool]) -> None:
        super().__init__(
            manager.req_states, manager.query_start_loc, manager.num_bonus_tokens, manager._max_total_logits
        )
        self.cut = Cut(self._confidence_probs, self.query_start_loc)
        device, shape = self._confidence_probs.device, self._confidence_probs.shape
        on_host = [host_buffer(4 * shape.numel(), device).view(torch.float32).view(shape).fill_(1.0) for _ in range(2)]
        self._stale_confidences = [SimpleNamespace(cpu=copy, np=copy.numpy()) for copy in on_host]
        self._is_drafting, self._is_last_pass = is_drafting, is_last_pass
        # Of the last step whose drafts were all whole: its requests, their slots, and their (draft, other) tokens.
        self._req_ids: list[str] = []
        self._slots: NDArray[np.intp] = np.zeros(0, np.intp)
        self._scheduled: NDArray[np.int32] = np.zeros((2, 0), np.int32)
        self._last_slots: tuple[NDArray[np.integer], Tensor] | None = None

    @property
    def confidences(self) -> Tensor:
        """float32 [R, K], by slot: the drafter writes them."""
        return self._confidence_probs

    def compile(self, index_dtype: torch.dtype) -> None:
        """Compile the kernel, or load it from Triton's cache. index_dtype: of vLLM's slot numbers."""
        nobody = torch.zeros(1, dtype=index_dtype, device=self._confidence_probs.device)
        self.cut(nobody, np.array([[0], [1]], np.int32), 0)

    def add_request(self, req_idx: int) -> None:
        self._req_ids = []  # a request may come again in another slot
        super().add_request(req_idx)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """How many tokens the step has, once drafts are cut to those that pay."""
        global _cutting
        _cutting = self
        budget = self._budget_of_whole_drafts(num_tokens_per_req, draft_tokens)
        if budget is None:
            return int(super().get_num_tokens(num_tokens_per_req, draft_tokens))
        self._batch_budget = None, None, budget
        return len(num_tokens_per_req) + budget

    def _budget_of_whole_drafts(self, num_tokens: dict[str, int], draft_tokens: dict[str, list[int]]) -> int | None:
        """How many draft tokens stay, as vLLM's own `get_num_tokens` has it. None: not every request has a whole draft.

        Args:
            num_tokens, draft_tokens: As of `get_num_tokens`.
        """
        k, num_requests = self.num_speculative_steps, len(num_tokens)
        if len(draft_tokens) != num_requests or set(map(len, draft_tokens.values())) != {k}:
            return None
        if set(num_tokens.values()) != {k + 1}:
            return None
        if list(num_tokens) != self._req_ids:
            self._req_ids = list(num_tokens)
            slots = map(self.req_states.req_id_to_index.__getitem__, self._req_ids)
            self._slots = np.fromiter(slots, np.intp, num_requests)
            self._scheduled = np.array([[k], [1]], np.int32).repeat(num_requests, 1)
        known = self._stale_confidences[self._stale_idx].np.take(self._slots, 0)
        survival = np.multiply.accumulate(known, 1, np.float64).ravel()
        drafting, verifying = self.cost_tables
        most_rows = max(num_requests, self._max_total_logits)
        return best_cut(num_requests, survival, drafting[num_requests] + verifying[num_requests : most_rows + 1])

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> tuple[Any, ...]:
        """Cut the drafts on the device."""
        global _cutting
        _cutting = None
        (drafts, others, budget), self._batch_budget = self._batch_budget, None
        scheduled = self._scheduled
        if drafts is not None:
            scheduled = np.array([[of[req_id] for req_id in req_ids] for of in (drafts, others)], np.int32)
        starts = self.cut(idx_mapping, scheduled, budget)
        starts.rows = self.cut.request, self.cut.place  # type: ignore[attr-defined] # for `rows_of`
        return starts, self.query_start_loc, budget, *compat.counts_on_host(self)

    def cut_again(self, batch: Any) -> None:
        """For a further forward pass of the same step: as many draft tokens stay, by the drafts that it has now.

        Args:
            batch: vLLM's `InputBatch`, whose tensors are written.
        """
        if 0 < batch.num_draft_tokens < batch.num_reqs * self.num_speculative_steps:
            self.cut.again(batch.idx_mapping, batch.num_draft_tokens)

    def record_confidences(self, confidence_probs: Tensor, input_batch: Any) -> None:
        """Begin to copy the confidences to the host, once per step. A step without drafts leaves them as they are."""
        if not (self._is_last_pass() and self._is_drafting()):
            return
        if confidence_probs is not self._confidence_probs:  # of another drafter, by request of the batch
            self._confidence_probs[input_batch.idx_mapping] = confidence_probs[: input_batch.num_reqs]
        written = self._stale_idx
        arrived = written ^ 1
        self._copy_events[arrived].synchronize()
        if self._pending_resets:
            self._stale_confidences[arrived].np[self._pending_resets] = 1.0
            self._pending_resets.clear()
        self._stale_idx = arrived
        # In the device's own order, which takes no further stream and no copy on the device.
        self._stale_confidences[written].cpu.copy_(self._confidence_probs, non_blocking=True)
        self._copy_events[written].record()

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """vLLM's steps of made-up requests, so that a token costs what a draft token does.

        vLLM gives each token 8,192 tokens of context, whose KV cache takes longer to read than a draft token's, which
        is that of its request. And its made-up tokens are all the same one, and padding, for which no expert of a
        mixture-of-experts model is read: drafts would seem to be free there.
        """
        original = InputBatch.__dict__["make_dummy"]

        def make_dummy(*args: Any, **kwargs: Any) -> Any:
            return original.__get__(None, InputBatch)(*args, **{**kwargs, "is_padding": False})

        InputBatch.make_dummy = make_dummy
        try:
            for batch in super().batches_to_profile(capture_sizes):
                yield {**batch, "context_len": MEASURED_CONTEXT, "randomize_inputs": True}
        finally:
            InputBatch.make_dummy = original

    def slots_on_device(self, slots: NDArray[np.integer], upload_slots: Callable[[], Tensor]) -> Tensor:
        """The slots of a step's requests, [B], which are mostly those of the last step."""
        if self._last_slots is None or not np.array_equal(self._last_slots[0], slots):
            self._last_slots = slots, upload_slots()
        return self._last_slots[1]


_cutting: Cutting | None = None
"""Of the step whose inputs vLLM prepares, from its `get_num_tokens` to its `reallocate_drafts`."""


def forget_step() -> None:
    """A step has raised, maybe while its inputs were prepared."""
    global _cutting
    _cutting = None


def upload_input(original: Callable[..., Tensor], data: Any, **options: Any) -> Tensor | None:
    """In place of `async_tensor_h2d` of vLLM's runner, which calls it for three inputs of a step that is cut.

    They are, in `prepare_inputs`: the slots, `(idx_mapping_np, device=…, dtype=…)`; where the requests' rows begin,
    `(cu_num_logits_np, device=…)`; and where their tokens do, `(query_start_loc_np, out=…)`. `_cut_kernel` writes the
    latter two.
    """
    if _cutting is None:
        return original(data, **options)
    names = options.keys()
    if names == {"device", "dtype"}:
        return _cutting.slots_on_device(data, lambda: original(data, **options))
    assert names in ({"device"}, {"out"}), "another input is uploaded"
    return options.get("out")


def rows_of(
    original: Callable[..., tuple[Tensor, Tensor]], idx_mapping: Tensor, num_rows: int, starts: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    """In place of `expand_idx_mapping`: each row's slot, and its place among its request's, which are written.

    starts: vLLM's `cu_num_logits`, of `Cutting.reallocate_drafts` where drafts were cut.
    """
    rows = getattr(starts, "rows", None)
    if rows is None:
        return original(idx_mapping, num_rows, starts, *args)
    return rows[0][:num_rows], rows[1][:num_rows]
