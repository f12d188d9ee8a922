"""The life of an engine as a state machine: whatever happens to its requests, they get the rollouts of another engine.

Requests come, continue earlier conversations, end, are aborted and preempted; weights change; drafting is switched off
and on. The other engine drafts nothing and lives a simple life: it generates the same requests from their beginning, in
one batch, before weights change and at the end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollout_spec.noise import host as noise
from tests.conftest import VOCAB_SIZE
from tests.drafters.recorder import FUZZING
from tests.integrations.engines import (
    FIRST_PROMPTS,
    GAP,
    LAST,
    MIXES_MASKS,
    assert_same_scores,
    generate,
    runner_of,
    stats_of,
)

NUM_LIVES = int(os.environ.get("ENGINE_LIVES", "0"))
"""So many lives, other ones in every run; 0: a few, always the same ones."""

MAX_PROMPT, MAX_DRAFT_TOKENS = 90, 5

SAMPLING = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.3]),
    "max_tokens": st.integers(1, 40),
    "logprobs": st.sampled_from([0, None, 1, 3]),
    "ignore_eos": st.booleans(),
    "output_kind": st.sampled_from(list(RequestOutputKind)),
    "top_k": st.sampled_from([0, 0, 6]),
    "top_p": st.sampled_from([1.0, 1.0, 0.8]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05]),
}
RARE = {
    "repetition_penalty": st.just(1.3),
    "presence_penalty": st.just(0.7),
    "frequency_penalty": st.just(0.5),
    "min_tokens": st.integers(1, 12),
    "stop": st.sampled_from([["w3"], ["w5 w", "w1"], ["9 w1"]]),
    "stop_token_ids": st.sampled_from([[6], [7, 12]]),
    "include_stop_str_in_output": st.booleans(),
    "bad_words": st.sampled_from([["w2"], ["w3 w4", "w5"]]),
    "allowed_token_ids": st.just(list(range(2, 14))),
}
if MIXES_MASKS:
    del RARE["allowed_token_ids"]
OF_OUTPUT = ("presence_penalty", "frequency_penalty", "stop", "bad_words")
"""Depend on what of a text is output: a rollout with these cannot be compared from its middle on."""
OPTIONS = st.fixed_dictionaries({}, optional={"keep_in_history": st.booleans(), "problem_id": st.integers(0, 2)})


@st.composite
def sampling_params(draw) -> SamplingParams:
    """Parameters with a seed; a few of the rarer ones are set."""
    chosen = {name: draw(value) for name, value in SAMPLING.items()}
    for name in draw(st.lists(st.sampled_from(sorted(RARE)), max_size=2, unique=True)):
        chosen[name] = draw(RARE[name])
    chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
    options = draw(OPTIONS)
    return SamplingParams(
        seed=draw(st.integers(0, 2**40)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])) if chosen["temperature"] else 1,
        extra_args={"rollout_spec": options} if options else None,
        **chosen,
    )


@dataclass
class Rollout:
    """One sample of a request.

    Attributes:
        inner_id: The engine's id of it.
        params: Its own: n is 1, and the seed is its own.
        start: How many of its tokens earlier weights have sampled.
        token_ids, logprobs, text: What the caller got.
        sampled: What the engine was seen to have sampled for it.
        is_whole: Whether that is all.
        is_comparable: Whether the other engine can go on from `start`.
    """

    request_id: str
    inner_id: str
    prompt: list[int]
    params: SamplingParams
    start: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sampled: list[int] = field(default_factory=list)
    is_whole: bool = False
    is_comparable: bool = True

    @property
    def max_surplus(self) -> int:
        """Most tokens sampled past the end, as only the front end knows where a stop string is complete."""
        return MAX_DRAFT_TOKENS if isinstance(self.stop_reason, str) else 0

    def receive(self, output: Any) -> None:
        """Take what a step brought."""
        if self.params.output_kind != RequestOutputKind.DELTA:
            self.token_ids, self.logprobs, self.text = [], [], ""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.text += output.text
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self.finish_reason is not None:
            self.sampled, self.is_whole = self.token_ids, True

    def reference(self) -> tuple[list[int], SamplingParams]:
        """(prompt, parameters) of a request that samples the same tokens from `start` on."""
        params = self.params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.max_tokens -= self.start
        params.min_tokens = max(params.min_tokens - self.start, 0)
        return self.prompt + self.sampled[: self.start], params


def changer_of_weights(*engines: Any) -> Callable[[int], None]:
    """A function that gives several engines a variant of the first one's parameters, in place; 0: as they are now."""

    def parameters(llm: Any) -> list[tuple[str, torch.Tensor]]:
        return sorted(runner_of(llm).model.named_parameters())

    first = {name: tensor.clone() for name, tensor in parameters(engines[0])}

    @torch.no_grad()
    def change(variant: int) -> None:
        for llm in engines:
            generator = torch.Generator().manual_seed(variant)
            for name, tensor in parameters(llm):
                tensor.copy_(first[name])
                if variant and tensor.dim() > 1:
                    tensor += 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return change


