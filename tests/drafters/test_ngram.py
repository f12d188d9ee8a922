"""Prompt lookup: which earlier positions a lookup visits, and what it makes of them."""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec import noise
from rollout_spec.drafters import build_drafter, kernels
from rollout_spec.drafters.kernels import MAX_CANDIDATES, MAX_DEPTH, MAX_MIXED, MIN_MATCH, NUM_HEADS, OWN_BASE
from rollout_spec.drafters.ngram import NgramIndex

SLOW = bool(numba.config.DISABLE_JIT)


def examples(count):
    """Settings of one test; far fewer examples where the kernels are interpreted."""
    return settings(max_examples=max(5, count // 15) if SLOW else count, deadline=None, derandomize=True)


def bucket(first, second):
    """The hash of two tokens, in plain integers."""
    mixed = (first * 0x9E3779B1 ^ second * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) % NUM_HEADS


def visited(text, context):
    """(position, match length) of what a lookup finds: it visits MAX_CANDIDATES positions whose two tokens share the
    context's bucket, newest first, and those of other bigrams use up visits as well."""
    wanted = bucket(context[-2], context[-1])
    chain = [p for p in range(len(text) - 2, 0, -1) if bucket(text[p - 1], text[p]) == wanted]
    found = []
    for position in chain[:MAX_CANDIDATES]:
        length = 0
        while length < min(MAX_DEPTH, position + 1, len(context)) and text[position - length] == context[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((position, length))
    return found


def weighed(text, found):
    """({token: probability}, longest match, how many are that long)."""
    longest = max((length for _, length in found), default=0)
    weights: dict[int, float] = {}
    for position, length in found:
        token = text[position + 1]
        weights[token] = weights.get(token, 0.0) + OWN_BASE ** (length - longest)
    total = sum(weights.values())
    q = {token: weight / total for token, weight in weights.items()}
    return q, longest, sum(length == longest for _, length in found)


def index_of(text, row=1):
    index = NgramIndex()
    index.clear_row(row)
    index.reserve(len(text))
    kernels.append_context(index.arrays, row, np.array(text, np.int32))
    return index


def look_up(index, row, context):
    ends, lengths = np.full(MAX_CANDIDATES, -9, np.int32), np.full(MAX_CANDIDATES, -9, np.int32)
    count = kernels.match_own(index.arrays, row, np.array(context, np.int32), MAX_DEPTH, ends, lengths)
    assert (ends[count:] == -9).all()
    return list(zip(ends[:count].tolist(), lengths[:count].tolist(), strict=True))


def colliding_bigrams():
    """Four tokens a, b, c, d such that the bigrams (a, b) and (c, d) share a bucket."""
    first_of: dict[int, tuple[int, int]] = {}
    for bigram in itertools.product(range(1, 400), repeat=2):
        other = first_of.setdefault(bucket(*bigram), bigram)
        if not set(other) & set(bigram):
            return (*other, *bigram)
    raise AssertionError("no collision")


COLLIDING = colliding_bigrams()


def test_the_hash_is_the_one_that_the_oracle_knows():
    largest = 2**31 - 1
    for first, second in itertools.product((0, 1, 7, 150_000, largest), repeat=2):
        assert int(kernels.bucket_of(np.int32(first), np.int32(second))) == bucket(first, second)


@examples(150)
@given(
    alphabet=st.sampled_from([(0, 1), (0, 1, 2, 3), COLLIDING, (0, 2**31 - 1)]),
    choices=st.lists(st.integers(0, 3), min_size=2, max_size=120),
    drafted=st.lists(st.integers(0, 3), max_size=6),
)
def test_lookups_equal_brute_force(alphabet, choices, drafted):
    """More occurrences than a lookup visits, bigrams that share a bucket, and contexts with drafted tokens."""
    text = [alphabet[c % len(alphabet)] for c in choices]
    context = [*text[-MAX_DEPTH:], *(alphabet[c % len(alphabet)] for c in drafted)]
    index = index_of(text)
    index.check_integrity(1)
    found = visited(text, context)
    assert look_up(index, 1, context) == found
    tokens, weights = np.full(MAX_MIXED, -9, np.int32), np.full(MAX_MIXED, np.nan)
    ends, lengths = np.zeros(MAX_CANDIDATES, np.int32), np.zeros(MAX_CANDIDATES, np.int32)
    count, longest, evidence = kernels._own_distribution(
        index.arrays, 1, np.array(context, np.int32), tokens, weights, ends, lengths
    )
    q, expected_longest, expected_evidence = weighed(text, found)
    assert (longest, evidence) == (expected_longest, expected_evidence)
    assert dict(zip(tokens[:count].tolist(), weights[:count].tolist(), strict=True)) == pytest.approx(q)


def test_other_bigrams_of_the_bucket_use_up_visits():
    a, b, c, d = COLLIDING
    text = [a, b, 0] + [c, d, 0] * (MAX_CANDIDATES - 1) + [a, b]
    assert [position for position, _ in look_up(index_of(text), 1, text)] == [1]
    text = [a, b, 0] + [c, d, 0] * MAX_CANDIDATES + [a, b]
    assert look_up(index_of(text), 1, text) == []


def test_a_lookup_visits_the_newest():
    text = [1, 2] * (2 * MAX_CANDIDATES)
    found = look_up(index_of(text), 1, text)
    assert [position for position, _ in found] == [len(text) - 3 - 2 * i for i in range(MAX_CANDIDATES)]
    assert max(length for _, length in found) == MAX_DEPTH


@pytest.mark.parametrize("length", range(4))
def test_short_contexts(length):
    """One token is no context, and nothing follows the newest one."""
    drafter = build_drafter("ngram", min_survival=0.0)
    drafter.start_request("r", [1] * length)
    drafter.check_integrity()
    (draft,) = drafter.propose(["r"], np.full(1, 3, np.int32))
    assert draft.token_ids.tolist() == ([1, 1, 1] if length > MIN_MATCH else [])


@examples(60)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=3, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_rows_are_apart_and_used_again(texts, order):
    """Contexts that grow side by side, row by row and capacity by capacity, then start over in used rows."""
    index = NgramIndex()
    for _ in range(2):
        order.shuffle(texts)
        for row in range(len(texts)):
            index.clear_row(row)
        turns = [row for row, text in enumerate(texts) for _ in text]
        order.shuffle(turns)
        at = [0] * len(texts)
        for row in turns:
            index.reserve(at[row] + 1)
            kernels.append_token(index.arrays, row, np.int32(texts[row][at[row]]))
            at[row] += 1
        for row, text in enumerate(texts):
            index.check_integrity(row)
            assert index.context(row).tolist() == text
            if len(text) >= MIN_MATCH:
                assert look_up(index, row, text) == visited(text, text)


def test_growing_keeps_the_chains():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 4, 700).tolist()
    index = index_of(text[:500], row=0)
    before = index.memory_bytes()
    index.reserve(700)
    index.clear_row(5)
    assert index.memory_bytes() > before
    kernels.append_context(index.arrays, 0, np.array(text[500:], np.int32))
    index.check_integrity(0)
    index.check_integrity(5)
    assert look_up(index, 0, text) == visited(text, text)


@examples(80)
@given(
    text=st.lists(st.integers(0, 2), max_size=90),
    split=st.integers(0, 90),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
def test_drafts_equal_brute_force(text, split, seed):
    """Whole drafts and their confidences, wherever the prompt ends, with more occurrences than are visited."""
    drafter = build_drafter("ngram", max_draft_tokens=5, min_survival=0.0, sharpness=1.5)
    drafter.start_request("r", text[:split], seed=seed)
    drafter.extend("r", text[split:])
    (draft,) = drafter.propose(["r"], np.full(1, 5, np.int32))
    drafted: list[int] = []
    survival = 1.0
    for token, confidence in zip(draft.token_ids.tolist(), draft.confidence.tolist(), strict=True):
        context = [*text[-MAX_DEPTH:], *drafted]
        q, _, _ = weighed(text, visited(text, context))
        scores = dict(q)
        if seed is not None:
            position = len(text) + len(drafted) - 1
            scores = {t: 1.5 * np.log(p) + float(noise.gumbel(seed, position, t)) for t, p in q.items()}
        assert scores[token] == pytest.approx(max(scores.values()), abs=1e-6)
        survival *= q[token]
        assert confidence == pytest.approx(survival, rel=1e-5)
        drafted.append(token)
    if len(drafted) < 5:
        context = [*text[-MAX_DEPTH:], *drafted]
        assert len(context) < MIN_MATCH or not visited(text, context)


def test_integrity_and_memory_without_a_tree():
    """Prompt lookup keeps nothing of finished requests and stores no text in the suffix tree."""
    drafter = build_drafter("ngram", max_history_tokens=50)
    sizes = set()
    for i in range(30):
        drafter.start_request(str(i), [1, 2, 3])
        drafter.extend(str(i), [4, 1, 2, 3, 4, 1, 2])
        drafter.check_integrity()
        assert drafter.propose([str(i)], np.ones(1, np.int32))[0].token_ids.tolist() == [3]
        drafter.stop_request(str(i), keep=bool(i % 2))
        drafter.check_integrity()
        sizes.add(drafter.memory_bytes())
    assert len(sizes) == 1
