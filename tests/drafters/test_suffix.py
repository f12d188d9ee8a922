"""The suffix tree by itself, and the life of its index: weights, capacities, removal, bounded memory."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import BLOCK_TOKENS, MAX_DEPTH, MAX_MIXED, NUM_ENTRIES, NUM_NODES, NUM_TOKENS
from rollout_spec.drafters.mixture import HistoryDrafter
from rollout_spec.drafters.suffix import SuffixTree
from tests import naive

SLOW = bool(numba.config.DISABLE_JIT)


def examples(count):
    """Settings of one test; far fewer examples where the kernels are interpreted."""
    return settings(max_examples=max(5, count // 15) if SLOW else count, deadline=None, derandomize=True)


def grow(tree, roots, rollout, piece=7):
    """Store a text and index it from its first indexed position on, a piece at a time."""
    text, first, weight = rollout
    end = -1
    for position, token in enumerate(text):
        if position % piece == 0:
            tree.reserve(piece, num_blocks=1)
        end = kernels.append_text(tree.arrays, end, position, token)
        if position >= first:
            for root in roots:
                context = min(position, MAX_DEPTH)
                kernels.insert(tree.arrays, tree.arrays.tokens, root, end - 1, context, token, np.float32(weight))


def take_back(tree, root, rollout):
    text, first, weight = np.array(rollout[0], np.int32), *rollout[1:]
    for position in range(first, text.size):
        length = min(position, MAX_DEPTH)
        kernels.insert(tree.arrays, text, root, position - 1, length, text[position], np.float32(-weight))


def assert_counts(tree, root, rollouts, context):
    """The match is the longest one, and every shorter match has the counts of brute force."""
    levels = tree.levels(root, np.array(context, np.int32))
    longest = naive.longest_match(rollouts, context)
    assert max((length for length, _ in levels), default=0) == longest
    for length in range(1, longest + 1):
        weights = next(weights for depth, weights in levels if depth >= length)
        assert weights == naive.continuations(rollouts, context, length)


def blended(tree, root, context, unit_weight=1.0):
    """What `_tree_distribution` returns: ({token: probability}, match length, evidence)."""
    tokens, weights = np.full(MAX_MIXED, -9, np.int32), np.full(MAX_MIXED, np.nan)
    path = np.full(MAX_DEPTH, -9, np.int32)
    context = np.array(context, np.int32)
    count, length, evidence = kernels._tree_distribution(tree.arrays, root, context, unit_weight, tokens, weights, path)
    return dict(zip(tokens[:count].tolist(), weights[:count].tolist(), strict=True)), length, evidence


# Weights are powers of two, whose sums float32 holds exactly: comparisons need no tolerance.
texts = st.lists(st.integers(0, 2), max_size=30) | st.lists(st.integers(0, 1), min_size=30, max_size=70)
rollouts_of = st.lists(
    st.tuples(texts, st.integers(0, 3), st.sampled_from([0.25, 0.5, 1.0, 2.0])), min_size=1, max_size=4
)
contexts = st.lists(st.integers(0, 2), max_size=40)


@examples(80)
@given(rollouts=rollouts_of, context=contexts, data=st.data())
def test_tree_equals_brute_force(rollouts, context, data):
    """Counts at every match length and the blended distribution, in two roots of one forest."""
    tree = SuffixTree()
    first, both = tree.new_root(), tree.new_root()
    for i, rollout in enumerate(rollouts):
        grow(tree, (first, both) if i % 2 == 0 else (both,), rollout)
    tree.check_integrity()
    text, _, _ = data.draw(st.sampled_from(rollouts))
    seen = text[: data.draw(st.integers(0, len(text)))]
    for root, indexed in ((first, rollouts[::2]), (both, rollouts)):
        for query in (context, seen):
            query = query[-MAX_DEPTH:]
            assert_counts(tree, root, indexed, query)
            for unit_weight in (1.0, 4.0):
                q, length, evidence = blended(tree, root, query, unit_weight)
                expected, longest = naive.tree_distribution(indexed, query, unit_weight)
                assert length == longest
                assert q == pytest.approx(expected, abs=1e-6)
                total = sum(naive.continuations(indexed, query, longest).values()) if longest else 0.0
                assert evidence == pytest.approx(total / unit_weight)
                assert sum(q.values()) <= 1 + 1e-6


@examples(80)
@given(rollouts=rollouts_of, context=contexts)
def test_taking_back_leaves_the_counts_of_the_others(rollouts, context):
    tree = SuffixTree()
    root = tree.new_root()
    for rollout in rollouts:
        grow(tree, (root,), rollout)
    while rollouts:
        gone, rollouts = rollouts[0], rollouts[1:]
        take_back(tree, root, gone)
        tree.check_integrity()
        assert_counts(tree, root, rollouts, context[-MAX_DEPTH:])
        assert_counts(tree, root, rollouts, gone[0][-MAX_DEPTH:])
    grow(tree, (root,), gone)  # over nodes that weigh nothing
    tree.check_integrity()
    assert_counts(tree, root, [gone], gone[0][:-1][-MAX_DEPTH:])


@pytest.mark.parametrize("length", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, MAX_DEPTH + 9])
def test_matches_are_at_most_max_depth_long(length):
    """Two contexts that differ MAX_DEPTH + 1 tokens back are one context."""
    tree = SuffixTree()
    root = tree.new_root()
    rollouts = [([head, *[0] * length, tail], 0, 1.0) for head, tail in ((1, 3), (2, 4))]
    for rollout in rollouts:
        grow(tree, (root,), rollout)
    tree.check_integrity()
    query = rollouts[0][0][:-1]
    levels = tree.levels(root, np.array(query, np.int32))
    assert levels[-1][0] == min(length + 1, MAX_DEPTH)
    assert set(levels[-1][1]) >= ({3} if length < MAX_DEPTH else {3, 4})
    assert (4 in levels[-1][1]) == (length >= MAX_DEPTH)
    assert_counts(tree, root, rollouts, query[-MAX_DEPTH:])


def test_capacities_grow_without_losing_anything():
    rng = np.random.default_rng(0)
    size = 1500
    text = rng.integers(0, 12, size).tolist()
    tree = SuffixTree()
    before = tree.arrays
    root = tree.new_root()
    grow(tree, (root,), (text, 0, 1.0), piece=100)
    tree.check_integrity()
    for name in ("node_end", "node_depth", "node_entries", "node_weight", "entry_token", "child_keys", "child_nodes"):
        assert getattr(tree.arrays, name).size > getattr(before, name).size, name
    assert tree.arrays.child_keys.size & (tree.arrays.child_keys.size - 1) == 0
    for end in range(5, size, size // 20):
        assert_counts(tree, root, [(text, 0, 1.0)], text[max(0, end - 6) : end])


@examples(12)
@given(
    sizes=st.lists(st.integers(1, 2 * BLOCK_TOKENS + 40), min_size=2, max_size=3),
    num_prompt=st.sampled_from([0, 1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rollouts_that_cross_blocks_side_by_side(sizes, num_prompt, seed):
    """Pieces of several requests alternate, so that their blocks do too; contexts span the seams."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 2, num_prompt).tolist()
    bodies = [rng.integers(0, 2, size).tolist() for size in sizes]
    drafter = HistoryDrafter(["problem"])
    for i in range(len(bodies)):
        drafter.start_request(str(i), prompt, problem_id=7)
    at = [0] * len(bodies)
    while any(at[i] < len(body) for i, body in enumerate(bodies)):
        for i, body in enumerate(bodies):
            step = int(rng.integers(1, 90))
            drafter.extend(str(i), body[at[i] : at[i] + step])
            at[i] += step
    drafter.check_integrity()
    rollouts = [([*prompt, *body], num_prompt, 1.0) for body in bodies]
    for text, _, _ in rollouts:
        for seam in (BLOCK_TOKENS, 2 * BLOCK_TOKENS):
            for end in (seam - 1, seam, seam + 1, seam + MAX_DEPTH):
                if num_prompt < end <= len(text):
                    assert_counts(drafter._tree, drafter._roots[7], rollouts, text[max(0, end - MAX_DEPTH) : end])


