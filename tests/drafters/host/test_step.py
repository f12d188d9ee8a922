"""What is learned from a step, against plain lists that are read from the beginning each time."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import constants
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled, decide
from rollout_spec.drafting import Drafting
from rollout_spec.features import FEATURE_WORDS, no_features
from tests.drafters.recorder import SENTINEL, examples, sampled

K = 3
MAX_MODEL_LEN = 14
TOKENS = st.integers(0, 3)
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(TOKENS, max_size=3),
        "max_tokens": st.integers(1, 12) | st.just(2000),
        "min_tokens": st.integers(0, 4),
        "stops": st.lists(TOKENS, max_size=4, unique=True),
    }
)
MOVE = st.fixed_dictionaries(
    {
        "tokens": st.lists(TOKENS, max_size=K + 1),
        "times": st.sampled_from([1, 1, 1, 1, 100]),
        "is_seen": st.sampled_from([True, True, False]),  # False: the drafter sees these tokens in a later step
        "num_cut": st.integers(0, 2),  # drafted tokens after the first difference
    }
)


class Plain:
    """What should be known: the whole text that a request's engine has, and where it ends."""

    def __init__(self):
        self.outcomes = np.zeros((constants.CELLS, 2))

    def end(self, request):
        """How many of the tokens seen so far the request keeps, and whether it has ended there."""
        for n, token in enumerate(request.output[: request.num_seen], 1):
            if n >= request.max_tokens or (n >= request.min_tokens and token in request.stops):
                return n, True
        return request.num_seen, False

    def grade(self, draft, said):
        if not said:
            return
        for place, right in outcomes(draft.tokens, said):
            self.outcomes[draft.cells[place]] += (1, right)
        draft.tokens = []


def outcomes(drafted, said):
    """Place and whether it was right of each drafted token that was reached."""
    for place, (token, target) in enumerate(zip(drafted, said, strict=False)):
        yield place, token == target
        if token != target:
            return


def any_draft(rng, arrays, row):
    """Writes a draft of any kind into a request's row. Returns the same as lists."""
    drafts, length = arrays.history, int(rng.integers(0, K + 1))
    drafts.tokens[row] = rng.integers(0, 4, K)
    drafts.cells[row] = rng.integers(0, constants.CELLS, K)
    drafts.lengths[row] = length
    arrays.num_offered[row] = rng.integers(0, K + 1)
    return SimpleNamespace(tokens=drafts.tokens[row, :length].tolist(), cells=drafts.cells[row].tolist())


def in_engine(rng, table, some, moves, has_features):
    """The step as an engine keeps it: requests in any order, among others, each with a part of its text."""
    width = len(some) + 2
    batch_rows = rng.permutation(width)[: len(some)]
    num_accepted, num_verified, first = (rng.integers(0, 3, width) for _ in range(3))
    num_verified += num_accepted
    lengths, token_ids = np.zeros(width, np.int32), np.full((width, 1700), SENTINEL, np.int32)
    for batch_row, request, move in zip(batch_rows, some, moves, strict=True):
        text = request.prompt + request.output
        first[batch_row] = rng.integers(0, table.arrays.num_tokens[request.row] + 1)
        lengths[batch_row] = len(text)
        token_ids[batch_row, : len(text) - first[batch_row]] = text[first[batch_row] :]
        num_accepted[batch_row] = max(len(move["tokens"]) * move["times"] - 1, 0)
        num_verified[batch_row] = num_accepted[batch_row] + move["num_cut"]
    starts = np.cumsum([0, *(num_verified + 1)])
    features = rng.integers(1, 2**40, (starts[-1], FEATURE_WORDS)) if has_features else NO_FEATURES
    rows = np.array([request.row for request in some], np.int64)
    return Sampled(rows, batch_rows, token_ids, first, lengths, num_verified, num_accepted, starts, features)


