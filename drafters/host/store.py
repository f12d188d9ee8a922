"""The text that the indexes refer to: prompts and rollouts, in pages.

A document is a prompt or a rollout. It is a list of pages of PAGE_TOKENS tokens; a page knows the position of the token
before it, so that a rollout's contexts reach back into its prompt, and rollouts grow side by side without moving.
A position is page * PAGE_TOKENS + offset. Positions do not change until their document is removed; then its pages are
free for others at once. A token costs 4 bytes, its features 32, a page 16.

Compiled functions never allocate capacity: their callers reserve it first. Each helper is compiled for one signature,
as compiling takes long: scalars are np.int64, because numba compiles a function again for each argument type.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.constants import MAX_DEPTH
from rollout_spec.features import Features, no_features
from rollout_spec.jit import njit
from rollout_spec.types import Int32Array

PAGE_BITS = 5
PAGE_TOKENS = 1 << PAGE_BITS
"""Tokens per page."""
PAGE_MASK = PAGE_TOKENS - 1
POSITION_BITS = 26
"""Bits of a position, which leave room for a part of the key's hash in an entry of the n-gram table."""
MAX_PAGES = 1 << (POSITION_BITS - PAGE_BITS)
"""Pages that positions can tell apart."""
# Indices into `counts`
NUM_FREE_PAGES, NUM_TOKENS = range(2)
# Columns of `pages`: the document, -1 where the page is free; the position of the token before the page's first
# one, -1 where there is none; the document's next page, -1 where there is none; the index in the document of the page's
# first token. What is read of a page together is in one line of the processor's cache.
DOCUMENT, BACK, NEXT, START = range(4)
# Columns of `documents`: the problem (see `is_private`), -1 where there is no document; PROMPT or ROLLOUT; the first
# position, -1 of an empty document; the last position, of an empty rollout its prompt's, -1 where there is none; its
# tokens; how many of them, the first ones, the index knows.
PROBLEM, KIND, FIRST, LAST, LENGTH, INDEXED = range(6)
PROMPT, ROLLOUT = range(2)


class TextArrays(NamedTuple):
    """The text of prompts and rollouts, as compiled functions see it. P pages, D documents."""

    tokens: Int32Array  # [P * PAGE_TOKENS]
    pages: Int32Array  # [P, 4] see DOCUMENT
    documents: Int32Array  # [D, 6] see PROBLEM
    free_pages: Int32Array  # [P] stack
    counts: NDArray[np.int64]  # [2] see NUM_FREE_PAGES
    features: Features  # [P * PAGE_TOKENS, FEATURE_WORDS] of the tokens; of length 0 before any are given


@njit(allocates=False)
def is_private(problem):
    """Whether a problem's text is for the request alone that has said it. The numbers of such problems are odd."""
    return problem & 1 == 1


@njit(allocates=False)
def before(pages, position):
    """Position of the token before, -1 when there is none."""
    if position & PAGE_MASK:
        return position - 1
    return np.int64(pages[position >> PAGE_BITS, BACK])


@njit(allocates=False)
def step_back(pages, position, steps):
    """Position `steps` tokens before, -1 when there is none."""
    while position >= 0:
        offset = position & PAGE_MASK
        if steps <= offset:
            return position - steps
        steps -= offset + 1
        position = np.int64(pages[position >> PAGE_BITS, BACK])
    return np.int64(-1)


@njit(allocates=False)
def last_position(store, document):
    """A document's last position; of an empty rollout its prompt's last one, -1 when there is none."""
    return np.int64(store.documents[document, LAST])


@njit(allocates=False)
def problem_of(store, position):
    """The problem of the document that a position belongs to."""
    return np.int64(store.documents[store.pages[position >> PAGE_BITS, DOCUMENT], PROBLEM])


@njit(allocates=False)
def read_back(store, position, text, end):
    """Copy the tokens that end at `position` to text[:end]. Returns how many there were, at most `end`."""
    tokens, pages = store.tokens, store.pages
    at = end
    while at > 0 and position >= 0:
        at -= 1
        text[at] = tokens[position]
        position = before(pages, position)
    return end - at


@njit(allocates=False)
def after(pages, position):
    """Position of the token after one that is not its document's last."""
    if (position & PAGE_MASK) != PAGE_MASK:
        return position + 1
    return np.int64(pages[position >> PAGE_BITS, NEXT]) << PAGE_BITS


