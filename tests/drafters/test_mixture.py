"""The history drafter: what it drafts, what it learns, and its life cycle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from rollout_spec import noise
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.kernels import MAX_DEPTH
from rollout_spec.drafters.mixture import HistoryDrafter
from tests import naive
from tests.drafters.test_indexes import assert_levels

K = 6


def propose(drafter, *req_ids, limit=K):
    return drafter.propose(list(req_ids), np.full(len(req_ids), limit, np.int32))


def feed(drafter, req_id, prompt, tokens, **kwargs):
    drafter.start_request(req_id, prompt, **kwargs)
    drafter.extend(req_id, tokens)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    history=st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=4),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    source=st.sampled_from(["problem", "own"]),
    seed=st.one_of(st.none(), st.integers(0, 2**62)),
)
def test_drafts_equal_brute_force(history, own, source, seed):
    """One source, fresh counters: each slot is the oracle's favourite, or its coupled choice."""
    prompt = [3, 1]
    drafter = HistoryDrafter([source], max_draft_tokens=K, min_survival=0.0, sharpness=1.5)
    for i, text in enumerate(history):
        feed(drafter, f"h{i}", prompt, text)
        drafter.stop_request(f"h{i}")
    feed(drafter, "r", prompt, own, seed=seed)
    (draft,) = propose(drafter, "r")
    rollouts = [([*prompt, *text], len(prompt), 1.0) for text in (*history, own)]
    drafted: list[int] = []
    for token in draft.token_ids.tolist():
        context = [*prompt, *own, *drafted]
        q, _ = (
            naive.tree_distribution(rollouts, context[-MAX_DEPTH:])
            if source == "problem"
            else naive.own_distribution([*prompt, *own], drafted, MAX_DEPTH)
        )
        tokens = np.array(sorted(q))
        scores = np.array([q[t] for t in tokens])
        if seed is not None:
            scores = 1.5 * np.log(scores) + noise.gumbel(seed, len(context) - 1, tokens)
        assert scores[tokens == token][0] == pytest.approx(scores.max(), abs=1e-6)
        drafted.append(token)
    if len(drafted) < K:  # it stopped because nothing was left to say
        context = [*prompt, *own, *drafted]
        rest = (
            naive.tree_distribution(rollouts, context[-MAX_DEPTH:])[0]
            if source == "problem"
            else naive.own_distribution([*prompt, *own], drafted, MAX_DEPTH)[0]
        )
        assert not rest
    assert len(draft.confidence) == len(drafted)
    assert (np.diff(draft.confidence) <= 0).all()
    assert ((draft.confidence >= 0) & (draft.confidence <= 1)).all()


def test_siblings_in_flight_are_visible_at_the_next_propose():
    drafter = HistoryDrafter(max_draft_tokens=K, min_survival=0.0)
    feed(drafter, "a", [1, 2], [5, 6, 7, 8])
    feed(drafter, "b", [1, 2], [5, 6])
    assert propose(drafter, "b")[0].token_ids.tolist()[:2] == [7, 8]
    drafter.extend("a", [9])
    assert propose(drafter, "b")[0].token_ids.tolist()[:3] == [7, 8, 9]


def test_problems_are_apart_and_shared_history_is_not():
    for name, expected in (("suffix", [7, 8]), ("mixture", [7, 8])):
        drafter = build_drafter(name, max_draft_tokens=K, min_survival=0.0)
        feed(drafter, "a", [1, 2], [5, 6, 7, 8])
        feed(drafter, "b", [3, 4], [5, 6])
        assert propose(drafter, "b")[0].token_ids.tolist()[:2] == expected
    drafter = HistoryDrafter(["problem"], max_draft_tokens=K, min_survival=0.0)
    feed(drafter, "a", [1, 2], [5, 6, 7, 8])
    feed(drafter, "b", [3, 4], [5, 6])
    feed(drafter, "c", [3, 4], [5, 6], problem_id=99)
    assert all(len(draft.token_ids) == 0 for draft in propose(drafter, "b", "c") if 7 in draft.token_ids)
    feed(drafter, "d", [8, 8], [5, 6], problem_id=99)
    drafter.extend("c", [4, 4])
    assert propose(drafter, "d")[0].token_ids.tolist()[0] == 4


def test_rollouts_taken_back_leave_no_trace():
    drafter = HistoryDrafter(["problem", "shared"], max_draft_tokens=K, min_survival=0.0)
    feed(drafter, "a", [1, 2], [5, 6, 7, 8])
    drafter.stop_request("a", keep=False)
    feed(drafter, "b", [1, 2], [5, 6])
    assert len(propose(drafter, "b")[0].token_ids) == 0


