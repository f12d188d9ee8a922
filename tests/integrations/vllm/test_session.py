"""The drafting session's budget, without an engine."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled
from rollout_spec.features import no_features
from rollout_spec.history.problems import Problems, problem_of_prompt
from rollout_spec.integrations.vllm.session import STEPS_PER_SHARING, HostSession, Session
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Draft
from tests.adversaries import NoDrafter
from tests.history.made_up import rollouts_in


class Outcome(NamedTuple):
    """What became of a request's draft."""

    target_token_ids: list[int]
    num_accepted: int
    num_verified: int


def a_request(prompt=(1, 2, 3)):
    params = SimpleNamespace(
        temperature=1.0, seed=5, max_tokens=200, min_tokens=0, eos_token_id=None, stop_token_ids=[], extra_args=None
    )
    return SimpleNamespace(prompt_token_ids=list(prompt), sampling_params=params, lora_request=None, mm_features=None)


def a_session(share_from_first_rank=None, *, index_late=False, **options):
    config = RolloutSpecConfig(**{"num_speculative_tokens": 4, "drafter": "suffix", **options})
    model = SimpleNamespace(max_model_len=500, get_vocab_size=lambda: 50, get_hidden_size=lambda: 8, model="policy")
    model.hf_text_config, model.skip_tokenizer_init = SimpleNamespace(model_type="llama"), True
    engine = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_scheduled_tokens=None, max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    return HostSession(config, engine, share_from_first_rank, index_late=index_late)


def schedule(session, requests):
    """Requests are scheduled, by name. Those that are live already are started again with a longer prompt only."""
    lengths = {name: live.conversation.length for name, live in session.live.items()}
    new = {name: r for name, r in requests.items() if len(r.prompt_token_ids or ()) != lengths.get(name)}
    session.start_requests([SimpleNamespace(**{**vars(request), "req_id": name}) for name, request in new.items()])


def advance(session, tokens, outcomes=None, *, ended=(), step_tokens=None, requests=None, has_features=False):
    """One step in which each request of `tokens` says its own. Returns what is to be verified.

    The batch begins with a chunk of a prompt, of which the session is not to see anything. With features every row's
    words are 1.
    """
    session.finish_requests(ended, ())
    requests = requests or {req_id: a_request((7, len(req_id))) for req_id in tokens}
    schedule(session, {req_id: request for req_id, request in requests.items() if req_id in tokens})
    if not session.is_drafter_alive:
        return {req_id: [] for req_id in tokens}
    outcomes = {req_id: Outcome([0], 0, o) if isinstance(o, int) else o for req_id, o in (outcomes or {}).items() if o}
    followed = session.rows_of(list(tokens))
    is_followed = followed >= 0
    outcomes = [outcomes.get(req_id, Outcome(new[:1], 0, 0)) for req_id, new in tokens.items()]
    num_seen = np.zeros(followed.size, np.int64)
    num_seen[is_followed] = session.drafter.table.arrays.num_tokens[followed[is_followed]]
    texts = np.full((followed.size + 1, 60), 49, np.int32)
    for text, new in zip(texts[1:], tokens.values(), strict=True):
        text[: len(new)] = new
    verified = np.array([0, *(outcome.num_verified for outcome in outcomes)])
    starts = np.concatenate(([0], np.cumsum(verified + 1)))
    targets = np.full(starts[-1], PLACEHOLDER_TOKEN_ID)
    for start, outcome in zip(starts[1:], outcomes, strict=False):
        targets[start : start + len(outcome.target_token_ids)] = outcome.target_token_ids
    first = np.array([0, *num_seen])
    sampled = Sampled(
        rows=followed[is_followed],
        batch_rows=1 + np.flatnonzero(is_followed),
        token_ids=texts,
        first=first,
        lengths=(first + np.array([60, *map(len, tokens.values())])).astype(np.int32),
        num_verified=verified,
        num_accepted=np.array([0, *(outcome.num_accepted for outcome in outcomes)]),
        starts=starts,
        features=np.ones_like(no_features(targets.size)) if has_features else NO_FEATURES,
    )
    drafts = session.draft(
        sampled,
        num_step_tokens=int(followed.size + verified.sum()) if step_tokens is None else step_tokens,
        targets=targets if getattr(session.drafter, "wants_rejected_targets", False) else None,
    )
    names = itertools.compress(tokens, is_followed)
    listed = zip(names, drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=True)
    return {req_id: draft[:length] for req_id, draft, length in listed}


