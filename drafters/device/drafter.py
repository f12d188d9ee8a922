"""The drafter whose history lives on the device, so that the engine need not wait for sampled tokens.

Texts are scanned, not indexed. A problem has some ten thousand tokens (16 rollouts of 2,000 are 128 KB), and a step
reads each request's problem once: 512 requests over 32 problems of 32,000 tokens read 64 MB, nearly all from the cache,
whose 5 TB/s would make that 13 us; comparing takes longer. The alternatives: hash chains read 100 bytes per candidate,
but one after another, and need insertions in an order that all ranks share; a suffix array of reversed prefixes finds
the longest match in 17 dependent reads, but must be sorted again as every request grows in every step. The scan keeps
no state besides the texts: a token can be matched once it is stored, and dropping a text is freeing its memory. Its
time grows with a problem's tokens: those of its live requests, and at most `max_problem_tokens` of ended rollouts.

Other problems' texts are too many to be scanned, and little of them is of use: of each context of three tokens an index
holds a place in each of a few other problems (`kernels.Texts.index`). A request looks up its last three tokens, and
what is found there votes beside the matches of its own problem, with a small weight. The index has a fixed size: texts
that began, ended or came later overwrite others. A place whose text has gone is recognised by the text's stamp.

The texts are one array, and what the target saw at each token (`rollout_spec.features`) is another beside it. Both are
a pool from which every text gets a piece: no engine has as many tokens in flight as its longest requests could have, so
a live request gets a piece twice as long whenever its own is full, and its text is moved there. The rollout of a
request that ends stays where it is, and is copied to the host. A problem's rollouts stay in the pool while it has live
requests, and after that until the space is needed; when requests of an evicted problem start, its newest rollouts are
uploaded while the prompts are read.

The host decides where texts lie, by the lengths that it knows and the order of its calls, so that all ranks decide
alike. While it serves, it waits for the device in one case: a rollout is to be uploaded before its copy to the host has
arrived, as when a problem is evicted and needed again within a step or two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec import checks
from rollout_spec.drafters.base import Tokens
from rollout_spec.drafters.device import kernels
from rollout_spec.drafters.device.kernels import EngineSlots
from rollout_spec.drafters.host.constants import CELLS, MAX_DEPTH
from rollout_spec.features import FEATURE_WORDS, no_features
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.history.store import Rollout, RolloutStore, check_rollouts
from rollout_spec.launches import next_power_of_2
from rollout_spec.transfers import copy_to_host, runs_later, upload

MAX_RESIDENT_TOKENS = 4_000_000
"""Ended rollouts' tokens that are kept on the device, unless it is told otherwise."""
MAX_INDEX_BYTES = 1 << 26
"""Most bytes of the index of all problems' texts."""
MAX_MEMBERS = kernels.MAX_MEMBERS.value
TOKENS_PER_DOCUMENT, TOKENS_PER_PROBLEM = 16, 256
"""Tokens of ended rollouts per entry of the table of documents, and of that of problems."""
MORE_ROOM = 1024
"""For at least so many further tokens a live request gets room when it needs some."""
DRAFT_DTYPES = torch.int64, torch.float32
"""Of drafts and their rates."""
NEVER = 2**31 - 1
"""As a length at which a text ends."""
NO_PROBLEM = -(2**64)
"""A request without a problem has the id NO_PROBLEM - slot. Hashes and callers' ids are never negative."""


def token_bytes(*, features: bool) -> int:
    """Bytes that a token of a text takes, with or without what the target saw at it."""
    return 4 + 8 * FEATURE_WORDS * features


