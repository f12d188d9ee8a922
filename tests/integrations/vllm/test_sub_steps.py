"""How steps of vLLM's scheduler are lengthened, and what is learned from them."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import sub_steps
from rollout_spec.integrations.vllm.sub_steps import COUNTS, STEP, Steps, num_passes

NAMES, WIDTH = ("a", "b"), 4


class Request(SimpleNamespace):
    """Of vLLM, decoding."""

    def __init__(self, **changes):
        fields = {"is_prefill_chunk": False, "use_structured_output": False, "resumable": False, "max_tokens": 100}
        counts = {"num_output_tokens": 10, "num_output_placeholders": 0, "num_computed_tokens": 30}
        super().__init__(**{**fields, **counts, **changes})


class Scheduler:
    """Its requests hold two blocks of 16 tokens each; `num_free` are left."""

    def __init__(self, *requests, num_free=99):
        self.requests = dict(zip(NAMES, requests or (Request(), Request()), strict=True))
        for name, request in self.requests.items():
            request.request_id = name
        self.max_model_len, self.num_lookahead_tokens, self.log_stats = 1000, 2, True
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=WIDTH - 1))
        self.kv_cache_manager = self.coordinator = self.block_pool = self
        self.single_type_managers = [SimpleNamespace(req_to_blocks={name: [0, 1] for name in NAMES}, block_size=16)]
        self.get_num_free_blocks = lambda: num_free

    def allocate_slots(self, request, num_new_tokens, *, num_lookahead_tokens):
        return SimpleNamespace(get_block_ids=lambda allow_none: ([num_new_tokens],))


def scheduled(k=WIDTH - 1, next_k=WIDTH - 1, **changes):
    """vLLM's `SchedulerOutput` of a step in which both requests are decoded."""
    cached = SimpleNamespace(req_ids=list(NAMES), resumed_req_ids=set(), new_block_ids=[None, ([7],)])
    fields = {
        "num_scheduled_tokens": dict.fromkeys(NAMES, k + 1),
        "total_num_scheduled_tokens": 2 * (k + 1),
        "scheduled_spec_decode_tokens": {name: [-1] * k for name in NAMES if k},
        "num_spec_tokens_to_schedule": next_k,
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached,
    }
    return SimpleNamespace(**{**fields, **changes})


def steps(scheduler=None, sub_steps=4, **options):
    return Steps(scheduler or Scheduler(), 4, sub_steps, **{"has_clock": True, "chooses_k": True, **options})


@pytest.mark.parametrize("k", [0, 3])
def test_a_step_gets_room_for_all_of_its_passes(k):
    step = scheduled(k)
    steps().lengthen(step)
    assert num_passes(step) == 4
    assert step.num_scheduled_tokens == {"a": 4 * (k + 1), "b": 4 * (k + 1)}
    assert step.total_num_scheduled_tokens == 8 * (k + 1)
    assert {name: len(drafts) for name, drafts in step.scheduled_spec_decode_tokens.items()} == {
        "a": 4 * (k + 1) - 1,
        "b": 4 * (k + 1) - 1,
    }
    assert step.scheduled_cached_reqs.new_block_ids == [([4 * (k + 1)],), ([7, 4 * (k + 1)],)]


@pytest.mark.parametrize(
    ("scheduler", "step", "n"),
    [
        (Scheduler(Request(is_prefill_chunk=True), Request()), {}, 1),
        (Scheduler(Request(use_structured_output=True), Request()), {}, 1),
        (Scheduler(Request(resumable=True), Request()), {}, 1),
        (Scheduler(), {"scheduled_new_reqs": ["c"]}, 1),
        (Scheduler(), {"num_scheduled_tokens": {"a": 4, "b": 3}}, 1),
        (Scheduler(), {"num_scheduled_tokens": {"a": 9, "b": 9}}, 1),  # prompts
        (Scheduler(), {"scheduled_spec_decode_tokens": {"a": [-1] * 3}}, 1),
        # The longest has so many left, the other ends on the way.
        (Scheduler(Request(max_tokens=13), Request(max_tokens=11)), {}, 3),
        (Scheduler(Request(max_tokens=11), Request(max_tokens=11)), {}, 1),
        # max_model_len: the last token needs no place.
        (Scheduler(Request(num_computed_tokens=1000 - 1 - 2 * WIDTH), Request()), {}, 2),
        (Scheduler(Request(num_computed_tokens=1000 - 2 * WIDTH), Request()), {}, 1),
    ],
)
def test_how_many_passes_a_step_may_have(scheduler, step, n):
    step = scheduled(**step)
    steps(scheduler).lengthen(step)
    assert num_passes(step) == n
    assert step.num_scheduled_tokens["a"] == (n * WIDTH if n > 1 else step.num_scheduled_tokens["a"])