def test_what_ends_in_one_step_enters_history_in_one_order_on_all_ranks():
    """vLLM names it in a set."""
    session = a_session()
    advance(session, {"b": [1], "a": [2], "c": [3]})
    session.finish_requests(["c", "a", "b"], ())
    assert [rollout.read().tokens.tolist() for rollout in session.drafter.rollouts.by_age] == [[2], [1], [3]]


def test_steps_are_timed_and_ranks_share_what_they_took():
    asked = []

    def share(steps):
        asked.append(steps)
        return [{**step, "seconds": 1.25, "draft_seconds": 0.25} for step in steps]

    session = a_session(share)
    drafts = {}
    for n in range(3 * STEPS_PER_SHARING + 2):  # nothing that was drafted is accepted
        last = {req_id: len(draft) for req_id, draft in drafts.items()}
        drafts = advance(session, {"a": [1 + n % 3]}, last, requests={"a": a_request()})
    sizes = [len(steps) for steps in asked]
    assert sizes[0] == 1, "what is measured for the first time is shared at once"
    assert 1 < max(sizes) <= STEPS_PER_SHARING
    assert sum(sizes) > 2 * STEPS_PER_SHARING
    times = session.budget.times
    for sizes in times._sizes:  # without drafts and with them
        assert {size.seconds for size in sizes.values()} == {1.0}
    assert times.undrafted(1) == 1.0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["row_of", "learn_step", "propose_rows", "update_index", "output_of"])
def test_a_drafter_that_raises_ends_speculation_or_where_other_ranks_go_on_the_run(method, ranks):
    """Faults of a user's own, in engines: `test_faults.py`."""
    share = (lambda values: values) if ranks == 2 else None
    session = a_session(share, budget=False, index_late=method == "update_index")
    requests = {"a": a_request((7, 8)), "b": a_request((7, 8))}

    def broken(*args, **kwargs):
        raise ArithmeticError("broken")

    setattr(session.drafter, method, broken)

    def go_through_a_life():
        drafts = []
        for n in range(5):
            drafts.append(advance(session, {"a": [n], "b": [n]}, requests=requests))
            session.update_index()
        advance(session, {"c": [1]}, ended=["a", "b"])
        return drafts

    if ranks == 2:
        with pytest.raises(ArithmeticError, match="broken"):
            go_through_a_life()
        return
    drafts = go_through_a_life()
    if method != "output_of":
        assert not any(step.get("a") for step in drafts[1:])
    assert (session.is_drafter_alive, session.stats.drafter_errors, session.num_live_requests()) == (False, 1, 0)
    with pytest.raises(RuntimeError, match="its drafter has raised"):
        session.set_enabled(True)
    session.update_index()
    session.finish_requests(["a", "b", "c"], ())
    session.close()
    assert (session.enabled, session.stats.drafter_errors) == (False, 1)


def num_timed(session):
    return session.budget.times.now


def test_steps_are_timed_but_not_what_lies_between_two_generations():
    """Nor the first step, which began before the engine was watched."""
    session = a_session()
    advance(session, {"a": [1]}, step_tokens=3)
    assert num_timed(session) == 0
    advance(session, {"a": [2]}, step_tokens=41)
    assert num_timed(session) == 1
    assert list(session._prompt_tokens) == [2, 40]
    advance(session, {"a": [1]})
    timed = num_timed(session)
    advance(session, {"b": [3]}, ended=["a"])
    assert num_timed(session) == timed
    session.set_enabled(False)
    assert advance(session, {"b": [1]}) == {"b": []}
    assert num_timed(session) == timed + 1, "steps without drafts are what others are compared with"


@pytest.mark.parametrize(
    ("mode", "sizes"), [("FULL_AND_PIECEWISE", [1, 2, 4, 8]), ("FULL_DECODE_ONLY", []), ("NONE", [])]
)
def test_costs_are_those_of_the_graphs_that_steps_run_in(mode, sizes):
    """vLLM chooses them after the session is made; steps of mixed draft lengths run in no full graph."""
    compilation = pytest.importorskip("vllm.config.compilation")
    session = a_session()
    session._vllm_config.compilation_config = SimpleNamespace(
        cudagraph_mode=compilation.CUDAGraphMode[mode], cudagraph_capture_sizes=[8, 4, 2, 1]
    )
    advance(session, {"a": [1]})
    assert session.budget.times._padded == sizes


