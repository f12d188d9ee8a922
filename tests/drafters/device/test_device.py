"""The device drafter against its reference; the compiled kernels are emulated."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rollout_spec.drafters.device import drafter as device
from rollout_spec.drafters.device import kernels
from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest
from rollout_spec.drafters.host import constants
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.features import FEATURE_WORDS, no_features
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.history.store import Rollout
from tests.drafters.device.reference import Document, ReferenceDrafter, find_matches
from tests.drafters.recorder import random_features
from tests.launches import ours, recorded_variants

K = 5
MAX_LEN = 96


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Several tiles and splits on short texts, which move several times as they grow."""
    before = kernels.TILE, kernels.NEW_TOKENS, kernels.TARGET_PROGRAMS, device.MORE_ROOM
    kernels.TILE = kernels.NEW_TOKENS = kernels.TARGET_PROGRAMS = 16
    device.MORE_ROOM = 8
    yield
    kernels.TILE, kernels.NEW_TOKENS, kernels.TARGET_PROGRAMS, device.MORE_ROOM = before


class Engine:
    """What the device drafter sees of an engine, and the reference beside it."""

    def __init__(self, max_requests=6, **options):
        self.drafter = DeviceDrafter(
            max_requests=max_requests,
            max_model_len=MAX_LEN,
            device=torch.device("cpu"),
            max_draft_tokens=K,
            **{"max_resident_tokens": 2000, **options},
        )
        self.reference = ReferenceDrafter(
            max_draft_tokens=K, features=options.get("features", True), num_buckets=len(self.drafter._texts.index)
        )
        self.history = torch.full((max_requests, MAX_LEN), 999, dtype=torch.int32)
        self.total_len = torch.zeros(max_requests, dtype=torch.int32)
        self.seeds = torch.zeros(max_requests, dtype=torch.int64)
        self.temperature = torch.zeros(max_requests)
        self.slots = kernels.EngineSlots(self.history, self.total_len, self.seeds, self.temperature)
        self.live = {}
        self.free = list(range(max_requests))
        self.num_started = 0

    def start(self, prompt, *, seed=None, problem_id=None):
        """A request comes; one of temperature 1 where it has a seed."""
        slot = self.free.pop()
        req_id = str(self.num_started)
        self.num_started += 1
        self.live[req_id] = slot
        self.history[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.total_len[slot] = len(prompt)
        self.seeds[slot] = 0 if seed is None else seed
        self.temperature[slot] = 0.0 if seed is None else 1.0
        self.drafter.start_request(slot, prompt, problem_id=problem_id)
        self.reference.start_request(req_id, prompt, problem_id=problem_id, seed=seed)
        return req_id

    def commit(self, req_id, tokens, features=None):
        """A step's tokens, and what the target saw at some of the last ones."""
        slot = self.live[req_id]
        length = int(self.total_len[slot])
        tokens = tokens[: MAX_LEN - length]
        self.history[slot, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len[slot] += len(tokens)
        slots, known = torch.tensor([slot], dtype=torch.int32), no_features(len(tokens))
        self.drafter.reserve(slots.numpy(), self.total_len[slots].numpy())
        if features is None:
            self.drafter.extend(slots, slots * 0, self.slots)
        else:
            features = features[: len(tokens)]
            known[len(tokens) - len(features) :] = features
            num_sampled = torch.tensor([len(features)], dtype=torch.int32)
            # The request's rows come after another one's, and before those of rejected drafts.
            rows = torch.from_numpy(np.concatenate((np.full((2, FEATURE_WORDS), 7), features, features)))
            first_rows = torch.tensor([2], dtype=torch.int32)
            self.drafter.extend(slots, num_sampled, self.slots, rows, first_rows)
        self.reference.extend(req_id, tokens, known)
        return len(tokens)

    def stop(self, req_id, **trim):
        slot = self.live.pop(req_id)
        self.free.append(slot)
        self.drafter.stop_requests([EndedRequest(slot, int(self.total_len[slot]), **trim)])
        self.reference.stop_request(req_id, keep=trim.get("keep", True))

    def add(self, prompt, tokens, features=None):
        """A rollout comes that ended elsewhere."""
        context, said = np.array(prompt[-32:], np.int32), np.array(tokens, np.int32)
        self.drafter.add_rollouts([Rollout(problem_of_prompt(prompt), context, said, features)])
        if tokens:
            self.reference.add_rollout(problem_of_prompt(prompt), prompt[-32:], tokens, features)

    def propose(self, num_sampled=None):
        """Drafts and rates of the live requests, device and reference."""
        req_ids = sorted(self.live)
        slots = torch.tensor([self.live[req_id] for req_id in req_ids], dtype=torch.int32)
        sampled = torch.ones(len(req_ids), dtype=torch.int32) if num_sampled is None else num_sampled
        self.drafter.reserve(slots.numpy(), self.total_len[slots].numpy())
        drafts, rates = self.drafter.propose(slots, sampled, self.slots)
        expected = self.reference.propose(req_ids, np.full(len(req_ids), K, np.int32))
        return req_ids, drafts, rates, expected

    def assert_same_drafts(self):
        req_ids, drafts, rates, expected = self.propose()
        for i, (req_id, draft) in enumerate(zip(req_ids, expected, strict=True)):
            n = len(draft.token_ids)
            assert drafts[i, :n].tolist() == draft.token_ids.tolist(), req_id
            np.testing.assert_allclose(rates[i, :n].cumprod(0), draft.confidence, rtol=2e-3)
            assert (rates[i, n:] == 0).all()
            last = draft.token_ids[-1] if n else self.history[self.live[req_id], self.total_len[self.live[req_id]] - 1]
            assert drafts[i, n:].tolist() == [int(last)] * (K - n)
        return expected


TOKENS = st.lists(st.integers(0, 2), max_size=K + 1) | st.lists(st.integers(0, 9), min_size=9, max_size=12)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("commit"), st.integers(0, 5), TOKENS),
        st.tuples(st.just("accept"), st.integers(0, 5), st.integers(0, K)),
        st.tuples(st.just("retell"), st.integers(0, 2), st.integers(0, 30)),
        st.tuples(st.just("stop"), st.integers(0, 5), st.sampled_from([True, True, True, False])),
        st.tuples(st.just("add"), st.integers(0, 2), TOKENS),
        st.tuples(st.just("evict"), st.none(), st.none()),
        st.tuples(st.just("propose"), st.none(), st.none()),
    ),
    max_size=40,
)
ENDED = [operation for i in range(3) for operation in (("start", i, False), ("commit", 0, [2]), ("stop", 0, True))]
PROMPTS = [[0, 1, 2, 0, 1], [2, 2, 0, 1, 2, 0, 1, 1], [1]]