def test_newer_policies_weigh_more():
    def favourite(recency):
        drafter = HistoryDrafter(["problem"], max_draft_tokens=1, min_survival=0.0, recency=recency)
        for i in range(3):
            feed(drafter, f"old{i}", [1, 2], [5, 6])
            drafter.stop_request(f"old{i}")
        for version in range(1, 200):  # far enough that weights are rescaled
            drafter.begin_policy_version(version)
        feed(drafter, "new", [1, 2], [5, 7])
        feed(drafter, "r", [1, 2], [5])
        drafter.check_integrity()
        return propose(drafter, "r")[0].token_ids.tolist()

    assert favourite(1.0) == [6]
    assert favourite(0.97) == [7]


def test_batches_write_to_the_right_requests():
    drafter = HistoryDrafter(["problem"], max_draft_tokens=K, min_survival=0.0)
    for i in range(4):
        feed(drafter, f"h{i}", [i], [10 + i, 20 + i, 30 + i])
    for i in range(4):
        feed(drafter, f"r{i}", [i], [10 + i])
    drafts = drafter.propose(["r2", "r0"], np.array([2, 1], np.int32))
    assert [draft.token_ids.tolist() for draft in drafts] == [[22, 32], [20]]
    assert [draft.token_ids.tolist() for draft in propose(drafter, "r1", "r3", limit=0)] == [[], []]
    assert len(propose(drafter, "r1", limit=100)[0].token_ids) <= K


def test_same_calls_same_drafts():
    def run():
        rng = np.random.default_rng(5)
        drafter, drafts = HistoryDrafter(max_draft_tokens=K), []
        for i in range(12):
            feed(drafter, str(i), [1, 2], rng.integers(0, 4, 30).tolist(), seed=i)
            if i % 3 == 2:
                drafter.stop_request(str(i - 1))
            (draft,) = propose(drafter, str(i))
            drafts.append((draft.token_ids.tolist(), draft.confidence.tolist()))
            targets = rng.integers(0, 4, len(draft.token_ids) + 1)
            drafter.observe([str(i)], [targets], np.zeros(1, np.int32))
        return drafts

    assert run() == run()


def test_outcomes_calibrate():
    """Drafts that keep failing lose confidence, are cut, and their source loses weight."""
    drafter = HistoryDrafter(["problem"], max_draft_tokens=K, min_survival=0.2)
    feed(drafter, "h", [1, 2], [5, 6, 7, 8] * 10)
    feed(drafter, "r", [1, 2], [5, 6])
    first = propose(drafter, "r")[0]
    assert len(first.token_ids) == K
    for _ in range(200):
        (draft,) = propose(drafter, "r")
        if len(draft.token_ids) == 0:
            break
        assert draft.confidence[0] <= first.confidence[0] + 1e-6
        drafter.observe(["r"], [[99]], np.zeros(1, np.int32))
    assert len(propose(drafter, "r")[0].token_ids) == 0


def test_memory_is_bounded_and_the_oldest_rollouts_go_first():
    limit = 500
    drafter = HistoryDrafter(max_draft_tokens=K, min_survival=0.0, max_history_tokens=limit)
    rng = np.random.default_rng(0)
    feed(drafter, "live", [9], [1, 2, 3])
    for i in range(60):
        feed(drafter, str(i), [i % 5], [*rng.integers(0, 50, 40).tolist(), 60 + i])
        drafter.stop_request(str(i))
        assert drafter._num_indexed <= limit + 41
    drafter.check_integrity()
    kept = [int(rollout.text[-1]) - 60 for rollout in drafter._finished]
    assert kept == list(range(60 - len(kept), 60))
    drafter.extend("live", [1, 2])
    assert propose(drafter, "live")[0].token_ids.tolist()[:1] == [3]
    assert drafter.memory_bytes() < 20e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ["prompt"]}, "sources"),
        ({"sources": []}, "sources"),
        ({"max_draft_tokens": 0}, "max_draft_tokens"),
        ({"min_survival": 1.0}, "min_survival"),
        ({"sharpness": 0}, "sharpness"),
        ({"sharpness": float("nan")}, "sharpness"),
        ({"sharpness": float("inf")}, "sharpness"),
        ({"recency": 1.5}, "recency"),
        ({"max_history_tokens": 0}, "max_history_tokens"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        HistoryDrafter(**options)


def test_bad_calls():
    drafter = HistoryDrafter(["own"])
    drafter.start_request("a", [1])
    for call, message in (
        (lambda: drafter.start_request("a", [1]), "live already"),
        (lambda: drafter.start_request("b", [-1]), "negative"),
        (lambda: drafter.start_request("b", [[1]]), "one-dimensional"),
        (lambda: drafter.extend("b", [1]), "not live"),
        (lambda: drafter.extend("a", [-2]), "negative"),
        (lambda: propose(drafter, "b"), "not live"),
        (lambda: drafter.propose(["a"], np.zeros(2, np.int32)), "max_tokens"),
        (lambda: drafter.observe(["b"], [[1]], np.zeros(1, np.int32)), "not live"),
        (lambda: drafter.observe(["a"], [], np.zeros(1, np.int32)), "observe got"),
        (lambda: drafter.stop_request("b"), "not live"),
        (lambda: drafter.begin_policy_version(-1), "go up"),
        (lambda: build_drafter("treee"), "unknown drafter"),
        (lambda: build_drafter("no.such.Drafter"), "cannot be imported"),
        (lambda: build_drafter("suffix", depth=3), "does not take these options"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    sources=st.sampled_from([("shared",), ("problem", "shared"), ("shared", "own"), ("problem", "shared", "own")]),
    history=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=15), st.booleans()), max_size=4),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
