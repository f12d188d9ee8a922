"""The device drafter where the device runs late: nothing is read before it has arrived."""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("vllm")

import vllm.v1.worker.cpu.shm  # noqa: F401  puts its own in the place of torch's streams

from rollout_spec.drafters.device import drafter as device
from rollout_spec.transfers import HostCopy
from tests.drafters.device.test_device import PROMPTS, Engine
from tests.drafters.recorder import random_features
from tests.ptx.streams import late_streams

SEEDS = range(4)


def work(seed):
    """Everything that the drafter says in a random life of requests, in a pool so small that problems leave and return.

    Drafts are read a while after they were made, rollouts when they have arrived.
    """
    rng = np.random.default_rng(seed)
    engine = Engine(max_requests=3, max_resident_tokens=64)
    engine.drafter.rollouts.is_recording = True
    said, copies, recorded = [], [], []
    for _ in range(80):
        operation = rng.choice(["start", "commit", "commit", "propose", "propose", "stop", "add"])
        live = sorted(engine.live)
        if operation == "start" and engine.free:
            engine.start([*PROMPTS[rng.integers(3)], int(rng.integers(3))], seed=int(rng.integers(2**62)))
        elif operation == "commit" and live:
            req_id = live[rng.integers(len(live))]
            tokens = rng.integers(0, 3, rng.integers(1, 6)).tolist()
            engine.commit(req_id, tokens, random_features(rng, tokens[-3:]))
        elif operation == "propose" and live:
            drafts, rates = engine.propose()[1:3]
            copies.append(HostCopy((drafts, (rates * 1e6).int())))
        elif operation == "stop" and live:
            engine.stop(live[rng.integers(len(live))])
            recorded += engine.drafter.rollouts.take_recorded(wait=bool(rng.integers(2)))
        elif operation == "add":
            prompt, tokens = [*PROMPTS[rng.integers(3)], 0], rng.integers(0, 3, 9).tolist()
            engine.add(prompt, tokens, random_features(rng, tokens))
        while len(copies) > 2 or (copies and copies[0].has_arrived()):
            said += [values.copy() for values in copies.pop(0).read()]
    said += [values for copy in copies for values in copy.read()]
    recorded += engine.drafter.rollouts.take_recorded(wait=True)
    return said + [values for rollout in recorded for values in (rollout.context, rollout.tokens, rollout.features)]


@cache
def expected(seed):
    return work(seed)


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


@pytest.fixture(scope="module", autouse=True)
def texts_that_move():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "MORE_ROOM", 2)
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_does_not_depend_on_when_the_device_works(seed):
    with late_streams(seed) as machine:
        found = work(seed)
    assert same(found, expected(seed))
    assert machine.num_copies > 5