def test_a_long_prompt_is_context_but_not_indexed():
    prompt = list(range(100, 100 + 2 * MAX_DEPTH))
    drafter = HistoryDrafter(["problem"])
    drafter.start_request("a", prompt, problem_id=7)
    drafter.extend("a", [5, 6])
    drafter.check_integrity()
    root = drafter._roots[7]
    levels = drafter._tree.levels(root, np.array(prompt, np.int32))
    assert levels == [(MAX_DEPTH, {5: 1.0})]
    assert drafter._tree.levels(root, np.array(prompt[:-1], np.int32)) == []


# -- weights of policy versions --------------------------------------------------------------------------------------


@examples(60)
@given(
    history=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=15), st.integers(0, 3)), min_size=1, max_size=6),
    query=st.lists(st.integers(0, 2), max_size=8),
    keep=st.booleans(),
)
def test_each_version_halves_the_weight_of_the_ones_before(history, query, keep):
    """recency 0.5: exact weights, and at most five versions between two rescalings."""
    drafter = HistoryDrafter(["problem"], recency=0.5)
    version, rollouts = 0, []
    for i, (body, steps) in enumerate(history):
        for _ in range(steps):
            version += 1
            drafter.begin_policy_version(version)
        drafter.start_request(str(i), [1], problem_id=7)
        drafter.extend(str(i), body)
        rollouts.append(([1, *body], 1, version))
    drafter.check_integrity()
    if not keep:
        for i in range(0, len(history), 2):
            drafter.stop_request(str(i), keep=False)
        rollouts = rollouts[1::2]
        drafter.check_integrity()
    unit = drafter._settings.unit_weight
    assert 1 <= unit <= 16
    # A context whose rollouts all weigh next to nothing counts as never seen; this history is too short for that.
    weighted = [(text, first, unit * 0.5 ** (version - then)) for text, first, then in rollouts]
    if min((weight for _, _, weight in weighted), default=1.0) < 2 * kernels.NEGLIGIBLE_WEIGHT:
        return
    assert_counts(drafter._tree, drafter._roots[7], weighted, [1, *query])


