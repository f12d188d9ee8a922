"""The text that the indexes refer to: prompts and rollouts, in pages.

A document is a prompt or a rollout. It is a list of pages of PAGE_TOKENS tokens; a page knows the position of the token
before it, so that a rollout's contexts reach back into its prompt, and rollouts grow side by side without moving.
A position is page * PAGE_TOKENS + offset. Positions stand still until their document is removed; then its pages are
free for others at once. A token costs 4 bytes, a page 16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import NUM_FREE_PAGES, NUM_TOKENS, PAGE_BITS, PAGE_TOKENS, POSITION_BITS, Store
from rollout_spec.types import Int32Array

MAX_PAGES = 1 << (POSITION_BITS - PAGE_BITS)
"""Pages that positions can tell apart."""


class TextStore:
    """Owns the pages and documents. Capacities grow by an eighth or by doubling.

    Attributes:
        arrays: what the kernels read and write; replaced whenever a capacity grows.
    """

    def __init__(self) -> None:
        pages, documents = 64, 64
        self.arrays = Store(
            tokens=np.zeros(pages * PAGE_TOKENS, np.int32),
            page_document=np.full(pages, -1, np.int32),
            page_back=np.zeros(pages, np.int32),
            page_next=np.zeros(pages, np.int32),
            page_start=np.zeros(pages, np.int32),
            free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
            document_problem=np.full(documents, -1, np.int32),
            document_kind=np.zeros(documents, np.int8),
            document_version=np.zeros(documents, np.int32),
            document_first=np.full(documents, -1, np.int32),
            document_last=np.full(documents, -1, np.int32),
            document_length=np.zeros(documents, np.int32),
            counts=np.array([pages, 0], np.int64),
        )
        self._free_documents = list(range(documents - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages that there are, free ones included."""
        return int(self.arrays.page_document.size)

    @property
    def num_used_pages(self) -> int:
        """Pages that hold text."""
        return self.num_pages - int(self.arrays.counts[NUM_FREE_PAGES])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.arrays.counts[NUM_TOKENS])

    def new_document(self, problem: int, kind: int, version: int, *, after: int = -1) -> int:
        """Begin an empty document whose first token follows the last one of document `after` (-1: nothing)."""
        if not self._free_documents:
            size = self.arrays.document_problem.size
            fields = [name for name in Store._fields if name.startswith("document_")]
            grown = {name: _grown(getattr(self.arrays, name), 2 * size, -1) for name in fields}
            self.arrays = self.arrays._replace(**grown)
            self._free_documents = list(range(2 * size - 1, size - 1, -1))
        document, arrays = self._free_documents.pop(), self.arrays
        arrays.document_problem[document] = problem
        arrays.document_kind[document] = kind
        arrays.document_version[document] = version
        arrays.document_first[document] = -1
        arrays.document_last[document] = arrays.document_last[after] if after >= 0 else -1
        arrays.document_length[document] = 0
        return document

    def reserve(self, num_pages: int) -> bool:
        """Make room for `num_pages` more pages. Returns whether the arrays were replaced. Amortised O(1) per token.

        Raises:
            MemoryError: more than MAX_PAGES would be in use.
        """
        free, pages = int(self.arrays.counts[NUM_FREE_PAGES]), self.num_pages
        if free >= num_pages:
            return False
        size = pages + num_pages - free
        if size > MAX_PAGES:
            raise MemoryError(f"live requests and history need more than {MAX_PAGES * PAGE_TOKENS} tokens")
        size = max(size, min(pages + pages // 8, MAX_PAGES))
        arrays = self.arrays
        fields = ("page_document", "page_back", "page_next", "page_start", "free_pages")
        new: dict[str, NDArray] = {name: _grown(getattr(arrays, name), size, -1) for name in fields}
        new["tokens"] = _grown(arrays.tokens, size * PAGE_TOKENS, 0)
        new["free_pages"][free : free + size - pages] = np.arange(size - 1, pages - 1, -1)
        arrays.counts[NUM_FREE_PAGES] += size - pages
        self.arrays = arrays._replace(**new)
        return True

    def release(self, document: int) -> None:
        """Give a removed document's number back."""
        self._free_documents.append(document)

    def text(self, document: int) -> Int32Array:
        """A document's tokens."""
        length = int(self.arrays.document_length[document])
        text = np.empty(length, np.int32)
        kernels.read_back(self.arrays, self.arrays.document_last[document], text, length)
        return text

    def memory_bytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check the invariants that every operation keeps. O(size); raises AssertionError."""
        arrays, pages = self.arrays, self.num_pages
        free = arrays.free_pages[: arrays.counts[NUM_FREE_PAGES]]
        assert len(set(free.tolist())) == free.size, "a page is free twice"
        assert (arrays.page_document[free] == -1).all(), "a free page has a document"
        owned, tokens = 0, 0
        for document in np.flatnonzero(arrays.document_problem >= 0).tolist():
            length, first = int(arrays.document_length[document]), int(arrays.document_first[document])
            page, at, last = first >> PAGE_BITS, 0, -1
            while at < length:
                assert arrays.page_document[page] == document, f"page {page} of document {document}"
                assert arrays.page_start[page] == at, f"start of page {page}"
                assert at == 0 or arrays.page_back[page] == last, f"link back from page {page}"
                size = min(PAGE_TOKENS, length - at)
                last = page * PAGE_TOKENS + size - 1
                at, owned, page = at + size, owned + 1, int(arrays.page_next[page])
            assert not length or arrays.document_last[document] == last, f"last position of document {document}"
            tokens += length
        assert owned == pages - free.size, "a page is neither free nor owned"
        assert tokens == self.num_tokens, "token count"


def _grown(old: NDArray, size: int, fill: int) -> NDArray:
    new = np.full(size, fill, old.dtype)
    new[: old.size] = old
    return new
