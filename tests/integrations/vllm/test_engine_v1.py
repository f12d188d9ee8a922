"""A step of the V1 engine, in a stand-in for vLLM's runner, waits for the device no more than it must."""

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
from rollout_spec.integrations.vllm.engine_v1 import EngineV1
from rollout_spec.stats import SpeculationStats
from rollout_spec.verify.api import verify_rows

VOCAB_SIZE = 10


DRAFTS = {"a": [3, 4], "b": [], "c": [5, 6, 7], "d": [8]}
TARGETS = {"a": [3, 9, 1], "b": [2], "c": [5, 6, 7, 4], "d": [1, 2]}
"""What the target says at the rows of each request: its drafts and the bonus."""


class Runner:
    """vLLM's V1 runner in a step of greedy requests."""

    def __init__(self, max_num_logprobs):
        self.device = torch.device("cpu")
        self.use_async_scheduling = False
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=None
        )
        self.drafter = object()
        session = SimpleNamespace(
            stats=SpeculationStats(),
            is_drafter_alive=True,
            drafter=object(),
            drafting=SimpleNamespace(wants_rejected_targets=False),
            update_index=Mock(),
        )
        sampling = SimpleNamespace(
            all_greedy=True, temperature=None, top_k=None, top_p=None, max_num_logprobs=max_num_logprobs
        )
        self.input_batch = SimpleNamespace(
            req_ids=list(DRAFTS), logitsprocs=SimpleNamespace(all=[]), sampling_metadata=sampling
        )
        self.sampler = SimpleNamespace(logprobs_mode="raw_logprobs")
        self.requests = {
            req_id: SimpleNamespace(sampling_params=SamplingParams(temperature=0, seed=1)) for req_id in DRAFTS
        }
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(DRAFTS), bool))
        lengths = torch.tensor([len(tokens) for tokens in DRAFTS.values()])
        ends = (lengths + 1).cumsum(0)
        self.query_start_loc = SimpleNamespace(np=np.append(0, ends).astype(np.int32))
        self.positions = torch.arange(int(ends[-1]))
        said = [token for tokens in TARGETS.values() for token in tokens]
        self.logits = 5.0 * torch.nn.functional.one_hot(torch.tensor(said), VOCAB_SIZE).float()
        self.metadata = SimpleNamespace(
            num_draft_tokens=lengths.tolist(),
            draft_token_ids=torch.tensor([t for tokens in DRAFTS.values() for t in tokens], dtype=torch.int32),
            cu_num_draft_tokens=lengths.cumsum(0).int(),
        )
        with patch.object(engine_v1, "HostSession", lambda *args, **kwargs: session):
            self.adapter = EngineV1(self, RolloutSpecConfig(num_speculative_tokens=4))


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
        runner = Runner(max_num_logprobs)
        if on_device:
            runner.logits = runner.logits.as_subclass(OnDevice)
            OnDevice.waits.clear()
            runner.adapter.session.update_index.side_effect = lambda: outputs.append(list(OnDevice.waits))
        output = runner.adapter.sample(runner.logits, runner.metadata)
        parsed, scores = RejectionSampler.parse_output(
            output.sampled_token_ids, VOCAB_SIZE, logprobs_tensors=output.logprobs_tensors
        )
        scores = None if scores is None else [np.asarray(values).tolist() for values in scores[:3]]
        verified, accepted, *_ = runner.adapter.finish_counting()
        outputs.append((parsed, scores, verified.tolist(), accepted.tolist()))
    plain, waited_before, on_device = outputs
    assert on_device == plain
    assert waited_before == []
    assert len(OnDevice.waits) == 2 + (6 if max_num_logprobs is not None else 0)