@pytest.mark.parametrize(
    ("num_examples", "options"), [(30, {}), (60, {"max_resident_tokens": 48}), (15, {"has_features": True})]
)
def test_drafts_and_rates_are_the_references(num_examples, options, monkeypatch):
    """Requests of three problems start, get tokens, some as drafted, end and start again; others end elsewhere.

    Some retell what others have said, also of other problems. Of the index's places many are taken by others again.

    Also in a pool that is nearly always full, where places are neither lost nor taken twice, and with features.
    """

    monkeypatch.setattr(device, "MAX_INDEX_BYTES", 1024)

    @settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    @given(OPERATIONS, st.randoms(use_true_random=False))
    def run(operations, random):
        check_against_reference(ENDED * ("max_resident_tokens" in options) + operations, random, **options)

    run()


def check_against_reference(operations, random, *, has_features=False, **options):
    """Carry out operations, of which some tokens have features, and compare drafts, rates and counters.

    The reference drops nothing: with a pool that is too small only what it holds is checked.
    """
    is_bounded = "max_resident_tokens" in options
    engine, last = Engine(**options), {}
    rng = np.random.default_rng(random.getrandbits(32))

    def features(tokens):
        return random_features(rng, tokens[-3:]) if has_features and rng.random() < 0.8 else None

    for name, a, b in [*operations, ("propose", None, None)]:
        live = sorted(engine.live)
        if name == "start" and engine.free:
            engine.start(PROMPTS[a], seed=random.getrandbits(62) if b else None)
        elif name == "commit" and live:
            engine.commit(live[a % len(live)], b, features(b))
            last.pop(live[a % len(live)], None)
        elif name == "accept" and live:
            tokens = [*last.pop(live[a % len(live)], [])[:b], 1]
            engine.commit(live[a % len(live)], tokens, features(tokens))
        elif name == "retell" and engine.free:
            texts = [text.tokens for text in engine.reference.texts()] or [[]]
            tokens = texts[b % len(texts)][-12:-1]
            engine.commit(engine.start(PROMPTS[a]), tokens, features(tokens))
        elif name == "stop" and live:
            engine.stop(live[a % len(live)], keep=b)
        elif name == "add":
            engine.add(PROMPTS[a], b, random_features(rng, b) if has_features and rng.random() < 0.8 else None)
        elif name == "evict" and engine.drafter._idle:
            engine.reference.evict(next(iter(engine.drafter._idle)))
            engine.drafter._evict_oldest()
        elif name == "propose" and live and not is_bounded:
            drafts = engine.assert_same_drafts()
            last = {req_id: draft.token_ids.tolist() for req_id, draft in zip(live, drafts, strict=True)}
        engine.drafter.check_integrity()
        if is_bounded:
            check_pool(engine.drafter)
    np.testing.assert_array_equal(engine.drafter._counts.numpy(), engine.reference.counters.counts)