def test_rejected_targets_reach_a_drafter_that_looks_ahead():
    session, request = a_session(drafter="lookahead", budget=False), a_request((10, 11, 30, 31, 32))
    assert advance(session, {"a": [10]}, requests={"a": request})["a"] == [11, 30, 31, 32]
    assert set(session.drafter._pool.tokens) == {-1}
    advance(session, {"a": [11, 33]}, {"a": Outcome([11, 33, 34, 35, 36], 1, 4)}, requests={"a": request})
    assert set(session.drafter._pool.tokens) == {-1, 34, 35, 36}


def test_drafts_leave_room_in_the_step():
    """The scheduler would hold requests back: 62 prompt tokens a step leave room for one draft."""
    session, request = a_session(), a_request()
    verified = 0
    longest = []
    for n in range(150):
        drafts = advance(
            session, {"a": [1 + n % 3]}, {"a": verified}, step_tokens=63 + verified, requests={"a": request}
        )
        verified = len(drafts.get("a", []))
        longest.append(verified)
    assert max(longest) == 1


class Listener(NoDrafter):
    """A drafter that keeps what it is told, and drafts as many sevens as it may."""

    def __init__(self):
        self.started, self.limits, self.extended = {}, [], []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        self.started[req_id] = (problem_id, seed)

    def extend(self, req_id, new_token_ids):
        self.extended.append((req_id, list(new_token_ids)))

    def propose(self, req_ids, max_tokens):
        self.limits.append(dict(zip(req_ids, max_tokens.tolist(), strict=True)))
        sizes = np.maximum(max_tokens, 0).tolist()
        return [Draft(np.full(n, 7, np.int32), np.linspace(0.9, 0.5, n, dtype=np.float32)) for n in sizes]


def a_listening_session(**options):
    session = a_session(**{"budget": False, "drafter": f"{__name__}.Listener", "drafter_options": {}, **options})
    return session, session.drafter._drafter


def test_the_budget_learns_of_each_draft_what_was_verified_and_accepted(monkeypatch):
    session, _ = a_listening_session(budget=True)
    monkeypatch.setattr(session.budget, "wants_drafts", lambda num_tokens: True)
    session.budget.times.observe(3, 1.0, drafted=False)
    advance(session, {"a": [1], "b": [2], "c": [3]})
    told = []
    monkeypatch.setattr(session.budget, "observe_drafts", lambda *counts: told.append(counts))
    outcomes = {"c": Outcome([7, 7, 9], 2, 2), "a": Outcome([7, 1, 1], 1, 2)}  # the scheduler has cut one of c
    advance(session, {"c": [7, 7, 9], "b": [5], "a": [7, 1]}, outcomes)
    confidence = np.linspace(0.9, 0.5, 4, dtype=np.float32)
    assert told[0] == (pytest.approx(2 * confidence[:2].sum()), 3)


def test_a_drafter_that_is_not_asked_takes_no_time(monkeypatch):
    """Steps that do not ask it must not lower its measured cost."""
    session, drafter = a_listening_session(budget=True)
    asked, learnt = iter([True, False, True, True]), []
    monkeypatch.setattr(session.budget, "wants_drafts", lambda num_tokens: next(asked))
    monkeypatch.setattr(session.budget, "observe_step", lambda *args, **kwargs: learnt.append(kwargs))
    session.budget.times.observe(2, 1.0, drafted=False)
    for _ in range(4):
        advance(session, {"a": [1], "b": [2]})
    assert len(drafter.limits) == 3
    assert [step["num_asked"] for step in learnt] == [2, 0, 2]
    assert [step["draft_seconds"] > 0 for step in learnt] == [True, False, True]


@pytest.mark.parametrize(
    ("temperature", "verify", "seed"), [(1.0, "sample", 5), (0.0, "sample", None), (1.0, "rejection", None)]
)
def test_the_drafter_knows_the_seeds_that_decide_what_is_sampled(temperature, verify, seed):
    session, drafter = a_listening_session(verify=verify)
    request = a_request()
    request.sampling_params.temperature = temperature
    advance(session, {"a": [1]}, requests={"a": request})
    assert drafter.started == {"a": (problem_of_prompt([1, 2, 3]), seed)}


def test_requests_that_share_nothing_are_not_shown_to_a_drafter_of_ones_own():
    session, drafter = a_listening_session()
    request = a_request()
    request.sampling_params.extra_args = {"rollout_spec": {"own_only": True}}
    requests = {"a": request, "b": a_request()}
    for _ in range(3):
        assert set(advance(session, {"a": [1], "b": [1]}, requests=requests)) == {"b"}
    advance(session, {}, ended="ab")
    assert set(drafter.started) == {req_id for req_id, _ in drafter.extended} == {"b"}


