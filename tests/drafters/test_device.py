"""The device drafter against its reference; Triton's interpreter runs the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rollout_spec.drafters import device, device_kernels, device_reference
from rollout_spec.drafters.device import DeviceDrafter, Ended, Pool
from rollout_spec.drafters.device_reference import Document, ReferenceDrafter

K = 5
MAX_LEN = 96


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Several tiles and splits on short texts."""
    before = device_kernels.TILE, device_kernels.TARGET_PROGRAMS
    device_kernels.TILE, device_kernels.TARGET_PROGRAMS = 16, 16
    yield
    device_kernels.TILE, device_kernels.TARGET_PROGRAMS = before


class Engine:
    """What the device drafter sees of an engine, and the reference beside it."""

    def __init__(self, max_requests=6, **options):
        drafter_options = {name: options[name] for name in ("sharpness", "recency") if name in options}
        self.reference = ReferenceDrafter(max_draft_tokens=K, **drafter_options)
        self.drafter = DeviceDrafter(
            max_requests=max_requests,
            max_model_len=MAX_LEN,
            device=torch.device("cpu"),
            max_draft_tokens=K,
            **{"max_resident_tokens": 2000, **options},
        )
        self.history = torch.full((max_requests, MAX_LEN), 999, dtype=torch.int32)
        self.total_len = torch.zeros(max_requests, dtype=torch.int32)
        self.seeds = torch.zeros(max_requests, dtype=torch.int64)
        self.temperature = torch.zeros(max_requests)
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

    def commit(self, req_id, tokens):
        """A step's tokens."""
        slot = self.live[req_id]
        length = int(self.total_len[slot])
        tokens = tokens[: MAX_LEN - length]
        self.history[slot, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len[slot] += len(tokens)
        self.drafter.follow(torch.tensor([slot], dtype=torch.int32), self.history, self.total_len)
        self.reference.extend(req_id, tokens)
        return len(tokens)

    def stop(self, req_id, **trim):
        slot = self.live.pop(req_id)
        self.free.append(slot)
        self.drafter.stop_requests([Ended(slot, int(self.total_len[slot]), **trim)])
        self.reference.stop_request(req_id)

    def propose(self, num_sampled=None):
        """Drafts and rates of the live requests, device and reference."""
        req_ids = sorted(self.live)
        slots = torch.tensor([self.live[req_id] for req_id in req_ids], dtype=torch.int32)
        sampled = torch.ones(len(req_ids), dtype=torch.int32) if num_sampled is None else num_sampled
        drafts, rates = self.drafter.propose(
            slots, sampled, self.history, self.total_len, self.seeds, self.temperature
        )
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


TOKENS = st.lists(st.integers(0, 2), max_size=K + 1)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("commit"), st.integers(0, 5), TOKENS),
        st.tuples(st.just("accept"), st.integers(0, 5), st.integers(0, K)),
        st.tuples(st.just("stop"), st.integers(0, 5), st.none()),
        st.tuples(st.just("version"), st.none(), st.none()),
        st.tuples(st.just("propose"), st.none(), st.none()),
    ),
    max_size=40,
)
PROMPTS = [[0, 1, 2, 0, 1], [2, 2], [1]]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(OPERATIONS, st.randoms(use_true_random=False))
def test_drafts_and_rates_are_the_references(operations, random):
    """Requests of three problems come, say things, some of them drafted, end and come again."""
    engine = Engine()
    version, last = 0, {}
    for name, a, b in [*operations, ("propose", None, None)]:
        live = sorted(engine.live)
        if name == "start" and engine.free:
            engine.start(PROMPTS[a], seed=random.getrandbits(62) if b else None)
        elif name == "commit" and live:
            engine.commit(live[a % len(live)], b)
            last.pop(live[a % len(live)], None)
        elif name == "accept" and live:
            engine.commit(live[a % len(live)], [*last.pop(live[a % len(live)], [])[:b], 1])
        elif name == "stop" and live:
            engine.stop(live[a % len(live)])
        elif name == "version":
            version += 1
            engine.drafter.begin_policy_version(version)
            engine.reference.begin_policy_version(version)
        elif name == "propose" and live:
            drafts = engine.assert_same_drafts()
            last = {req_id: draft.token_ids.tolist() for req_id, draft in zip(live, drafts, strict=True)}
        engine.drafter.check_integrity()
    for ours, theirs in zip(engine.drafter._counters, ("coarse", "fine", "by_sharpness"), strict=True):
        np.testing.assert_array_equal(ours.numpy(), getattr(engine.reference.counters, theirs))
