"""Which problem a prompt belongs to, and what of it is known: conversations are recognised by how their prompts begin.

A later turn's prompt is the earlier prompt, the rollout and an answer to it; the prompt of a rollout that was aborted
and goes on is the earlier one and what was said so far. So a known text is the prompt of a request, or its prompt and
output once it has ended, and a prompt belongs to the problem of the text that begins it and agrees with most of it. A
prompt that no known text begins is the *root* of a new problem.

Different conversations begin with the same system prompt, and they must stay apart. So a prompt without its last
tokens, which may be no more than that, counts only where tokens of its rollouts follow. And where a whole request is no
more than that, it begins many prompts and was met in few requests: such a text begins no more of them.

Texts are compared by hashes of their beginnings: one pass over a prompt gives the hash of each of its beginnings, and a
filter says which of these may be known. Two texts that are taken for one cost drafts, and never a wrong token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.history.rollout import Root
from rollout_spec.jit.compiler import inlined, njit
from rollout_spec.noise.host import derive_seed
from rollout_spec.types import Int32Array

SLACK = 4
"""A text is also known without its last tokens: chat templates drop some, such as a prompt's trailing `<think>`, when
they render a turn again. A prompt is only where what its rollouts said follows: its end may be all that is its own. As
many tokens may stand in place of those dropped."""
RUN = 8
"""So many tokens in a row of an output tell that it was said. A template may drop what was thought before them."""
LAST_SAID = 1024
"""They are found at an output's beginning and within its last tokens, where an answer begins that follows a thought."""
MAX_LONGER = 16
"""So many different prompts may a text begin for each request that had it, or that ended with it. One that begins more
is what different conversations have in common."""
MIN_TOKENS = 16
"""Shorter texts begin no other prompt: what begins with the same few words need not be the same conversation."""
MAX_TEXTS = 100_000
"""Known texts. Those that were not met for longest are forgotten."""
MIN_TEXTS = 1_000
"""So many are known however small the history is: live requests' prompts among them."""
TOKENS_PER_TEXT = 32
"""A prompt or an output in the history takes a page of so many tokens, or more."""

FILTER_BITS = 23
"""The filter has two to this power bits, a megabyte in all. Each known hash sets two."""
RUN_BITS = 21
"""Two to this power runs of tokens are remembered, at most, in 8 MB. Newer ones take the places of older ones."""