@pytest.mark.parametrize(("num_free", "n", "blocks"), [(3, 1, [None, ([7],)]), (4, 4, [([16],), ([7, 16],)])])
def test_blocks_are_for_all_and_for_the_next_step_or_for_nobody(num_free, n, blocks):
    """The one that vLLM schedules while this one runs, from 30 + 4 * 4 tokens on: with its 4 and 2 more, 4 blocks."""
    step = scheduled()
    steps(Scheduler(num_free=num_free)).lengthen(step)
    assert num_passes(step) == n
    assert step.scheduled_cached_reqs.new_block_ids == blocks


def test_blocks_that_a_request_has_are_not_asked_for_again():
    step = scheduled()
    requests = Request(num_computed_tokens=14), Request(num_computed_tokens=15)
    steps(Scheduler(*requests)).lengthen(step)  # 14 + 4 * 4 + 2 tokens are 2 blocks
    assert num_passes(step) == 4
    assert step.scheduled_cached_reqs.new_block_ids == [None, ([7, 16],)]


def test_a_resumed_request_and_an_empty_step_are_left_alone():
    step = scheduled()
    step.scheduled_cached_reqs.resumed_req_ids.add("a")
    steps().lengthen(step)
    assert num_passes(step) == 1
    step = scheduled(num_scheduled_tokens={})
    steps().lengthen(step)
    assert not hasattr(step, STEP)


def test_a_step_in_flight_gives_at_least_a_token_in_each_pass():
    requests = [Request(max_tokens=18, num_output_placeholders=16) for _ in range(2)]
    of_engine, first, second = steps(Scheduler(*requests)), scheduled(), scheduled()
    of_engine.lengthen(first)
    of_engine.lengthen(second)
    assert (num_passes(first), num_passes(second)) == (4, 4)  # 18 - 10 - 4 are left at most
    third = scheduled()
    requests[0].max_tokens = requests[1].max_tokens = 16
    of_engine.lengthen(third)
    assert num_passes(third) == 2


def test_ranks_without_a_common_clock_agree_by_state_alone():
    for k, n in ((3, 2), (0, 1)):
        step = scheduled(k)
        steps(sub_steps=None, has_clock=False).lengthen(step)
        assert num_passes(step) == n


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(sub_steps.time, "perf_counter", lambda: clock.seconds)
    return clock


@pytest.mark.parametrize(
    ("is_cut", "chooses_k", "k", "k_while_off"), [(False, True, 1, 0), (True, True, 3, 0), (False, False, 3, 3)]
)
def test_k_of_the_next_drafts(monkeypatch, is_cut, chooses_k, k, k_while_off):
    """Whole drafts where they are cut; a user's own K as it is, also while drafts are off."""
    scheduler, found = Scheduler(), []
    scheduler.vllm_config.speculative_config.enable_adaptive_verification = is_cut
    monkeypatch.setattr(sub_steps.Schedule, "choose", lambda self, num_requests, most: 1)
    of_engine = steps(scheduler, chooses_k=chooses_k)
    for is_enabled in (True, False, True):
        of_engine.set_enabled(is_enabled)
        step = scheduled()
        of_engine.lengthen(step)
        found.append(step.num_spec_tokens_to_schedule)
    assert found == [k, k_while_off, k]


class Schedule:
    """In place of the one of `schedule.py`."""

    def __init__(self):
        self.told = []

    def choose(self, num_requests, most):
        return most

    def observe(self, drafted, accepted, seconds):
        self.told.append((drafted.tolist(), accepted.tolist(), seconds))


def output(*sampled, counts=None):
    found = SimpleNamespace(sampled_token_ids=list(sampled), req_id_to_index={"a": 0, "b": 1})
    if counts is not None:
        setattr(found, COUNTS, np.array(counts))
    return found