def check_pool(drafter):
    """Every text in the pool is one that ended in its problem, and no document is lost."""
    drafter._publish()
    num_held = sum(len(problem.pieces) for problem in drafter._problems.values())
    assert num_held + len(drafter._free_documents) == len(drafter._texts.documents) - len(drafter._last_drafts.lengths)
    for problem in drafter._problems.values():
        ended = [rollout.tokens.tolist() for rollout in drafter.rollouts.of_problem(problem.problem_id)]
        for document in problem.pieces:
            start, length = drafter._texts.documents[document, :2].tolist()
            text = drafter._texts.tokens[start : start + length].tolist()
            assert text in ended
            ended.remove(text)


def test_what_was_sampled_past_a_rollouts_end_is_not_found():
    """What was said before its end is, although the same three tokens have come again since."""
    said = [5, 6, 7, 8, 9]
    engine = Engine()
    ended = engine.start([1])
    engine.commit(ended, [*said, *said[:3], 10])
    engine.stop(ended, stop_token_ids=[9])
    engine.commit(engine.start([2]), said[:3])
    assert engine.propose()[1][0, :2].tolist() == [8, 9]


def test_what_others_must_not_see_they_do_not_find():
    """Prompts, and requests on their own, which find nothing of others either. In the first slot somebody else has said
    the same before.
    """
    said, private = [5, 6, 7, 8, 9, 10, 11], [15, 16, 17, 18, 19, 20, 21]
    engine = Engine(max_requests=8)

    def say(slot, tokens, prompt=(1,), **options):
        engine.drafter.start_request(slot, prompt, problem_id=slot, **options)
        engine.total_len[slot] = len(prompt) + len(tokens)
        engine.history[slot, : engine.total_len[slot]] = torch.tensor([*prompt, *tokens])
        slots = torch.tensor([slot], dtype=torch.int32)
        engine.drafter.reserve(slots.numpy(), engine.total_len[slots].numpy())
        return engine.drafter.propose(slots, torch.ones_like(slots), engine.slots)[1]

    say(0, said)
    engine.drafter.stop_requests([EndedRequest(0, 1 + len(said), keep=False)])
    assert not say(0, said, own_only=True).any()
    assert not say(5, [], prompt=said).any()
    assert not say(1, said[:6]).any()
    say(2, said)
    assert not say(3, said[:6], own_only=True).any()
    assert say(4, said[:6])[0, 0] > 0
    say(6, private, own_only=True)
    assert not say(7, private[:6]).any()