def test_problems_are_told_apart_by_all_that_shapes_their_outputs():
    def problem(prompt=(1, 2, 3), adapter=None, images=(), **extra_args):
        request = a_request(prompt)
        request.sampling_params.extra_args = extra_args
        request.lora_request = SimpleNamespace(lora_name=adapter) if adapter else None
        request.mm_features = [
            SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=i)) for i, image in enumerate(images)
        ]
        return session.begin_conversation(request, np.array(prompt, np.int32)).problem_id

    session = Session()
    session.problems = Problems()
    assert problem() == problem_of_prompt([1, 2, 3])
    assert problem([]) is None
    assert problem([], adapter="x") is not None
    assert problem(rollout_spec={"problem_id": 0}, adapter="x") == 0
    variants = [{"adapter": "x"}, {"adapter": "y"}, {"images": ["i"]}, {"images": ["i", "j"]}, {"images": ["j", "i"]}]
    variants += [{"adapter": "x", "images": ["i"]}, {"adapter": "x", "prompt": [1, 2, 4]}]
    ids = [problem(**variant) for variant in variants]
    assert len(set(ids)) == len(ids)
    assert ids == [problem(**variant) for variant in variants]
    assert problem(adapter="policy-v3") == problem(adapter="policy-v12") != problem(adapter="other-v3")


# -- conversations ---------------------------------------------------------------------------------------------------

ROOT, ANSWER = list(range(20)), [40, 41, 42, 43]


def say(session, req_id, prompt, tokens, **extra_args):
    """A request from start to end. Returns what was drafted after each of its tokens."""
    request = a_request(prompt)
    request.sampling_params.extra_args = extra_args
    drafted = []
    for token in tokens:
        last = {req_id: len(drafted[-1])} if drafted else {}
        drafted.append(advance(session, {req_id: [token]}, last, requests={req_id: request})[req_id])
    advance(session, {}, ended=[req_id])
    return drafted


def test_rollouts_that_are_not_kept_are_not_taken_for_known():
    session = a_session(budget=False)
    say(session, "a", ROOT, [30, 31, 32, 33], rollout_spec={"keep_in_history": False})
    drafts = say(session, "a2", [*ROOT, 30, 31, 32, 33, *ANSWER], [30, 31], rollout_spec={"keep_in_history": False})
    assert drafts[1] == [32, 33, 40, 41]  # as its prompt says
    assert session.drafter._store.num_tokens == 0


# -- history that lasts ----------------------------------------------------------------------------------------------


def with_folder(folder, **options):
    """A session that has read this folder."""
    session = a_session(history_dir=str(folder), **options)
    session.engine_history.load()
    return session


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_id_that_comes_again_is_another_request(tmp_path, has_folder, goes_on):
    """Also in a streaming session, which goes on with a longer prompt. With a folder a complete batch ends at once."""
    session = with_folder(tmp_path, budget=False) if has_folder else a_session(budget=False)
    first, second = a_request((1, 2)), a_request((1, 2, 3, 4) if goes_on else (1, 2))
    first.sampling_params.eos_token_id = 9
    advance(session, {"a": [3, 9]}, requests={"a": first})
    assert has_folder != ("a" in session.live)
    advance(session, {"a": [5]}, ended="" if goes_on or has_folder else "a", requests={"a": second})
    requests, row = session.drafter.table.arrays, session.live["a"].row
    assert requests.num_tokens[row] == len(second.prompt_token_ids) + 1
    assert not requests.is_complete[row]
    session.drafter.check_integrity()


@pytest.mark.parametrize("names", ["ae", "ea"])
def test_prompts_of_embeddings_keep_no_complete_batch_waiting(tmp_path, names):
    """They have no row, so that nothing is known of them; the last row of the arrays is nobody's."""
    session, embedded = with_folder(tmp_path, budget=False), a_request()
    embedded.prompt_token_ids = None
    requests = {"a": a_request(), "e": embedded}
    requests["a"].sampling_params.eos_token_id = 9
    tokens = {name: [9 if name == "a" else 4] for name in names}
    advance(session, {"e": [4]}, requests=requests)
    advance(session, tokens, requests=requests)
    assert session.drafter.history_summary()["rollouts"] == 1
    session.close()
    assert [rollout.tokens.tolist() for rollout in rollouts_in(tmp_path)] == [[9]]
