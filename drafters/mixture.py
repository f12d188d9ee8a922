"""The history drafter: blends what a problem's rollouts, all rollouts and the request's own context suggest.

For each draft slot every source gives a distribution over the few tokens it has seen after the longest match:

- `problem` and `shared`, two roots of the suffix tree: counts of the deepest nodes on the match's path, blended from
  shallow to deep as in prediction by partial matching (Cleary and Witten 1984);
- `own`, the request's own context: candidates weighted by the length of their match.

The sources' distributions are averaged with weights from how often each source's first choice was right so far, by
length of the match and amount of evidence. The draft is then the most probable token or, where the request's dice are
known, argmax(sharpness * log q + noise), which is the target's own choice wherever q is the target's distribution
(coupling: Daliri et al., arXiv:2408.07978). A draft ends where its estimated survival falls below `min_survival`.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters import kernels
from rollout_spec.drafters.base import Tokens
from rollout_spec.drafters.kernels import (
    MAX_DEPTH,
    NUM_EVIDENCE_BINS,
    NUM_LENGTH_BINS,
    NUM_PROBABILITY_BINS,
    PROBLEM,
    SHARED,
    SOURCES,
    Calibration,
    Proposals,
    Rows,
    Settings,
)
from rollout_spec.drafters.ngram import NgramIndex
from rollout_spec.drafters.suffix import SuffixTree
from rollout_spec.types import Draft, Int32Array

WEIGHT_BITS = 4
"""The newest policy version's rollouts weigh between 1 and 2 ** WEIGHT_BITS."""
WEIGHT_GRID = 64
"""Weights are multiples of 1 / WEIGHT_GRID."""
CHUNK_TOKENS = 256
"""Tokens indexed between two capacity checks."""


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A finished rollout: what is needed to index it again."""

    problem_id: int | None
    version: int
    text: Int32Array
    num_prompt_tokens: int  # of `text`; at most MAX_DEPTH, the rest of the prompt is nobody's context


@dataclass(slots=True)
class _Live:
    row: int
    problem_id: int | None
    version: int
    num_prompt_tokens: int


class HistoryDrafter:
    """Drafts from prior rollouts, siblings in flight and the request's own context. See the module's docstring.

    Implements `rollout_spec.drafters.base.Drafter`.

    Args:
        sources: Which of `SOURCES` to use.
        max_draft_tokens: Longest draft, K.
        min_survival: A draft ends where the estimated probability of reaching and accepting a slot falls below this.
        sharpness: Exponent on the mixture's probabilities in coupled choice. Above 1: history is a noisy estimate of
            the target, and its small probabilities are mostly noise.
        recency: Weight of a rollout relative to one of the next policy version, in (0, 1].
        max_history_tokens: Bound on indexed tokens. When it is reached, the oldest rollouts are dropped until half is
            left and the index is built anew, which costs O(1) per token amortised. Live requests stay indexed, so it
            should be several times what they hold.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        sources: Sequence[str] = SOURCES,
        *,
        max_draft_tokens: int = 8,
        min_survival: float = 0.1,
        sharpness: float = 1.3,
        recency: float = 0.98,
        max_history_tokens: int = 2_000_000,
    ) -> None:
        unknown = set(sources) - set(SOURCES)
        if unknown or not sources:
            raise ValueError(f"sources must be some of {SOURCES}, got {tuple(sources)}")
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens must be at least 1, got {max_draft_tokens}")
        if not 0 <= min_survival < 1:
            raise ValueError(f"min_survival must be in [0, 1), got {min_survival}")
        if not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness must be positive and finite, got {sharpness}")
        if not 0 < recency <= 1:
            raise ValueError(f"recency must be in (0, 1], got {recency}")
        if max_history_tokens < 1:
            raise ValueError(f"max_history_tokens must be at least 1, got {max_history_tokens}")
        self._max_draft_tokens = max_draft_tokens
        self._recency = recency
        self._max_history_tokens = max_history_tokens
        self._tree = SuffixTree()
        self._contexts = NgramIndex()
        self._settings = Settings(
            uses=("problem" in sources, "shared" in sources, "own" in sources),
            shared_root=self._tree.new_root(),
            sharpness=float(sharpness),
            min_survival=float(min_survival),
            unit_weight=1.0,
        )
        bins = NUM_LENGTH_BINS
        self._calibration = Calibration(
            sources=np.zeros((len(SOURCES), bins, NUM_EVIDENCE_BINS, 2)),
            choices=np.zeros((2, NUM_PROBABILITY_BINS, bins, 2)),
        )
        self._rows = self._new_rows(4)
        self._proposals = self._new_proposals(4)
        self._live: dict[str, _Live] = {}
        self._free_rows: list[int] = []
        self._roots: dict[int, int] = {}
        self._finished: deque[_Rollout] = deque()
        self._num_indexed = 0  # tokens stored since the index was built, those taken back included
        self._num_rebuilt = 0  # of them, those that the last rebuild could not drop
        self._version = 0
        self._weight_shift = 0  # see `_weight`
        self._pending: list[tuple[int, Int32Array]] = []

    # -- the protocol ------------------------------------------------------------------------------------------------

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        if req_id in self._live:
            raise ValueError(f"request {req_id!r} is live already")
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
        prompt = _as_tokens("prompt_token_ids", prompt_token_ids)
        if problem_id is None and prompt.size:
            problem_id = int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little")
        row = self._free_rows.pop() if self._free_rows else len(self._live)
        self._contexts.clear_row(row)
        if row >= self._rows.root.size:
            self._grow_rows(2 * row)
        self._live[req_id] = _Live(row, problem_id, self._version, min(prompt.size, MAX_DEPTH))
        self._rows.seed[row] = 0 if seed is None else seed
        self._rows.has_dice[row] = seed is not None
        self._proposals.lengths[row] = 0
        self._contexts.reserve(prompt.size)
        kernels.append_context(self._contexts.arrays, row, prompt)
        self._attach(row, problem_id, self._version, prompt[-MAX_DEPTH:])

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        live = self._request(req_id)
        tokens = _as_tokens("new_token_ids", new_token_ids)
        if tokens.size:
            self._pending.append((live.row, tokens))

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        if len(max_tokens) != len(req_ids):
            raise ValueError(f"max_tokens has {len(max_tokens)} entries for {len(req_ids)} requests")
        self._flush()
        batch = np.array([self._request(req_id).row for req_id in req_ids], np.int64)
        limits = np.clip(np.asarray(max_tokens, np.int64), 0, self._max_draft_tokens)
        out = self._proposals
        kernels.propose(
            self._tree.arrays,
            self._contexts.arrays,
            self._rows,
            batch,
            limits,
            self._settings,
            self._calibration,
            out,
        )
        lengths = out.lengths[batch].tolist()
        return [
            Draft(out.tokens[row, :n].copy(), out.confidence[row, :n].copy())
            for row, n in zip(batch, lengths, strict=True)
        ]

    def observe(self, req_ids: Sequence[str], target_token_ids: Sequence[Tokens], num_accepted: Int32Array) -> None:
        if not len(req_ids) == len(target_token_ids) == len(num_accepted):
            raise ValueError(
                f"observe got {len(req_ids)} requests, {len(target_token_ids)} token lists and "
                f"{len(num_accepted)} acceptance counts"
            )
        batch = np.array([self._request(req_id).row for req_id in req_ids], np.int64)
        tokens, starts = _ragged([np.asarray(t, np.int32) for t in target_token_ids])
        accepted = np.asarray(num_accepted, np.int64)
        kernels.observe(batch, tokens, starts, accepted, self._calibration, self._proposals)

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        live = self._request(req_id)
        self._flush()
        if self._uses_tree:
            text = self._contexts.context(live.row)
            text = text[text.size - int(self._rows.stored[live.row]) :].copy()
            first = live.num_prompt_tokens
            if keep:
                self._finished.append(_Rollout(live.problem_id, live.version, text, first))
            else:
                kernels.take_back(self._tree.arrays, text, first, self._rows, live.row, self._settings)
        del self._live[req_id]
        self._free_rows.append(live.row)
        if self._num_indexed > max(self._max_history_tokens, 2 * self._num_rebuilt):
            self._rebuild()

    def begin_policy_version(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"policy versions go up: {version} after {self._version}")
        self._flush()
        self._version = version
        shift = int(-version * math.log2(self._recency)) // WEIGHT_BITS * WEIGHT_BITS
        if shift != self._weight_shift:
            factor = 2.0 ** max(self._weight_shift - shift, -200)
            self._tree.scale(factor)
            self._rows.weight[:] *= np.float32(factor)
            self._weight_shift = shift
        self._settings = self._settings._replace(unit_weight=self._weight(version))

    def memory_bytes(self) -> int:
        own = sum(array.nbytes for group in (self._rows, self._proposals, self._calibration) for array in group)
        kept = sum(rollout.text.nbytes for rollout in self._finished)
        return self._tree.memory_bytes() + self._contexts.memory_bytes() + own + kept

    def check_integrity(self) -> None:
        self._flush()
        self._tree.check_integrity()
        for req_id, live in self._live.items():
            self._contexts.check_integrity(live.row)
            text = self._contexts.context(live.row)
            end = self._rows.block_end[live.row]
            kept = min(text.size, int(self._rows.stored[live.row]), MAX_DEPTH)
            stored = self._tree.arrays.tokens[end - kept + 1 : end + 1]
            assert np.array_equal(text[text.size - kept :], stored), f"stored text of {req_id}"
        rows = [live.row for live in self._live.values()] + self._free_rows
        assert len(rows) == len(set(rows)), "a row has two owners"

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _request(self, req_id: str) -> _Live:
        live = self._live.get(req_id)
        if live is None:
            raise ValueError(f"request {req_id!r} is not live: start_request comes first")
        return live

    @property
    def _uses_tree(self) -> bool:
        return self._settings.uses[PROBLEM] or self._settings.uses[SHARED]

    def _weight(self, version: int) -> float:
        """recency ** -version / 2 ** shift, on a grid of 1 / WEIGHT_GRID.

        New rollouts grow heavier instead of old ones lighter, until everything is divided by a power of two. On the
        grid, sums of weights are exact in float32, so that a rollout can be taken back without a remainder.
        """
        weight = 2.0 ** (-version * math.log2(self._recency) - self._weight_shift)
        return max(round(weight * WEIGHT_GRID), 1) / WEIGHT_GRID

    def _attach(self, row: int, problem_id: int | None, version: int, prompt_tail: Int32Array) -> None:
        """Give a row a root, a weight and a fresh text that starts with the end of the prompt."""
        if problem_id is None:
            self._rows.root[row] = -1
        else:
            if problem_id not in self._roots:
                self._roots[problem_id] = self._tree.new_root()
            self._rows.root[row] = self._roots[problem_id]
        self._rows.weight[row] = self._weight(version)
        self._rows.block_end[row] = -1
        self._rows.stored[row] = 0
        if self._uses_tree:
            self._tree.reserve(prompt_tail.size)
            kernels.store(self._tree.arrays, self._rows, row, prompt_tail, self._settings, False)

    def _flush(self) -> None:
        """Index what `extend` collected, in one kernel call per chunk."""
        pending, self._pending = self._pending, []
        chunk: list[tuple[int, Int32Array]] = []
        size = 0
        for row, tokens in pending:
            for start in range(0, tokens.size, CHUNK_TOKENS):
                piece = tokens[start : start + CHUNK_TOKENS]
                chunk.append((row, piece))
                size += piece.size
                if size >= CHUNK_TOKENS:
                    self._index(chunk, size)
                    chunk, size = [], 0
        if chunk:
            self._index(chunk, size)

    def _index(self, chunk: list[tuple[int, Int32Array]], size: int) -> None:
        batch = np.array([row for row, _ in chunk], np.int64)
        tokens, starts = _ragged([tokens for _, tokens in chunk])
        self._contexts.reserve(int(self._contexts.arrays.lengths[batch].max()) + size)
        if self._uses_tree:
            self._tree.reserve(size, num_blocks=len(chunk))
            self._num_indexed += size
        kernels.commit(self._tree.arrays, self._contexts.arrays, self._rows, batch, tokens, starts, self._settings)

    def _rebuild(self) -> None:
        """Drop the oldest rollouts until half of the bound is left, and index the rest and the live requests anew."""
        live_tokens = int(sum(self._rows.stored[live.row] for live in self._live.values()))
        room = max(0, self._max_history_tokens // 2 - live_tokens)
        kept: deque[_Rollout] = deque()
        for rollout in reversed(self._finished):
            room -= rollout.text.size
            if room < 0:
                break
            kept.appendleft(rollout)
        texts = {}
        for req_id, live in self._live.items():
            length = int(self._rows.stored[live.row])
            texts[req_id] = self._contexts.context(live.row)[-length:].copy() if length else np.zeros(0, np.int32)
        self._finished = kept
        self._roots.clear()
        self._tree = SuffixTree()
        self._settings = self._settings._replace(shared_root=self._tree.new_root())
        self._num_indexed = 0
        spare = len(self._live) + len(self._free_rows)
        if spare >= self._rows.root.size:
            self._grow_rows(2 * spare)
        for rollout in kept:
            self._reindex(spare, rollout.problem_id, rollout.version, rollout.text, rollout.num_prompt_tokens)
        for req_id, live in self._live.items():
            self._reindex(live.row, live.problem_id, live.version, texts[req_id], live.num_prompt_tokens)
        self._num_rebuilt = self._num_indexed

    def _reindex(self, row: int, problem_id: int | None, version: int, text: Int32Array, num_prompt: int) -> None:
        self._attach(row, problem_id, version, text[:num_prompt])
        for start in range(num_prompt, text.size, CHUNK_TOKENS):
            piece = text[start : start + CHUNK_TOKENS]
            self._tree.reserve(piece.size)
            kernels.store(self._tree.arrays, self._rows, row, piece, self._settings, True)
            self._num_indexed += piece.size

    def _new_rows(self, capacity: int) -> Rows:
        return Rows(
            root=np.zeros(capacity, np.int64),
            block_end=np.full(capacity, -1, np.int64),
            stored=np.zeros(capacity, np.int64),
            weight=np.ones(capacity, np.float32),
            seed=np.zeros(capacity, np.int64),
            has_dice=np.zeros(capacity, np.bool_),
        )

    def _new_proposals(self, capacity: int) -> Proposals:
        k = self._max_draft_tokens
        return Proposals(
            lengths=np.zeros(capacity, np.int32),
            tokens=np.zeros((capacity, k), np.int32),
            confidence=np.zeros((capacity, k), np.float32),
            choice_cells=np.zeros((capacity, k, 3), np.int32),
            source_tokens=np.full((capacity, k, len(SOURCES)), -1, np.int32),
            source_cells=np.zeros((capacity, k, len(SOURCES), 2), np.int32),
        )

    def _grow_rows(self, capacity: int) -> None:
        rows, proposals = self._new_rows(capacity), self._new_proposals(capacity)
        old: list[NDArray] = [*self._rows, *self._proposals]
        new: list[NDArray] = [*rows, *proposals]
        for old_array, new_array in zip(old, new, strict=True):
            new_array[: old_array.shape[0]] = old_array
        self._rows, self._proposals = rows, proposals


def _as_tokens(name: str, tokens: Tokens) -> Int32Array:
    array = np.asarray(tokens, np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError(f"{name} must not be negative nor exceed 31 bits, got {array.min()} to {array.max()}")
    return array.astype(np.int32)  # a copy: the caller may use the buffer again


def _ragged(arrays: list[Int32Array]) -> tuple[Int32Array, NDArray[np.int64]]:
    """Concatenate; starts[i] : starts[i + 1] is array i."""
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([a.size for a in arrays], out=starts[1:])
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.int32)), starts