@pytest.mark.parametrize("kind", ["history", "one by one"])
@examples(30)
@given(
    some=st.lists(REQUEST, min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.lists(MOVE, min_size=3, max_size=3), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    is_late=st.booleans(),
)
def test_what_is_learned_from_a_step(kind, some, steps, seed, is_late):
    rng, ours = np.random.default_rng(seed), HistoryDrafter(max_draft_tokens=K)
    lone = Mock(spec=["start_request", "extend", "propose", "stop_request"])
    chosen = ours if kind == "history" else lone
    drafting = Drafting(chosen, K, max_model_len=MAX_MODEL_LEN, vocab_size=9, index_late=is_late)
    drafter, table = drafting.drafter, drafting.drafter.table
    plain = Plain()
    live = [SimpleNamespace(**request, output=[], num_seen=0, kept=0, features=[]) for request in some]
    for number, request in enumerate(live):
        drafter.start_request(str(number), request.prompt, problem_id=0)
        request.name, request.row = str(number), drafter.row_of(str(number))
        table.limit(
            request.row, max_tokens=request.max_tokens, min_tokens=request.min_tokens, stop_token_ids=request.stops
        )
        request.draft = any_draft(rng, table.arrays, request.row)
    for moves, has_features in steps:
        for request, move in zip(live, moves, strict=False):
            request.output += move["tokens"] * move["times"]
        seen = [(request, move) for request, move in zip(live, moves, strict=False) if move["is_seen"]]
        rng.shuffle(seen)
        now, moves = [request for request, _ in seen], [move for _, move in seen]
        outcome = in_engine(rng, table, now, moves, has_features)
        learned = drafting.learn(outcome)
        assert learned.num_verified == outcome.num_verified[outcome.batch_rows].sum()
        assert learned.num_sampled == outcome.num_accepted[outcome.batch_rows].sum() + len(now)
        limits, num_emitted = [0] * len(now), 0
        for i, (request, batch_row) in enumerate(zip(now, outcome.batch_rows, strict=True)):
            request.num_seen, num_known = len(request.output), request.kept
            request.kept, is_complete = plain.end(request)
            said = request.output[num_known : request.kept]
            num_before = request.num_seen - outcome.num_accepted[batch_row] - 1
            num_emitted += max(request.kept - max(num_before, num_known), 0)
            for at in range(num_known, request.kept):
                is_known = has_features and at >= num_before
                feature_row = outcome.starts[batch_row] + at - num_before
                request.features.append(outcome.features[feature_row] if is_known else no_features(1)[0])
            plain.grade(request.draft, said)
            to_come = request.max_tokens - request.kept
            if not is_complete and to_come > 1:
                left = MAX_MODEL_LEN - len(request.prompt) - request.kept - 1
                limits[i] = max(min(K, to_come - 1, left), 0)
            assert table.arrays.num_tokens[request.row] == len(request.prompt) + request.kept
            assert table.arrays.is_complete[request.row] == is_complete
            assert table.arrays.num_offered[request.row] == 0
            if kind == "history" and said:
                assert table.arrays.history.lengths[request.row] == 0
        assert learned.limits.tolist() == limits
        assert learned.num_live == sum(not plain.end(request)[1] for request in now)
        assert learned.num_emitted == num_emitted
        if kind == "history":
            np.testing.assert_allclose(ours._outcomes, plain.outcomes, rtol=1e-4)
        for request in now:
            request.draft = any_draft(rng, table.arrays, request.row)
    for request in live:
        if kind != "history":
            calls = [call.args for call in lone.extend.call_args_list]
            tokens = [token for name, tokens in calls if name == request.name for token in tokens]
            assert tokens == request.output[: request.kept]
            assert {int}.issuperset(map(type, tokens))
            continue
        tokens, features = ours._store.read(ours._live[request.name].document)
        assert tokens.tolist() == request.output[: request.kept]
        features = no_features(request.kept) if features is None else features
        assert features.tolist() == [row.tolist() for row in request.features]
    ours.check_integrity()


def test_of_an_unlikely_draft_and_a_likely_one_after_it_the_likely_one_is_verified():
    """Each token costs half of what one that comes true gains."""
    table, tokens, lengths = RequestTable(2), np.empty((2, 2), np.int32), np.empty(2, np.int64)
    rows = np.array([table.start(1), table.start(1)])
    table.arrays.history.confidence[rows], table.arrays.history.lengths[rows] = [[0.1, 0.9], [0.9, 0.8]], 2
    limits, chosen, vocab_size, trust = np.full(2, 2), np.arange(2), 9, 1.0
    value, cost = 1.0, np.arange(5) / 2
    are_valid, gain = decide(table.reference, rows, limits, chosen, vocab_size, trust, value, cost, tokens, lengths)
    assert (are_valid, lengths.tolist()) == (True, [0, 2])
    assert gain == pytest.approx(0.9 + 0.8 - 1, abs=0.01)


def test_features_are_those_of_the_rows_that_said_the_tokens():
    """Of three rows two say what is kept; two tokens of earlier steps had not been seen."""
    drafter = HistoryDrafter(max_draft_tokens=K)
    drafter.start_request("a", [1])
    features = np.arange(1, 1 + 3 * FEATURE_WORDS).reshape(3, FEATURE_WORDS)
    step = sampled(drafter.table, [0], [[5, 6, 7, 8]], [1], num_verified=[2], features=features)
    Drafting(drafter, K, max_model_len=99, vocab_size=9).learn(step)
    _, found = drafter._store.read(drafter._live["a"].document)
    assert found.tolist() == [*no_features(2).tolist(), *features[:2].tolist()]


def test_what_is_removed_has_been_indexed(monkeypatch):
    """Otherwise the index would be searched for tokens that it does not have, and get them later."""
    drafter, waiting = HistoryDrafter(max_draft_tokens=K), []
    drafting = Drafting(drafter, K, max_model_len=99, vocab_size=9, index_late=True)
    drafter.start_request("a", [1])
    drafting.learn(sampled(drafter.table, [0], [[5]]))
    assert drafter._num_unindexed == 1
    monkeypatch.setattr(drafter, "_remove", lambda request: waiting.append(drafter._num_unindexed))
    drafter.stop_request("a", keep=False)
    assert waiting == [0]


def test_features_of_another_shape_are_refused():
    drafting = Drafting(HistoryDrafter(max_draft_tokens=K), K, max_model_len=9, vocab_size=9)
    table = drafting.drafter.table
    drafting.drafter.start_request("a", [1])
    for wrong in (no_features(2)[:, :1], no_features(2).astype(np.int32)):
        with pytest.raises(ValueError, match="features of 2 tokens must be"):
            drafting.learn(sampled(table, [0], [[5, 6]], features=wrong))
    assert table.arrays.num_tokens[0] == 1
