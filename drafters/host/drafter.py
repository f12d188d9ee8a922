"""The history drafter: drafts what followed the same context in earlier rollouts, siblings and the request itself.

An index (`suffix.py` or `ngram.py`) finds earlier positions whose context agrees with the end of the request's, longest
matches first. Each is a candidate that votes for the token at its position. A vote's weight depends on the candidate's
source; votes are blended over match lengths as in prediction by partial matching (Cleary and Witten 1984), which gives
a distribution q. The draft is the most probable token or, where the request's seed and so the target's noise is known,
argmax(log q + noise), which is the target's own choice where q is the target's distribution (coupling: Daliri et al.,
arXiv:2408.07978).
Where it is known what the target saw at each token (`rollout_spec.features`), candidates of similar states weigh more,
and a candidate votes for all tokens that were likely at its position, not only for the one that was sampled there.
Candidates with another token drop out and the others move on by one token; when none is left the index is searched
again with the drafted tokens as context. After its first token a draft ends where its estimated survival, calibrated
from outcomes, falls below `min_survival`.

`constants.py` holds the constants, `voting.py` and `step.py` the compiled code.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from rollout_spec import checks
from rollout_spec.drafters.base import Tokens
from rollout_spec.drafters.host import constants, ngram, step, suffix
from rollout_spec.drafters.host.index import WINDOW, DrafterSettings, Index, append_tokens, remove_document
from rollout_spec.drafters.host.lookahead import LOOKAHEAD_ORDER, new_pool
from rollout_spec.drafters.host.requests import UNLIMITED, RequestTable
from rollout_spec.drafters.host.step import NO_FEATURES, HistoryState, Learned, Sampled, StepOptions
from rollout_spec.drafters.host.store import (
    LENGTH,
    MAX_PAGES,
    PAGE_TOKENS,
    PROBLEM,
    PROMPT,
    ROLLOUT,
    TextStore,
    is_private,
)
from rollout_spec.drafters.host.voting import new_scratch
from rollout_spec.features import SIGNATURE_BITS, Features, check_features, decoded_probabilities
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.history.store import Rollout, RolloutStore, check_rollouts
from rollout_spec.jit import by_reference
from rollout_spec.types import Draft, Int32Array

IndexKind = Literal["suffix", "ngram"]
MAX_DRAFT_TOKENS = 1 << 16
"""Bound on K, far above any of use, for which the buffers take megabytes."""
POOL_ENTRIES = 1 << 14
"""N-grams in the lookahead pool."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that live requests or rollouts in the history refer to."""

    documents: list[int]
    """Tokens that are context only and not indexed, if any, then the others, if any."""
    key: tuple[int, int, int]
    """Its problem, a 64-bit hash of its tokens, and how many of them are not indexed."""
    users: int = 0


@dataclass(slots=True)
class _Request:
    """A live request, or the rollout of one that has ended (`rollout_spec.history.store.EndedRollout`)."""

    texts: TextStore
    row: int
    document: int
    problem_id: int
    """Negative: the request had no problem."""
    prompt: _Prompt | None

    @property
    def num_sampled(self) -> int:
        return int(self.texts.arrays.documents[self.document, LENGTH])

    def arrive(self, *, wait: bool) -> bool:
        return True

    def read(self) -> Rollout:
        tokens, features = self.texts.read(self.document)
        last = self.prompt.documents[-1] if self.prompt else -1
        context = self.texts.text_before_end(last, constants.MAX_DEPTH) if last >= 0 else tokens[:0]
        return Rollout(self.problem_id, context, tokens, features)