def test_stamps_that_are_used_up_begin_anew():
    """What began before is then not found any more by others, and what begins later is."""
    said, more = [5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26]
    engine = Engine()
    engine.drafter._last_stamp = engine.drafter._max_stamp - 2
    early = engine.start([1], problem_id=8)
    engine.commit(early, said)
    last, first = engine.start([2]), engine.start([3])
    assert engine.drafter._last_stamp == 1
    for request in (last, first):
        engine.commit(request, said[:6])
    assert not engine.propose()[2].any()
    engine.commit(early, more)
    engine.commit(engine.start([4], problem_id=16), [*said[:6], 12, *more[:6], 13])  # in the same column
    _, drafts, rates, _ = engine.propose()
    assert drafts[2, 0] == 12
    assert not rates[1].any(), "it began before, so it finds nothing"
    engine.commit(first, more[:6])
    assert engine.propose()[1][2, 0] == 13


@pytest.mark.parametrize("prompt", [[7, 8], [7, 8] * 20])
def test_a_finished_rollout_ends_where_the_engine_ended_it(prompt):
    """The engine samples past the end; stop tokens do not count before min_tokens, nor in the prompt. 0 is one, too."""
    engine = Engine()
    keep = engine.start(prompt)
    cases = {
        (): [1, 0, 2, 0, 3],
        ((0,),): [1, 0],
        ((0, 3), 3): [1, 0, 2, 0],
        ((3, 4, 5, 6, 0), 5): [1, 0, 2, 0, 3],
        ((8,),): [1, 0, 2, 0, 3],
        ((0,), 2): [1, 0],
        ((0,), 3): [1, 0, 2, 0],
        ((0,), 4): [1, 0, 2, 0],
        ((), 0, 4): [1, 0, 2, 0],
    }
    for trim in cases:
        request = engine.start(prompt)
        engine.commit(request, [1, 0, 2, 0, 3])
        names = ("stop_token_ids", "min_tokens", "max_tokens")
        engine.stop(request, **dict(zip(names, trim, strict=False)))
    assert [rollout.read().tokens.tolist() for rollout in engine.drafter.rollouts.by_age] == list(cases.values())
    engine.drafter.check_integrity()  # what comes before the contexts of a long prompt is free again
    for rollout in engine.drafter.rollouts.by_age:
        assert rollout.read().context.tolist() == prompt[-constants.MAX_DEPTH :]
        for kept in (rollout.tokens, rollout.features):
            assert kept.untyped_storage().nbytes() == kept.nbytes, "what was sampled past the end takes memory"
    assert keep in engine.live


def test_the_newest_rollouts_stay_on_the_host_and_come_back_first():
    """Of five tokens each: the host has room for three, and the problem on the device for exactly two."""
    engine = Engine(max_problem_tokens=10, max_history_tokens=16)
    drafter = engine.drafter
    for number in range(4):
        request = engine.start([0, 1])
        engine.commit(request, [5, 6, 7 + number])
        engine.stop(request)
    kept = [rollout.tokens.tolist() for rollout in drafter.rollouts.by_age]
    assert kept == [[0, 1, 5, 6, 7 + number] for number in (1, 2, 3)]
    assert not drafter.rollouts._arriving, "what has arrived is no longer waited for"
    drafter._evict_oldest()
    slot = engine.live[engine.start([0, 1])]
    drafter._publish()
    problem = drafter._live[slot].problem
    assert problem.members[0] == slot
    assert resident(drafter, problem) == [[0, 1, 5, 6, 10], [0, 1, 5, 6, 9]]
    drafter.check_integrity()


