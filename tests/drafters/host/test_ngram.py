"""The n-gram table against brute force: what it returns is true, and the newest is always there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import ngram
from rollout_spec.drafters.host.constants import MAX_DEPTH
from rollout_spec.drafters.host.ngram import LONG_ORDER, SHORT_ORDER
from rollout_spec.drafters.host.store import LAST
from tests.drafters.recorder import SLOW, Recorder, examples

ORDERS = (LONG_ORDER, SHORT_ORDER)


@examples(40)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=3),
    prompt=st.lists(st.integers(0, 2), max_size=5),
)
def test_the_newest_occurrence_comes_first(texts, prompt):
    recorder = Recorder("ngram")
    for i in range(len(texts)):
        recorder.start(str(i), prompt, problem_id=i % 2)
    for at in range(30):
        for i, text in enumerate(texts):
            if at >= len(text):
                continue
            context = recorder.context(str(i))
            recorder.extend(str(i), [text[at]])
            recorder.drafter._flush()
            newest = (recorder.drafter._live[str(i)].document, at)
            for order in ORDERS:
                if len(context) >= order:
                    found = recorder.table_candidates(recorder.problem(str(i)), context, order)
                    assert found[0] == (newest, min(len(context), MAX_DEPTH))


def test_problems_are_apart_where_their_entries_look_the_same():
    recorder = Recorder("ngram")
    for i in range(2):
        recorder.start(str(i), [], [1, 2, 3, 4, 100 + i], problem_id=i)
    recorder.drafter._flush()
    index, (ours, theirs) = recorder.drafter._index, map(recorder.problem, "01")
    found = recorder.table_candidates(theirs, [1, 2, 3, 4], LONG_ORDER)
    last = int(recorder.drafter._store.arrays.documents[recorder.drafter._live["0"].document, LAST])
    ngram.insert(index.buckets, theirs, last, np.array([1, 2, 3, 4], np.int32), 4, LONG_ORDER)
    assert recorder.problem("0") == ours != theirs
    assert recorder.table_candidates(theirs, [1, 2, 3, 4], LONG_ORDER) == found != []


def test_nothing_that_was_found_is_lost_when_the_table_grows():
    rng = np.random.default_rng(0)
    recorder = Recorder("ngram")
    for i in range(6):
        recorder.start(str(i), [1, 2], rng.integers(0, 5, 300), problem_id=i % 2)
    recorder.stop("1", keep=False)
    recorder.drafter._flush()
    queries = [rng.integers(0, 5, 6).tolist() for _ in range(20 if SLOW else 200)]

    def found():
        ours, theirs = recorder.problem("0"), recorder.problem("3")
        return [
            recorder.table_candidates(problem, query, order)
            for query in queries
            for problem, order in ((ours, LONG_ORDER), (theirs, LONG_ORDER), (ours, SHORT_ORDER))
        ]

    before, drafter = found(), recorder.drafter
    for factor in (2, 8):
        old = drafter._index.buckets
        drafter._reserve_index(0, old.size * factor)
        assert drafter._index.buckets.size > old.size
        assert found() == before
    for query in queries:
        recorder.check_table(recorder.problem("0"), query)