class Ranges:
    """Allocates ranges of an array of fixed size, first fit; freed neighbours are joined. O(number of gaps) per call.

    Attributes:
        gaps: The free ranges (first element, size), in order.
    """

    def __init__(self, size: int) -> None:
        self.gaps: list[tuple[int, int]] = [(0, size)] if size else []

    def allocate(self, size: int) -> int | None:
        """Take a range of this size and return its first element; None if no gap is large enough."""
        for i, (start, free) in enumerate(self.gaps):
            if free >= size:
                self.gaps[i : i + 1] = [(start + size, free - size)] if free > size else []
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Free a range, which may be empty."""
        if not size:
            return
        i = bisect_left(self.gaps, (start, size))
        if i < len(self.gaps) and start + size == self.gaps[i][0]:
            size += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == start:
            start, size = self.gaps[i - 1][0], size + self.gaps.pop(i - 1)[1]
            i -= 1
        self.gaps.insert(i, (start, size))


@dataclass(slots=True)
class Archived:
    """A rollout on the host, or on its way there (`rollout_spec.history.store.EndedRollout`)."""

    problem_id: int
    order: int  # number of requests that started before it
    capacity: int  # size of `tokens` while the copy is under way
    tokens: Tensor  # int32: the end of the prompt and the output; after the output unused until it has arrived
    features: Tensor  # int64 [tokens, FEATURE_WORDS] of them, or [0, FEATURE_WORDS]
    fields: Tensor | None = None
    """int64 [3]: offset, length and prompt, as in the table of documents; None once the rollout has arrived."""
    copied: torch.cuda.Event | None = None
    """Recorded after the copy from the device; None where there is none."""
    num_context: int = 0
    """Tokens of the prompt; like the next, 0 until it has arrived."""
    num_sampled: int = 0

    def arrive(self, *, wait: bool) -> bool:
        """Copy what has arrived to pageable memory, without the unused end."""
        if self.fields is None:
            return True
        if self.copied is not None:
            if wait:
                self.copied.synchronize()
            elif not self.copied.query():
                return False
        _, length, self.num_context = self.fields.tolist()
        self.num_sampled = length - self.num_context
        self.tokens, self.features = self.tokens[:length].clone(), self.features[:length].clone()
        self.fields = None
        return True

    def read(self) -> Rollout:
        tokens, features = self.tokens.numpy(), self.features.numpy()
        of_output = features[self.num_context :] if features.size else None
        return Rollout(self.problem_id, tokens[: self.num_context], tokens[self.num_context :], of_output)


class EndedRequest(NamedTuple):
    """A request that has ended, and by what its last token is found: the engine samples past a request's end."""

    slot: int
    length: int
    """Upper bound on its tokens, prompt included."""
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    """Output tokens below which a stop token does not end it."""
    max_tokens: int = NEVER
    """Output tokens after which it ends."""
    keep: bool = True
    """Whether its rollout stays in the history. Otherwise its text goes, as after a preemption, but not what was learnt
    from outcomes."""


@dataclass(slots=True)
class _Problem:
    problem_id: int
    row: int
    num_live: int = 0
    members: list[int] = field(default_factory=list)
    """Its documents, newest request first."""
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(first token, size) in the pool of each ended rollout, by document."""

    @property
    def num_resident(self) -> int:
        """Tokens that it occupies in the pool."""
        return sum(size for _, size in self.pieces.values())

    @property
    def is_shared(self) -> bool:
        """Whether other problems' requests see its texts, and its own see theirs."""
        return self.problem_id > NO_PROBLEM

    def scanned_members(self) -> list[int]:
        """At most MAX_MEMBERS of its documents, in their order. Where there are more, live requests stay."""
        surplus = len(self.members) - MAX_MEMBERS
        if surplus <= 0:
            return self.members
        left_out = set([document for document in self.members if document in self.pieces][-surplus:])
        return [document for document in self.members if document not in left_out][:MAX_MEMBERS]


@dataclass(slots=True)
class _InSlot:
    problem: _Problem
    prompt_length: int
    order: int
    """Requests started before it."""