def test_the_newest_rollouts_from_elsewhere_come_back_first():
    """Of five tokens each. On the device there is room for two."""
    engine = Engine(max_problem_tokens=10)
    for number in range(4):
        engine.add([0, 1], [5, 6, 7 + number])
    engine.drafter._evict_oldest()
    slot = engine.live[engine.start([0, 1])]
    assert resident(engine.drafter, engine.drafter._live[slot].problem) == [[0, 1, 5, 6, 10], [0, 1, 5, 6, 9]]


def resident(drafter, problem):
    """The texts of a problem's ended rollouts on the device, newest first."""
    drafter._publish()
    places = [
        drafter._texts.documents[document, :2].tolist() for document in problem.members if document in problem.pieces
    ]
    return [drafter._texts.tokens[start : start + length].tolist() for start, length in places]


@pytest.mark.parametrize("bound", ["max_problem_tokens", "max_resident_tokens"])
def test_of_a_problem_with_live_requests_the_oldest_rollouts_leave_the_device(bound):
    """There is room for two of 16 tokens each. A rollout is as old as its request, whenever that ended."""
    engine = Engine(**{"max_resident_tokens": 64, bound: 32})
    stays = engine.start([0, 1])
    problem = engine.drafter._live[engine.live[stays]].problem
    requests = [engine.start([0, 1]) for _ in range(4)]
    for i, expected in ((1, [1]), (0, [1, 0]), (2, [2, 1]), (3, [3, 2])):
        engine.commit(requests[i], [5] * 13 + [i])
        engine.stop(requests[i])
        engine.drafter.check_integrity()
        assert resident(engine.drafter, problem) == [[0, 1, *[5] * 13, n] for n in expected]
    for i, expected in ((8, [8, 3]), (9, [9, 8])):
        engine.add([0, 1], [5] * 13 + [i])
        engine.drafter.check_integrity()
        assert resident(engine.drafter, problem) == [[0, 1, *[5] * 13, n] for n in expected]


def test_requests_without_a_prompt_leave_nothing_behind():
    """They have no problem, so no request could draft from them. Also in the first slot."""
    engine = Engine(max_requests=1)
    for _ in range(2):
        request = engine.start([])
        engine.commit(request, [1, 2, 1])
        engine.stop(request)
        engine.drafter.check_integrity()
    assert not engine.drafter.rollouts.by_age
    assert not engine.drafter._problems
    assert engine.drafter._pool.gaps == [(0, engine.drafter._texts.tokens.numel())]


def test_without_the_noise_seeds_make_no_difference():
    drafted = []
    for use_noise, seed in ((False, 5), (True, None), (True, 5)):
        engine = Engine(use_noise=use_noise)
        for i in range(4):
            request = engine.start([0, 1])
            engine.commit(request, [5, 6 + i % 2, 8])
            engine.stop(request)
        for n in range(4):
            engine.commit(engine.start([0, 1], seed=None if seed is None else seed + n), [5])
        drafted.append(engine.propose()[1].tolist())
    assert drafted[0] == drafted[1] != drafted[2]


