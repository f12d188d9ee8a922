"""Where each row of a step's logits belongs: computed once per step, for the verifier and whoever reads its results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_spec.jit.compiler import njit
from rollout_spec.types import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID, SamplingBatch


class Layout(NamedTuple):
    """Where each of N logits rows belongs. A request's rows are its drafted positions, then the bonus position."""

    starts: Tensor
    """int32 [B + 1]: each request's first row, then N."""
    temperature: Tensor
    """float32 [N]: the row's. It and the seed are gathered once: vLLM's V2 runner keeps them in pinned host memory."""
    seed: Tensor
    """int64 [N]: the row's."""
    position: Tensor
    """int64 [N]: the row's input position."""
    draft: Tensor
    """int32 [N]: the token drafted there; the placeholder at bonus positions, and where the id does not fit."""

    @classmethod
    def without_drafts(cls, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Layout:
        """Of rows that have a request each. Temperature float [N], seeds int64 [N], positions integer [N]."""
        starts = torch.arange(seeds.shape[0] + 1, dtype=torch.int32, device=seeds.device)
        draft = torch.full_like(starts[:-1], PLACEHOLDER_TOKEN_ID)
        return cls(starts, temperature.float(), seeds, positions.long(), draft)

    def with_temperature_applied(self) -> Layout:
        """The same for logits that have been divided by their temperature: it is 1 then, or 0."""
        return self._replace(temperature=(self.temperature >= GREEDY_TEMPERATURE).float())

    def places(self) -> tuple[Tensor, Tensor]:
        """(request of the batch, place among its rows) of each row, int64 [N]."""
        row, starts = torch.arange(self.draft.shape[0], device=self.draft.device), self.starts.long()
        owner = torch.bucketize(row, starts[1:], right=True)
        return owner, row - starts[owner]


def lay_out(cu_num_draft_tokens: Tensor, draft_token_ids: Tensor, rows: SamplingBatch) -> Layout:
    """The layout of N = D + B rows, on the device of the arguments. O(N); does not wait for the device.

    Args:
        cu_num_draft_tokens: integer [B], inclusive sums of draft lengths.
        draft_token_ids: integer [D].
        rows: The requests'.
    """
    if cu_num_draft_tokens.is_cuda:
        from rollout_spec.verify import kernel  # brings triton, which machines without a GPU may lack

        return kernel.lay_out(cu_num_draft_tokens, draft_token_ids, rows)
    num_requests = cu_num_draft_tokens.shape[0]
    num_rows = num_requests + draft_token_ids.shape[0]
    layout = (
        np.empty(num_requests + 1, np.int32),
        np.empty(num_rows, np.float32),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int32),
    )
    _lay_out(
        cu_num_draft_tokens.numpy().astype(np.int64, copy=False),
        draft_token_ids.numpy().astype(np.int64, copy=False),
        rows.temperature.numpy().astype(np.float32, copy=False),
        rows.seeds.numpy(),
        rows.positions.numpy().astype(np.int64, copy=False),
        *layout,
    )
    return Layout(*map(torch.from_numpy, layout))


@njit(nogil=True, allocates=False)
def _lay_out(  # type: ignore[no-untyped-def]
    cu_drafts, draft_ids, temperatures, seeds, positions, starts, temperature, seed, position, draft,
):  # fmt: skip
    row = first = 0
    for i in range(cu_drafts.size):
        starts[i] = row
        for j in range(first, cu_drafts[i] + 1):
            temperature[row], seed[row] = temperatures[i], seeds[i]
            position[row] = positions[i] + j - first
            is_token = j < cu_drafts[i] and 0 <= draft_ids[j] < 2**31
            draft[row] = draft_ids[j] if is_token else PLACEHOLDER_TOKEN_ID
            row += 1
        first = cu_drafts[i]
    starts[cu_drafts.size] = row
