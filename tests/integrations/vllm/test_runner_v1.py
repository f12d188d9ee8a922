"""The V1 adapter between stand-ins for vLLM's runner and our proposer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample.rejection_sampler import RejectionSampler

from rollout_spec import RolloutSpecConfig
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.integrations.vllm import runner_v1
from rollout_spec.integrations.vllm.runner_v1 import RunnerAdapterV1, Verification
from rollout_spec.stats import SpeculationStats
from rollout_spec.verify.api import verify_rows
from tests.integrations.vllm.test_session import (
    a_listening_session,
    a_request,
    a_session,
    advance,
    of_model,
    schedule,
)

VOCAB_SIZE = 10


def params(**values):
    """A greedy request's."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
    neutral |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    neutral |= dict.fromkeys(("bad_words", "allowed_token_ids", "logit_bias", "thinking_token_budget"))
    return SimpleNamespace(**{"seed": 1, **neutral, **values})


class Runner:
    """vLLM's V1 runner in a step of greedy requests.

    Args:
        drafts: What is verified, by request.
        targets: What the target says at the rows of each request: its drafts and the bonus.
        discarded: Requests whose prompts have not been read to their end.
    """

    def __init__(self, drafts, targets, discarded=(), use_async_scheduling=False, wants_rejected_targets=False):
        self.device = torch.device("cpu")
        self.use_async_scheduling = use_async_scheduling
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=None
        )
        self.drafter = object()
        session = SimpleNamespace(
            stats=SpeculationStats(),
            enabled=True,
            drafter=SimpleNamespace(wants_rejected_targets=wants_rejected_targets),
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
        with patch.object(runner_v1, "HostSession", lambda *args, **kwargs: session):
            self.adapter = RunnerAdapterV1(self, RolloutSpecConfig(num_speculative_tokens=4))
        self.schedule(drafts, targets, discarded)

    def schedule(self, drafts, targets, discarded=()):
        self.input_batch.req_ids = list(drafts)
        self.requests = {req_id: SimpleNamespace(sampling_params=params()) for req_id in drafts}
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
    """What the proposer is told: verified and accepted tokens by row, its first row of logits, and the target's."""
    *counts, targets, features = runner.adapter.count_last_verification()
    assert not features.size
    return (*(values.tolist() for values in counts), None if targets is None else targets.tolist())


@pytest.mark.parametrize("wants_rejected_targets", [False, True])
def test_every_request_gets_its_own_outcome(wants_rejected_targets):
    runner = Runner(DRAFTS, TARGETS, wants_rejected_targets=wants_rejected_targets)
    # As wide as K allows in every step, and not as the longest draft, for which kernels would be compiled again.
    assert runner.sample() == [[3, 9, -1, -1, -1], [2, -1, -1, -1, -1], [5, 6, 7, 4, -1], [1, -1, -1, -1, -1]]
    targets = [3, 9, 1, 2, 5, 6, 7, 4, 1, 2] if wants_rejected_targets else None
    assert told(runner) == ([2, 0, 3, 1], [1, 0, 3, 0], [0, 3, 4, 8, 10], targets)
    runner.adapter.session.update_index.assert_called_once_with()
    stats = runner.adapter.stats
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 4, 3)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (6, 4, 8)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([3, 2, 1], [2, 1, 1])


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

    monkeypatch.setattr(runner_v1, "verify_rows", verify_on_device)
    monkeypatch.setattr(torch, "empty_like", empty_like)
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
    runner.adapter.command("set_enabled", False)
    assert runner.adapter.stats.draft_tokens == 6


def test_requests_that_change_rows_are_followed():
    runner = Runner(DRAFTS, TARGETS)
    runner.sample()
    turned = dict(reversed(DRAFTS.items()))
    runner.schedule(turned, TARGETS)
    assert runner.sample() == [[1, -1, -1, -1, -1], [5, 6, 7, 4, -1], [2, -1, -1, -1, -1], [3, 9, -1, -1, -1]]
    assert told(runner) == ([1, 3, 0, 2], [0, 3, 0, 1], [0, 2, 6, 7, 10], None)


def described(runner, **requests):
    """What the adapter says of a batch of these requests' sampling parameters, in these rows."""
    batch = runner.input_batch
    batch.req_ids = list(requests)
    runner.requests = {name: SimpleNamespace(sampling_params=p, output_token_ids=[]) for name, p in requests.items()}
    new = [SimpleNamespace(sampling_params=params(sampling_type=None), lora_request=None)]
    schedule = {"scheduled_new_reqs": new, "finished_req_ids": set(), "preempted_req_ids": None}
    runner.adapter.on_scheduled(SimpleNamespace(num_spec_tokens_to_schedule=0, **schedule))
    return runner.adapter._describe_batch(batch.sampling_metadata)


