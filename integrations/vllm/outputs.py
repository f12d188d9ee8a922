"""What a step of vLLM's V2 model runner tells the host: written by the verifier into one buffer, and copied at once.

vLLM copies the sampled tokens, their numbers and what log-probabilities consist of one by one, each to new pinned
memory, and the verifier's counts would be one more. Here all of it is one buffer, with a part for each of the step's
forward passes. Its copy begins, in vLLM's stream for copies, when vLLM asks for the first part of it
(`hooks.copy_to_host_v2`), or after the last pass. It is read, and the step is counted, when vLLM reads its own output
(`hooks.get_output_v2`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

from rollout_spec.integrations.vllm.sampling import raise_if_broken
from rollout_spec.integrations.vllm.sub_steps import COUNTS
from rollout_spec.stats import SpeculationStats
from rollout_spec.transfers import host_buffer, runs_later
from rollout_spec.verify.kernel import StepOutput

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that these do not divide."""


class PassBuffer:
    """The output of one forward pass, on the device and on the host: a part of a `StepBuffer`.

    Attributes:
        step: The whole.
        on_device, on_host: By field, `on_host` once the step is copied.
        scores: In further passes, the log-probabilities that requests ask for, on the device; None: nobody asks.
        scores_on_host: The same once the step is copied.
    """

    def __init__(self, step: StepBuffer, on_device: dict[str, Tensor], on_host: dict[str, NDArray[Any]]) -> None:
        self.on_device, self.on_host, self.step = on_device, on_host, step
        self.scores: LogprobsTensors | None = None
        self.scores_on_host: LogprobsTensors | None = None
        self._num_rejected = torch.zeros_like(on_device["num_sampled"])
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def output(self, seq_lens: Tensor, slots: Tensor, prefill: Tensor) -> StepOutput:
        """Where the verifier writes. seq_lens, slots, prefill: The last three fields of `StepOutput`."""
        of = self.on_device
        counts = of["num_broken"], of["num_sampled"], of["num_rows"], self._num_rejected
        return StepOutput(of["output"], of["targets"], of["logprobs"], of["ranks"], *counts, seq_lens, slots, prefill)

    def sampled(self, num_requests: int) -> tuple[Tensor, Tensor]:
        """(tokens int64 [B, width], how many int32 [B]), which `hooks.copy_to_host_v2` recognises."""
        width = self.step.width
        if (num_requests, width) not in self._views:
            tokens = self.on_device["output"][: num_requests * width].view(num_requests, width)
            counts = self.on_device["num_sampled"][:num_requests]
            # Attributes of the tensors themselves, as vLLM passes nothing else on.
            tokens.copy_of_step = self.step, self.tokens_on_host(num_requests)  # type: ignore[attr-defined]
            counts.copy_of_step = self.step, self.on_host["num_sampled"][:num_requests]  # type: ignore[attr-defined]
            self._views[num_requests, width] = tokens, counts
        return self._views[num_requests, width]

    def tokens_on_host(self, num_requests: int) -> NDArray[np.int64]:
        """int64 [B, width]"""
        return self.on_host["output"][: num_requests * self.step.width].reshape(num_requests, -1)

    def num_rejected(self, num_requests: int) -> Tensor:
        """int32 [B]"""
        return self._num_rejected[:num_requests]

    def logprobs(self, num_requests: int, num_rows: int) -> LogprobsTensors:
        """Of sampled tokens alone, N of them, as vLLM takes them."""
        of = self.on_device
        tensors = _CopiedLogprobs(of["targets"], of["logprobs"], of["ranks"])
        tensors.of_pass, tensors.num_requests, tensors.num_rows = self, num_requests, num_rows
        return tensors


