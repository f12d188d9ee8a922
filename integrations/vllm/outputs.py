"""What a step of vLLM's V2 model runner tells the host: written by the verifier into one buffer, and copied at once.

vLLM copies the sampled tokens, their numbers and what log-probabilities consist of one by one, each to new pinned
memory, and the verifier's counts would be one more. Here all of it is one buffer. Its copy begins, in vLLM's stream for
copies, when vLLM asks for the first part of it (`hooks.copy_to_host_v2`). It is read, and the step is counted, when
vLLM reads its own output (`hooks.get_output_v2`).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from rollout_spec.integrations.vllm.sampling import raise_if_broken
from rollout_spec.stats import SpeculationStats
from rollout_spec.transfers import host_buffer, runs_later
from rollout_spec.verify.kernel import StepOutput

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that these do not divide."""


class StepBuffer:
    """The output of one step, on the device and on the host.

    Args:
        max_requests, width: Most requests of a step, and rows of each.
    """

    def __init__(self, max_requests: int, width: int, device: torch.device) -> None:
        num_rows = max_requests * width
        sizes = {
            "output": (torch.int64, num_rows), "targets": (torch.int64, num_rows), "ranks": (torch.int64, num_rows),
            "logprobs": (torch.float32, num_rows), "num_broken": (torch.int32, max_requests),
            "num_sampled": (torch.int32, max_requests), "num_rows": (torch.int32, max_requests),
        }  # fmt: skip
        places, end = {}, 0
        for name, (dtype, size) in sizes.items():
            places[name] = dtype, end, end + size * dtype.itemsize
            end += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._whole = torch.zeros(end, dtype=torch.uint8, device=device)
        self._copy = host_buffer(end, device)
        self.on_device = {name: self._whole[a:b].view(dtype) for name, (dtype, a, b) in places.items()}
        self.on_host = {name: self._copy[a:b].view(dtype).numpy() for name, (dtype, a, b) in places.items()}
        self._num_rejected = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._is_copied = True
        self.is_unread = False
        """Whether vLLM has been given a step of which it has not read the output."""
        self._uncounted: list[str] | None = None  # the requests of a step that has not been counted

    def step(self, req_ids: list[str], seq_lens: Tensor, slots: Tensor, prefill: Tensor) -> StepOutput:
        """A step begins: where its output goes. seq_lens, slots, prefill: The last three fields of `StepOutput`."""
        self._uncounted, self._is_copied = req_ids, False
        of = self.on_device
        counts = of["num_broken"], of["num_sampled"], of["num_rows"], self._num_rejected
        return StepOutput(of["output"], of["targets"], of["logprobs"], of["ranks"], *counts, seq_lens, slots, prefill)

    def sampled(self, num_requests: int, width: int) -> tuple[Tensor, Tensor]:
        """(tokens int64 [B, width], how many int32 [B]), which `hooks.copy_to_host_v2` recognises."""
        if (num_requests, width) not in self._views:
            tokens = self.on_device["output"][: num_requests * width].view(num_requests, width)
            counts = self.on_device["num_sampled"][:num_requests]
            # Attributes of the tensors themselves, as vLLM passes nothing else on.
            tokens.copy_of_step = self, self.on_host["output"][: num_requests * width].reshape(num_requests, width)  # type: ignore[attr-defined]
            counts.copy_of_step = self, self.on_host["num_sampled"][:num_requests]  # type: ignore[attr-defined]
            self._views[num_requests, width] = tokens, counts
        return self._views[num_requests, width]

    def num_rejected(self, num_requests: int) -> Tensor:
        """int32 [B]"""
        return self._num_rejected[:num_requests]

    def logprobs(self, num_requests: int, num_rows: int) -> LogprobsTensors:
        """Of sampled tokens alone, N of them, as vLLM takes them."""
        of = self.on_device
        tensors = _CopiedLogprobs(of["targets"], of["logprobs"], of["ranks"])
        tensors.buffer, tensors.num_requests, tensors.num_rows = self, num_requests, num_rows
        return tensors

    def copy(self) -> None:
        """Begin the copy to the host, in the current stream, unless it has begun."""
        if not self._is_copied:
            self._copy.copy_(self._whole, non_blocking=True)
            self._is_copied = True

    def count(self, stats: SpeculationStats) -> None:
        """Count the step, whose copy has arrived, unless that has been done.

        Raises:
            FloatingPointError: a row had no sample because the model's logits are NaN or +inf.
        """
        if self._uncounted is None or not self._is_copied:
            return
        of, size = self.on_host, len(self._uncounted)
        raise_if_broken(of["num_broken"][:size], self._uncounted)  # it stays uncounted: whoever asks gets the error
        self._uncounted = None
        rows, sampled = (of[name][:size].astype(np.int64) for name in ("num_rows", "num_sampled"))
        has_sampled = sampled > 0
        stats.record(rows[has_sampled] - 1, sampled[has_sampled] - 1)


class _CopiedLogprobs(LogprobsTensors):
    """Log-probabilities that lie in a `StepBuffer`."""

    buffer: StepBuffer
    num_requests: int
    num_rows: int

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        self.buffer.copy()
        return self

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        """Copies, as the buffer is soon another step's. Only the device knew whose rows are whose."""
        of, starts = self.buffer.on_host, None
        if self.num_rows != self.num_requests:
            starts = [0, *of["num_rows"][: self.num_requests].cumsum().tolist()]
        columns = (of[name][: self.num_rows, None].copy() for name in ("targets", "logprobs"))
        return LogprobsLists(*columns, of["ranks"][: self.num_rows].copy(), starts)


class StepBuffers:
    """Buffers in turn: as many as vLLM launches steps before it reads the output of the first.

    Attributes:
        made_up: For steps of vLLM's made-up requests, of which it reads nothing.
    """

    def __init__(
        self, max_requests: int, width: int, device: torch.device, num_ahead: int, stats: SpeculationStats
    ) -> None:
        self.made_up, *self._buffers = (StepBuffer(max_requests, width, device) for _ in range(1 + num_ahead))
        self._num_steps, self._device, self._stats = 0, device, stats
        self._lock = threading.Lock()  # vLLM reads outputs in a thread of its own, where workers are processes
        self._reads_outputs = False  # of tensor-parallel ranks vLLM reads one's

    def read(self, buffer: StepBuffer, *, is_sound: bool = True) -> None:
        """vLLM has read a step's output, or failed to. Raises as `StepBuffer.count`."""
        self._reads_outputs, buffer.is_unread = True, False
        if is_sound:
            with self._lock:
                buffer.count(self._stats)

    def finish_counting(self) -> None:
        """Count the steps whose output vLLM has not read yet. Waits for the device. Raises as `StepBuffer.count`."""
        if not self._reads_outputs:
            return
        if runs_later(self._device):
            torch.cuda.synchronize(self._device)
        with self._lock:
            for buffer in self._buffers:
                buffer.count(self._stats)

    def next(self) -> StepBuffer:
        """The next step's.

        Raises:
            RuntimeError: vLLM has not read the output that is in it.
        """
        buffer = self._buffers[self._num_steps % len(self._buffers)]
        if buffer.is_unread and self._reads_outputs:
            raise RuntimeError(
                f"vLLM has launched {len(self._buffers) + 1} steps before reading what the first of them sampled: "
                "rollout_spec would lose it. Please report this, with vLLM's version"
            )
        self._num_steps += 1
        buffer.is_unread = True
        return buffer