def test_full_counters_are_halved_when_a_request_ends():
    engine = Engine()
    for counters in (engine.drafter._counts, engine.reference.counters.counts):
        counters[:2, 0], counters[:2, 1] = constants.MAX_TRIALS, 101
        counters[1, 0] -= 1
    engine.stop(engine.start([1]))
    for counters in (engine.drafter._counts, engine.reference.counters.counts):
        assert counters[:2].tolist() == [[constants.MAX_TRIALS // 2, 50], [constants.MAX_TRIALS - 1, 101]]


def test_what_cannot_fit_pushes_nothing_out():
    engine = Engine(max_resident_tokens=48, max_problem_tokens=48)
    stays, request = engine.start([0]), engine.start([0])
    engine.commit(request, [1, 2, 3])
    engine.stop(request)
    keep, other, long = (engine.start([5]) for _ in range(3))
    engine.commit(other, [1] * 11)
    engine.stop(other)
    engine.commit(long, [1] * 45)
    problem = engine.drafter._live[engine.live[stays]].problem
    engine.stop(long)
    assert problem.num_resident == 4
    assert engine.drafter._live[engine.live[keep]].problem.num_resident == 12
    engine.drafter.check_integrity()


def test_a_request_without_room_has_no_drafts_until_there_is_some():
    """Ended rollouts make room for live requests, and these for each other once they end. Tokens that had no room are
    copied from the engine then.
    """
    engine = Engine(max_requests=3, max_live_tokens=70, max_resident_tokens=20)
    said = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    ended = engine.start([3])
    engine.commit(ended, said)
    engine.stop(ended)
    first, second = engine.start([1, 2]), engine.start([2, 1])
    for request in (first, first, first, second):
        engine.commit(request, said)
        engine.assert_same_drafts()
    assert len(engine.drafter._problems) == 3
    engine.commit(second, said)
    _, _, rates, _ = engine.propose()
    assert rates.any(1).tolist() == [True, False], "the second has no room for its last tokens"
    assert len(engine.drafter._problems) == 2, "the ended rollout has made room"
    engine.reference.evict(problem_of_prompt([3]))
    engine.stop(first, keep=False)
    for n in range(2):
        assert engine.assert_same_drafts()[0].token_ids.size == K
        engine.commit(second, [7, 8][n:])
    engine.drafter.check_integrity()


@pytest.mark.parametrize("features", [False, True])
def test_warming_up_compiles_what_any_batch_launches(features, monkeypatch):
    """With 1 or 2 requests, 3 or 4, and more, each scan has another number of programs. It leaves no trace."""
    monkeypatch.setattr(kernels, "SPLITS", (2, 4, 8))
    engine, num_given = Engine(features=features), 2
    with recorded_variants() as compiled:
        engine.drafter.warm_up(torch.int32, engine.slots, num_given)
    assert not engine.drafter._counts.any()
    engine.drafter.check_integrity()
    request = engine.start([1, 2, 1])
    engine.commit(request, [2])
    engine.assert_same_drafts()
    engine.stop(request, keep=False)
    with recorded_variants() as launched:
        for batch in range(1, 7):
            requests = [engine.start([1, 2, 1]) for _ in range(batch)]
            slots = torch.tensor(list(engine.live.values()), dtype=torch.int32)
            ones = torch.ones_like(slots)
            seen = torch.zeros(batch, FEATURE_WORDS, dtype=torch.int64) if features else None
            engine.drafter.extend(slots, ones, engine.slots)
            engine.drafter.propose(slots, ones, engine.slots, seen, slots)
            given = torch.ones(batch, num_given, dtype=torch.int64)
            engine.drafter.continue_drafts(slots, ones, given, engine.slots)
            for request in requests:
                engine.commit(request, [2])
                engine.stop(request, stop_token_ids=list(range(7, 7 + batch)))
    assert launched <= compiled
    assert {name for name, *_ in compiled} == ours(kernels)


def test_live_requests_are_looked_at_before_rollouts_from_elsewhere():
    """More of these come than documents are looked at; a request still finds its own text and its sibling's."""
    engine = Engine(max_resident_tokens=20_000)
    own, sibling = engine.start([0, 1]), engine.start([0, 1])
    for i in range(device.MAX_MEMBERS + 3):
        engine.add([0, 1], [2, 10 + i])
    engine.commit(sibling, [5, 6, 7])
    engine.commit(own, [8, 9, 5])
    engine.drafter._publish()
    problem = engine.drafter._live[engine.live[own]].problem
    row = engine.drafter._texts.members[problem.row].tolist()
    assert row[0] == device.MAX_MEMBERS
    assert row[-2:] == [engine.live[sibling], engine.live[own]]
    newest = [document for document in problem.members if document in problem.pieces]
    assert row[1:-2] == newest[: device.MAX_MEMBERS - 2]
    req_ids, drafts, _, _ = engine.propose()
    assert drafts[req_ids.index(own), :2].tolist() == [6, 7]
    engine.commit(own, [8])
    req_ids, drafts, _, _ = engine.propose()
    assert drafts[req_ids.index(own), :2].tolist() == [9, 5]
    engine.drafter.check_integrity()


def test_rejected_arguments():
    drafter = Engine().drafter
    drafter.start_request(0, [1])
    with pytest.raises(ValueError, match="slot 0 is taken"):
        drafter.start_request(0, [1])
    with pytest.raises(ValueError, match="slot 1 is free"):
        drafter.stop_requests([EndedRequest(0, 5), EndedRequest(1, 5)])
    assert 0 in drafter._live


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(0, 2**62)),
    st.one_of(st.none(), st.integers(0, 2**32)),
)
def test_the_host_drafter_drafts_the_same(rollouts, own, seed, features):
    """On the same history and noise, while there are few matches and none of the request's own has reached its end."""
    rng = None if features is None else np.random.default_rng(features)
    known = [None if rng is None else random_features(rng, text) for text in (*rollouts, own)]
    host = HistoryDrafter("suffix", max_draft_tokens=K, min_survival=0.0)
    ours = ReferenceDrafter(max_draft_tokens=K)
    prompt = [9, 8]
    for drafter in (host, ours):
        for i, rollout in enumerate(rollouts):
            drafter.start_request(str(i), prompt)
            drafter.extend(str(i), rollout, known[i])
            drafter.stop_request(str(i))
        drafter.start_request("own", prompt, seed=seed)
        drafter.extend("own", own, known[-1])
    (theirs,) = host.propose(["own"], np.array([K], np.int32))
    (draft,) = ours.propose(["own"], np.array([K], np.int32))
    text = np.array([*prompt, *own], np.int32)
    texts = [text, *(np.array([*prompt, *rollout], np.int32) for rollout in reversed(rollouts))]
    matches = find_matches([Document(tokens, 2, no_features(tokens.size)) for tokens in texts], text)
    assume(0 < len(matches) <= 6)
    steps = min([len(draft.token_ids), *(text.size - match.position for match in matches if match.document == 0)])
    same = [a == b for a, b in zip(draft.token_ids[:steps], theirs.token_ids, strict=False)]
    if seed is None and not all(same):  # equally probable tokens, of which each drafter takes its own first
        steps = same.index(False) + 1
    else:
        assert same == [True] * steps
    np.testing.assert_allclose(draft.confidence[:steps], theirs.confidence[:steps], rtol=1e-4)


