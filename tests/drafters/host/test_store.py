"""The paged text store against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import store
from rollout_spec.drafters.host.constants import MAX_DEPTH
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.drafters.host.index import remove_document
from rollout_spec.drafters.host.store import (
    PAGE_TOKENS,
    ROLLOUT,
    TextStore,
    append_token,
)
from tests.drafters.recorder import examples

BARE = HistoryDrafter()
NO_INDEX = BARE._known()._replace(settings=BARE._settings._replace(use_tree=False, use_shared=False))
LARGEST = 2**31 - 1


def append(texts, document, tokens):
    texts.reserve(len(tokens) // PAGE_TOKENS + 2)
    for token in tokens:
        append_token(texts.arrays, document, token)


def remove(texts, document):
    remove_document(NO_INDEX._replace(store=texts.arrays), document, np.empty(MAX_DEPTH, np.int32))
    texts.release(document)


def pages(tokens):
    return -(-len(tokens) // PAGE_TOKENS)


pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2 * PAGE_TOKENS + 2), st.booleans()), max_size=25)


@examples(60)
@given(pieces=pieces)
def test_documents_that_grow_side_by_side_and_leave_equal_plain_lists(pieces):
    texts, held, number = TextStore(), {}, {}
    for step, (name, size, leaves) in enumerate(pieces):
        if name not in held:
            number[name], held[name] = texts.new_document(3, ROLLOUT), []
        if leaves:
            remove(texts, number[name])
            del held[name], number[name]
        else:
            new = [LARGEST - step, *range(1000 * step, 1000 * step + size)]
            append(texts, number[name], new)
            held[name] += new
        texts.check_integrity()
        assert {name: texts.text(number[name]).tolist() for name in held} == held
        assert texts.num_tokens == sum(map(len, held.values()))
        assert texts.num_used_pages == sum(map(pages, held.values()))


def test_growth_is_in_proportion():
    texts, replaced, documents = TextStore(), 0, []
    for number in range(2000):
        replaced += texts.reserve(1)
        documents.append(texts.new_document(0, ROLLOUT))
        append(texts, documents[-1], [number])
    assert [texts.text(document).tolist() for document in documents] == [[number] for number in range(2000)]
    assert replaced < 60
    assert texts.num_pages <= 2000 * 9 // 8 + 64


def test_every_page_that_positions_can_tell_apart_is_used_and_no_more(monkeypatch):
    texts = TextStore()
    monkeypatch.setattr(store, "MAX_PAGES", texts.num_pages + 1)  # less than growth by an eighth asks for
    with pytest.raises(MemoryError, match="need more than"):
        texts.reserve(store.MAX_PAGES + 1)
    assert texts.reserve(store.MAX_PAGES)
    assert texts.num_pages == store.MAX_PAGES
