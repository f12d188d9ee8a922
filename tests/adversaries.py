"""Drafters that draft badly or raise, for tests of what an engine does then. Named by dotted path in configurations."""

from __future__ import annotations

import time

import numpy as np

from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.types import Draft
from tests.conftest import VOCAB_SIZE


class Adversary:
    """Has the four methods that a drafter needs, and no others.

    Drafts of random length: half of them random tokens, half of them copied from another request's output.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._outputs: dict[str, list[int]] = {}
        self.finished: list[list[int]] = []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        assert req_id not in self._outputs
        self._outputs[req_id] = []

    def extend(self, req_id, new_token_ids):
        self._outputs[req_id] += [int(token) for token in new_token_ids]

    def propose(self, req_ids, max_tokens):
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens, strict=True):
            length = int(self._rng.integers(0, limit + 1)) if limit > 0 else 0
            tokens = self._rng.integers(0, self._vocab_size, length)
            others = [output for other, output in self._outputs.items() if other != req_id]
            if others and self._rng.random() < 0.5:
                other = others[int(self._rng.integers(len(others)))]
                at = len(self._outputs[req_id])
                tokens = np.array(other[at : at + length])
            drafts.append(Draft(tokens.astype(np.int32), np.ones(len(tokens), np.float32)))
        return drafts

    def stop_request(self, req_id, *, keep=True):
        self.finished.append(self._outputs.pop(req_id))


class NoDrafter:
    """Has two of the four methods that it needs."""

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        pass

    def stop_request(self, req_id, *, keep=True):
        pass


class Silent(Adversary):
    """Proposes nothing."""

    def propose(self, req_ids, max_tokens):
        return [Draft(np.zeros(0, np.int32), np.zeros(0, np.float32)) for _ in req_ids]


def _raise(result):
    raise ArithmeticError("a fault of the drafter's own")


def _replaced(draft_of):
    """A fault of drafts: each becomes (tokens, confidence) of another, for its size."""
    return lambda drafts: [Draft(*draft_of(draft.token_ids.size)) for draft in drafts]


FAULTS = {
    "raises": _raise,
    "too many": _replaced(lambda size: (np.zeros(99, np.int32), np.ones(99, np.float32))),
    "out of vocabulary": _replaced(lambda size: (np.full(size, VOCAB_SIZE, np.int32), np.ones(size, np.float32))),
}
"""What becomes of what a method returns."""


class Faulty(Adversary):
    """One of its methods has a fault, from a call on.

    Args:
        method: Its name.
        fault: One of FAULTS.
        calls: Which calls have it, as the arguments of a range.
    """

    def __init__(self, method, fault, calls=(5, 10**9)) -> None:
        super().__init__()
        original, self.num_calls = getattr(self, method), 0

        def faulty(*args, **kwargs):
            result = original(*args, **kwargs)
            self.num_calls += 1
            return FAULTS[fault](result) if self.num_calls in range(*calls) else result

        setattr(self, method, faulty)

    def memory_bytes(self):
        return 0


class RaisesWhenBuilt(Adversary):
    """The constructor raises a TypeError that has nothing to do with its arguments."""

    def __init__(self):
        super().__init__()
        len(5)  # TypeError


class SameToken(Adversary):
    """Always drafts the same token, 5."""

    def propose(self, req_ids, max_tokens):
        lengths = np.maximum(max_tokens, 0)
        return [Draft(np.full(n, 5, np.int32), np.ones(n, np.float32)) for n in lengths]


def _rank():
    import torch

    return torch.distributed.get_rank()


class SlowOnTheSecondRank(Adversary):
    """Sleeps while it drafts, on the second tensor-parallel rank: its steps take longer than the first rank's."""

    def propose(self, req_ids, max_tokens):
        if _rank() == 1:
            time.sleep(0.01)
        return super().propose(req_ids, max_tokens)


class RaisesOnTheFirstRank(Adversary):
    """`propose` raises on one tensor-parallel rank from the sixth call on."""

    rank = calls = 0

    def propose(self, req_ids, max_tokens):
        self.calls += 1
        if self.calls > 5 and _rank() == self.rank:
            raise ArithmeticError("a fault of the drafter's own")
        return super().propose(req_ids, max_tokens)


class RaisesOnTheSecondRank(RaisesOnTheFirstRank):
    rank = 1


class RaisesInTheExchangeOfHistory(HistoryDrafter):
    """Raises where it hands over what has ended, on one tensor-parallel rank, from the sixth call on.

    Args:
        rank: Which.
    """

    def __init__(self, rank, **options) -> None:
        super().__init__(**options)
        self._rank_with_a_fault, self._num_calls = rank, 0
        self._take_recorded, self.rollouts.take_recorded = self.rollouts.take_recorded, self._raise_or_take

    def _raise_or_take(self, *, wait=False):
        self._num_calls += 1
        if self._num_calls > 5 and _rank() == self._rank_with_a_fault:
            raise ArithmeticError("a fault of the drafter's own")
        return self._take_recorded(wait=wait)