class DeviceDrafter:
    """Drafts for the requests of one engine, told apart by slot.

    Args:
        max_requests: Slots of the engine, R.
        max_model_len: Longest text of a request, in tokens.
        device: Where the texts live.
        max_draft_tokens: Drafted tokens per request, K.
        use_noise: Whether to draft with the noise by which requests of positive temperature are sampled.
        features: Use what the target saw, where it is given: candidates weigh by how similar the target's state was,
            and vote for all tokens that it thought likely there.
        max_resident_tokens: Bound on the ended rollouts' tokens in the pool. Each takes 36 bytes, 4 without `features`.
        max_live_tokens: What the pool has room for beside these. None: `max_requests` texts of `max_model_len`. Where
            live requests need more, rollouts of problems without live requests make room; then some have no drafts.
        max_problem_tokens: Bound on one problem's tokens in the pool; its newest rollouts are kept.
        max_history_tokens: Bound on the tokens kept on the host. The oldest rollouts go first.

    Attributes:
        max_history_tokens: Most tokens that are kept.
        rollouts: The ended ones, with or without a place in the pool.
        wants_features: Whether features are of use.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_model_len: int,
        device: torch.device,
        max_draft_tokens: int = 8,
        use_noise: bool = True,
        features: bool = True,
        max_resident_tokens: int = MAX_RESIDENT_TOKENS,
        max_live_tokens: int | None = None,
        max_problem_tokens: int = 131_072,
        max_history_tokens: int = 64_000_000,
    ) -> None:
        checks.integer("max_resident_tokens", max_resident_tokens, 1)
        checks.integer("max_problem_tokens", max_problem_tokens, 1)
        checks.integer("max_history_tokens", max_history_tokens, 1)
        self.wants_features = checks.switch("features", features)
        self._device = device
        # One more than the longest text: of a text that fills its piece the last tokens may be missing.
        self._largest_piece = max_model_len + 1
        self._use_noise = use_noise
        self._max_resident_tokens, self._max_problem_tokens = max_resident_tokens, max_problem_tokens

        num_documents = max_requests + max_resident_tokens // TOKENS_PER_DOCUMENT
        # All live requests may have problems of their own while a rollout of another one comes.
        num_problems = max_requests + 1 + max_resident_tokens // TOKENS_PER_PROBLEM
        # Two to four entries per token of the pool, while that is not too much.
        num_entries = min(1 << (2 * max_resident_tokens).bit_length(), MAX_INDEX_BYTES // 8)
        columns = kernels.COLUMNS.value
        num_buckets = max(num_entries // columns, 1)
        position_bits = max(max_model_len, max_problem_tokens).bit_length()
        stamp_shift = position_bits + num_documents.bit_length()
        self._max_stamp = (1 << 63 - stamp_shift) - 1
        self._last_stamp = 0
        all_live = max_requests * self._largest_piece
        num_tokens = max_resident_tokens + (all_live if max_live_tokens is None else min(max_live_tokens, all_live))
        self._pool = Ranges(num_tokens)
        self._pieces = np.zeros((max_requests, 2), np.int64)  # (first token, size) in the pool of each slot
        new = torch.zeros
        self._texts = kernels.Texts(
            members=new(num_problems, 1 + MAX_MEMBERS, dtype=torch.int32, device=device),
            tokens=new(num_tokens, dtype=torch.int32, device=device),
            documents=new(num_documents, kernels.FIELDS.value, dtype=torch.int64, device=device),
            features=new(num_tokens * self.wants_features, FEATURE_WORDS, dtype=torch.int64, device=device),
            index=new(num_buckets, columns, dtype=torch.int64, device=device),
            layout=(position_bits, stamp_shift, num_buckets),
        )
        num_drafted = new(max_requests, dtype=torch.int32, device=device)
        drafted = new(max_requests, max_draft_tokens, dtype=torch.int32, device=device)
        self._last_drafts = kernels.LastDrafts(num_drafted, drafted, torch.zeros_like(drafted))
        self._continued: dict[int, kernels.LastDrafts] = {}  # the same of `continue_drafts`, by the tokens given
        self._counts = new(CELLS, 2, dtype=torch.int32, device=device)

        self._num_started = 0  # requests, and rollouts that were added
        self._live: dict[int, _InSlot] = {}
        self._problems: dict[int, _Problem] = {}
        self._idle: dict[int, _Problem] = {}  # without live requests, idle longest first
        self._num_resident = 0
        self._free_rows = list(range(num_problems - 1, -1, -1))
        self._free_documents = list(range(num_documents - 1, max_requests - 1, -1))
        self.max_history_tokens = max_history_tokens
        self.rollouts: RolloutStore[Archived] = RolloutStore()
        self._num_archived = 0  # sum of their capacities
        self._changed_problems: dict[int, _Problem] = {}
        self._changed_documents: dict[int, tuple[int, ...]] = {}
        self._unindexed: set[int] = set()  # documents that have been uploaded

    # -- requests come and go ----------------------------------------------------------------------------------------

    def start_request(
        self, slot: int, prompt_token_ids: Tokens, *, problem_id: int | None = None, own_only: bool = False
    ) -> None:
        """Begin a request in a slot. Its tokens are read from the engine's own copy, by `propose` or `extend`.

        It has room for them after `reserve`.

        Args:
            problem_id: Requests with the same id share history. None: the hash of the prompt; an empty prompt has no
                problem.
            own_only: Draft for it from its own text alone.

        Raises:
            ValueError: the slot is taken.
        """
        if slot in self._live:
            raise ValueError(f"slot {slot} is taken")
        if own_only or (problem_id is None and not len(prompt_token_ids)):
            problem_id = NO_PROBLEM - slot
        elif problem_id is None:
            problem_id = problem_of_prompt(prompt_token_ids)
        problem = self._problems.get(problem_id)
        self.rollouts.begin_request(problem_id)
        if problem is None:
            problem = self._add_problem(problem_id)
            self._upload(problem)
        self._idle.pop(problem_id, None)
        problem.num_live += 1
        problem.members.insert(0, slot)
        live = _InSlot(problem, len(prompt_token_ids), self._num_started)
        self._live[slot] = live
        self._num_started += 1
        self._changed_problems[problem.row] = problem
        self._describe(slot, problem, 0, 0, live.prompt_length)

    def reserve(self, slots: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Give live requests room for their texts, where the pool has it. Called before each `propose` or `extend`.

        A request without room has no drafts, and of its rollout only what has room is kept.

        Args:
            slots: integer [B].
            lengths: integer [B], upper bounds on the tokens of each after the step, prompts and what `continue_drafts`
                is given included.
        """
        is_short = self._pieces[slots, 1] <= np.minimum(lengths, self._largest_piece - 1)
        if not is_short.any():
            return
        self._publish()
        rows, old_pieces = [], []
        for slot, length in zip(slots[is_short].tolist(), lengths[is_short].tolist(), strict=True):
            if slot not in self._live:
                continue
            piece = tuple(self._pieces[slot].tolist())
            size = min(max(length + MORE_ROOM, 2 * piece[1]), self._largest_piece)
            start = self._pool.allocate(size)
            while start is None and self._idle:
                self._evict_oldest()
                start = self._pool.allocate(size)
            if start is not None:
                rows.append((slot, start, size))
                old_pieces.append(piece)
                self._pieces[slot] = start, size
        if rows:
            kernels.move(upload(np.array(rows, np.int64), self._device), self._texts)
        for piece in old_pieces:
            self._pool.release(*piece)

    def stop_requests(self, ended: Sequence[EndedRequest]) -> None:
        """End requests; their rollouts enter the history, unless they are not to be kept.

        Raises:
            ValueError: a slot is free.
        """
        for request in ended:
            if request.slot not in self._live:
                raise ValueError(f"slot {request.slot} is free: start_request comes first")
        self._publish()  # what is retired is found by the tables on the device
        # Places first: finding one may evict others, also rollouts of this call, which are not retired then. The rest
        # of a request's piece is freed only after that, so that nobody gets it. Problems become idle last: from then on
        # they may be evicted.
        retired: dict[int, tuple[EndedRequest, _InSlot]] = {}  # by document
        left: dict[int, _Problem] = {}
        for request in ended:
            slot, live = request.slot, self._live.pop(request.slot)
            problem = left[live.problem.row] = live.problem
            problem.num_live -= 1
            self.rollouts.release(problem.problem_id)
            self._changed_problems[problem.row] = problem
            # Without a stamp nobody finds it any more.
            self._changed_documents[slot] = (0, 0, 0, problem.row, 0, 0, 0)
            start, size = self._pieces[slot].tolist()
            self._pieces[slot] = 0
            context = min(live.prompt_length, MAX_DEPTH)
            begin = live.prompt_length - context
            capacity = min(request.length, size) - begin
            keeps = request.keep and problem.is_shared and capacity > context
            place = self._place(problem, capacity, start + begin) if keeps else None
            if place is None:
                self._pool.release(start, size)
                problem.members.remove(slot)
                continue
            document, first = place
            self._pool.release(start, begin)
            self._pool.release(first + capacity, size - begin - capacity)
            problem.members[problem.members.index(slot)] = document
            self._keep(problem, document, first, capacity)
            retired.pop(document, None)  # a rollout of this call that was evicted for this one
            retired[document] = request, live
        self._retire({document: of for document, of in retired.items() if document in of[1].problem.pieces})
        for problem in left.values():
            self._mark_idle_if_unused(problem)
        kernels.halve_full(self._counts)
        self.rollouts.take_arrived()

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """As `HistoryDrafter.add_rollouts`. O(tokens).

        They are uploaded, also where no request of their problem is live, as other problems draft from them; problems
        that have been idle longer make room. If an idle problem's rollout does not fit, the whole problem leaves the
        device, and is uploaded with all its rollouts when it is needed again, as are those that have left already.
        """
        for rollout in check_rollouts(rollouts):
            tokens = np.concatenate((rollout.context, rollout.tokens), dtype=np.int32)
            features = no_features(tokens.size if self.wants_features else 0)
            if self.wants_features and rollout.features is not None:
                features[rollout.context.size :] = rollout.features
            problem = self._problems.get(rollout.problem_id)
            if problem is None and not self.rollouts.knows(rollout.problem_id):
                problem = self._add_problem(rollout.problem_id)
            texts = torch.from_numpy(tokens), torch.from_numpy(features)
            sizes = {"num_context": rollout.context.size, "num_sampled": rollout.tokens.size}
            archived = Archived(rollout.problem_id, self._num_started, tokens.size, *texts, **sizes)
            self._num_started += 1
            self._archive(archived, record=False)
            if problem is not None:
                self._idle.pop(rollout.problem_id, None)
                has_place = self._bring(problem, archived)
                self._mark_idle_if_unused(problem)
                if not has_place and problem.num_live == 0:
                    self._evict(problem)

    def warm_up(
        self,
        slots_dtype: torch.dtype,
        engine: EngineSlots,
        num_given_tokens: int = 0,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Launch every kernel in every variant that a batch can need, so that none is compiled while serving.

        Call it before the first request starts.

        Args:
            slots_dtype: Of the slots of a batch.
            num_given_tokens: M of `continue_drafts`; 0: it will not be called.
            engine, tables: As for `propose`.
        """
        features = torch.zeros_like(self._texts.features[:1])
        most = self._last_drafts.lengths.numel()
        for batch in sorted({1, most, *(kernels.TARGET_PROGRAMS // n for n in kernels.SPLITS)}):
            if 1 <= batch <= most:
                slots = torch.arange(batch, dtype=slots_dtype, device=self._device)
                nothing = torch.zeros_like(slots, dtype=torch.int32)
                self.extend(slots, nothing, engine)
                self.propose(slots, nothing, engine, features, nothing, tables)
                if num_given_tokens:
                    given = torch.zeros(batch, num_given_tokens, dtype=torch.int64, device=self._device)
                    self.continue_drafts(slots, nothing, given, engine)
        row = torch.zeros(1, kernels.RETIRED_FIELDS.value, dtype=torch.int64, device=self._device)
        kernels.retire(row, row[:, :1].int(), self._texts)
        kernels.move(row[:, :3].contiguous(), self._texts)

    # -- a step ------------------------------------------------------------------------------------------------------

    def propose(
        self,
        slots: Tensor,
        num_sampled: Tensor,
        engine: EngineSlots,
        features: Tensor | None = None,
        first_rows: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Copy the new tokens from the engine and draft. Never waits for the device.

        Can be captured in a CUDA graph where nothing but this and `extend` was called since the last call.

        Args:
            slots: int32 [B], the batch's slots.
            num_sampled: int32 [B], tokens of the last step. 0, as for prompts not yet read to their end: no draft.
            features: int64 [N, FEATURE_WORDS], what the target saw at each row of the step's logits; None: not known.
            first_rows: int32 [B], with features: the first row of each request, which its first new token comes from.
            tables: int64 and float32 [R, K]: where the result is written, by slot. None: new tensors.

        Returns:
            `tables`, or (drafts int64 [B, K], rates float32 [B, K]): tokens, and the estimated probability that each is
            accepted once it is reached. Positions without a draft repeat the last token and have rate 0.
        """
        self.extend(slots, num_sampled, engine, features, first_rows)
        return self._draft(slots, num_sampled, engine, self._last_drafts, tables)

    def extend(
        self,
        slots: Tensor,
        num_sampled: Tensor,
        engine: EngineSlots,
        features: Tensor | None = None,
        first_rows: Tensor | None = None,
    ) -> None:
        """Copy the new tokens from the engine without drafting. Arguments as for `propose`."""
        self._publish()
        texts, k = self._texts, self._last_drafts.tokens.shape[1]
        known = kernels.NOT_KEPT if not self.wants_features else kernels.UNKNOWN if features is None else kernels.GIVEN
        new = texts.features if features is None else features, num_sampled if first_rows is None else first_rows
        of_engine = engine.token_ids, engine.token_ids.stride(0), engine.lengths
        outcomes = *self._last_drafts, self._counts
        arguments = slots, *of_engine, *texts.stored, texts.index, *outcomes, *new, num_sampled
        sizes = {"K": k, "WIDTH": next_power_of_2(k), "BLOCK": kernels.NEW_TOKENS}
        kernels.launch_extend[slots.shape](*arguments, FEATURES=known.value, LAYOUT=texts.layout, **sizes, num_warps=1)

    def _draft(
        self,
        slots: Tensor,
        wanted: Tensor,
        engine: EngineSlots,
        last: kernels.LastDrafts,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Find matches, and draft from them. Arguments as for `continue_drafts`, result and `tables` as of `propose`.

        Args:
            last: Where the drafts are kept to be graded.
        """
        texts, batch, k = self._texts, slots.shape[0], last.tokens.shape[1]
        num_kept, num_found = kernels.MAX_CANDIDATES.value, kernels.COLUMNS.value
        splits = max((n for n in kernels.SPLITS if n * batch <= kernels.TARGET_PROGRAMS), default=kernels.SPLITS[0])
        keys = torch.empty(batch, splits, num_kept, dtype=torch.int64, device=self._device)
        found = torch.empty(batch, num_found, dtype=torch.int32, device=self._device)
        where = texts.members, texts.tokens, texts.documents, texts.index
        sizes = splits // kernels.TILE_SPLITS, len(texts.index)
        tiles = {"TILE_SPLITS": kernels.TILE_SPLITS, "TILE": kernels.TILE}
        kernels.launch_scan[batch, splits](
            slots, wanted, *where, keys, found, *sizes, LAYOUT=texts.layout, **tiles, num_warps=4
        )
        if tables is None:
            drafts, rates = (torch.empty(batch, k, dtype=dtype, device=self._device) for dtype in DRAFT_DTYPES)
        else:
            drafts, rates = tables
        of_engine = engine.seeds, engine.temperature
        kernels.launch_draft[slots.shape](
            *(slots, keys, found, texts.members, *texts.stored, *of_engine, self._counts, *last, drafts, rates),
            BY_SLOT=tables is not None,
            FEATURES=self.wants_features,
            USE_NOISE=self._use_noise,
            K=k,
            WIDTH=next_power_of_2(k),
            NUM_KEYS=splits * num_kept,
            num_warps=4 if self.wants_features else 1,  # a lane per choice
            # Without fusion every product is rounded before lanes add them. A fused multiply-add leaves one of two
            # products unrounded: lanes' sums could differ in the last bit, and which is stored would be up to the
            # hardware.
            enable_fp_fusion=False,
        )
        return drafts, rates

    def continue_drafts(
        self, slots: Tensor, wanted: Tensor, token_ids: Tensor, engine: EngineSlots
    ) -> tuple[Tensor, Tensor]:
        """Draft what follows tokens that another drafter has drafted. Called after `propose` of the same step.

        The texts are looked up as if these tokens had been said; other requests of the problem see them meanwhile. What
        becomes of these drafts is not counted: their rates are those of drafts that begin at a request's end.

        Args:
            slots: int32 [B], the batch's slots.
            wanted: int32 [B], 1 or 0: nothing is drafted for the request.
            token_ids: int64 [B, M], M < K: how the drafts begin.

        Returns:
            (drafts int64 [B, K - M], rates float32 [B, K - M]), as of `propose`.
        """
        num_given = token_ids.shape[1]
        scratch = self._continued.get(num_given)
        if scratch is None:
            num_drafted, *others = (torch.zeros_like(tensor) for tensor in self._last_drafts)
            scratch = kernels.LastDrafts(num_drafted, *(tensor[:, num_given:].contiguous() for tensor in others))
            self._continued[num_given] = scratch
        lengthened = torch.empty_like(wanted)
        arguments = slots, wanted, token_ids, token_ids.stride(0), *self._texts.stored, lengthened
        sizes = {"FEATURES": self.wants_features, "M": num_given, "WIDTH": next_power_of_2(num_given)}
        kernels.launch_lengthen[slots.shape](*arguments, SHORTEN=False, **sizes, num_warps=1)
        drafted = self._draft(slots, lengthened, engine, scratch)
        kernels.launch_lengthen[slots.shape](*arguments, SHORTEN=True, **sizes, num_warps=1)
        return drafted

    # -- what is known about it --------------------------------------------------------------------------------------

    def history_summary(self) -> dict[str, int]:
        return self.rollouts.summary()

    def memory_bytes(self) -> int:
        """Bytes on the device and of history on the host."""
        texts = *self._texts.stored, self._texts.members, self._texts.index
        tensors = [*texts, *self._last_drafts, self._counts]
        tensors += [tensor for scratch in self._continued.values() for tensor in scratch]
        of_history = token_bytes(features=self.wants_features) * self._num_archived
        return sum(t.numel() * t.element_size() for t in tensors) + of_history

    def check_integrity(self) -> None:
        """Check internal invariants; for tests. Raises AssertionError."""
        places = [place for problem in self._problems.values() for place in problem.pieces.values()]
        documents = [document for problem in self._problems.values() for document in problem.pieces]
        assert len(documents) == len(set(documents)), "a document has two owners"
        assert not set(documents) & set(self._free_documents), "a document is free and owned"
        assert self._num_resident == sum(size for _, size in places) <= self._max_resident_tokens, "resident tokens"
        assert not {*np.flatnonzero(self._pieces[:, 1])} - {*self._live}, "a free slot has a piece of the pool"
        end = 0
        for start, size in sorted([*places, *self._pool.gaps, *map(tuple, self._pieces[self._pieces[:, 1] > 0])]):
            assert start == end, "the pool has a hole or an overlap"
            end = start + size
        assert not {start for start, _ in self._pool.gaps} & {sum(gap) for gap in self._pool.gaps}, "unjoined gaps"
        assert end == self._texts.tokens.numel(), "the pool lost its end"
        for problem in self._problems.values():
            live = {slot for slot, request in self._live.items() if request.problem is problem}
            assert problem.num_live == len(live), "live requests"
            assert (problem.num_live == 0) == (problem.problem_id in self._idle), "idle problems"
            assert sorted(problem.members) == sorted([*live, *problem.pieces]), "members"
        held = {problem.problem_id: problem.num_live + len(problem.pieces) for problem in self._problems.values()}
        assert self.rollouts.num_held == {name: num for name, num in held.items() if num}, "problems held"
        assert self._num_archived == sum(rollout.capacity for rollout in self.rollouts.by_age), "archived tokens"

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _add_problem(self, problem_id: int) -> _Problem:
        """A problem that is not on the device yet. Where there is no row for it, the one that is idle longest goes."""
        if not self._free_rows:
            self._evict_oldest()
        problem = self._problems[problem_id] = _Problem(problem_id, self._free_rows.pop())
        return problem

    def _describe(self, document: int, problem: _Problem, first: int, length: int, prompt_length: int) -> None:
        """Write a text's row of the table of documents, with a new stamp."""
        fields = first, length, prompt_length, problem.row, problem.problem_id % kernels.COLUMNS.value, 0
        self._changed_documents[document] = (*fields, self._new_stamp(problem))

    def _bring(self, problem: _Problem, rollout: Archived) -> bool:
        """Upload a rollout as its problem's newest; False: there is no place for it."""
        size = rollout.tokens.numel()
        place = self._place(problem, size)
        if place is None:
            return False
        document, start = place
        self._texts.tokens[start : start + size] = upload(rollout.tokens.numpy(), self._device)
        if self.wants_features:
            self._texts.features[start : start + size] = upload(rollout.features.numpy(), self._device)
        problem.members.insert(0, document)
        self._keep(problem, document, start, size)
        self._describe(document, problem, start, size, rollout.num_context)
        self._unindexed.add(document)
        self._changed_problems[problem.row] = problem
        return True

    def _keep(self, problem: _Problem, document: int, start: int, size: int) -> None:
        """A piece of the pool holds an ended rollout from now on."""
        problem.pieces[document] = (start, size)
        self.rollouts.hold(problem.problem_id)
        self._num_resident += size

    def _new_stamp(self, problem: _Problem) -> int:
        """The next text's stamp."""
        if not problem.is_shared:
            return 0
        self._reserve_stamps(1)
        self._last_stamp += 1
        return self._last_stamp

    def _reserve_stamps(self, count: int) -> None:
        """Where fewer are left, as once in many millions of texts, empty the index and begin anew."""
        if self._last_stamp + count > self._max_stamp:
            self._texts.index.zero_()
            self._texts.documents[:, kernels.STAMP.value] = 0
            self._changed_documents = {document: (*row[:-1], 0) for document, row in self._changed_documents.items()}
            self._last_stamp = 0

    def _place(self, problem: _Problem, size: int, start: int | None = None) -> tuple[int, int] | None:
        """(document, first token in the pool) for a rollout of `size` tokens, None where there is no room.

        To make room, problems without live requests are evicted, then the problem's oldest rollouts.

        Args:
            problem: One that is not idle: it would be evicted, too.
            start: Where it is in the pool; None: it comes from elsewhere.
        """
        assert problem.problem_id not in self._idle, "no place is sought for an idle problem"
        if size > self._max_problem_tokens:
            return None
        oldest = [document for document in reversed(problem.members) if document in problem.pieces]
        while True:
            fits = problem.num_resident + size <= self._max_problem_tokens and len(problem.pieces) < MAX_MEMBERS
            num_free = self._max_resident_tokens - self._num_resident
            if fits and num_free >= size and self._free_documents:
                place = self._pool.allocate(size) if start is None else start
                if place is not None:
                    document = self._free_documents.pop()
                    self._changed_documents.pop(document, None)  # or a pending row would overwrite what `retire` writes
                    return document, place
            if fits and self._idle:
                self._evict_oldest()
            elif oldest and problem.num_resident + num_free >= size:
                self._forget(problem, oldest.pop(0))
            else:
                return None

    def _forget(self, problem: _Problem, document: int) -> None:
        """Free an ended rollout's place."""
        piece = problem.pieces.pop(document)
        self.rollouts.release(problem.problem_id)
        self._pool.release(*piece)
        self._num_resident -= piece[1]
        problem.members.remove(document)
        self._free_documents.append(document)
        self._changed_documents[document] = (0,) * kernels.FIELDS.value

    def _mark_idle_if_unused(self, problem: _Problem) -> None:
        if problem.num_live == 0 and problem.problem_id not in self._idle:
            self._idle[problem.problem_id] = problem
            if not problem.is_shared:  # no other request will have this id
                self._evict(problem)

    def _evict_oldest(self) -> None:
        """Free the rollouts of the problem that has been idle longest."""
        self._evict(next(iter(self._idle.values())))

    def _evict(self, problem: _Problem) -> None:
        for document in list(problem.pieces):
            self._forget(problem, document)
        self._changed_problems.pop(problem.row, None)
        self._free_rows.append(problem.row)
        del self._problems[problem.problem_id], self._idle[problem.problem_id]

    def _retire(self, retired: Mapping[int, tuple[EndedRequest, _InSlot]]) -> None:
        """Find where rollouts end, and copy them to the host. retired: By document."""
        if not retired:
            return
        most_stops = max(1, *(len(request.stop_token_ids) for request, _ in retired.values()))
        stops = np.full((len(retired), most_stops), -1, np.int32)
        rows = np.zeros((len(retired), kernels.RETIRED_FIELDS.value), np.int64)
        # Before any is drawn: had numbering begun anew in between, those drawn earlier would outrank all later texts.
        self._reserve_stamps(len(retired))
        for n, (document, (request, live)) in enumerate(retired.items()):
            stops[n, : len(request.stop_token_ids)] = request.stop_token_ids
            may_stop = live.prompt_length + max(request.min_tokens, 1)
            must_stop = min(live.prompt_length + request.max_tokens, NEVER)
            capacity, stamp = live.problem.pieces[document][1], self._new_stamp(live.problem)
            rows[n] = request.slot, document, capacity, may_stop, must_stop, stamp
        kernels.retire(upload(rows, self._device), upload(stops, self._device), self._texts)
        copies = []
        for document, (_, live) in retired.items():
            start, size = live.problem.pieces[document]
            place = slice(start, start + size)
            parts = self._texts.tokens[place], self._texts.features[place], self._texts.documents[document, :3]
            copies.append(Archived(live.problem.problem_id, live.order, size, *map(copy_to_host, parts)))
        if runs_later(self._device):
            copied = torch.cuda.Event()
            copied.record()
            for rollout in copies:
                rollout.copied = copied
        for rollout in copies:
            self._archive(rollout, record=True)

    def _archive(self, rollout: Archived, *, record: bool) -> None:
        """Keep a rollout on the host, and drop the oldest ones until the bound holds."""
        self.rollouts.add(rollout, record=record)
        self._num_archived += rollout.capacity
        while self._num_archived > self.max_history_tokens:
            self._num_archived -= self.rollouts.drop_oldest().capacity

    def _upload(self, problem: _Problem) -> None:
        """Bring a problem's newest rollouts from the host."""
        newest_first = sorted(self.rollouts.of_problem(problem.problem_id), key=lambda rollout: -rollout.order)
        num_tokens, wanted = 0, []
        for rollout in newest_first[:MAX_MEMBERS]:
            rollout.arrive(wait=True)
            num_tokens += rollout.tokens.numel()
            if num_tokens > self._max_problem_tokens:
                break
            if rollout.num_sampled:
                wanted.append(rollout)
        for rollout in reversed(wanted):
            self._bring(problem, rollout)

    def _publish(self) -> None:
        """Upload the rows of the device's tables that have changed, and index the texts that were uploaded."""
        if self._changed_documents:
            self._write(self._texts.documents, self._changed_documents)
        if self._unindexed:
            fields = {document: self._changed_documents[document] for document in self._unindexed}
            rows = [(document, document, row[1], NEVER, NEVER, row[-1]) for document, row in fields.items()]
            no_stops = torch.full((len(rows), 1), -1, dtype=torch.int32, device=self._device)
            kernels.retire(upload(np.array(rows, np.int64), self._device), no_stops, self._texts)
            self._unindexed = set()
        self._changed_documents = {}
        if self._changed_problems:
            values = np.zeros((len(self._changed_problems), 1 + MAX_MEMBERS), np.int32)
            for row, problem in zip(values, self._changed_problems.values(), strict=True):
                members = problem.scanned_members()
                row[0] = len(members)
                row[1 : 1 + len(members)] = members
            self._write(self._texts.members, dict(zip(self._changed_problems, values, strict=True)))
            self._changed_problems = {}

    def _write(self, table: Tensor, rows: Mapping[int, object]) -> None:
        """Replace rows of a table."""
        values = np.array(list(rows.values()), np.int64 if table.dtype == torch.int64 else np.int32)
        table[upload(np.array(list(rows), np.int64), self._device)] = upload(values, self._device)
