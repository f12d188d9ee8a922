"""Where each row of a step's logits belongs: computed once per step, for the verifier and whoever reads its results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_spec.types import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID


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
        return places(self.starts, self.draft.shape[0])


def places(starts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """`Layout.places`."""
    row, starts = torch.arange(num_rows, device=starts.device), starts.long()
    owner = torch.bucketize(row, starts[1:], right=True)
    return owner, row - starts[owner]