def test_what_is_learned_of_a_step(clock):
    """A step takes from when it was scheduled, or the one before had ended, to when its output is there.

    It says nothing where the one before, or those that the host prepares meanwhile, have another K.
    """
    of_engine, said = steps(sub_steps=1), output([5], [7])
    schedule = of_engine._schedule = Schedule()

    def lengthen(*args, **changes):
        step = scheduled(*args, **changes)
        of_engine.lengthen(step)
        return step

    first = lengthen(0, 3)
    clock.seconds = 1.0
    second = lengthen()  # scheduled while the first one runs
    clock.seconds = 3.0
    of_engine.observe(first, said)  # the next one has drafts
    third = lengthen(scheduled_spec_decode_tokens={"a": [-1] * 3, "b": [-1] * 2}, total_num_scheduled_tokens=7)
    of_engine.observe(second, said)  # the one before had none
    fourth = lengthen(total_num_scheduled_tokens=28)
    clock.seconds = 5.0
    of_engine.observe(third, output([5, 6], [7, 8, 9]))
    clock.seconds = 6.0
    of_engine.observe(fourth, said)  # with prompts
    clock.seconds = 9.0  # nothing was scheduled meanwhile
    fifth = lengthen()
    clock.seconds = 10.0
    of_engine.observe(fifth, output([5, 6], []))
    sixth, _ = lengthen(), lengthen(3, 0)
    of_engine.observe(sixth, said)  # nothing will be drafted
    of_engine.observe(scheduled(num_scheduled_tokens={}), said)
    assert schedule.told == [([3, 2], [1, 2], 2.0), ([3, 3], [0, 0], None), ([3], [1], 1.0)]


def test_each_pass_of_a_step_is_learned_from(clock, monkeypatch):
    of_engine = steps(Scheduler())
    schedule, timed = Schedule(), []
    of_engine._schedule = schedule
    monkeypatch.setattr(of_engine._chooser, "observe", lambda *of_step: timed.append(of_step))
    for _ in range(2):
        step = scheduled()
        of_engine.lengthen(step)
        clock.seconds += 2.0
        of_engine.observe(step, output([0] * 9, [0] * 4, counts=[[4, 1], [1, 1], [1, 1], [3, 1]]))
    assert schedule.told == [([3, 3], [accepted, 0], 0.5) for accepted in (3, 0, 0, 2)]
    assert timed == [(2, True, 4, 2.0)]


def test_vllm_counts_drafts_by_pass(clock):
    of_engine, counted = steps(Scheduler()), []

    def count(stats, *, num_draft_tokens, num_accepted_tokens, request_id):
        counted.append((num_draft_tokens, num_accepted_tokens, request_id))
        return "new"

    of_request = {"num_draft_tokens": 15, "num_accepted_tokens": 5, "request_id": "b"}
    step = scheduled()
    of_engine.lengthen(step)
    of_engine.observe(step, output([], [0] * 6, counts=[[1, 3], [1, 1], [1, 1], [1, 1]]))
    assert of_engine.count_drafts(count, "old", **of_request) == "new"
    assert counted == [(3, 2, "b"), (3, 0, "b"), (3, 0, "b"), (3, 0, "b")]
    step = scheduled(0)
    of_engine.lengthen(step)
    of_engine.observe(step, output([], [0] * 4, counts=[[1, 1]] * 4))
    assert of_engine.count_drafts(count, "old", **of_request) == "old", "nothing was drafted"
    of_engine.observe(scheduled(num_scheduled_tokens={}), None)
    assert of_engine.count_drafts(count, "old", **of_request) == "new"
    assert counted[4:] == [(15, 5, "b")]


def test_steps_that_try_a_number_do_not_say_what_a_pass_takes(clock, monkeypatch):
    """Their drafts are counted, but they may take longer than a step will."""
    of_engine, chosen = steps(sub_steps=None), iter([(4, False), (4, True), (4, False)])
    of_engine._schedule = schedule = Schedule()

    def choose(num_requests, has_drafts):
        n, of_engine._chooser.is_trial = next(chosen)
        return n

    monkeypatch.setattr(of_engine._chooser, "choose", choose)
    for _ in range(3):
        step = scheduled()
        of_engine.lengthen(step)
        clock.seconds += 2.0
        of_engine.observe(step, output([0] * 4, [0] * 4, counts=[[1, 1]] * 4))
    assert [seconds for _, _, seconds in schedule.told] == [None] * 4 + [0.5] * 4
