"""A drafter of your own: it repeats what followed the last few tokens when the request said them before.

    python examples/custom_drafter.py

replays it over a few made-up rollouts. An engine takes it by its dotted path, from a folder on PYTHONPATH:

    from rollout_spec import engine_kwargs
    from vllm import LLM

    llm = LLM(model, **engine_kwargs(drafter="custom_drafter.RepeatDrafter", drafter_options={"context_length": 3}))

The class needs no registration and no base class. The output does not depend on what it drafts; only the speed does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_spec.drafters.base import Drafter, Tokens
from rollout_spec.estimate.costs import UNIT_COST
from rollout_spec.estimate.phases import Engine, RecordedRollout, simulate
from rollout_spec.types import Draft, Int32Array


class RepeatDrafter:
    """Implements `rollout_spec.drafters.base.Drafter`, which says when each method is called.

    Args:
        context_length: Tokens that must have been said before, in the same order, for a draft.

    Raises:
        ValueError: `context_length` is below 1.
    """

    def __init__(self, *, context_length: int = 2) -> None:
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}")
        self._context_length = context_length
        self._texts: dict[str, list[int]] = {}
        self._drafted: dict[str, list[int]] = {}
        self._trials, self._hits = 2, 1  # outcomes of drafted tokens, beginning with a rate of one half

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        if req_id in self._texts:
            raise ValueError(f"request {req_id!r} is live already")
        self._texts[req_id] = [int(token) for token in prompt_token_ids]

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        # What was sampled says how far the last draft was right.
        for drafted, said in zip(self._drafted.pop(req_id, []), new_token_ids, strict=False):
            self._trials += 1
            if drafted != said:
                break
            self._hits += 1
        self._text(req_id).extend(int(token) for token in new_token_ids)

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        if len(max_tokens) != len(req_ids):
            raise ValueError(f"max_tokens has {len(max_tokens)} entries for {len(req_ids)} requests")
        rate = self._hits / self._trials
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens.tolist(), strict=True):
            tokens = self._find_repetition(self._text(req_id))[:limit]
            # The probability that the target gets as far as each token and accepts it.
            survival = rate ** np.arange(1, len(tokens) + 1)
            drafts.append(Draft(np.array(tokens, np.int32), survival.astype(np.float32)))
            self._drafted[req_id] = tokens
        return drafts

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        self._text(req_id)
        del self._texts[req_id]
        self._drafted.pop(req_id, None)

    def memory_bytes(self) -> int:
        return 8 * sum(len(text) for text in self._texts.values())

    def check_integrity(self) -> None:
        assert self._drafted.keys() <= self._texts.keys(), "a draft of a request that is not live"

    def _text(self, req_id: str) -> list[int]:
        if req_id not in self._texts:
            raise ValueError(f"request {req_id!r} is not live: start_request comes first")
        return self._texts[req_id]

    def _find_repetition(self, text: list[int]) -> list[int]:
        """What followed the newest earlier occurrence of the last `context_length` tokens."""
        size = self._context_length
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return text[end:]
        return []


def make_rollouts(seed: int = 0) -> list[RecordedRollout]:
    """Rollouts in which every other sentence is copied from the prompt, as in code or arithmetic."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for number in range(4):
        sentences = rng.integers(0, 1000, (5, 12), np.int32)
        prompt = sentences.ravel()
        for _ in range(3):
            pieces = [
                piece for which in rng.integers(0, 5, 8) for piece in (rng.integers(0, 1000, 6), sentences[which])
            ]
            tokens = np.concatenate(pieces).astype(np.int32)
            rollouts.append(RecordedRollout(number, prompt, tokens))
    return rollouts


def main() -> None:
    drafter: Drafter = RepeatDrafter()
    steps = list(simulate(make_rollouts(), drafter, Engine(UNIT_COST, k=8), batch=12))
    accepted = sum(step.num_accepted for step in steps) / sum(step.num_requests for step in steps)
    print(f"{1 + accepted:.2f} tokens per step")


if __name__ == "__main__":
    main()
