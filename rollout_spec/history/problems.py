"""Which problem a request belongs to: that of the conversation that its prompt continues, or a new one.

A later turn's prompt is the earlier prompt, the rollout and an answer to it; the prompt of a rollout that was aborted
and goes on is the earlier one and what was sampled so far. So a known text is the prompt of a request, or its prompt
and output once it has ended, and a prompt belongs to the problem of the longest known text that begins it. A prompt
that no known text begins is the *root* of a new problem.

A system prompt begins many conversations, which must stay apart: a text that more than 16 prompts per request continue
identifies none. Texts are compared by hashes of their beginnings. Two texts that are taken for one cost drafts, and
never a wrong token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.history.store import Root
from rollout_spec.noise.host import derive_seed
from rollout_spec.types import Int32Array

SLACK = 4
"""A text is also known without its last tokens: chat templates drop some, such as a prompt's trailing `<think>`, when
they render a turn again."""
MIN_LONGER = 8
"""A prompt without its last tokens counts only where the new prompt is longer than all of it by so many tokens, as by
an answer: prompts of the same length that differ at their end are different problems."""
MIN_TOKENS = 16
"""Shorter texts begin no other prompt: what begins with the same few words need not be the same conversation."""
MAX_LONGER = 16
"""Prompts that may continue a text, for each request that had it as its prompt or ended with it."""
MAX_TEXTS, MIN_TEXTS, TOKENS_PER_TEXT = 100_000, 1_000, 32
"""Texts are known for each so many tokens of history, within bounds: without rollouts a text is of no use. Those that
were not met for longest are forgotten."""


class Conversation(NamedTuple):
    """What a request's prompt continues, if anything."""

    problem_id: int | None
    """None: the prompt is empty, and the request shares no history."""
    num_known: int = 0
    """How many of the prompt's first tokens the problem's history has already."""
    length: int = 0
    """Tokens of the prompt."""
    state: int = 0
    """Hash of the prompt, 64 bits, from which its output's goes on."""


@dataclass(slots=True)
class _Text:
    problem_id: int
    length: int
    whole: int  # hash of all tokens
    head: int | None  # hash of all but the last SLACK
    num_known: int  # `Conversation.num_known` of a prompt equal to it
    is_root: bool = False
    is_ended: bool = False  # whether it ends with an output
    is_stored: bool = True  # whether its tokens are in the drafter's history
    num_met: int = 1  # requests that had it as their prompt, or ended with it
    num_longer: int = 0  # prompts that continued it

    @property
    def is_shared(self) -> bool:
        """Whether different conversations begin with it."""
        return self.num_longer >= MAX_LONGER * self.num_met


