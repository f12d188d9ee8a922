"""The suffix tree against brute force, however it was grown and whatever was taken out of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host.store import PAGE_TOKENS, order_hash
from rollout_spec.drafters.host.suffix import MAX_WALK, REMOVED
from rollout_spec.drafters.host.vote import ENOUGH_CANDIDATES, MAX_CANDIDATES, MAX_DEPTH
from tests.drafters.recorder import SLOW, Recorder, examples

token_lists = st.lists(st.integers(0, 3), max_size=12) | st.lists(st.integers(0, 1), max_size=70)
contexts = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_DEPTH + 4)


def check_contexts(recorder, problem, context):
    """A given context, and the ends and middles of what the problem holds."""
    recorder.check()
    recorder.check_tree(problem, context)
    for text in recorder.texts().values():
        whole = [*text.before, *text.tokens]
        for end in {len(whole), len(whole) // 2, len(text.before)} - {0}:
            recorder.check_tree(problem, whole[:end])


@examples(80)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=2),
    rollouts=st.lists(st.tuples(token_lists, st.integers(0, 2)), min_size=1, max_size=5),
    context=contexts,
    random=st.randoms(use_true_random=False),
)
def test_candidates_equal_brute_force_in_any_order_of_growth_and_removal(prompts, rollouts, context, random):
    recorder = Recorder(shared=True)
    recorder.start_interleaved(prompts, [tokens for tokens, _ in rollouts], random, flush=0.2)
    problem = recorder.problem("0")
    check_contexts(recorder, problem, context)
    order = list(range(1, len(rollouts)))
    random.shuffle(order)
    for i in order:
        recorder.stop(str(i), keep=rollouts[i][1] == 2)
        check_contexts(recorder, problem, context)


@examples(25)
@given(
    history=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=60), st.booleans()), min_size=3, max_size=12),
    max_pages=st.integers(1, 8),
    max_versions=st.none() | st.integers(0, 2),
    context=contexts,
)
def test_candidates_equal_brute_force_after_eviction(history, max_pages, max_versions, context):
    recorder = Recorder(shared=True, max_history_tokens=max_pages * PAGE_TOKENS, max_history_versions=max_versions)
    recorder.start("live", [1, 2], [0, 1, 2, 0], problem_id=7)
    for i, (tokens, new_version) in enumerate(history):
        recorder.start(str(i), [1, 2], tokens, problem_id=7)
        recorder.stop(str(i))
        check_contexts(recorder, recorder.problem("live"), context)
        if new_version:
            recorder.drafter.begin_policy_version(i + 1)
            recorder.check()


@pytest.mark.parametrize("length", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 3 * MAX_DEPTH])
def test_contexts_are_told_apart_up_to_max_depth(length):
    recorder = Recorder()
    recorder.start("a", [1], [0] * length + [3], problem_id=7)
    recorder.start("b", [2], [0] * length + [4], problem_id=7)
    recorder.check()
    recorder.check_tree(recorder.problem("a"), [1] + [0] * length)
    found = recorder.tree_candidates(recorder.problem("a"), [1] + [0] * length)
    assert found[0][1] == min(length + 1, MAX_DEPTH)


def test_the_newest_of_equal_matches_is_among_the_candidates():
    """More equal matches than a lookup gathers."""
    recorder = Recorder()
    for i in range(2 * MAX_CANDIDATES):
        recorder.start(str(i), [1, 2, 3], [i], problem_id=7)
    recorder.drafter._flush()
    found = recorder.tree_candidates(recorder.problem("0"), [1, 2, 3])
    assert len(found) == MAX_CANDIDATES
    assert found[0] == ((recorder.drafter._live[str(2 * MAX_CANDIDATES - 1)].document, 0), 3)


def test_longer_matches_come_before_more_than_enough_shorter_ones():
    recorder = Recorder()
    recorder.start("long", [5, 6, 7], [8], problem_id=7)
    for i in range(2 * ENOUGH_CANDIDATES):
        recorder.start(str(i), [9, 7], [i], problem_id=7)
    recorder.drafter._flush()
    found = recorder.tree_candidates(recorder.problem("long"), [5, 6, 7])
    assert found[0] == ((recorder.drafter._live["long"].document, 0), 3)


def counting(num):
    return [token for i in range(1, num) for token in (i, 0)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(counting(4 * MAX_WALK), id="counting-up"),
        pytest.param(counting(4 * MAX_WALK)[::-1], id="counting-down"),
        pytest.param([0] * 6 * MAX_WALK, id="one-token"),
        pytest.param([0, 1] * 4 * MAX_WALK, id="two-tokens"),
        pytest.param(([0] * 40 + [1]) * 16, id="runs"),
        pytest.param([int(c) for i in range(1, 6 * MAX_WALK) for c in f"{i:b}2"], id="binary-numbers"),
    ],
)
def test_regular_texts_do_not_hide_matches(text):
    """The walk down is bounded: a text that makes the tree a list would hide its older contexts."""
    recorder = Recorder()
    recorder.start("a", [], text, problem_id=7)
    recorder.start("b", [], [0], problem_id=7)  # a second text, so that removal has something to leave
    recorder.drafter._flush()
    problem = recorder.problem("a")
    for end in range(1, len(text), 37):
        recorder.check_tree(problem, text[:end])
    recorder.drafter.check_integrity()
    recorder.stop("a", keep=False)
    recorder.check()


def depth(tree, root):
    """Nodes on the longest branch."""
    deepest, stack = 0, [(int(root), 1)]
    while stack:
        node, at = stack.pop()
        if node >= 0:
            deepest = max(deepest, at)
            stack += [(int(child), at + 1) for child in tree.children[node]]
    return deepest


@pytest.mark.parametrize(
    "kind", ["random", "counting-up", "counting-down", "one-token", "copies", "copies-removed", "contexts-of-one-token"]
)
def test_branches_are_shorter_than_a_walk(kind):
    rng = np.random.default_rng(0)
    size = 300 if SLOW else 3000
    text = {
        "random": rng.integers(0, 3, size).tolist(),
        "counting-up": counting(size // 2),
        "counting-down": counting(size // 2)[::-1],
        "one-token": [0] * size,
        "contexts-of-one-token": [token for i in range(size // 4) for token in (0, 1 + i // 2, 2, 1)],
    }.get(kind, rng.integers(0, 3, size // 20).tolist())
    recorder = Recorder(shared=True)
    recorder.start("0", [1], text, problem_id=7)
    if kind.startswith("copies"):
        for i in range(1, 20):
            recorder.start(str(i), [1], text, problem_id=7)
            recorder.drafter._flush()
    if kind == "copies-removed":
        for i in range(1, 20, 2):
            recorder.stop(str(i), keep=False)
    recorder.drafter._flush()
    for tree in recorder.drafter._index.tree, recorder.drafter._index.shared:
        assert max(depth(tree, root) for root in tree.roots if root >= 0) < MAX_WALK


def test_the_longest_match_is_found_in_a_large_history_with_many_removals():
    rng = np.random.default_rng(0)
    recorder = Recorder()
    size = 3 if SLOW else 30
    for i in range(2 * size):
        recorder.start(str(i), [1, 2], rng.integers(0, 2, 150), problem_id=7)
        if i % 3 == 1:
            recorder.stop(str(i - 1), keep=False)
    recorder.drafter.check_integrity()
    for _ in range(10):
        recorder.check_tree(recorder.problem("1"), rng.integers(0, 2, 40).tolist())
        recorder.check_tree(recorder.problem("1"), recorder.context("1")[: rng.integers(1, 152)])


def test_roots_grow_and_are_used_again():
    """Many distinct last tokens; what is removed leaves the table of roots no fuller."""
    recorder = Recorder()
    for i in range(40):
        recorder.start(str(i), [], range(1000 * i, 1000 * i + 100), problem_id=7)
        recorder.drafter._flush()
        index = recorder.drafter._index
        assert index.tree.counts[0] == (index.tree.roots >= 0).sum() == 99
        assert index.tree.counts[1] == (index.tree.roots == REMOVED).sum()
        assert index.tree.counts.sum() * 4 <= index.tree.roots.size * 3
        recorder.stop(str(i), keep=False)
    recorder.check()
    assert recorder.drafter._index.tree.roots.size <= 1024
    recorder.start("a", [], range(5000), problem_id=7)
    recorder.check()
    recorder.check_tree(recorder.problem("a"), [3998, 3999])


def test_an_unseen_last_token_has_no_candidates():
    recorder = Recorder()
    recorder.start("a", [1], [2, 3], problem_id=7)
    recorder.drafter._flush()
    for problem, context in ((recorder.problem("a"), [9]), (recorder.problem("a"), [3]), (99, [1])):
        assert recorder.tree_candidates(problem, context) == []


def test_order_hashes_fit_in_32_bits_and_are_distinct():
    tokens = [0, 1, 2, 3, 255, 2**16, 2**31 - 1]
    hashes = [int(order_hash(token)) for token in tokens]
    assert len(set(hashes)) == len(tokens)
    assert max(hashes) < 2**32
    assert hashes != sorted(hashes)


@pytest.mark.parametrize("damage", ["order", "missing", "twice", "counts"])
def test_integrity_notices(damage):
    recorder = Recorder()
    recorder.start("a", [], [0, 1, 0, 2, 0, 1, 0, 3], problem_id=7)
    recorder.check()
    index = recorder.drafter._index
    node = next(int(root) for root in index.tree.roots if root >= 0 and (index.tree.children[root] >= 0).any())
    if damage == "order":
        index.tree.children[node] = index.tree.children[node, ::-1].copy()
    elif damage == "missing":
        index.tree.children[node] = -1
    elif damage == "twice":
        index.tree.roots[np.flatnonzero(index.tree.roots < 0)[0]] = node
        index.tree.counts[0] += 1
    else:
        index.tree.counts[0] += 1
    with pytest.raises(AssertionError):
        recorder.drafter.check_integrity()


def test_other_problems_are_found_behind_ones_own():
    """The own problem's positions, which its own tree gives, must not use up the shared tree's candidates."""
    recorder = Recorder(shared=True)
    recorder.start("other", [9, 1, 2, 3], [50], problem_id=8)
    for i in range(ENOUGH_CANDIDATES):
        recorder.start(str(i), [8, 1, 2, 3], [i], problem_id=7)
    recorder.drafter._flush()
    found = recorder.tree_candidates(recorder.problem("0"), [1, 2, 3], shared=True)
    assert found[0] == ((recorder.drafter._live["other"].document, 0), 3)
