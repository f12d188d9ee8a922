"""The V1 adapter between stand-ins for vLLM's runner and our proposer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rollout_spec import RolloutSpecConfig, transfers
from rollout_spec.integrations.vllm import engine_v1
from rollout_spec.integrations.vllm.commands import run_command
from rollout_spec.integrations.vllm.engine_v1 import EngineV1
from rollout_spec.stats import SpeculationStats
from rollout_spec.verify.api import verify_rows

VOCAB_SIZE = 10


class Runner:
    """vLLM's V1 runner in a step of greedy requests.

    Args:
        drafts: What is verified, by request.
        targets: What the target says at the rows of each request: its drafts and the bonus.
        discarded: Requests whose prompts have not been read to their end.
    """

    def __init__(self, drafts, targets, discarded=(), use_async_scheduling=False):
        self.device = torch.device("cpu")
        self.use_async_scheduling = use_async_scheduling
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=None
        )
        self.drafter = object()
        session = SimpleNamespace(
            stats=SpeculationStats(),
            enabled=True,
            is_drafter_alive=True,
            drafter=SimpleNamespace(wants_rejected_targets=False),
            set_enabled=lambda enabled: None,
            update_index=Mock(),
            finish_requests=lambda finished, preempted: None,
        )
        self.input_batch = SimpleNamespace(
            req_ids=[],
            logitsprocs=SimpleNamespace(all=[]),
            sampling_metadata=SimpleNamespace(
                all_greedy=True, temperature=None, top_k=None, top_p=None, max_num_logprobs=None
            ),
        )
        self.sampler = SimpleNamespace(logprobs_mode="raw_logprobs")
        with patch.object(engine_v1, "HostSession", lambda *args, **kwargs: session):
            self.adapter = EngineV1(self, RolloutSpecConfig(num_speculative_tokens=4))
        self.schedule(drafts, targets, discarded)

    def schedule(self, drafts, targets, discarded=()):
        self.input_batch.req_ids = list(drafts)
        self.requests = {
            req_id: SimpleNamespace(sampling_params=SamplingParams(temperature=0, seed=1)) for req_id in drafts
        }
        self.discard_request_mask = SimpleNamespace(np=np.array([req_id in discarded for req_id in drafts]))
        lengths = torch.tensor([len(tokens) for tokens in drafts.values()])
        ends = (lengths + 1).cumsum(0)
        self.query_start_loc = SimpleNamespace(np=np.append(0, ends).astype(np.int32))
        self.positions = torch.arange(int(ends[-1]))
        self.logits = torch.zeros(int(ends[-1]), VOCAB_SIZE)
        said = [token for req_id in drafts for token in targets[req_id]]
        self.logits[torch.arange(len(said)), said] = 5.0
        self.metadata = SimpleNamespace(
            num_draft_tokens=lengths.tolist(),
            draft_token_ids=torch.tensor([t for tokens in drafts.values() for t in tokens], dtype=torch.int32),
            cu_num_draft_tokens=lengths.cumsum(0).int(),
            cu_num_sampled_tokens=ends.int(),
            logits_indices=torch.arange(int(ends[-1])),
            max_spec_len=int(lengths.max()),
        )

    def sample(self):
        return self.adapter.sample(self.logits, self.metadata).sampled_token_ids.tolist()


DRAFTS = {"a": [3, 4], "b": [], "c": [5, 6, 7], "d": [8]}
TARGETS = {"a": [3, 9, 1], "b": [2], "c": [5, 6, 7, 4], "d": [1, 2]}


def told(runner):
    """What the drafter is told: verified and accepted tokens by row."""
    verified, accepted, targets, features = runner.adapter.finish_counting()
    assert targets is None
    assert not features.size
    return verified.tolist(), accepted.tolist()


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU; `waits` names what waited for it."""

    is_cuda = True
    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        is_upload = name == "copy_" and not isinstance(args[0], cls)
        if name in ("cpu", "item", "numpy", "tolist") or (name == "__getitem__" and isinstance(args[1], np.ndarray)):
            cls.waits.append(name)
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if name == "cpu" or is_upload else result


class Event:
    """A CUDA event, which can be waited for once."""

    def __init__(self):
        self.has_passed = False

    def record(self):
        """Nothing runs at the same time here."""

    def synchronize(self):
        if not self.has_passed:
            OnDevice.waits.append("event")
        self.has_passed = True


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The verifier's results are on a device, as far as copies are concerned."""

    def verify_on_device(logits, *args, **kwargs):
        result = verify_rows(logits.as_subclass(torch.Tensor), *args, **kwargs)
        return type(result)(*(value if value is None else value.as_subclass(OnDevice) for value in result))

    def empty_like(tensor, device, pin_memory):
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(engine_v1, "verify_rows", verify_on_device)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(transfers, "runs_later", lambda device: True)
    monkeypatch.setattr(engine_v1, "upload", lambda values, device: torch.from_numpy(values))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(OnDevice, "waits", [])


@pytest.mark.parametrize("max_num_logprobs", [None, 0, 1])
def test_a_step_waits_for_the_device_only_where_vllm_reads_it(on_a_gpu, max_num_logprobs):
    outputs = []
    for on_device in (False, True):
        runner = Runner(DRAFTS, TARGETS)
        runner.input_batch.sampling_metadata.max_num_logprobs = max_num_logprobs
        if on_device:
            runner.logits = runner.logits.as_subclass(OnDevice)
            OnDevice.waits.clear()
            runner.adapter.session.update_index.side_effect = lambda: outputs.append(list(OnDevice.waits))
        output = runner.adapter.sample(runner.logits, runner.metadata)
        parsed, scores = RejectionSampler.parse_output(
            output.sampled_token_ids, VOCAB_SIZE, logprobs_tensors=output.logprobs_tensors
        )
        scores = None if scores is None else [np.asarray(values).tolist() for values in scores[:3]]
        outputs.append((parsed, scores, told(runner)))
    plain, waited_before, on_device = outputs
    assert on_device == plain
    assert waited_before == []
    assert len(OnDevice.waits) == 2 + (6 if max_num_logprobs is not None else 0)


def test_where_scheduling_is_asynchronous_the_last_step_is_counted_by_the_next_call():
    """The buffers of the runner are the next step's by then."""
    runner = Runner(DRAFTS, TARGETS, discarded={"d"}, use_async_scheduling=True)
    runner.sample()
    assert runner.adapter.stats.steps == 0
    runner.schedule({"b": [], "e": [1]}, {"b": [2], "e": [1, 2]})
    runner.sample()
    assert runner.adapter.stats.draft_tokens == 5
    run_command(runner.adapter, "set_enabled", False)
    assert runner.adapter.stats.draft_tokens == 6


def test_where_nothing_learns_a_step_is_counted_before_it_ends():
    """No `draft` follows, and there may be no next step."""
    runner = Runner(DRAFTS, TARGETS)
    runner.adapter.session.is_drafter_alive = False
    runner.sample()
    assert runner.adapter.stats.steps == 1
    runner.logits[4] = torch.nan
    with pytest.raises(FloatingPointError, match="first in request c"):
        runner.sample()
