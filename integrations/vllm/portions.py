"""Verifies a step some requests at a time, where vLLM's processors make float32 copies of the logits: V2 runner.

With 512 requests, nine rows each and 152,000 tokens in the vocabulary one copy would take 2.8 GB, which vLLM's memory
profile has not seen. V1's processors cannot be called for a part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollout_spec.types import VerifyResult
from rollout_spec.verify.layout import Layout

MAX_PROCESSED = 1 << 28
"""Logits that are copied at once: 1 GiB."""


def verify_in_portions(
    logits: Tensor,
    input_batch: Any,
    layout: Layout,
    hidden: Tensor | None,
    verify: Callable[[Tensor, Any, Layout, Tensor | None], VerifyResult],
) -> VerifyResult:
    """`verify(logits, input_batch, layout, hidden)` for some requests at a time, joined.

    Args:
        logits: float [N, V].
        input_batch: vLLM's `InputBatch`. Its `cu_num_logits_np` must say each request's rows, which it does not where
            drafts are cut on the device.
        hidden: float [N, H] or None.
    """
    starts, results = input_batch.cu_num_logits_np.tolist(), []
    for first, end in portions(starts, MAX_PROCESSED // logits.shape[1]):
        rows = slice(starts[first], starts[end])
        # Clones: where memory is not aligned, Triton would compile the kernels again.
        of_rows = (None if field is None else field[rows].clone() for field in layout[1:])
        some = Layout(layout.starts[first : end + 1] - starts[first], *of_rows)  # type: ignore[arg-type]
        batch = _part(input_batch, slice(first, end), rows)
        results.append(verify(logits[rows], batch, some, None if hidden is None else hidden[rows]))
    return VerifyResult(*(None if fields[0] is None else torch.cat(fields) for fields in zip(*results, strict=True)))


def portions(starts: list[int], max_rows: int) -> Iterator[tuple[int, int]]:
    """(first request, the one after the last) of portions of at most so many rows, but of one request at least.

    Args:
        starts: Each request's first row, then the number of rows.
    """
    first = 0
    for request in range(1, len(starts)):
        is_last = request == len(starts) - 1
        if is_last or starts[request + 1] - starts[first] > max_rows:
            yield first, request
            first = request


def _part(input_batch: Any, requests: slice, rows: slice) -> Any:
    """What `compat.apply_sampling_params` reads of an `InputBatch`, of some requests and their rows."""
    return SimpleNamespace(
        input_ids=input_batch.input_ids,
        logits_indices=input_batch.logits_indices[rows],
        expanded_idx_mapping=input_batch.expanded_idx_mapping[rows].clone(),
        expanded_local_pos=input_batch.expanded_local_pos[rows].clone(),
        idx_mapping=input_batch.idx_mapping[requests].clone(),
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[requests],
    )