@contextmanager
def refusing_blocks(scheduler: Any, count: int):
    """The cache is full for so many requests: vLLM's scheduler preempts for each."""
    manager = scheduler.kv_cache_manager
    allocate, left = manager.allocate_slots, [count]

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return None if left[0] >= 0 else allocate(*args, **kwargs)

    manager.allocate_slots = allocate_slots
    try:
        yield
    finally:
        del manager.allocate_slots


class EngineLife(RuleBasedStateMachine):
    """One life, which ends when all requests have ended. The engines live on, and so does the history.

    Args:
        on: The engine under test, in this process.
        off: The same model without drafts.
        change_weights: Those of both; see `changer_of_weights`.
        check: Looks at the drafter after each step; gets the machine and whether the drafter took part in it.
        check_end: Looks at it when all has ended; gets the machine.

    Attributes:
        is_asynchronous: Whether the engine schedules a step before the last one's tokens are known.
        waiting: By the engine's id, the rollouts that have not ended there.
        grown: The engine's ids of those that got tokens in the last step.
    """

    is_asynchronous = False
    _ids = itertools.count()
    _given: list[str] = []  # noqa: RUF012  # requests of this life and of one before it that has failed

    def __init__(
        self,
        on: Any,
        off: Any,
        change_weights: Callable[[int], None],
        check: Callable[[EngineLife, bool], None],
        check_end: Callable[[EngineLife], None],
    ) -> None:
        super().__init__()
        self.on, self.off, self.change_weights = on, off, change_weights
        self.engine = on.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.rollouts: list[Rollout] = []
        self.waiting: dict[str, Rollout] = {}
        self.grown: set[str] = set()
        self._check, self._check_end = check, check_end
        self._uncompared: list[Rollout] = []
        self._conversations: list[list[int]] = []
        self._clear()

    # -- what can happen ---------------------------------------------------------------------------------------------

    @rule(
        first=st.integers(0, 2),
        repeat=st.integers(1, 6),
        continued=st.none() | st.integers(0, 30),
        answer=st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=12),
        count=st.integers(1, 3),
        data=st.data(),
    )
    def add(
        self, first: int, repeat: int, continued: int | None, answer: list[int], count: int, data: st.DataObject
    ) -> None:
        """Requests with one prompt, perhaps of a conversation's later turn."""
        prompt = [*FIRST_PROMPTS[first]] if repeat == 6 else [1, 4 + first, 9] * repeat
        if continued is not None and self._conversations:
            prompt = [*self._conversations[continued % len(self._conversations)], *answer][:MAX_PROMPT]
        for _ in range(count):
            self._add(prompt, data.draw(sampling_params()))

    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        """Some steps of the engine."""
        for _ in range(count if self.waiting else 0):
            self._step()

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        """The caller gives a request up, with all of its samples."""
        request_ids = sorted({rollout.request_id for rollout in self.waiting.values()})
        if not request_ids:
            return
        request_id = request_ids[which % len(request_ids)]
        self._look_at_scheduler()
        self.engine.abort_request([request_id])
        for rollout in [r for r in self.waiting.values() if r.request_id == request_id]:
            rollout.is_whole = True
            del self.waiting[rollout.inner_id]

    @rule(after=st.integers(1, 4), count=st.integers(1, 4))
    def preempt(self, after: int, count: int) -> None:
        """After some steps, one in which there is no room for some requests."""
        self.step(after)
        with refusing_blocks(self.scheduler, count):
            self.step(1)

    @rule(after=st.integers(1, 4))
    def preempt_all(self, after: int) -> None:
        """What trainers do when weights change while rollouts run, without the change."""
        self.step(after)
        assert self.engine.reset_prefix_cache(reset_running_requests=True)

    @rule(is_on=st.booleans())
    def toggle(self, is_on: bool) -> None:
        """Switch drafting off or on."""
        self.on.collective_rpc("rollout_spec", args=("set_enabled", is_on))

    @rule(after=st.integers(0, 4), variant=st.integers(0, 3))
    def update_weights(self, after: int, variant: int) -> None:
        """New weights. Requests go on with a cache that is computed anew, as their first tokens' would be stale."""
        self.step(after)
        assert self.engine.reset_prefix_cache(reset_running_requests=True)
        self._look_at_scheduler()
        self._compare()
        for rollout in self.rollouts:
            if rollout.finish_reason is None:
                rollout.start = len(rollout.sampled)
                changes = any(getattr(rollout.params, name) for name in OF_OUTPUT)
                rollout.is_comparable &= not (rollout.start and changes)
        self._uncompared = list(self.waiting.values())
        assert self.off.llm_engine.reset_prefix_cache()
        self.change_weights(variant)

    @rule()
    def finish(self) -> None:
        """All requests end."""
        while self.waiting:
            self._step()

    def teardown(self) -> None:
        """All rollouts are those of the other engine, and nothing is left of them."""
        self.toggle(True)
        self.finish()
        assert not self.engine.has_unfinished_requests()
        self._look_at_scheduler()
        self._compare()
        # With this one the others' end is noticed.
        self._add([1, 4, 9], LAST)
        self.finish()
        self._check_end(self)
        self._given.clear()

    # -- the engine under test ---------------------------------------------------------------------------------------

    def _add(self, prompt: list[int], params: SamplingParams) -> None:
        request_id, before = str(next(self._ids)), set(self.scheduler.requests)
        self._given.append(request_id)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        inner_ids = [inner_id for inner_id in self.scheduler.requests if inner_id not in before]
        assert len(inner_ids) == params.n
        for i, inner_id in enumerate(inner_ids):
            own = params.clone()
            own.n, own.seed = 1, params.seed + i
            self.waiting[inner_id] = Rollout(request_id, inner_id, prompt, own)
            self.rollouts.append(self.waiting[inner_id])
            self._uncompared.append(self.waiting[inner_id])

    def _step(self) -> None:
        self._look_at_scheduler()
        before = stats_of(self.on)
        stepped = list(self.waiting.values())
        num_known = sum(len(rollout.sampled) for rollout in stepped)
        for output in self.engine.step():
            of_request = [r for r in self.rollouts if r.request_id == output.request_id]
            for completion in output.outputs:
                of_request[completion.index].receive(completion)
        self.grown = set()
        for inner_id, rollout in list(self.waiting.items()):
            request = self.scheduler.requests.get(inner_id)
            if request is None or request.num_output_tokens > len(rollout.sampled):
                self.grown.add(inner_id)
            if request is None:
                del self.waiting[inner_id]
                if rollout.is_whole:
                    self._conversations.append(rollout.prompt + rollout.token_ids)
        self._look_at_scheduler()
        stats = stats_of(self.on)
        emitted, accepted, request_steps = (
            stats[name] - before[name] for name in ("emitted_tokens", "accepted_tokens", "request_steps")
        )
        if self.is_asynchronous:  # what lies past a rollout's end is counted
            assert emitted == accepted + request_steps
        # Of several samples some callers get none before the last has ended.
        elif all(rollout.is_whole for rollout in stepped if rollout.inner_id not in self.waiting):
            new = sum(len(rollout.sampled) for rollout in stepped) - num_known
            assert new <= emitted <= new + sum(rollout.max_surplus for rollout in stepped)
        assert stats["draft_tokens"] == sum(stats["drafted_per_position"]) >= stats["accepted_tokens"]
        assert stats["accepted_tokens"] == sum(stats["accepted_per_position"])
        assert stats["num_drafts"] <= stats["request_steps"]
        assert stats["drafter_errors"] == 0
        # Without a forward pass, as where all were preempted, the drafter hears of nothing.
        self._check(self, stats["steps"] > before["steps"])

    def _look_at_scheduler(self) -> None:
        """Note what has been sampled."""
        for rollout in self.waiting.values():
            rollout.sampled = list(self.scheduler.requests[rollout.inner_id].output_token_ids)

    def _clear(self) -> None:
        """End what a life that has failed has left, and begin with the first weights."""
        self.on.collective_rpc("rollout_spec", args=("set_enabled", True))
        self.change_weights(0)
        assert self.off.llm_engine.reset_prefix_cache()
        assert self.engine.reset_prefix_cache(reset_running_requests=True)
        self.engine.abort_request(self._given)
        self._given.clear()
        self._add([1, 4, 9], LAST)
        self._uncompared, self.rollouts, self.waiting = [], [], {}
        while self.engine.has_unfinished_requests():
            self.engine.step()

    # -- the other engine --------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Compare what the present weights have sampled."""
        rollouts, self._uncompared = [r for r in self._uncompared if r.is_comparable and r.sampled], []
        if not rollouts:
            return
        references = [rollout.reference() for rollout in rollouts]
        outputs = generate(self.off, [params for _, params in references], [prompt for prompt, _ in references])
        for rollout, expected, (prompt, params) in zip(rollouts, outputs, references, strict=True):
            self._assert_same(rollout, expected, prompt, params)

    def _assert_same(self, rollout: Rollout, expected: Any, prompt: list[int], params: SamplingParams) -> None:
        got, tokens = rollout.sampled[rollout.start :], list(expected.token_ids)
        count = len(got) if rollout.finish_reason is None else max(len(got), len(tokens))
        at = next((i for i in range(count) if got[i : i + 1] != tokens[i : i + 1]), count)
        if at < count:
            assert at < min(len(got), len(tokens)), f"{rollout} ends otherwise than {expected}"
            self._assert_close(prompt, params, tokens, at, got[at])
        elif rollout.finish_reason is not None:
            assert (rollout.finish_reason, rollout.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if not rollout.start:
                assert rollout.text == expected.text
        if params.logprobs is not None:
            ours = rollout.logprobs[rollout.start :][:at]
            assert_same_scores(ours, expected.logprobs[: len(ours)])

    def _assert_close(self, prompt: list[int], params: SamplingParams, tokens: list[int], at: int, other: int) -> None:
        """Two tokens were so close that rounding decides: by their noise, and scores that the other engine gives."""
        params = params.clone()
        params.logprobs, params.max_tokens = VOCAB_SIZE, at + 1
        (output,) = generate(self.off, [params], [prompt])
        assert list(output.token_ids[:at]) == tokens[:at], "the other engine is not sure either"
        two = np.array([tokens[at], other])
        scores = np.array([output.logprobs[at][int(token)].logprob for token in two])
        if params.temperature:
            scores = scores + noise.gumbel(params.seed, len(prompt) + at - 1, two)
        assert abs(scores[0] - scores[1]) < GAP, f"token {at} is {other}, not {tokens[at]}: {params}"


def check_what_is_live(session: Any) -> None:
    """A folder's history counts the requests that are live of each problem, and looks at the same problems."""
    history = session.engine_history
    if history is not None:
        assert history._live.total() == len(session.live)
        assert history._thread._watched.keys() == history._live.keys()


class Watch:
    """Follows what a session on the host tells its drafter.

    Args:
        session: The engine's `HostSession`.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self._stopped: dict[str, tuple[list[int], bool]] = {}  # (output, whether it is kept), by request
        stop_request = session.drafter.stop_request

        def stop(req_id, *, keep=True):
            assert req_id not in self._stopped
            self._stopped[req_id] = session.drafter.output_of(req_id).tolist(), keep
            stop_request(req_id, keep=keep)

        session.drafter.stop_request = stop

    def check(self, life: EngineLife, took_part: bool) -> None:
        """After a step: the drafter knows the requests that are there, and what they have said."""
        session = self.session
        check_what_is_live(session)
        if not took_part:
            return
        session.drafter.check_integrity()
        assert session.live.keys() <= {*life.scheduler.requests, *life.scheduler.finished_req_ids}
        assert session.live.keys() == session.drafter._live.keys()
        assert session.num_live_requests() <= len(session.live)
        requests = session.drafter.table.arrays
        for req_id in session.live.keys() & set(life.scheduler.requests):
            output = list(life.scheduler.requests[req_id].output_token_ids)
            known, row = session.drafter.output_of(req_id).tolist(), session.live[req_id].row
            assert requests.num_tokens[row] - requests.num_prompt_tokens[row] == len(known)
            assert known == (output if req_id in life.grown else output[: len(known)])

    def check_end(self, life: EngineLife) -> None:
        """All have ended: the drafter was told of each once, and what it had said."""
        assert len(self.session.live) <= 1, "only the last request's end is still unknown"
        for rollout in life.rollouts[:-1]:
            options = (rollout.params.extra_args or {}).get("rollout_spec", {})
            said, keep = self._stopped.pop(rollout.inner_id, ([], False))
            assert keep == (bool(said) and options.get("keep_in_history", True))
            if rollout.is_whole:
                assert said[: len(rollout.sampled)] == rollout.sampled
                assert len(said) <= len(rollout.sampled) + rollout.max_surplus
            else:
                count = min(len(said), len(rollout.sampled))
                assert said[:count] == rollout.sampled[:count]
        self.forget()

    def forget(self) -> None:
        """Another life begins."""
        self._stopped.clear()


def run(new_life: Callable[[], EngineLife], *, num_lives: int, num_events: int) -> None:
    """Live some lives, FUZZING times as many, or ENGINE_LIVES other ones."""
    run_state_machine_as_test(
        new_life,
        settings=settings(
            max_examples=NUM_LIVES or num_lives * FUZZING,
            stateful_step_count=num_events,
            derandomize=not NUM_LIVES,
            database=None,
            phases=[Phase.generate],  # the engine's history is another one in every life
            print_blob=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
