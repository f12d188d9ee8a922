"""A drafter that knows what each request will say, and cuts or spoils its drafts by a pattern."""

from __future__ import annotations

import numpy as np

from rollout_spec.types import Draft
from tests.adversaries import NoDrafter
from tests.recurrent.models import VOCAB_SIZE

OUTPUTS: dict[tuple[int, ...], list[int]] = {}
"""By prompt: what it is followed by. A test fills it."""


class Cut(NoDrafter):
    """Drafts the target's own tokens.

    Args:
        pattern: `every other step`, `some requests` (in each step others) and `any length` leave drafts out or shorten
            them; `wrong` drafts are rejected.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._rng = np.random.default_rng(0)
        self._requests: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self._step = 0

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        self._requests[req_id] = tuple(prompt_token_ids.tolist()), []

    def extend(self, req_id, new_token_ids):
        self._requests[req_id][1].extend(int(token) for token in new_token_ids)

    def propose(self, req_ids, max_tokens):
        self._step += 1
        limits = enumerate(zip(req_ids, max_tokens, strict=True))
        drafts = [self._draft(row, req_id, int(limit)) for row, (req_id, limit) in limits]
        return [Draft(tokens, np.ones(tokens.size, np.float32)) for tokens in drafts]

    def _draft(self, row, req_id, limit):
        prompt, output = self._requests[req_id]
        if self._pattern == "any length":
            limit = int(self._rng.integers(limit + 1))
        elif self._pattern == "every other step":
            limit *= self._step % 2
        elif self._pattern == "some requests":
            limit *= (self._step + row) % 2
        tokens = np.array(OUTPUTS[prompt][len(output) :][:limit], np.int32)
        return (tokens + 1) % VOCAB_SIZE if self._pattern == "wrong" else tokens

    def stop_request(self, req_id, *, keep=True):
        del self._requests[req_id]