@pytest.mark.parametrize("version", [300, 40_000, 10**9])
def test_a_run_may_resume_at_any_version(version):
    """A jump that makes older rollouts weigh nothing, and newer ones as much as ever."""
    drafter = HistoryDrafter(["problem"], max_draft_tokens=1, min_survival=0.0, recency=0.9)
    for i in range(2):
        drafter.start_request(f"old{i}", [1], problem_id=7)
        drafter.extend(f"old{i}", [5, 6])
    drafter.stop_request("old0")
    drafter.begin_policy_version(version)
    drafter.extend("old1", [5, 6, 8])  # still of the old policy
    drafter.check_integrity()
    drafter.start_request("new", [1], problem_id=7)
    drafter.extend("new", [5, 7])
    drafter.start_request("r", [1], problem_id=7)
    drafter.extend("r", [5])
    drafter.check_integrity()
    assert drafter.propose(["r"], np.ones(1, np.int32))[0].token_ids.tolist() == [7]
    drafter.stop_request("old1", keep=False)
    drafter.stop_request("new", keep=False)
    drafter.check_integrity()


def test_weights_may_fade_to_nothing():
    drafter = HistoryDrafter(["problem"], recency=0.5)
    drafter.start_request("a", [1], problem_id=7)
    drafter.extend("a", [3, 4, 3, 4])
    for version in range(1, 300):  # 2**-300 is 0 in float32
        drafter.begin_policy_version(version)
    drafter.check_integrity()
    drafter.extend("a", [3, 3, 4])
    drafter.check_integrity()
    assert drafter.propose(["a"], np.full(1, 4, np.int32))[0].token_ids.size == 0
    drafter.stop_request("a", keep=False)
    drafter.check_integrity()


