"""The suffix tree and the context index against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import BLOCK_TOKENS, MAX_CONTINUATIONS, MAX_DEPTH
from rollout_spec.drafters.mixture import HistoryDrafter
from rollout_spec.drafters.ngram import NgramIndex
from rollout_spec.drafters.suffix import SuffixTree
from tests import naive

texts = st.lists(st.integers(0, 2), max_size=40)


def assert_levels(tree, root, rollouts, context):
    """The tree's counts at every match length are those of brute force."""
    context = np.array(context[-MAX_DEPTH:], np.int32)
    levels = tree.levels(root, context)
    longest = naive.longest_match(rollouts, list(context))
    assert max((length for length, _ in levels), default=0) == longest
    for length in range(1, longest + 1):
        weights = next(weights for depth, weights in levels if depth >= length)
        assert weights == pytest.approx(naive.continuations(rollouts, list(context), length))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 2), max_size=4),
    rollouts=st.lists(texts, min_size=1, max_size=5),
    context=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_tree_grown_in_any_interleaving_equals_brute_force(prompt, rollouts, context, order):
    drafter = HistoryDrafter(["problem"])
    for i in range(len(rollouts)):
        drafter.start_request(str(i), prompt, problem_id=7)
    turns = [i for i, text in enumerate(rollouts) for _ in text]
    order.shuffle(turns)
    at = [0] * len(rollouts)
    for i in turns:
        drafter.extend(str(i), [rollouts[i][at[i]]])
        at[i] += 1
    drafter.check_integrity()
    expected = [([*prompt, *text], len(prompt), 1.0) for text in rollouts]
    assert_levels(drafter._tree, drafter._roots[7], expected, context)

    for i in range(0, len(rollouts), 2):  # taking rollouts back leaves the others'
        drafter.stop_request(str(i), keep=False)
    drafter.check_integrity()
    assert_levels(drafter._tree, drafter._roots[7], expected[1::2], context)


def test_texts_longer_than_a_block():
    rng = np.random.default_rng(0)
    rollouts = [rng.integers(0, 3, 2 * BLOCK_TOKENS + 50).tolist() for _ in range(2)]
    drafter = HistoryDrafter(["problem"])
    for i, text in enumerate(rollouts):
        drafter.start_request(str(i), [1, 2], problem_id=7)
        for start in range(0, len(text), 100):
            drafter.extend(str(i), text[start : start + 100])
        drafter.check_integrity()
    expected = [([1, 2, *text], 2, 1.0) for text in rollouts]
    for end in (BLOCK_TOKENS - 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 3):
        assert_levels(drafter._tree, drafter._roots[7], expected, rollouts[0][:end])


def test_a_context_keeps_its_newest_continuations():
    drafter = HistoryDrafter(["problem"])
    drafter.start_request("a", [0], problem_id=7)
    followers = list(range(1, MAX_CONTINUATIONS + 4))
    for token in followers:
        drafter.extend("a", [token, 0])
    drafter.check_integrity()
    ((_, weights), *_) = drafter._tree.levels(drafter._roots[7], np.array([0], np.int32))
    assert list(weights) == followers[: -MAX_CONTINUATIONS - 1 : -1]


def test_scaling_keeps_the_distribution():
    drafter = HistoryDrafter(["problem"])
    drafter.start_request("a", [0], problem_id=7)
    drafter.extend("a", [1, 0, 2, 0, 1, 0, 1])
    before = drafter._tree.levels(drafter._roots[7], np.array([0], np.int32))
    drafter._tree.scale(0.25)
    after = drafter._tree.levels(drafter._roots[7], np.array([0], np.int32))
    assert [(n, {k: v / 4 for k, v in w.items()}) for n, w in before] == after
    assert SuffixTree().memory_bytes() > 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.lists(st.integers(0, 3), min_size=2, max_size=14), drafted=st.lists(st.integers(0, 3), max_size=3))
def test_context_index_equals_brute_force(text, drafted):
    index = NgramIndex()
    index.clear_row(2)
    index.reserve(len(text))
    kernels.append_context(index.arrays, 2, np.array(text, np.int32))
    index.check_integrity(2)
    ends, lengths = np.zeros(kernels.MAX_CANDIDATES, np.int32), np.zeros(kernels.MAX_CANDIDATES, np.int32)
    context = np.array([*text, *drafted], np.int32)
    count = kernels.match_own(index.arrays, 2, context, MAX_DEPTH, ends, lengths)
    assert list(zip(ends[:count], lengths[:count], strict=True)) == naive.own_matches(text, drafted, MAX_DEPTH)


def test_context_index_grows_and_reuses_rows():
    index = NgramIndex()
    for row, length in ((0, 100), (9, 3000), (0, 5)):
        index.clear_row(row)
        index.reserve(length)
        kernels.append_context(index.arrays, row, np.arange(length, dtype=np.int32) % 7)
        index.check_integrity(row)
        assert len(index.context(row)) == length
