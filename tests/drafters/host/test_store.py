"""The paged text store against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import store
from rollout_spec.drafters.host.history import HistoryDrafter
from rollout_spec.drafters.host.index import remove_document
from rollout_spec.drafters.host.store import (
    FIRST,
    LAST,
    PAGE_TOKENS,
    PROBLEM,
    PROMPT,
    ROLLOUT,
    TextStore,
    append_token,
    read_back,
    step_back,
)
from rollout_spec.drafters.host.vote import MAX_DEPTH
from tests.drafters.recorder import SENTINEL, examples

BARE = HistoryDrafter()
NO_INDEX = BARE._known()._replace(settings=BARE._settings._replace(use_tree=False, use_table=False, use_shared=False))
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


def last_tokens(texts, document, num):
    buffer = np.full(num, SENTINEL, np.int32)
    found = read_back(texts.arrays, texts.arrays.documents[document, LAST], buffer, num)
    assert (buffer[: num - found] == SENTINEL).all()
    return buffer[num - found :].tolist()


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


@pytest.mark.parametrize("prompt_size", [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS])
def test_rollouts_reach_back_into_their_prompt(prompt_size):
    texts, tokens = TextStore(), list(range(100, 100 + prompt_size))
    prompt = texts.new_document(0, PROMPT)
    append(texts, prompt, tokens)
    rollouts = [texts.new_document(0, ROLLOUT, context=prompt) for _ in range(2)]
    for size in range(PAGE_TOKENS + 2):
        for i, document in enumerate(rollouts):
            whole = [*tokens, *([i] * size)]
            for num in (1, MAX_DEPTH, 200):
                assert last_tokens(texts, document, num) == whole[-num:]
            assert texts.text(document).tolist() == [i] * size
            append(texts, document, [i])


def test_steps_back_equal_reading_back():
    texts = TextStore()
    prompt = texts.new_document(0, PROMPT)
    append(texts, prompt, range(PAGE_TOKENS + 3))
    document = texts.new_document(0, ROLLOUT, context=prompt)
    append(texts, document, range(1000, 1000 + PAGE_TOKENS + 3))
    last, pages = int(texts.arrays.documents[document, LAST]), texts.arrays.pages
    whole = last_tokens(texts, document, 500)
    for steps in range(len(whole) + 3):
        position = int(step_back(pages, last, steps))
        assert (position < 0) == (steps >= len(whole))
        assert position < 0 or texts.arrays.tokens[position] == whole[-1 - steps]


def test_positions_stand_still_while_capacities_grow():
    texts = TextStore()
    document, other = (texts.new_document(0, ROLLOUT) for _ in range(2))
    append(texts, document, [7] * 40)
    first, before = int(texts.arrays.documents[document, FIRST]), texts.arrays
    assert texts.reserve(1000)
    assert not texts.reserve(1000)
    assert texts.arrays is not before
    append(texts, other, range(1000 * PAGE_TOKENS))
    append(texts, document, [8])
    assert texts.arrays.documents[document, FIRST] == first
    assert texts.text(document).tolist() == [7] * 40 + [8]
    assert texts.text(other).tolist() == list(range(1000 * PAGE_TOKENS))
    texts.check_integrity()


def test_more_documents_than_there_was_room_for():
    texts = TextStore()
    size = len(texts.arrays.documents)
    documents = [texts.new_document(i, ROLLOUT) for i in range(3 * size)]
    assert len(set(documents)) == 3 * size
    assert texts.arrays.documents[documents, PROBLEM].tolist() == list(range(3 * size))
    for document in documents:
        append(texts, document, [document])
    assert [texts.text(document).tolist() for document in documents] == [[document] for document in documents]
    texts.check_integrity()


def test_growth_is_in_proportion():
    texts, replaced = TextStore(), 0
    for _ in range(2000):
        replaced += texts.reserve(1)
        append(texts, texts.new_document(0, ROLLOUT), [1])
    assert replaced < 60
    assert texts.num_pages <= 2000 * 9 // 8 + 64


def test_every_page_that_positions_can_tell_apart_is_used_and_no_more(monkeypatch):
    texts = TextStore()
    monkeypatch.setattr(store, "MAX_PAGES", texts.num_pages + 1)  # less than growth by an eighth asks for
    with pytest.raises(MemoryError, match="need more than"):
        texts.reserve(store.MAX_PAGES + 1)
    assert texts.reserve(store.MAX_PAGES)
    assert texts.num_pages == store.MAX_PAGES
