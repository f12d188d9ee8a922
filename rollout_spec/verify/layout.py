"""Where each row of a step's logits belongs: computed once per step, for the verifier and whoever reads its results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec.jit.compiler import njit
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch


class Layout(NamedTuple):
    """Where each of N logits rows belongs. A request's rows are its drafted positions, then the bonus position."""

    starts: Tensor
    """int32 [B + 1]: each request's first row, then N."""
    request: Tensor
    """int32 [N]: the row's index into the fields of `SamplingBatch`."""
    temperature: Tensor
    """float32 [N]: the row's. It and the seed are gathered once: vLLM's V2 runner keeps them in pinned host memory."""
    seed: Tensor | None
    """int64 [N]: the row's; None: all are greedy."""
    position: Tensor
    """int64 [N]: the row's input position."""
    draft: Tensor
    """int32 [N]: the token drafted there; the placeholder at bonus positions, and where the id does not fit."""


def lay_out(cu_num_draft_tokens: Tensor, draft_token_ids: Tensor, rows: SamplingBatch) -> Layout:
    """The layout of N = D + B rows, on the device of the arguments. O(N); does not wait for the device.

    Args:
        cu_num_draft_tokens: integer [B], inclusive sums of draft lengths.
        draft_token_ids: integer [D].
        rows: The requests'; their seeds may be None if all are greedy.
    """
    if cu_num_draft_tokens.is_cuda:
        from rollout_spec.verify import kernel  # brings triton, which machines without a GPU may lack

        return kernel.lay_out(cu_num_draft_tokens, draft_token_ids, rows)
    ends = np.diff(cu_num_draft_tokens.numpy(), prepend=0) + np.arange(1, cu_num_draft_tokens.shape[0] + 1)
    return lay_out_inputs(cu_num_draft_tokens, draft_token_ids, rows, rows.positions, ends.astype(np.int32))


def lay_out_inputs(
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    rows: SamplingBatch,
    positions: Tensor,
    input_ends: NDArray[np.int32],
) -> Layout:
    """`lay_out` on the CPU where positions are those of a step's inputs. Of `rows` they are not read.

    Args:
        positions: integer [T], of the inputs. Each request's last ones are those that its rows belong to.
        input_ends: int32 [B], where each request's inputs end.
    """
    num_requests = cu_num_draft_tokens.shape[0]
    num_rows = num_requests + draft_token_ids.shape[0]
    layout = (
        np.empty(num_requests + 1, np.int32),
        np.empty(num_rows, np.int32),
        np.empty(num_rows, np.float32),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int32),
    )
    seeds = positions if rows.seeds is None else rows.seeds
    _lay_out(
        cu_num_draft_tokens.numpy().astype(np.int64, copy=False),
        draft_token_ids.numpy().astype(np.int64, copy=False),
        rows.temperature.numpy().astype(np.float32, copy=False),
        seeds.numpy().astype(np.int64, copy=False),
        positions.numpy().astype(np.int64, copy=False),
        input_ends,
        *layout,
    )
    starts, request, temperature, seed, position, draft = map(torch.from_numpy, layout)
    return Layout(starts, request, temperature, None if rows.seeds is None else seed, position, draft)


@njit(nogil=True, allocates=False)
def _lay_out(  # type: ignore[no-untyped-def]
    cu_drafts, draft_ids, temperatures, seeds, positions, input_ends,
    starts, request, temperature, seed, position, draft,
):  # fmt: skip
    row = first = 0
    for i in range(cu_drafts.size):
        starts[i] = row
        num_rows = cu_drafts[i] - first + 1
        for j in range(num_rows):
            request[row], temperature[row], seed[row] = i, temperatures[i], seeds[i]
            position[row] = positions[input_ends[i] - num_rows] + j
            draft[row] = PLACEHOLDER_TOKEN_ID
            if first + j < cu_drafts[i] and 0 <= draft_ids[first + j] < 2**31:
                draft[row] = draft_ids[first + j]
            row += 1
        first = cu_drafts[i]
    starts[cu_drafts.size] = row
