"""The paged text store against plain lists."""

from __future__ import annotations

import pytest

from rollout_spec.drafters.host import store
from rollout_spec.drafters.host.store import PAGE_TOKENS, ROLLOUT, TextStore, append_token


def append(texts, document, tokens):
    texts.reserve(len(tokens) // PAGE_TOKENS + 2)
    for token in tokens:
        append_token(texts.arrays, document, token)


def test_growth_is_in_proportion():
    texts, replaced, documents = TextStore(), 0, []
    for number in range(2000):
        before = texts.num_pages
        texts.reserve(1)
        replaced += texts.num_pages > before
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
    texts.reserve(store.MAX_PAGES)
    assert texts.num_pages == store.MAX_PAGES