@njit(allocates=False)
def append_token(store, document, token):
    """Store a token behind a document's last one and return its position."""
    last = last_position(store, document)
    length = store.documents[document, LENGTH]
    if length > 0 and (last & PAGE_MASK) != PAGE_MASK:
        position = last + 1
    else:
        store.counts[NUM_FREE_PAGES] -= 1
        page = np.int64(store.free_pages[store.counts[NUM_FREE_PAGES]])
        position = page << PAGE_BITS
        store.pages[page, DOCUMENT] = document
        store.pages[page, BACK] = last
        store.pages[page, NEXT] = -1
        store.pages[page, START] = length
        if length > 0:
            store.pages[last >> PAGE_BITS, NEXT] = page
        else:
            store.documents[document, FIRST] = position
    store.tokens[position] = token
    store.documents[document, LAST] = position
    store.documents[document, LENGTH] = length + 1
    store.counts[NUM_TOKENS] += 1
    return position


@njit(allocates=False)
def clear_document(store, document):
    """Free a document's pages and forget it."""
    if store.documents[document, LENGTH] > 0:
        page = np.int64(store.documents[document, FIRST]) >> PAGE_BITS
        while page >= 0:
            following = np.int64(store.pages[page, NEXT])
            store.pages[page, DOCUMENT] = -1
            store.free_pages[store.counts[NUM_FREE_PAGES]] = page
            store.counts[NUM_FREE_PAGES] += 1
            page = following
    store.counts[NUM_TOKENS] -= store.documents[document, LENGTH]
    store.documents[document, LENGTH] = 0
    store.documents[document, PROBLEM] = -1


@njit(allocates=False)
def order_hash(token):
    """A hash by which tokens, and positions of equal contexts, are ordered: no real text degenerates the tree."""
    return (np.uint64(token) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)  # numba widens uint32 products


@njit(allocates=False)
def compare_context(tokens, pages, node, text, end, agreeing):
    """Compare the context of `node` with text[:end], from the last token backwards.

    At least `agreeing` last tokens agree. Returns (tokens that agree, sign): sign is -1 where the node's context comes
    first, 1 where it comes last, 0 where they agree over MAX_DEPTH tokens or over all there are.
    """
    length = agreeing
    position = step_back(pages, node, agreeing + 1)
    limit = min(end, MAX_DEPTH)
    while length < limit and position >= 0:
        here = min(limit - length, (position & PAGE_MASK) + 1)  # tokens to compare on this page
        at = end - 1 - length
        same = 0
        while same < here and tokens[position - same] == text[at - same]:
            same += 1
        length += same
        if same < here:
            first = order_hash(tokens[position - same]) < order_hash(text[at - same])
            return length, -1 if first else 1
        position = (
            np.int64(pages[position >> PAGE_BITS, BACK]) if here == (position & PAGE_MASK) + 1 else position - here
        )
    if length == MAX_DEPTH:
        return length, 0
    if position < 0:
        return length, -1 if length < end else 0
    return length, 1