@pytest.mark.parametrize("features", [False, True])
def test_a_draft_is_continued_as_if_its_beginning_had_been_said(features):
    """As by the reference, to which it is said; and it leaves no trace, whether a request has room or not."""
    rng = np.random.default_rng(3)
    engine = Engine(features=features)
    for seed in (None, 5):
        req_id = engine.start([0, 1, 2], seed=seed, problem_id=7)
        said = rng.integers(0, 3, 30).tolist()
        engine.commit(req_id, said, random_features(rng, said) if features else None)
        engine.stop(req_id)
    live = [engine.start([0, 1, 2], seed=seed, problem_id=7) for seed in (None, 8, 9)]
    for req_id in live:
        engine.commit(req_id, rng.integers(0, 3, 6).tolist())
    full = engine.start([1] * (MAX_LEN - 1), problem_id=7)
    engine.assert_same_drafts()
    num_drafted = 0
    for beginning, chosen in itertools.product(([0, 1], [2, 2], [1, 0]), [*live, full, None]):
        req_ids = [*live, full]
        slots = torch.tensor([engine.live[req_id] for req_id in req_ids], dtype=torch.int32)
        engine.drafter.reserve(slots.numpy(), engine.total_len[slots].numpy() + 2)
        wanted = torch.tensor([req_id == chosen for req_id in req_ids], dtype=torch.int32)
        given = torch.tensor([beginning] * 4)
        drafts, rates = engine.drafter.continue_drafts(slots, wanted, given, engine.slots)
        for i, req_id in enumerate(req_ids):
            expected = []
            if req_id == chosen != full:
                reference = copy.deepcopy(engine.reference)
                reference._live[req_id].drafted = []  # what was drafted before is not graded by this
                reference.extend(req_id, beginning)
                (draft,) = reference.propose([req_id], np.array([K - 2], np.int32))
                expected = draft.token_ids.tolist()
                np.testing.assert_allclose(rates[i, : len(expected)].cumprod(0), draft.confidence, rtol=2e-3)
            assert drafts[i, : len(expected)].tolist() == expected
            assert (rates[i, len(expected) :] == 0).all()
            num_drafted += len(expected)
        engine.drafter.check_integrity()
    assert num_drafted > 10
    engine.assert_same_drafts()