class Problems:
    """The known texts. The same calls give the same answers, in every process.

    Args:
        max_history_tokens: What the drafter's history holds at most. None: not known, as of a user's own drafter.
    """

    def __init__(self, max_history_tokens: int | None = None) -> None:
        texts = MAX_TEXTS if max_history_tokens is None else max_history_tokens // TOKENS_PER_TEXT
        self._max_texts = min(max(texts, MIN_TEXTS), MAX_TEXTS)
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # by `whole`, those met last at the end
        self._heads: dict[int, _Text] = {}  # the newest with this head
        self._roots: dict[int, _Text] = {}  # by problem id

    def start(
        self, prompt_token_ids: Int32Array, *, model: str = "", images: Sequence[tuple[int, str]] = ()
    ) -> Conversation:
        """A request begins: find the problem of its prompt, which is a known text from now on.

        Args:
            prompt_token_ids: int32 [n].
            model: Tells apart what gives other rollouts for the same prompt, such as a LoRA adapter. Conversations with
                different ones are different.
            images: (position in the prompt, what tells the image apart) of each.
        """
        size, salt = len(prompt_token_ids), derive_seed(model) if model else 0
        if not size and not images and not model:
            return Conversation(None)
        hashes = _hashes(np.asarray(prompt_token_ids, np.int32), salt, 0)
        for position, image in images:
            hashes[position:] += np.uint64(derive_seed(image, position))
        whole = int(hashes[-1]) if size else salt
        known = self._texts.get(whole)
        if known is not None and known.length == size:
            known.is_stored = True
            known.num_met += 1
            self._texts.move_to_end(whole)
            return Conversation(known.problem_id, known.num_known, size, whole)
        found, num_known = self._find(hashes), 0
        if found is None:
            problem_id = problem_of_prompt(prompt_token_ids)
            if model or images:
                problem_id = derive_seed(problem_id, model, *(name for _, name in images))
        else:
            text, size_of_beginning = found
            text.num_longer += 1
            self._texts.move_to_end(text.whole)
            problem_id = text.problem_id
            num_known = size_of_beginning if text.is_stored else 0
        head = int(hashes[-SLACK - 1]) if size > SLACK else None
        self._remember(_Text(problem_id, size, whole, head, num_known, is_root=found is None))
        return Conversation(problem_id, num_known, size, whole)

    def stop(self, conversation: Conversation, output_token_ids: Int32Array) -> None:
        """A request has ended and stays in the history: its prompt and output are a known text from now on."""
        problem_id, length, state = conversation.problem_id, conversation.length, conversation.state
        if problem_id is None or not len(output_token_ids):
            return
        hashes = _hashes(np.asarray(output_token_ids, np.int32), state, length)
        # Where the head would end within the prompt, the prompt itself is known.
        head = int(hashes[-SLACK - 1]) if hashes.size > SLACK else None
        length += hashes.size
        self._remember(_Text(problem_id, length, int(hashes[-1]), head, length, is_ended=True))

    def root_of(self, problem_id: int) -> Root | None:
        """By what a problem's first prompt is recognised; None where it is forgotten, or begins other conversations."""
        text = self._roots.get(problem_id)
        return None if text is None or text.is_shared else Root(text.length, text.whole)

    def add_root(self, problem_id: int, root: Root) -> None:
        """The root of a rollout of another engine or an earlier run. Nothing of the prompt is stored here."""
        self._remember(_Text(problem_id, root.length, root.whole, None, 0, is_root=True, is_stored=False))

    def __len__(self) -> int:
        """Known texts."""
        return len(self._texts)

    def _find(self, hashes: NDArray[np.uint64]) -> tuple[_Text, int] | None:
        """The longest known text that begins a new prompt, and how many tokens it agrees with."""
        size, lengths = hashes.size, {key: length for length, key in enumerate(hashes.tolist(), 1)}
        known = (lengths.keys() & self._texts.keys()) | (lengths.keys() & self._heads.keys())
        for key in sorted(known, key=lengths.__getitem__, reverse=True):
            length, text = lengths[key], self._texts.get(key)
            is_whole = text is not None and text.length == length
            text = text if is_whole else self._heads.get(key)
            if text is None or text.is_shared or length < MIN_TOKENS:
                continue
            # A prompt without its end counts only before something like an answer.
            if is_whole or (text.length - SLACK == length and (text.is_ended or size >= text.length + MIN_LONGER)):
                return text, length
        return None

    def _remember(self, text: _Text) -> None:
        """Add a text, unless it is known, and forget the one that was not met for longest."""
        known = self._texts.get(text.whole)
        if known is not None:
            known.is_stored |= text.is_stored and text.problem_id == known.problem_id
            known.num_met += text.num_met
            self._texts.move_to_end(text.whole)
            return
        self._texts[text.whole] = text
        if text.head is not None:
            self._heads[text.head] = text
        if text.is_root:
            self._roots[text.problem_id] = text
        if len(self._texts) > self._max_texts:
            old = self._texts.popitem(last=False)[1]
            if old.head is not None and self._heads.get(old.head) is old:
                del self._heads[old.head]
            if old.is_root and self._roots.get(old.problem_id) is old:
                del self._roots[old.problem_id]


def problem_of_prompt(prompt_token_ids: Sequence[int] | NDArray[np.integer]) -> int:
    """The problem id of requests that name none: a hash of the prompt, in [0, 2**64)."""
    digest = hashlib.blake2b(np.asarray(prompt_token_ids, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def root_of_prompt(prompt_token_ids: Int32Array) -> Root:
    """By what an engine will recognise a prompt that begins a conversation, without adapter and images. O(n).

    Args:
        prompt_token_ids: int32 [n], not empty.
    """
    return Root(len(prompt_token_ids), int(_hashes(np.asarray(prompt_token_ids, np.int32), 0, 0)[-1]))


def _hashes(tokens: Int32Array, state: int, position: int) -> NDArray[np.uint64]:
    """Hash of each beginning of a text, uint64 [n], shortest first: a sum over tokens and their positions.

    Args:
        tokens: int32 [n].
        state: Hash of what lies before.
        position: Tokens that lie before.
    """
    positions = np.arange(position, position + tokens.size, dtype=np.uint64)
    mixed = _mix(_mix(positions) ^ tokens.astype(np.uint64))
    return np.cumsum(mixed, dtype=np.uint64) + np.uint64(state)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