def test_mixed_drafts_equal_brute_force(sources, history, own, seed):
    """Fresh counters: a source weighs as much as its match is long, and confidence is the product of probabilities.

    Two problems with one shared history, some of it finished and some in flight.
    """
    drafter = HistoryDrafter(sources, max_draft_tokens=K, min_survival=0.0, sharpness=1.5)
    rollouts = [(problem, ([3, 1, *text], 2, 1.0)) for problem, text, _ in [*history, (0, own, False)]]
    for i, (problem, text, finished) in enumerate(history):
        feed(drafter, f"h{i}", [3, 1], text, problem_id=problem)
        if finished:
            drafter.stop_request(f"h{i}")
    feed(drafter, "r", [3, 1], own, problem_id=0, seed=seed)
    (draft,) = propose(drafter, "r")

    def mixture(drafted):
        context = [3, 1, *own, *drafted]
        every = {
            "problem": naive.tree_distribution([rollout for problem, rollout in rollouts if problem == 0], context),
            "shared": naive.tree_distribution([rollout for _, rollout in rollouts], context),
            "own": naive.own_distribution([3, 1, *own], drafted, MAX_DEPTH),
        }
        used = [every[source] for source in sources]
        total = sum(length for _, length in used)
        return {
            t: sum(length * q.get(t, 0.0) for q, length in used) / total for t in set().union(*(q for q, _ in used))
        }

    drafted, survival = [], 1.0
    for token, confidence in zip(draft.token_ids.tolist(), draft.confidence.tolist(), strict=True):
        q = mixture(drafted)
        scores = dict(q)
        if seed is not None:
            position = 2 + len(own) + len(drafted) - 1
            scores = {t: 1.5 * np.log(p) + float(noise.gumbel(seed, position, t)) for t, p in q.items()}
        assert scores[token] == pytest.approx(max(scores.values()), abs=1e-5)
        survival *= q[token]
        assert confidence == pytest.approx(survival, rel=1e-4)
        drafted.append(token)
    assert len(drafted) == K or not mixture(drafted)


def test_a_source_that_is_always_wrong_loses_its_weight():
    """The problem's long match says 9; the request's own shorter match says 7, and is right."""
    drafter = HistoryDrafter(["problem", "own"], max_draft_tokens=1, min_survival=0.0)
    feed(drafter, "r", [8, 6, 4, 7, 1, 5, 6, 4], [], problem_id=7)  # (6, 4) was followed by 7 after another token
    feed(drafter, "h", [1], [5, 6, 4, 9], problem_id=7)
    choices = []
    for _ in range(40):
        (draft,) = propose(drafter, "r")
        choices.append(draft.token_ids.tolist())
        drafter.observe(["r"], [[7]], np.array([int(choices[-1] == [7])], np.int32))
    assert choices[0] == [9]
    assert choices[-1] == [7]
    counters = drafter._calibration.sources
    assert counters[0, :, :, 1].sum() == 0
    assert counters[2, :, :, 1].sum() == counters[2, :, :, 0].sum() == 40


