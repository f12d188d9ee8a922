"""Drafts from what the target saw: similar states weigh more, and candidates vote for all that was likely."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host.vote import (
    BLEND,
    MAX_DEPTH,
    MAX_DISAGREEMENT,
    MIN_REMEMBERED,
    SIMILARITY,
    UNKNOWN_DISAGREEMENT,
)
from rollout_spec.features.format import (
    decoded_probabilities,
    no_features,
    unpack,
)
from rollout_spec.noise import host as noise
from tests import naive
from tests.drafters.recorder import Recorder, examples, features_of, positions_of, random_features

K = 6


def make(index="suffix", **options):
    recorder = Recorder(index, max_draft_tokens=K, recency=1.0, inverse_temperature=1.5, **options)
    settings = recorder.drafter._settings
    recorder.drafter._settings = settings._replace(preference=np.ones_like(settings.preference))
    return recorder


def start(recorder, req_id, prompt, tokens, features, **kwargs):
    recorder.start(req_id, prompt, **kwargs)
    recorder.extend(req_id, tokens, features)


def positions(recorder, req_id):
    return positions_of(recorder.drafter._store, recorder.drafter._live[req_id].document)


# -- the model -------------------------------------------------------------------------------------------------------


def drafted_by_hand(recorder, req_id, seed, features):
    """For each drafted position, the scores of the tokens that may come next."""
    drafter, problem, context = recorder.drafter, recorder.problem(req_id), recorder.context(req_id)
    settings = drafter._settings
    features = {document: unpack(words) for document, words in features.items()}
    texts, candidates, weights = recorder.texts(), [], []
    mine, *_ = features[drafter._live[req_id].document]
    probability = decoded_probabilities()
    token, depth = (yield None), 0
    while True:
        if not candidates:
            candidates = recorder.tree_candidates(problem, context)
            weights = [1.0] * len(candidates)
            if drafter.wants_features:
                differing = []
                for (document, at), _ in candidates:
                    place = at - (depth + 1)  # before the rollout's first token there are no states
                    theirs = features[document][0] if place >= 0 and document in features else None
                    if theirs is None or not len(mine) or not mine[-1].any() or not theirs[place].any():
                        differing.append(None)
                    else:
                        differing.append(sum(int(word).bit_count() for word in theirs[place] ^ mine[-1]))
                known = [n for n in differing if n is not None]
                more = [(UNKNOWN_DISAGREEMENT if n is None else n - min(known)) if known else 0 for n in differing]
                left = [i for i, n in enumerate(more) if n <= MAX_DISAGREEMENT]
                candidates = [candidates[i] for i in left]
                weights = [np.exp(-SIMILARITY * more[i]) for i in left]
        votes = []
        for ((document, at), length), weight in zip(candidates, weights, strict=True):
            said, vote = texts[document].tokens[at], {}
            if drafter.wants_features and document in features:
                for top, code in zip(*(part[at] for part in features[document][1:]), strict=True):
                    if probability[code] < MIN_REMEMBERED:
                        break
                    vote[int(top)] = float(probability[code])
            if said not in vote:
                vote[said] = max(1.0 - sum(vote.values()), 0.0)
            votes.append((vote, length, weight))
        q = naive.blend_distributions(votes, BLEND)
        if seed is not None:
            q = {
                t: settings.inverse_temperature * np.log(max(p, 1e-300))
                + float(noise.gumbel(seed, len(context) - 1, t))
                for t, p in q.items()
            }
        token = yield q
        kept = [
            i
            for i, ((document, at), _) in enumerate(candidates)
            if texts[document].tokens[at] == token and at + 1 < len(texts[document].tokens)
        ]
        weights = [weights[i] for i in kept]
        candidates = [
            ((document, at + 1), min(length + 1, MAX_DEPTH)) for (document, at), length in (candidates[i] for i in kept)
        ]
        context, depth = [*context, token], depth + 1


@pytest.mark.parametrize("options", [{}, {"features": False}])
@examples(60)
@given(
    history=st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=4),
    own=st.lists(st.integers(0, 2), max_size=12),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    random=st.integers(0, 2**31),
)
def test_drafts_are_the_favourites_of_the_blended_distributions(options, history, own, seed, random):
    recorder, rng, known = make(**options), np.random.default_rng(random), {}
    for name, text in [*((f"h{i}", text) for i, text in enumerate(history)), ("r", own)]:
        features = random_features(rng, text)
        start(recorder, name, [3, 1], text, features, seed=seed if name == "r" else None)
        known[recorder.drafter._live[name].document] = features
        if name != "r":
            recorder.stop(name)
    (draft,) = recorder.propose("r")
    by_hand = drafted_by_hand(recorder, "r", seed, known)
    next(by_hand)
    token = None
    for depth in range(K):
        scores = by_hand.send(token)
        if depth == len(draft.token_ids):
            assert not scores
            break
        token = int(draft.token_ids[depth])
        assert scores[token] == pytest.approx(max(scores.values()), abs=1e-4)


# -- one by one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_the_more_similar_state_is_followed(index):
    """After the same words two rollouts went on differently; the request's last state is like the second's."""
    for mine, expected in ((0, 200), (20, 300)):
        recorder = make(index)
        start(recorder, "a", [1], [5, 6, 200], features_of([0, 0, 3], [{}] * 3), problem_id=7)
        start(recorder, "b", [1], [5, 6, 300], features_of([20, 20, 3], [{}] * 3), problem_id=7)
        start(recorder, "r", [1], [5, 6], features_of([30, mine], [{}] * 2), problem_id=7)
        assert recorder.draft("r", 1) == [expected]


def test_states_are_compared_at_the_same_distance_from_the_drafted_token():
    """The drafted 6 ends in a new lookup, whose candidates are compared by the states two tokens before."""
    for mine, expected in ((0, 200), (20, 300)):
        recorder = make()
        start(recorder, "x", [1], [5, 6], features_of([9, 9], [{}] * 2), problem_id=7)
        start(recorder, "a", [1], [8, 6, 200], features_of([0, 40, 40], [{}] * 3), problem_id=7)
        start(recorder, "b", [1], [8, 6, 300], features_of([20, 40, 40], [{}] * 3), problem_id=7)
        start(recorder, "r", [1], [5], features_of([mine], [{}]), problem_id=7)
        assert recorder.draft("r", 2) == [6, expected]


def test_dissimilar_candidates_are_dropped():
    """The longer match is of another state, and its token is not even the second choice."""
    recorder = make()
    start(recorder, "a", [1], [4, 5, 6, 200], features_of([60] * 4, [{}] * 4), problem_id=7)
    start(recorder, "b", [1], [6, 300], features_of([0] * 2, [{}] * 2), problem_id=7)
    start(recorder, "r", [1], [4, 5, 6], features_of([0] * 3, [{}] * 3), problem_id=7)
    assert recorder.draft("r", 1) == [300]


def test_candidates_of_unknown_states_stay():
    """A long match in the prompt, of which there are no states, against a short one whose state is far."""
    recorder = make()
    start(recorder, "a", [1], [6, 300], features_of([60] * 2, [{}] * 2), problem_id=7)
    start(recorder, "r", [4, 5, 6, 200, 9], [4, 5, 6], features_of([0] * 3, [{}] * 3), problem_id=7)
    assert recorder.draft("r", 1) == [300], "one known candidate is the most similar one, however far"
    start(recorder, "b", [1], [6, 300], features_of([60] * 2, [{}] * 2), problem_id=8)
    start(recorder, "s", [4, 5, 6, 200, 9], [4, 5, 6], None, problem_id=8)
    assert recorder.draft("s", 1) == [200], "of the request's own state nothing is known: words choose"


def test_what_was_likely_is_drafted_though_it_was_not_said():
    recorder = make()
    start(recorder, "a", [1], [5, 6, 200], features_of([0] * 3, [{}, {}, {200: 0.2, 300: 0.7}]), problem_id=7)
    start(recorder, "r", [1], [5, 6], features_of([0] * 2, [{}] * 2), problem_id=7)
    assert recorder.draft("r", 1) == [300]


def test_probability_that_is_not_remembered_stays_with_what_was_said():
    recorder = make()
    start(recorder, "a", [1], [5, 6, 200], features_of([0] * 3, [{}, {}, {300: 0.3, 301: 0.1}]), problem_id=7)
    start(recorder, "r", [1], [5, 6], features_of([0] * 2, [{}] * 2), problem_id=7)
    assert recorder.draft("r", 1) == [200]


def random_calls(index, give, **options):
    """Drafts of a run with several requests and outcomes."""
    rng, recorder, drafts = np.random.default_rng(5), Recorder(index, max_draft_tokens=K, **options), []
    for i in range(30):
        recorder.start(str(i), [1, 2, i % 3], seed=i if i % 2 else None)
        for size in (10, 20):
            tokens = rng.integers(0, 4, size)
            recorder.extend(str(i), tokens, give(np.random.default_rng(i), tokens))
        if i % 3 == 2:
            recorder.stop(str(i - 1), keep=bool(i % 2))
        (draft,) = recorder.propose(str(i))
        drafts.append((draft.token_ids.tolist(), draft.confidence.tolist()))
        recorder.extend(str(i), rng.integers(0, 4, len(draft.token_ids) + 1))
    recorder.check()
    return drafts


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_without_features_drafts_are_those_of_the_words_alone(index):
    words = random_calls(index, lambda rng, tokens: None)
    assert random_calls(index, lambda rng, tokens: no_features(tokens.size)) == words
    assert random_calls(index, random_features, features=False) == words
    assert random_calls(index, random_features) != words


@pytest.mark.parametrize(("options", "expected"), [({}, 32), ({"features": False}, 0)])
def test_features_take_32_bytes_per_token_where_they_are_used(options, expected):
    recorder = make(**options)
    start(recorder, "a", [1], [5, 6, 7], None)
    recorder.drafter._flush()
    before = recorder.drafter.memory_bytes()
    recorder.extend("a", [7], features_of([0], [{7: 0.5}]))
    recorder.drafter._flush()
    assert recorder.drafter.memory_bytes() - before == expected * recorder.drafter._store.arrays.tokens.size


def test_features_stay_with_their_tokens_when_pages_are_used_again():
    """Removed rollouts leave pages with old features; tokens of which nothing is known must not inherit them."""
    recorder = make()
    start(recorder, "old", [1], [5, 6] * 40, features_of([0] * 80, [{9: 0.9}] * 80), problem_id=7)
    recorder.stop("old", keep=False)
    start(recorder, "new", [1], [5, 6] * 40, None, problem_id=7)
    assert recorder.draft("new", 2) == [5, 6]
    assert not recorder.drafter._store.arrays.features[positions(recorder, "new")].any()


def test_features_grow_with_the_store():
    recorder, rng = make(), np.random.default_rng(0)
    features = random_features(rng, range(5000))
    start(recorder, "a", [1], np.arange(5000) % 7, features)
    recorder.drafter._flush()
    assert (recorder.drafter._store.arrays.features[positions(recorder, "a")] == features).all()


@pytest.mark.parametrize("wrong", [lambda f: f[:1], lambda f: f[:, :1], lambda f: f.astype(np.int32)])
def test_features_that_do_not_fit_their_tokens_are_refused(wrong):
    recorder = make()
    recorder.start("a", [1])
    with pytest.raises(ValueError, match="features of 2 tokens must be"):
        recorder.drafter.extend("a", [5, 6], wrong(no_features(2)))


def test_features_are_copied_when_they_are_given():
    recorder, features = make(), features_of([3, 4], [{7: 0.5}] * 2)
    start(recorder, "a", [1], [5, 6], features)
    expected, features[:] = features.copy(), 0
    recorder.drafter._flush()
    assert (recorder.drafter._store.arrays.features[positions(recorder, "a")] == expected).all()


def test_the_switch_is_a_boolean():
    with pytest.raises(TypeError, match="features must be a bool, got 'false'"):
        make(features="false")