class TextStore:
    """Owns the pages and documents. Capacities grow by an eighth or by doubling.

    Attributes:
        arrays: what the kernels read and write; replaced whenever a capacity grows.
    """

    def __init__(self) -> None:
        pages, documents = 64, 64
        self.arrays = TextArrays(
            tokens=np.zeros(pages * PAGE_TOKENS, np.int32),
            pages=np.full((pages, 4), -1, np.int32),
            documents=np.full((documents, 6), -1, np.int32),
            free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
            counts=np.array([pages, 0], np.int64),
            features=no_features(0),
        )
        self._free_documents = list(range(documents - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages that there are, free ones included."""
        return len(self.arrays.pages)

    @property
    def num_used_pages(self) -> int:
        """Pages that hold text."""
        return self.num_pages - int(self.arrays.counts[NUM_FREE_PAGES])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.arrays.counts[NUM_TOKENS])

    def new_document(self, problem: int, kind: int, *, context: int = -1) -> int:
        """Begin an empty document whose first token follows the last one of document `context` (-1: nothing)."""
        if not self._free_documents:
            size = len(self.arrays.documents)
            self.arrays = self.arrays._replace(documents=_grown(self.arrays.documents, 2 * size, -1))
            self._free_documents = list(range(2 * size - 1, size - 1, -1))
        document, documents = self._free_documents.pop(), self.arrays.documents
        last = documents[context, LAST] if context >= 0 else -1
        documents[document] = problem, kind, -1, last, 0, 0  # see PROBLEM
        return document

    def reserve(self, num_pages: int) -> None:
        """Make room for `num_pages` more pages. Amortised O(1) per token.

        Raises:
            MemoryError: more than MAX_PAGES would be in use.
        """
        free, pages = int(self.arrays.counts[NUM_FREE_PAGES]), self.num_pages
        if free >= num_pages:
            return
        size = pages + num_pages - free
        if size > MAX_PAGES:
            raise MemoryError(f"live requests and history need more than {MAX_PAGES * PAGE_TOKENS} tokens")
        size = max(size, min(pages + pages // 8, MAX_PAGES))
        arrays = self.arrays
        free_pages = _grown(arrays.free_pages, size, -1)
        free_pages[free : free + size - pages] = np.arange(size - 1, pages - 1, -1)
        arrays.counts[NUM_FREE_PAGES] += size - pages
        self.arrays = arrays._replace(
            tokens=_grown(arrays.tokens, size * PAGE_TOKENS, 0),
            pages=_grown(arrays.pages, size, -1),
            free_pages=free_pages,
            features=_grown(arrays.features, size * PAGE_TOKENS, 0) if len(arrays.features) else arrays.features,
        )

    def keep_features(self) -> None:
        """Keep tokens' features from now on; those of the tokens so far are not known."""
        if not len(self.arrays.features):
            self.arrays = self.arrays._replace(features=no_features(self.arrays.tokens.size))

    def release(self, document: int) -> None:
        """Give a removed document's number back."""
        self._free_documents.append(document)

    def text(self, document: int) -> Int32Array:
        """A document's tokens."""
        return self.text_before_end(document, int(self.arrays.documents[document, LENGTH]))

    def text_before_end(self, document: int, size: int) -> Int32Array:
        """The last `size` tokens of a document and of what it continues, or fewer if there are no more."""
        text = np.empty(size, np.int32)
        found = read_back(self.arrays, self.arrays.documents[document, LAST], text, text.size)
        return text[size - found :]

    def read(self, document: int) -> tuple[Int32Array, Features | None]:
        """A document's tokens and their features; None if features are not kept."""
        tokens = self.text(document)
        if not len(self.arrays.features):
            return tokens, None
        page, pages = int(self.arrays.documents[document, FIRST]) >> PAGE_BITS, []
        for _ in range(-(-tokens.size // PAGE_TOKENS)):
            pages.append(page)
            page = int(self.arrays.pages[page, NEXT])
        positions = np.array(pages, np.int64)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        return tokens, self.arrays.features[positions.ravel()[: tokens.size]]

    def check_integrity(self) -> None:
        """Check the invariants that every operation keeps. O(size); raises AssertionError."""
        arrays, pages = self.arrays, self.num_pages
        free = arrays.free_pages[: arrays.counts[NUM_FREE_PAGES]]
        assert len(set(free.tolist())) == free.size, "a page is free twice"
        assert (arrays.pages[free, DOCUMENT] == -1).all(), "a free page has a document"
        owned, tokens = 0, 0
        for document in np.flatnonzero(arrays.documents[:, PROBLEM] >= 0).tolist():
            length, first = int(arrays.documents[document, LENGTH]), int(arrays.documents[document, FIRST])
            page, at, last = first >> PAGE_BITS, 0, -1
            while at < length:
                assert arrays.pages[page, DOCUMENT] == document, f"page {page} of document {document}"
                assert arrays.pages[page, START] == at, f"start of page {page}"
                assert at == 0 or arrays.pages[page, BACK] == last, f"link back from page {page}"
                size = min(PAGE_TOKENS, length - at)
                last = page * PAGE_TOKENS + size - 1
                at, owned, page = at + size, owned + 1, int(arrays.pages[page, NEXT])
            assert not length or arrays.documents[document, LAST] == last, f"last position of document {document}"
            tokens += length
        assert owned == pages - free.size, "a page is neither free nor owned"
        assert tokens == self.num_tokens, "token count"
        assert len(arrays.features) in (0, arrays.tokens.size), "features and tokens"


def _grown(old: NDArray, size: int, fill: int) -> NDArray:
    shape = (size, *old.shape[1:])
    new = np.full(shape, fill, old.dtype) if fill else np.zeros(shape, old.dtype)  # zeros are not touched until used
    new[: len(old)] = old
    return new