def test_taking_back_many_fractional_weights_leaves_nothing():
    """1.07**30 is no float32 and neither are its sums; weights on a grid leave no remainder that would be drafted."""
    rng = np.random.default_rng(0)
    drafter = HistoryDrafter(["problem"], min_survival=0.0, recency=0.93)
    drafter.begin_policy_version(30)
    for i in range(8):
        drafter.start_request(str(i), [9], problem_id=7)
        drafter.extend(str(i), rng.integers(0, 2, 1000))
    for i in range(8):
        drafter.stop_request(str(i), keep=False)
    tree = drafter._tree
    assert not any(tree.continuations(node) for node in range(int(tree.arrays.counts[NUM_NODES])))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_history_is_rebuilt_from_the_newest_rollouts():
    limit = 300
    drafter = HistoryDrafter(["problem"], max_history_tokens=limit)
    rng = np.random.default_rng(0)
    bodies, sizes = [], []
    for i in range(40):
        bodies.append(rng.integers(0, 3, 20).tolist())
        drafter.start_request(str(i), [1], problem_id=7)
        drafter.extend(str(i), bodies[-1])
        drafter.stop_request(str(i))
        drafter.check_integrity()
        sizes.append(drafter._num_indexed)
        kept = bodies[len(bodies) - len(drafter._finished) :]
        assert drafter._num_indexed == sum(map(len, kept)) <= limit
        rollouts = [([1, *body], 1, 1.0) for body in kept]
        assert_counts(drafter._tree, drafter._roots[7], rollouts, bodies[0][:4])
    rebuilds = [i for i in range(1, 40) if sizes[i] < sizes[i - 1]]
    assert len(rebuilds) >= 2
    assert all(limit // 4 <= sizes[i] <= limit // 2 for i in rebuilds)
    assert int(drafter._tree.arrays.counts[NUM_TOKENS]) <= (limit // 20 + 1) * (BLOCK_TOKENS + MAX_DEPTH)


def test_rebuilding_keeps_the_weights_of_versions():
    """Finished and live rollouts of four policies weigh the same after the index is built anew."""
    drafter = HistoryDrafter(["problem"], recency=0.5)
    rng = np.random.default_rng(0)
    rollouts = []
    for version in range(4):
        drafter.begin_policy_version(version)
        body = rng.integers(0, 2, 20).tolist()
        drafter.start_request(str(version), [1], problem_id=7)
        drafter.extend(str(version), body)
        rollouts.append(([1, *body], 1, 0.5**-version))
        if version % 2 == 0:
            drafter.stop_request(str(version))
    drafter._flush()
    for _ in range(2):
        for context in ([0], [1, 0], [0, 1, 1]):
            assert_counts(drafter._tree, drafter._roots[7], rollouts, context)
        drafter._rebuild()
        drafter.check_integrity()


def test_entries_of_taken_back_rollouts_are_used_again():
    drafter = HistoryDrafter(["problem"])
    used = []
    for i in range(6):
        drafter.start_request(str(i), [1], problem_id=7)
        drafter.extend(str(i), [2, 3, 4, 2, 3, 5, 2, 3])
        drafter._flush()
        used.append(int(drafter._tree.arrays.counts[NUM_ENTRIES]))
        drafter.stop_request(str(i), keep=False)
        drafter.check_integrity()
    assert used[1:] == used[:1] * 5


def test_the_text_is_copied_when_it_is_given():
    drafter = HistoryDrafter(["problem"], min_survival=0.0)
    buffer = np.array([5, 6, 7], np.int32)
    drafter.start_request("a", [1], problem_id=7)
    drafter.extend("a", buffer)
    buffer[:] = 9  # the engine fills it again before the next propose
    drafter.start_request("b", [1], problem_id=7)
    assert drafter.propose(["b"], np.full(1, 3, np.int32))[0].token_ids.tolist() == [5, 6, 7]


class BoundedHistory(RuleBasedStateMachine):
    """Rebuilds, policy versions and removals in any order: the index holds the kept and the live rollouts."""

    LIMIT = 60

    def __init__(self):
        super().__init__()
        self.drafter = HistoryDrafter(["problem"], max_draft_tokens=4, recency=0.5, max_history_tokens=self.LIMIT)
        self.live: dict[str, tuple[int, list[int], int]] = {}
        self.started = self.version = 0

    @rule(prompt=st.integers(0, 1), seed=st.none() | st.integers(-(2**63), 2**63 - 1))
    def start(self, prompt, seed):
        req_id = f"r{self.started}"
        self.started += 1
        self.drafter.start_request(req_id, [prompt], problem_id=prompt, seed=seed)
        self.live[req_id] = (prompt, [], self.version)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=25))
    def extend(self, data, tokens):
        req_id = data.draw(st.sampled_from(sorted(self.live)))
        self.drafter.extend(req_id, tokens)
        self.live[req_id][1].extend(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), hit=st.booleans())
    def propose_and_observe(self, data, hit):
        req_ids = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, min_size=1))
        drafts = self.drafter.propose(req_ids, np.arange(1, len(req_ids) + 1, dtype=np.int32))
        for i, draft in enumerate(drafts):
            assert len(draft.token_ids) == len(draft.confidence) <= min(i + 1, 4)
            assert (np.diff(draft.confidence) <= 0).all()
            assert ((draft.confidence >= 0) & (draft.confidence <= 1)).all()
        accepted = np.array([len(draft.token_ids) if hit else 0 for draft in drafts], np.int32)
        self.drafter.observe(
            req_ids, [[*draft.token_ids[:n], 3] for draft, n in zip(drafts, accepted, strict=True)], accepted
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def stop(self, data, keep):
        req_id = data.draw(st.sampled_from(sorted(self.live)))
        self.drafter.stop_request(req_id, keep=keep)
        del self.live[req_id]
        in_flight = sum(len(body) for _, body, _ in self.live.values())
        assert self.drafter._num_indexed <= max(self.LIMIT, in_flight)

    @rule(step=st.integers(0, 2))
    def new_policy(self, step):
        self.version += step
        self.drafter.begin_policy_version(self.version)

    @invariant()
    def index_holds_the_kept_and_the_live(self):
        drafter = self.drafter
        drafter.check_integrity()
        unit = drafter._settings.unit_weight
        texts = [(kept.problem_id, kept.text.tolist(), kept.version) for kept in drafter._finished]
        texts += [(problem, [problem, *body], version) for problem, body, version in self.live.values()]
        assert drafter._num_indexed >= sum(len(text) - 1 for _, text, _ in texts)
        for problem, root in drafter._roots.items():
            rollouts = [(text, 1, unit * 0.5 ** (self.version - then)) for own, text, then in texts if own == problem]
            if all(weight > 2 * kernels.NEGLIGIBLE_WEIGHT for _, _, weight in rollouts):
                for context in ([0], [1, 2], [2, 0, 1]):
                    assert_counts(drafter._tree, root, rollouts, context)


TestBoundedHistory = BoundedHistory.TestCase
TestBoundedHistory.settings = settings(
    max_examples=4 if SLOW else 25, stateful_step_count=25, deadline=None, derandomize=True
)