def test_a_draft_that_goes_on_past_the_longest_text_is_written_into_no_other():
    engine = Engine()
    for _ in range(2):
        engine.commit(engine.start([1] * (MAX_LEN - 1)), [1])
    slots = torch.tensor(list(engine.live.values()), dtype=torch.int32)
    given = torch.full((2, 2), 2)
    engine.drafter.continue_drafts(slots, torch.ones_like(slots), given, engine.slots)
    for start in engine.drafter._pieces[slots.numpy(), 0]:
        assert (engine.drafter._texts.tokens[start : start + MAX_LEN] == 1).all()


def test_ranks_draft_the_same_bits():
    """In whatever order blocks and warps run, and no value depends on which lane of a warp stores it."""
    from tests.ptx.machine import changed_settings

    for seed in range(3):
        rng = np.random.default_rng(seed)
        engine = Engine(features=True)
        for i in range(6):
            req_id = engine.start([0, 1, 2], seed=i, problem_id=7)
            said = rng.integers(0, 3, 30).tolist()
            engine.commit(req_id, said, random_features(rng, said))
            if i < 3:
                engine.stop(req_id)
        ranks = []
        for order in range(3):
            with changed_settings(check_races=True, seed=order):
                _, drafts, rates, _ = engine.propose()
            ranks.append((drafts.tolist(), rates.tolist()))
        assert ranks[0] == ranks[1] == ranks[2]
        assert np.count_nonzero(ranks[0][1]) > 3


def test_texts_that_move_together_move_to_where_none_of_them_is():
    """The place of the first would be large enough for the second."""
    drafter, slots = Engine().drafter, np.arange(2)
    for slot in slots.tolist():
        drafter.start_request(slot, [1])
    drafter.reserve(slots, np.array([40, 5]))
    before = drafter._pieces[slots]
    drafter.reserve(slots, np.array([60, 30]))
    places = sorted([*before.tolist(), *drafter._pieces[slots].tolist()])
    assert all(start + size <= later for (start, size), (later, _) in itertools.pairwise(places))


def test_of_requests_that_say_nothing_nothing_is_recorded():
    """The host does not know that one is aborted before its first token. Of one that is not kept nothing is known."""
    engine = Engine()
    engine.drafter.rollouts.is_recording = True
    aborted, dropped = engine.start([1, 2]), engine.start([3], problem_id=4)
    engine.propose(num_sampled=torch.zeros(2, dtype=torch.int32))
    engine.drafter.stop_requests([EndedRequest(engine.live.pop(aborted), 4)])
    engine.stop(dropped, keep=False)
    assert engine.drafter.rollouts.take_recorded(wait=True) == []
    assert not engine.drafter.rollouts.knows(4)