def test_only_reached_slots_are_learned_from_and_only_once():
    drafter = HistoryDrafter(["problem"], max_draft_tokens=K, min_survival=0.0)
    feed(drafter, "h", [1], [5, 6, 7, 8, 2, 3])
    feed(drafter, "r", [1], [5])
    (draft,) = propose(drafter, "r")
    assert draft.token_ids.tolist() == [6, 7, 8, 2, 3]
    for _ in range(2):  # the second time there is no proposal left to learn from
        drafter.observe(["r"], [[6, 7, 99, 2, 3]], np.array([2], np.int32))
        assert drafter._calibration.choices[..., 0].sum() == 3
        assert drafter._calibration.choices[..., 1].sum() == 2


def test_a_new_request_does_not_inherit_its_rows_proposal():
    drafter = HistoryDrafter(["problem"], max_draft_tokens=K, min_survival=0.0)
    feed(drafter, "a", [1], [5, 6, 5])
    assert propose(drafter, "a")[0].token_ids.size
    drafter.stop_request("a")
    drafter.start_request("b", [1])
    drafter.observe(["b"], [[6]], np.array([0], np.int32))
    assert drafter._calibration.choices.sum() == 0


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64])
def test_seeds_that_do_not_fit(seed):
    """The request is refused as a whole: its name stays free."""
    drafter = HistoryDrafter()
    with pytest.raises(ValueError, match="seed must fit in 64 bits"):
        drafter.start_request("a", [1], seed=seed)
    drafter.start_request("a", [1], seed=-(2**63))
    drafter.check_integrity()


def test_drafters_by_path():
    drafter = build_drafter("rollout_spec.drafters.mixture.HistoryDrafter", sources=["own"], max_draft_tokens=2)
    feed(drafter, "a", [1, 2, 3, 4, 1, 2], [])
    assert len(propose(drafter, "a")[0].token_ids) <= 2
    for path in ("rollout_spec.drafters.mixture.Nothing", "rollout_spec.nothing.HistoryDrafter"):
        with pytest.raises(ValueError, match="cannot be imported"):
            build_drafter(path)
    with pytest.raises(ValueError, match="max_draft_tokens"):
        build_drafter("mixture", max_draft_tokens=0)


class LifeCycle(RuleBasedStateMachine):
    """Any order of calls: the index holds exactly the rollouts that it should."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.drafter = HistoryDrafter(max_draft_tokens=4, recency=1.0)
        self.live: dict[str, tuple[list[int], list[int]]] = {}
        self.kept: list[tuple[list[int], list[int]]] = []
        self.drafts: dict[str, int] = {}
        self.started = self.version = 0

    @rule(target=requests, prompt=st.lists(st.integers(0, 1), max_size=2), seed=st.one_of(st.none(), st.integers(0, 9)))
    def start(self, prompt, seed):
        req_id = f"r{self.started}"
        self.started += 1
        self.drafter.start_request(req_id, prompt, seed=seed)
        self.live[req_id] = (prompt, [])
        return req_id

    @rule(req_id=requests, tokens=st.lists(st.integers(0, 2), max_size=9))
    def extend(self, req_id, tokens):
        self.drafter.extend(req_id, tokens)
        self.live[req_id][1].extend(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def propose_and_observe(self, data):
        req_ids = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, min_size=1))
        drafts = self.drafter.propose(req_ids, np.full(len(req_ids), 4, np.int32))
        accepted = [data.draw(st.integers(0, len(draft.token_ids))) for draft in drafts]
        targets = [
            [*draft.token_ids.tolist()[:n], data.draw(st.integers(0, 2))]
            for draft, n in zip(drafts, accepted, strict=True)
        ]
        self.drafter.observe(req_ids, targets, np.array(accepted, np.int32))

    @rule(req_id=consumes(requests), keep=st.booleans())
    def stop(self, req_id, keep):
        self.drafter.stop_request(req_id, keep=keep)
        rollout = self.live.pop(req_id)
        if keep:
            self.kept.append(rollout)

    @rule()
    def new_policy(self):
        self.version += 1
        self.drafter.begin_policy_version(self.version)

    @rule()
    def rebuild(self):
        self.drafter._flush()
        self.drafter._rebuild()

    @invariant()
    def index_holds_what_was_said(self):
        self.drafter.check_integrity()
        rollouts = [([*p, *t], len(p), 1.0) for p, t in [*self.kept, *self.live.values()]]
        for context in ([0], [1, 2], [2, 0, 1]):
            assert_levels(self.drafter._tree, self.drafter._settings.shared_root, rollouts, context)


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