def test_what_a_request_asks_moves_with_it_and_leaves_with_it():
    runner = Runner(DRAFTS, TARGETS)
    plain = [params(seed=seed) for seed in range(4)]
    least, late = params(seed=10, min_p=0.5), params(seed=11, min_tokens=3)
    biased, processed = params(seed=12, logit_bias={2: 1.5}), params(seed=13, presence_penalty=0.5)
    batch = described(runner, a=plain[0], b=least, c=late, d=biased)
    assert batch.rows.seeds.tolist() == [0, 10, 11, 12]
    assert batch.rows.min_p.tolist() == [0, 0.5, 0, 0]
    assert batch.below_min_tokens == [runner.requests["c"]]
    assert {row: (tokens.tolist(), added.tolist()) for row, (tokens, added) in batch.biases.items()} == {
        3: ([2], [1.5])
    }
    assert batch.needs_processing
    batch = described(runner, d=biased, b=least)  # the others have ended, the last one fills the gap
    assert batch.rows.seeds.tolist() == [12, 10]
    assert batch.rows.min_p.tolist() == [0, 0.5]
    assert list(batch.biases) == [0]
    assert not batch.below_min_tokens
    batch = described(runner, e=plain[1], f=plain[2], g=plain[3], h=plain[0])
    assert batch.rows.seeds.tolist() == [1, 2, 3, 0]
    assert (batch.rows.min_p, batch.biases, batch.needs_processing) == (None, {}, False)
    batch = described(runner, e=processed, f=plain[2])  # another request of the same name in the same row
    assert batch.rows.seeds.tolist() == [13, 2]
    assert batch.needs_processing


def test_sampling_parameters_that_vllm_makes_anew_are_read_anew():
    runner = Runner(DRAFTS, TARGETS)
    described(runner, a=params(), b=params())
    metadata = SimpleNamespace(all_greedy=False, temperature=torch.tensor([0.5, 1.0]), top_k=None, top_p=None)
    rows = runner.adapter._describe_batch(metadata).rows
    assert rows.temperature is metadata.temperature


VERIFIED = Verification(
    num_verified=np.array([2, 0, 0, 0]),
    num_accepted=np.array([1, 0, 0, 0]),
    starts=np.array([0, 3, 4, 5, 6]),
    target_token_ids=np.array([24, 25, 3, 99, 9, 33]),
    features=np.repeat(np.arange(1, 7), FEATURE_WORDS).reshape(6, -1),
)
IS_SAMPLED = np.array([True, False, True, True])
NUM_TOKENS = np.array([6, 5, 3, 4, 0], np.int32)


def adapter_of(session):
    """One that drafts for a batch of four, of which "a" has been drafted for before it said 21 to 25."""
    requests = {"a": a_request([1, 2]), "chunk": a_request([1] * 9), "embedded": a_request(), "new": a_request([3, 4])}
    requests["embedded"].prompt_token_ids = None
    schedule(session, requests)
    advance(session, {"a": [20]}, requests={"a": requests["a"]})
    adapter = RunnerAdapterV1.__new__(RunnerAdapterV1)
    adapter.session, adapter.clock = session, SimpleNamespace(started=0.0)
    adapter.count_last_verification = lambda: VERIFIED
    tokens = np.full((5, 500), 49, np.int32)
    for row, text in zip(tokens, ([1, 2, 20, 21, 24, 25], [1] * 5, [0, 0, 9], [3, 4, 32, 33]), strict=False):
        row[: len(text)] = text
    adapter._runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=["a", "chunk", "embedded", "new", "left over"], token_ids_cpu=tokens, num_tokens_no_spec=NUM_TOKENS
        ),
        query_start_loc=SimpleNamespace(np=np.array([0, 3, 9, 10, 11, 99])),
    )
    return adapter


def test_the_session_is_told_what_each_request_said_since_it_was_seen():
    """Rows of chunks and of prompts of embeddings are not drafted for."""
    session, drafter = a_listening_session()
    drafts = adapter_of(session).draft(IS_SAMPLED)
    assert drafts == [[7] * 4, [], [], [7] * 4]
    assert list(session.live) == ["a", "chunk", "new"]
    assert drafter.extended[1:] == [("a", [21, 24, 25], [0, 1, 2]), ("new", [32, 33], [0, 6])]
    assert list(session._prompt_tokens)[-1] == 7, "11 tokens of 2 requests with 2 drafted ones"


def test_the_models_drafts_are_those_of_the_same_requests():
    session = a_session(drafter="suffix", has_model=True, budget=False)
    adapter = adapter_of(session)
    model = of_model([30, 31], [32, 33], [34, 35], [36, 37])
    assert adapter.draft(IS_SAMPLED, model) == [[30, 31], [], [], [36, 37]]
    session.drafter.learn_step = lambda *args: 1 / 0
    assert adapter.draft(IS_SAMPLED, model) == [[]] * 4
    assert session.broken
    assert adapter.draft(IS_SAMPLED, model) == [[30, 31], [], [34, 35], [36, 37]], "it drafts alone"


def test_rows_that_are_broken_are_named_by_their_request():
    runner = Runner(DRAFTS, TARGETS)
    runner.logits[4] = float("nan")  # the first row of c
    runner.sample()
    with pytest.raises(FloatingPointError, match="1 rows .* request c"):
        told(runner)


def test_without_a_drafter_a_step_is_counted_at_its_end():
    runner = Runner(DRAFTS, TARGETS)
    runner.adapter.session.enabled = False
    runner.logits[4] = float("nan")
    with pytest.raises(FloatingPointError, match="1 rows .* request c"):
        runner.sample()