def texts_for(max_history_tokens: int | None) -> int:
    """How many texts to know beside a history of at most so many tokens: as many as it can hold, within bounds.

    A text without rollouts in the history is of little use: a prompt that it begins finds none of them. None: the bound
    is not known, as of a user's own drafter.
    """
    if max_history_tokens is None:
        return MAX_TEXTS
    return min(max(max_history_tokens // TOKENS_PER_TEXT, MIN_TEXTS), MAX_TEXTS)


def namespace_of(adapter: str = "") -> int:
    """The namespace of texts with a LoRA adapter, by its name without a version; "" for none."""
    return derive_seed(adapter)


def root_of_prompt(prompt_token_ids: Int32Array) -> Root:
    """By what an engine will recognise a prompt that begins a conversation, without adapter and images. O(n).

    Args:
        prompt_token_ids: int32 [n], not empty.
    """
    roots = Roots(1)
    roots.start(prompt_token_ids, lambda: 0, namespace=namespace_of())
    root = roots.root_of(0)
    assert root is not None
    return root


class Conversation(NamedTuple):
    """What a request's prompt continues, if anything."""

    problem_id: int | None
    """None: the prompt is empty, and the request shares no history."""
    num_known: int
    """How many of the prompt's first tokens the problem's history has already."""
    turn: int
    """Rollouts of the conversation before this one, as far as they are known."""
    length: int
    """Tokens of the prompt."""
    state: int
    """Hash of the prompt, 64 bits, from which its output's goes on."""


@dataclass(slots=True)
class _Text:
    problem_id: int
    length: int
    whole: int  # hash of all tokens
    head: int | None  # of all but the last SLACK
    turn: int  # of a prompt equal to it
    num_known: int  # of a prompt equal to it
    num_met: int = 1  # requests that had it as their prompt, or ended with it
    num_longer: int = 0  # prompts that it began, as the longest of the texts that begin them
    is_stored: bool = True  # whether its tokens are known at the beginning of longer prompts
    is_root: bool = False
    is_ended: bool = False  # whether it ends with an output

    @property
    def is_shared(self) -> bool:
        """Whether it is what different conversations begin with."""
        return self.num_longer >= MAX_LONGER * max(self.num_met, 1)


class Roots:
    """The known texts, at most `max_texts`. The same calls give the same answers, in every process.

    A prompt of n tokens takes O(n) in compiled code, however many texts are known: about 50 µs for 8,000 tokens.
    """

    def __init__(self, max_texts: int = MAX_TEXTS) -> None:
        self._max_texts = max_texts
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # by `whole`, those met last at the end
        self._heads: dict[int, _Text] = {}  # the newest with this head
        self._roots: dict[int, _Text] = {}  # by problem id
        self._filter = np.zeros(1 << (FILTER_BITS - 3), np.uint8)
        self._said = np.zeros(1 << RUN_BITS, np.uint32)  # half a hash, at the place that its other half says
        self._num_filtered = 0  # texts whose hashes are in the filter, forgotten ones included

    def start(
        self,
        prompt_token_ids: Int32Array,
        new_problem_id: Callable[[], int | None],
        *,
        namespace: int = 0,
        images: Sequence[tuple[int, int]] = (),
        is_named: bool = False,
    ) -> Conversation:
        """A request begins: find the problem of its prompt. Its prompt is a known text from now on.

        Args:
            prompt_token_ids: int32 [n].
            new_problem_id: Gives the problem's id if the prompt continues nothing. None: it shares no history.
            namespace: 64 bits. Texts of different namespaces are different.
            images: (position in the prompt, 64 bits that tell the image apart) of each. A text is known where the
                images within it are the same.
            is_named: Whether the caller names the problem, which is all that this namespace is for: then the prompt is
                no root.
        """
        tokens, size = np.array(prompt_token_ids, np.int32), len(prompt_token_ids)
        hashes, candidates = self._hash(tokens, namespace, images)
        if not size:
            return Conversation(new_problem_id(), 0, 0, 0, namespace)
        state = int(hashes[-1])
        equal = self._texts.get(state)
        if equal is not None and equal.length == size:
            equal.is_stored = True
            equal.num_met += 1
            self._touch(equal)
            return Conversation(equal.problem_id, equal.num_known, equal.turn, size, state)
        found = self._find(tokens, hashes, candidates)
        if found is None:
            problem_id, turn, num_known = new_problem_id(), 0, 0
        else:
            text, num_agreeing = found
            self._touch(text)
            text.num_longer += 1
            problem_id, turn = text.problem_id, text.turn + (not text.is_ended)
            num_known = num_agreeing if text.is_stored else 0
        if problem_id is not None:
            head = int(hashes[size - SLACK - 1]) if size > SLACK else namespace
            is_root = found is None and not is_named
            self._remember(_Text(problem_id, size, state, head, turn, num_known, is_root=is_root))
        return Conversation(problem_id, num_known, turn, size, state)

    def stop(self, conversation: Conversation, output_token_ids: Int32Array) -> None:
        """A request has ended and stays in the history: its prompt and output are a known text from now on.

        Args:
            output_token_ids: int32 [m].
        """
        problem_id, _, turn, length, state = conversation
        if problem_id is None or not length or not len(output_token_ids):
            return
        tokens = np.array(output_token_ids, np.int32)
        for some in (tokens[:RUN], tokens[-LAST_SAID:]):
            places, marks = _runs(some, state)
            self._said[places] = marks
        hashes, _ = self._hash(tokens, state)
        # Where the head would end within the prompt, the prompt itself is known.
        head = int(hashes[-SLACK - 1]) if hashes.size > SLACK else None
        length += hashes.size
        self._remember(_Text(problem_id, length, int(hashes[-1]), head, turn + 1, length, is_ended=True))

    def root_of(self, problem_id: int) -> Root | None:
        """By what a problem's first prompt is recognised.

        None where the caller named the problem, where the prompt is forgotten, and where it begins other conversations.
        """
        text = self._roots.get(problem_id)
        return None if text is None or text.is_shared else Root(text.length, text.whole)

    def add_root(self, problem_id: int, root: Root) -> None:
        """A root that another engine has met, or this one in an earlier run. Nothing of it is stored here."""
        self._remember(_Text(problem_id, root.length, root.whole, None, 0, 0, 0, is_stored=False, is_root=True))

    def __len__(self) -> int:
        """Known texts."""
        return len(self._texts)

    def _hash(
        self, tokens: Int32Array, state: int, images: Sequence[tuple[int, int]] = ()
    ) -> tuple[NDArray[np.uint64], list[int]]:
        """(hash of each beginning of what follows `state`, shortest first; the lengths of those that may be known)."""
        hashes, candidates = np.empty(tokens.size, np.uint64), np.empty(tokens.size, np.int64)
        found: list[int] = []
        start = 0
        for end, image in [*sorted(images), (tokens.size, 0)]:
            end = min(end, tokens.size)
            if end > start:
                count = _hash_beginnings(
                    tokens[start:end], np.uint64(state), self._filter, hashes[start:end], candidates
                )
                found += (candidates[:count] + start).tolist()
                state, start = int(hashes[end - 1]), end
            state = (state ^ image) * 0x9E3779B97F4A7C15 % 2**64 if image else state
        return hashes, found

    def _find(self, tokens: Int32Array, hashes: NDArray[np.uint64], candidates: list[int]) -> tuple[_Text, int] | None:
        """(the text that agrees with most of a new prompt, with how many tokens it agrees)."""
        for size in reversed(candidates):
            if size < MIN_TOKENS:
                break
            key = int(hashes[size - 1])
            text = self._texts.get(key)
            if text is not None and text.length == size and not text.is_shared:
                return text, size
            text = self._heads.get(key)
            if text is None or text.length - SLACK != size or text.is_shared:
                continue
            if text.is_ended or self._follows(text, tokens[size : size + 2 * SLACK + RUN]):
                return text, size
        return None

    def _follows(self, text: _Text, tokens: Int32Array) -> bool:
        """Whether a run of these tokens (int32 [n]) was said in a rollout of a prompt."""
        places, marks = _runs(tokens, text.whole)
        return bool((self._said[places] == marks).any())

    def _touch(self, text: _Text) -> None:
        self._texts.move_to_end(text.whole)

    def _remember(self, text: _Text) -> None:
        """Add a text, unless it is known, and forget the one that was not met for longest."""
        known = self._texts.get(text.whole)
        if known is not None:
            known.is_stored |= text.is_stored and text.problem_id == known.problem_id
            known.num_met += text.num_met
            self._touch(known)
            return
        self._texts[text.whole] = text
        if text.head is not None:
            self._heads[text.head] = text
        if text.is_root:
            self._roots[text.problem_id] = text
        if len(self._texts) > self._max_texts:
            self._forget(self._texts.popitem(last=False)[1])
        self._num_filtered += 1
        if self._num_filtered > 2 * self._max_texts:
            self._filter[:] = 0
            self._num_filtered = len(self._texts)
            self._set(np.array([*self._texts, *self._heads], np.uint64))
        else:
            self._set(np.array([text.whole, text.whole if text.head is None else text.head], np.uint64))

    def _forget(self, text: _Text) -> None:
        if text.head is not None and self._heads.get(text.head) is text:
            del self._heads[text.head]
        if text.is_root and self._roots.get(text.problem_id) is text:
            del self._roots[text.problem_id]

    def _set(self, hashes: NDArray[np.uint64]) -> None:
        """Let these hashes (uint64 [n]) pass the filter."""
        for shift in (0, FILTER_BITS):
            bits = (hashes >> np.uint64(shift)).astype(np.int64) & ((1 << FILTER_BITS) - 1)
            np.bitwise_or.at(self._filter, bits >> 3, (1 << (bits & 7)).astype(np.uint8))


def _runs(tokens: Int32Array, state: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """(places, marks) of each run of these tokens, int32 [n], in rollouts of the prompt whose hash is `state`."""
    hashes = np.empty(max(tokens.size - RUN + 1, 0), np.uint64)
    _hash_runs(tokens, np.uint64(state), hashes)
    return hashes & np.uint64((1 << RUN_BITS) - 1), (hashes >> np.uint64(32)).astype(np.uint32)


@inlined(allocates=False)
def _mix(state, token):
    """The hash of a text and one more token, uint64."""
    state = (state ^ np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    return state ^ state >> np.uint64(29)


@njit(allocates=False)
def _hash_runs(tokens, state, hashes):
    """Hash each run of tokens, int32 [n], into uint64 [runs], as if it followed the text whose hash is `state`."""
    for i in range(hashes.size):
        run = state
        for j in range(i, i + RUN):
            run = _mix(run, tokens[j])
        hashes[i] = run


@njit(allocates=False)
def _hash_beginnings(tokens, state, known, hashes, found):
    """Hash each beginning of a text, and find those that may be known.

    Args:
        tokens: int32 [n].
        state: uint64, the hash of what lies before.
        known: uint8, the filter.
        hashes: uint64 [n], filled: of the first 1, 2, ..., n tokens.
        found: int64 [at least n], filled with the lengths of the beginnings that pass the filter, rising.

    Returns:
        How many those are.
    """
    mask, count = (1 << FILTER_BITS) - 1, 0
    for i in range(tokens.size):
        state = _mix(state, tokens[i])
        hashes[i] = state
        first = np.int64(state & np.uint64(mask))
        second = np.int64(state >> np.uint64(FILTER_BITS) & np.uint64(mask))
        if known[first >> 3] >> (first & 7) & 1 and known[second >> 3] >> (second & 7) & 1:
            found[count] = i + 1
            count += 1
    return count