class HistoryDrafter:
    """Drafts from prior rollouts, siblings in flight and the request's own context. See the module's docstring.

    Implements `rollout_spec.drafters.base.BatchDrafter`.

    Args:
        index: `"suffix"` finds every earlier occurrence, longest matches first; `"ngram"` the newest ones.
        own_only: Draft for every request from its own text alone.
        shared: Also draft from the rollouts of other problems, by the index "suffix".
        lookahead: Also draft from what the target sampled after rejected drafts (see `lookahead.py`).
        max_draft_tokens: Longest draft, K.
        min_survival: A draft ends after its first token where the estimated probability of reaching and accepting a
            token falls below this.
        features: Use what the target saw, where `extend` is given it: candidates weigh by how similar the target's
            state was, and vote for all tokens that it thought likely there, not only for the one that it sampled.
        max_history_tokens: Bound on the tokens kept, prompts included, counted in pages of 32. The oldest finished
            rollouts go first; live requests stay.

    Attributes:
        max_history_tokens: Most tokens that are kept.
        wants_features: Whether features that are given with tokens are of use.
        wants_rejected_targets: Whether the target's tokens after the first difference are of use.
        table: The live requests' rows.
        rollouts: The ended ones.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        index: IndexKind = "suffix",
        *,
        own_only: bool = False,
        shared: bool = False,
        lookahead: bool = False,
        max_draft_tokens: int = 8,
        min_survival: float = 0.01,
        features: bool = True,
        max_history_tokens: int = 8_000_000,
    ) -> None:
        index = cast(IndexKind, checks.choice("index", index, get_args(IndexKind)))
        own_only, shared = checks.switch("own_only", own_only), checks.switch("shared", shared)
        if own_only and shared:
            raise ValueError("own_only and shared exclude each other")
        if shared and index == "ngram":
            raise ValueError('the index "ngram" finds the own problem only: leave shared out')
        lookahead = checks.switch("lookahead", lookahead)
        features = checks.switch("features", features)
        max_draft_tokens = checks.integer("max_draft_tokens", max_draft_tokens, 1, MAX_DRAFT_TOKENS)
        max_history_tokens = checks.integer("max_history_tokens", max_history_tokens, 1)
        min_survival = checks.number("min_survival", min_survival, lambda value: 0 <= value < 1, "in [0, 1)")
        self.wants_features = features
        self.wants_rejected_targets = lookahead
        self._own_only = own_only
        self._max_draft_tokens = max_draft_tokens
        # A tenth of all pages is left to live requests, however large the bound.
        self._max_history_pages = min(max_history_tokens / PAGE_TOKENS, 0.9 * MAX_PAGES)
        self.max_history_tokens = 0 if own_only else int(self._max_history_pages * PAGE_TOKENS)
        self._store = TextStore()
        self._settings = DrafterSettings(
            use_tree=index == "suffix",
            use_shared=shared,
            min_survival=min_survival,
            by_disagreement=np.exp(-constants.SIMILARITY * np.arange(SIGNATURE_BITS + 1)).astype(np.float32),
            probability=decoded_probabilities(),
        )
        self._index = Index(suffix.new_tree(), suffix.new_tree(), ngram.new_buckets(1024 if index == "ngram" else 1))
        self._pool = new_pool(POOL_ENTRIES if lookahead else 1)
        self._outcomes = np.zeros((constants.CELLS, 2), np.float32)
        self.table = RequestTable(max_draft_tokens)
        self._referenced = self._state()
        self._reference = by_reference(self._referenced)
        self._scratch = by_reference(new_scratch(max_draft_tokens))
        self._window = np.empty(WINDOW, np.int32)
        self._options = StepOptions(max_draft_tokens, UNLIMITED, True)  # for `extend`, which knows no request's end
        self._live: dict[str, _Request] = {}
        self._prompts: dict[tuple[int, int, int], _Prompt] = {}
        self._problems: dict[int, int] = {}  # number in the store by problem id
        self._next_problem = 0
        self.rollouts: RolloutStore[_Request] = RolloutStore()
        self._unindexed: list[NDArray[np.int64]] = []  # documents whose last tokens are not indexed yet
        self._num_unindexed = 0

    # -- the protocol ------------------------------------------------------------------------------------------------

    def start_request(
        self,
        req_id: str,
        prompt_token_ids: Tokens,
        *,
        problem_id: int | None = None,
        seed: int | None = None,
        num_known: int = 0,
        own_only: bool = False,
    ) -> None:
        if not isinstance(req_id, str):
            raise TypeError(f"req_id must be a string, got {checks.shown(req_id)}")
        if req_id in self._live:
            raise ValueError(f"request {req_id!r} is live already")
        if seed is not None:
            seed = checks.integer("seed", seed)
        if problem_id is not None:
            problem_id = checks.integer("problem_id", problem_id, 0, 2**64 - 1)
        num_known = checks.integer("num_known", num_known)
        own_only = checks.switch("own_only", own_only) or self._own_only
        prompt_tokens = _as_array("prompt_token_ids", prompt_token_ids)
        if not 0 <= num_known <= prompt_tokens.size:
            raise ValueError(f"num_known must be from 0 to the prompt's {prompt_tokens.size} tokens, got {num_known}")
        if own_only or (problem_id is None and not prompt_tokens.size):
            problem_id = -1 - self._next_problem
        elif problem_id is None:
            problem_id = problem_of_prompt(prompt_tokens)
        if problem_id not in self._problems:
            num_known = 0
        self.rollouts.begin_request(problem_id)
        problem = self._problem(problem_id, own_only=own_only)
        prompt, document = self._new_rollout(problem, prompt_tokens, num_known)
        row = self.table.start(prompt_tokens.size, seed, document)
        self._live[req_id] = _Request(self._store, row, document, problem_id, prompt)

    def extend(self, req_id: str, new_token_ids: Tokens, features: Features | None = None) -> None:
        live = self._request(req_id)
        tokens = _as_array("new_token_ids", new_token_ids)
        if features is not None:
            check_features(features, tokens.size)
        if not tokens.size:
            return
        row = np.array([live.row])
        num_seen = self.table.arrays.num_tokens[row]
        sampled = Sampled(
            row,
            np.zeros(1, np.int64),
            tokens[None],
            num_seen,
            (num_seen + tokens.size).astype(np.int32),
            np.zeros(1, np.int64),
            np.array([tokens.size - 1]),
            np.array([0, tokens.size]),
            NO_FEATURES if features is None else features,
        )
        self.learn_step(sampled, None, self._options)

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        if isinstance(req_ids, str) or not isinstance(req_ids, Sequence):
            raise TypeError(f"req_ids must be a list of strings, got {checks.shown(req_ids)}")
        rows = np.array([self.row_of(req_id) for req_id in req_ids], np.int64)
        self._flush()
        self.propose_rows(rows, checks.integers("max_tokens", max_tokens, len(req_ids)))
        drafts = self.table.arrays.history
        tokens, confidence, lengths = drafts.tokens[rows], drafts.confidence[rows], drafts.lengths[rows].tolist()
        return [Draft(t[:n], c[:n]) for t, c, n in zip(tokens, confidence, lengths, strict=True)]

    def row_of(self, req_id: str) -> int:
        return self._request(req_id).row

    def learn_step(self, sampled: Sampled, targets: NDArray[np.int64] | None, options: StepOptions) -> Learned:
        if sampled.features.size:
            check_features(sampled.features, sampled.features.shape[0])
        self.update_index()  # prompts before the tokens that were sampled meanwhile
        if targets is not None:
            text = np.empty(LOOKAHEAD_ORDER + self._max_draft_tokens, np.int32)
            step.remember_rejected(self.table.arrays, self._state(), sampled, targets, text)
        if sampled.features.size and self.wants_features:
            self._store.keep_features()
        known, limits = self.table.arrays.num_tokens[sampled.rows], np.empty(sampled.rows.size, np.int64)
        num_new = int(np.maximum(sampled.lengths[sampled.batch_rows] - known, 0).sum())
        self._reserve(num_new, sampled.rows.size)
        if options.index_now:
            self._reserve_index(num_new, self._store.num_tokens + num_new)
        counts = step.learn(self.table.reference, self._state_by_reference(), options, sampled, self._window, limits)
        if not options.index_now and num_new:
            self._unindexed.append(self.table.arrays.document[sampled.rows])
            self._num_unindexed += num_new
        self._drop_oldest()
        return Learned(limits, *counts)

    def _reserve(self, num_tokens: int, num_pieces: int) -> None:
        """Make room for the text of `num_tokens` tokens in `num_pieces` pieces."""
        self._store.reserve(num_tokens // PAGE_TOKENS + num_pieces)  # a piece takes at most one page more than it fills

    def _state(self) -> HistoryState:
        """All that is known, for compiled functions."""
        return HistoryState(self._store.arrays, self._index, self._pool, self._settings, self._outcomes)

    def _state_by_reference(self) -> Any:
        now, last = self._state(), self._referenced
        if now.store is not last.store or now.lookup is not last.lookup:  # an array has grown
            self._referenced, self._reference = now, by_reference(now)
        return self._reference

    def update_index(self) -> None:
        if self._num_unindexed == 0:
            return
        self._reserve_index(self._num_unindexed, self._store.num_tokens)
        step.index_documents(self._state(), np.concatenate(self._unindexed), self._window)
        self._unindexed, self._num_unindexed = [], 0  # not before: without room for all it can be tried again

    def _reserve_index(self, num_new: int, num_tokens: int) -> None:
        """Make room in the index for `num_new` tokens more, and for `num_tokens` in all."""
        index, store = self._index, self._store
        num_entries = num_tokens * ngram.TABLE_ENTRIES_PER_TOKEN
        if self._settings.use_tree:
            tree, shared = suffix.reserve(store.arrays, index.tree, num_new, is_shared=False), index.shared
            if self._settings.use_shared:
                shared = suffix.reserve(store.arrays, shared, num_new, is_shared=True)
            if tree is not index.tree or shared is not index.shared:
                self._index = index._replace(tree=tree, shared=shared)
        elif index.buckets.size < num_entries:
            self._index = index._replace(buckets=ngram.new_buckets(num_entries))
            ngram.rehash(store.arrays, self._index.buckets, index.buckets, self._window)

    def propose_rows(self, rows: NDArray[np.int64], limits: NDArray[np.int64]) -> None:
        step.propose(self.table.reference, self._state_by_reference(), rows, limits, self._scratch)

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        live = self._request(req_id)
        keep = checks.switch("keep", keep) and not is_private(self._problems[live.problem_id])
        del self._live[req_id]
        self.table.stop(live.row)
        if not keep:
            self._flush()  # before `release`: where it drops the problem's last rollout, the number is still in use
        self.rollouts.release(live.problem_id)
        if keep:
            self.rollouts.add(live, record=live.problem_id >= 0)
        else:
            self._remove(live)

    def output_of(self, req_id: str) -> Int32Array:
        """A live request's tokens without its prompt, int32 [n].

        Raises:
            ValueError: `req_id` is not live.
        """
        return self._store.text(self._request(req_id).document)

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Put rollouts into the history that ended elsewhere, as the newest, the last one most. O(tokens).

        Raises:
            ValueError: see `check_rollouts`.
        """
        rollouts = check_rollouts(rollouts)
        self._flush()
        for rollout in [] if self._own_only else rollouts:
            problem = self._problem(rollout.problem_id)
            prompt, document = self._new_rollout(problem, rollout.context.copy(), rollout.context.size)
            self.rollouts.add(_Request(self._store, -1, document, rollout.problem_id, prompt), record=False)
            # Copies: code would be compiled again for arrays that cannot be written, as those of files.
            self._append(document, rollout.tokens.copy(), None if rollout.features is None else rollout.features.copy())
            self._flush()  # after each: arrays grow, but never shrink

    def memory_bytes(self) -> int:
        index = self._index
        arrays: list[NDArray] = [
            *self._store.arrays, *index.tree, *index.shared, index.buckets, self._outcomes, *self._pool,
        ]  # fmt: skip
        return self.table.memory_bytes() + sum(array.nbytes for array in arrays)

    def history_summary(self) -> dict[str, int]:
        return self.rollouts.summary()

    def check_integrity(self) -> None:
        self._flush()
        self._store.check_integrity()
        if self._settings.use_tree:
            suffix.check_integrity(self._store.arrays, self._index.tree, is_shared=False)
            if self._settings.use_shared:
                suffix.check_integrity(self._store.arrays, self._index.shared, is_shared=True)
        self.table.check_integrity([live.row for live in self._live.values()])
        held = Counter(live.problem_id for live in self._live.values())
        assert self.rollouts.num_held == held, "problems held"
        documents = [r.document for r in chain(self._live.values(), self.rollouts.by_age)]
        documents += [document for prompt in self._prompts.values() for document in prompt.documents]
        live = np.flatnonzero(self._store.arrays.documents[:, PROBLEM] >= 0).tolist()
        assert sorted(documents) == live, "a document has two owners or none"

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _request(self, req_id: str) -> _Request:
        live = self._live.get(req_id) if isinstance(req_id, str) else None
        if live is None:
            raise ValueError(f"request {checks.shown(req_id)} is not live: start_request comes first")
        return live

    def _problem(self, problem_id: int, *, own_only: bool = False) -> int:
        """A problem's number. `own_only`: a new problem is private."""
        number = self._problems.get(problem_id)
        if number is None:
            number = self._problems[problem_id] = 2 * self._next_problem + own_only
            self._next_problem += 1  # never used again: the lookahead pool may hold entries of an old number
        return number

    def _prompt(self, problem: int, tokens: Int32Array, num_known: int) -> _Prompt:
        """A problem's prompt, with one more user. Its first `num_known` tokens are not indexed."""
        key = (problem, hash(tokens.tobytes()), num_known)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt([], key)
            context = -1
            for part, is_indexed in ((tokens[:num_known][-constants.MAX_DEPTH :], False), (tokens[num_known:], True)):
                if part.size:
                    context = self._store.new_document(problem, PROMPT, context=context)
                    prompt.documents.append(context)
                    self._append(context, part, is_indexed=is_indexed)
        prompt.users += 1
        return prompt

    def _new_rollout(self, problem: int, context: Int32Array, num_known: int) -> tuple[_Prompt | None, int]:
        """The prompt of a rollout, if it has one, and a document for what follows."""
        prompt = self._prompt(problem, context, num_known) if context.size else None
        return prompt, self._store.new_document(problem, ROLLOUT, context=prompt.documents[-1] if prompt else -1)

    def _flush(self) -> None:
        """Index what the drafter was given so far, and drop the oldest rollouts until the bound holds."""
        self.update_index()
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self.rollouts.by_age and self._store.num_used_pages > self._max_history_pages:
            self._remove(self.rollouts.drop_oldest())

    def _append(
        self, document: int, tokens: Int32Array, features: Features | None = None, *, is_indexed: bool = True
    ) -> None:
        """Append tokens to a document. `update_index` indexes them, unless they are context only."""
        if features is not None and self.wants_features:
            self._store.keep_features()
        self._reserve(tokens.size, 1)
        append_tokens(self._state(), document, tokens, NO_FEATURES if features is None else features)
        if is_indexed:
            self._unindexed.append(np.array([document]))
            self._num_unindexed += tokens.size

    def _remove(self, request: _Request) -> None:
        """Take a rollout out of the index, and its prompt if no other rollout has the same."""
        prompt, documents = request.prompt, [request.document]
        if prompt is not None:
            prompt.users -= 1
            if prompt.users == 0:
                documents += reversed(prompt.documents)
                del self._prompts[prompt.key]
        for document in documents:
            remove_document(self._state(), document, self._window)
            self._store.release(document)
        if not self.rollouts.knows(request.problem_id):
            del self._problems[request.problem_id]


def _as_array(name: str, tokens: Tokens | Iterable[int]) -> Int32Array:
    """Token ids as an array.

    Raises:
        ValueError: they are not one-dimensional integers from 0 to 2^31 - 1.
    """
    values: NDArray[Any] | None = None
    has_bools = isinstance(tokens, list | tuple) and bool in map(type, tokens)  # which NumPy takes for integers
    if not has_bools and not isinstance(tokens, str | bytes | Set | Mapping):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            values = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens))
    is_integer = values is not None and values.ndim == 1 and (values.dtype.kind in "iu" or not values.size)
    if values is None or not is_integer or (values.size and not 0 <= values.min() <= values.max() < 2**31):
        raise ValueError(f"{name} must be one-dimensional integers from 0 to 2^31 - 1, got {checks.shown(tokens)}")
    return values.astype(np.int32)
