"""The device drafter on streams that run late; bugs planted in what orders them are caught."""

from __future__ import annotations

import inspect
import textwrap
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

import vllm.v1.worker.cpu.shm  # noqa: F401  puts its own in the place of torch's streams

from rollout_spec.drafters.device import archive
from rollout_spec.drafters.device import drafter as device
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.transfers import HostCopy
from tests.drafters.device.test_device import PROMPTS, Engine
from tests.drafters.recorder import random_features
from tests.interpreter import run_as_python
from tests.ptx.machine import Fault
from tests.ptx.streams import late_streams

SEEDS = range(4)
pytestmark = pytest.mark.skipif(run_as_python(), reason="runs the compiled kernels")


def work(seed, num_operations=80):
    """Everything that the drafter says in a random life of requests, in a pool so small that problems leave and return.

    Drafts are read a while after they were made, rollouts when they have arrived.
    """
    rng = np.random.default_rng(seed)
    engine = Engine(max_requests=3, max_resident_tokens=64)
    engine.drafter.record_rollouts()
    said, copies, recorded, version = [], [], [], 0
    for _ in range(num_operations):
        operation = rng.choice(["start", "commit", "commit", "propose", "propose", "stop", "add", "version"])
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
            recorded += engine.drafter.take_recorded(wait=bool(rng.integers(2)))
        elif operation == "add":
            prompt, tokens = [*PROMPTS[rng.integers(3)], 0], rng.integers(0, 3, 9).tolist()
            engine.add(prompt, tokens, random_features(rng, tokens))
        elif operation == "version":
            version += 1
            engine.drafter.begin_policy_version(version)
            engine.reference.begin_policy_version(version)
        while len(copies) > 2 or (copies and copies[0].has_arrived()):
            said += [values.copy() for values in copies.pop(0).read()]
    said += [values for copy in copies for values in copy.read()]
    recorded += engine.drafter.take_recorded(wait=True)
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
    assert machine.num_borrowed > 0


def test_a_result_belongs_to_the_stream_that_computes_it():
    with late_streams(0):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = torch.ones(3) + 1
        with pytest.raises(Fault, match="nothing orders the two"):
            torch.stack((result, result))


BUGS = {
    "the side does not wait for the kernels": (DeviceDrafter, "_on_side", "self._side.wait_stream(", "id("),
    "kernels do not wait for the side": (DeviceDrafter, "_publish", ".wait_stream(self._side)", ""),
    "one wait for several uploads": (DeviceDrafter, "_on_side", "self._side_is_ahead = True", "pass"),
    "an event in the other stream": (
        DeviceDrafter, "_retire", "copied.record(self._side)", "copied.record(torch.cuda.default_stream())",
    ),
    "an event before the copies": (
        DeviceDrafter, "_retire", "copied.record(self._side)", "pass", "copied = None", "pass",
        "copied = torch.cuda.Event()", "pass", "copies = []", "copies, copied = [], self._side.record_event()",
    ),
    "rollouts read before they arrive": (archive.Archived, "take_copy", "self.copied.synchronize()", "pass"),
    "rollouts taken for arrived": (archive.Archived, "take_copy", "not self.copied.query()", "False"),
    "counts read before they arrive": (HostCopy, "read", "self._event.synchronize()", "pass"),
    "counts with an event before the copy": (
        HostCopy, "__init__", "values = copy_to_host(", "self._event = torch.cuda.Event(); self._event.record()\n"
        "        values = copy_to_host(", "self._event = torch.cuda.Event()\n        self._event.record()\n", "pass\n",
    ),
    "an upload that waits": (device, "upload", "tensor.pin_memory()", "tensor"),
    "a pinned buffer for all uploads": (
        device, "upload", "return tensor", "buffer = vars(upload).setdefault(str(id(torch.cuda.current_stream())), "
        "torch.zeros(9999, dtype=torch.int64).pin_memory()).view(torch.uint8)[:tensor.nbytes]\n"
        "    tensor = buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)\n    return tensor",
        "tensor.pin_memory()", "tensor",
    ),
    "a download that waits": (device, "copy_to_host", "pin_memory=is_later", "pin_memory=False"),
    "memory of the other stream": (
        DeviceDrafter, "_write_text", "with self._on_side():", "text = upload(tokens, self._device)\n"
        "    with self._on_side():", "= upload(tokens, self._device)\n        if", "= text; del text\n        if",
    ),
}  # fmt: skip
"""Owner and name of a function of ours, and pairs of what is in it and what takes its place."""


def with_a_bug(function, *changes):
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, "the mutation no longer fits"
        source = source.replace(old, new)
    names = {}
    code = compile(f"from __future__ import annotations\n{source}", inspect.getsourcefile(function), "exec")
    exec(code, inspect.unwrap(function).__globals__, names)
    return names[function.__name__]


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_in_the_order_of_streams_are_caught(bug, monkeypatch):
    owner, name, *changes = BUGS[bug]
    before = [expected(seed) for seed in SEEDS]
    monkeypatch.setattr(owner, name, with_a_bug(getattr(owner, name), *changes))
    caught = []
    for seed in SEEDS:
        try:
            with late_streams(seed):
                assert same(work(seed), before[seed]), "other values"
        except (Fault, AssertionError) as fault:
            caught.append(str(fault))
    assert caught