class StepBuffer:
    """The output of one step, on the device and on the host.

    Args:
        max_requests, width: Most requests of a step, and rows of each in a forward pass.
        max_passes: Most forward passes.

    Attributes:
        passes: Where each pass writes.
        width: Most tokens that a request may get in a pass.
        is_unread: Whether vLLM has been given a step of which it has not read the output.
    """

    def __init__(self, max_requests: int, width: int, max_passes: int, device: torch.device) -> None:
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
        whole = torch.zeros(max_passes, end, dtype=torch.uint8, device=device)
        whole_on_host = host_buffer(max_passes * end, device).view(max_passes, end)
        self._copies = [(whole[:n], whole_on_host[:n]) for n in range(1, max_passes + 1)]
        """What steps of 1, 2, ... passes copy, and to where."""
        self.passes = []
        for part, copy in zip(whole, whole_on_host, strict=True):
            on_device = {name: part[a:b].view(dtype) for name, (dtype, a, b) in places.items()}
            on_host = {name: copy[a:b].view(dtype).numpy() for name, (dtype, a, b) in places.items()}
            self.passes.append(PassBuffer(self, on_device, on_host))
        self._num_passes, self.width, self._is_copied, self.is_unread = 1, 1, True, False
        self._uncounted: list[str] | None = None  # the requests of a step that has not been counted

    def begin(self, req_ids: list[str], width: int, num_passes: int) -> None:
        """A step begins."""
        self._uncounted, self._is_copied, self.width, self._num_passes = req_ids, False, width, num_passes

    def copy(self, *, is_complete: bool = False) -> None:
        """Begin the copy to the host, in the current stream, unless it has begun.

        vLLM asks for it after the first pass. If others follow, that waits for the last one, with `is_complete`.
        """
        if self._is_copied or (self._num_passes > 1 and not is_complete):
            return
        on_device, on_host = self._copies[self._num_passes - 1]
        on_host.copy_(on_device, non_blocking=True)
        self._is_copied = True
        for of_pass in self.passes[1 : self._num_passes]:
            if of_pass.scores is not None:
                of_pass.scores_on_host = of_pass.scores.to_cpu_nonblocking()

    def count(self, stats: SpeculationStats) -> None:
        """Count the step, whose copy has arrived, unless that has been done.

        Raises:
            FloatingPointError: a row had no sample because the model's logits are NaN or +inf.
        """
        if self._uncounted is None or not self._is_copied:
            return
        size = len(self._uncounted)
        for of_pass in self.passes[: self._num_passes]:
            # If it raises, the step stays uncounted: whoever asks gets the error.
            raise_if_broken(of_pass.on_host["num_broken"][:size], self._uncounted)
        self._uncounted = None
        for of_pass in self.passes[: self._num_passes]:
            rows, sampled = (of_pass.on_host[name][:size].astype(np.int64) for name in ("num_rows", "num_sampled"))
            has_sampled = sampled > 0
            stats.record(rows[has_sampled] - 1, sampled[has_sampled] - 1)

    def join(self, result: ModelRunnerOutput) -> None:
        """Add the output of further passes to what vLLM has read of the first one. Sets COUNTS, see `sub_steps.py`."""
        if self._num_passes == 1:
            return
        size, passes = len(result.req_ids), self.passes[: self._num_passes]
        counts = np.stack([of_pass.on_host["num_sampled"][:size] for of_pass in passes])
        width = int(counts.max())
        tokens = np.stack([of_pass.tokens_on_host(size)[:, :width] for of_pass in passes], 1)
        flat = tokens[np.arange(width) < counts.T[:, :, None]].tolist()
        ends = [0, *counts.sum(0).cumsum().tolist()]
        result.sampled_token_ids = [flat[a:b] for a, b in itertools.pairwise(ends)]
        if result.logprobs is not None:
            further = [of_pass.scores_on_host.tolists() for of_pass in passes[1:] if of_pass.scores_on_host is not None]
            result.logprobs = join_logprobs([result.logprobs, *further], counts)
        setattr(result, COUNTS, counts)


def join_logprobs(parts: Sequence[LogprobsLists], counts: NDArray[np.integer]) -> LogprobsLists:
    """The log-probabilities of all passes of a step, by request.

    Args:
        parts: Of each pass. Its rows are those of its requests, the first ones of each those of what was sampled.
        counts: integer [n, B], how many tokens each pass has sampled for each request.
    """
    firsts, end = [], 0
    for part in parts:
        starts, num_rows = part.cu_num_generated_tokens, part.logprobs.shape[0]
        firsts.append(end + (np.arange(num_rows) if starts is None else np.array(starts[:-1])))
        end += num_rows
    first, number = np.stack(firsts, 1).ravel(), counts.T.ravel()
    ends = number.cumsum()
    rows = np.repeat(first - (ends - number), number) + np.arange(ends[-1])
    starts = [0, *ends[counts.shape[0] - 1 :: counts.shape[0]].tolist()]
    columns = zip(*(part[:3] for part in parts), strict=True)
    return LogprobsLists(*(np.concatenate(column)[rows] for column in columns), starts)


class _CopiedLogprobs(LogprobsTensors):
    """Log-probabilities that lie in a `StepBuffer`."""

    of_pass: PassBuffer
    num_requests: int
    num_rows: int

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        self.of_pass.step.copy()
        return self

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        """Copies, as the buffer is soon another step's. Only the device knew whose rows are whose."""
        of, starts = self.of_pass.on_host, None
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
        self,
        max_requests: int,
        width: int,
        max_passes: int,
        device: torch.device,
        num_ahead: int,
        stats: SpeculationStats,
    ) -> None:
        self.made_up = StepBuffer(max_requests, width, 1, device)
        self._buffers = [StepBuffer(max_requests, width, max_passes, device) for _ in range(num_ahead)]
        self._num_steps, self._device, self._stats = 0, device, stats
        self._lock = threading.Lock()  # vLLM reads outputs in a thread of its own, where workers are processes
        self._reads_outputs = False  # of tensor-parallel ranks vLLM reads one's

    def read(self, buffer: StepBuffer, result: ModelRunnerOutput | None) -> None:
        """vLLM has read a step's output, or failed to: None. Raises as `StepBuffer.count`."""
        self._reads_outputs = True
        try:
            if result is not None:
                with self._lock:
                    buffer.count(self._stats)
                buffer.join(result)
        finally:
            buffer.is_unread = False

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
