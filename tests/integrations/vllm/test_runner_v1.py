"""The V1 adapter between stand-ins for vLLM's runner and our proposer."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.runner_v1 import RolloutSpecProposer, RunnerAdapterV1, Verification
from rollout_spec.report.stats import SpeculationStats
from rollout_spec.types import Drafts

VOCAB_SIZE = 10


def params(**values):
    """A greedy request's."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "min_p": 0.0}
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
        self.drafter = SimpleNamespace(
            stats=SpeculationStats(),
            session=SimpleNamespace(
                enabled=True,
                drafter=SimpleNamespace(wants_rejected_targets=wants_rejected_targets),
                set_enabled=lambda enabled: None,
                update_index=Mock(),
                end_missing=lambda requests: None,
            ),
            bind=lambda runner, model_drafter: None,
        )
        self.input_batch = SimpleNamespace(
            req_ids=[],
            logitsprocs=SimpleNamespace(all=[]),
            sampling_metadata=SimpleNamespace(
                all_greedy=True, temperature=None, top_k=None, top_p=None, max_num_logprobs=None
            ),
        )
        self.sampler = SimpleNamespace(logprobs_mode="raw_logprobs")
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
    """What the proposer is told: verified and accepted tokens by row, and the target's."""
    return tuple(values.tolist() for values in runner.adapter.count_last_verification()[:3])


def test_every_request_gets_its_own_outcome():
    runner = Runner(DRAFTS, TARGETS)
    # As wide as K allows in every step, and not as the longest draft, for which kernels would be compiled again.
    assert runner.sample() == [[3, 9, -1, -1, -1], [2, -1, -1, -1, -1], [5, 6, 7, 4, -1], [1, -1, -1, -1, -1]]
    assert told(runner) == ([2, 0, 3, 1], [1, 0, 3, 0], [3, 9, -1, 2, 5, 6, 7, 4, 1, -1])
    runner.drafter.session.update_index.assert_called_once_with()
    stats = runner.drafter.stats
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 4, 3)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (6, 4, 8)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([3, 2, 1], [2, 1, 1])


def test_a_drafter_that_wants_it_is_told_what_the_target_says_after_the_first_difference():
    runner = Runner(DRAFTS, TARGETS, wants_rejected_targets=True)
    assert runner.sample() == [[3, 9, -1, -1, -1], [2, -1, -1, -1, -1], [5, 6, 7, 4, -1], [1, -1, -1, -1, -1]]
    assert told(runner) == ([2, 0, 3, 1], [1, 0, 3, 0], [3, 9, 1, 2, 5, 6, 7, 4, 1, 2])


def test_chunks_of_prompts_are_not_counted():
    """vLLM discards what is sampled after a chunk."""
    runner = Runner(DRAFTS, TARGETS, discarded={"a", "b"})
    runner.sample()
    told(runner)
    stats = runner.drafter.stats
    assert (stats.request_steps, stats.num_drafts) == (2, 2)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (4, 3, 5)


def test_where_scheduling_is_asynchronous_the_last_step_is_counted_by_the_next_call():
    """The buffers of the runner are the next step's by then."""
    runner = Runner(DRAFTS, TARGETS, discarded={"d"}, use_async_scheduling=True)
    runner.sample()
    assert runner.drafter.stats.steps == 0
    runner.schedule({"b": [], "e": [1]}, {"b": [2], "e": [1, 2]})
    runner.sample()
    assert runner.drafter.stats.draft_tokens == 5
    runner.adapter.command("set_enabled", False)
    assert runner.drafter.stats.draft_tokens == 6


def test_requests_that_change_rows_are_followed():
    runner = Runner(DRAFTS, TARGETS)
    runner.sample()
    turned = dict(reversed(DRAFTS.items()))
    runner.schedule(turned, TARGETS)
    assert runner.sample() == [[1, -1, -1, -1, -1], [5, 6, 7, 4, -1], [2, -1, -1, -1, -1], [3, 9, -1, -1, -1]]
    assert told(runner) == ([1, 3, 0, 2], [0, 3, 0, 1], [1, -1, 5, 6, 7, 4, 2, 3, 9, -1])


def described(runner, **requests):
    """What the adapter says of a batch of these requests' sampling parameters, in these rows."""
    batch = runner.input_batch
    batch.req_ids = list(requests)
    runner.requests = {name: SimpleNamespace(sampling_params=p, output_token_ids=[]) for name, p in requests.items()}
    runner.adapter.on_requests_changed()
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


class Session:
    """Keeps what it is told, and drafts three tokens for each request, of which two are to be verified.

    Args:
        seen: Tokens seen of each request, whose rows are the requests' places here.
    """

    enabled = True
    follows_all = False

    def __init__(self, **seen):
        self.names = list(seen)
        self.arrays = SimpleNamespace(num_seen=np.array(list(seen.values())))
        self.calls = []

    def follow(self, req_ids, requests, *, has_changed):
        self.calls.append((req_ids, has_changed))
        return np.array([self.names.index(name) if requests[name].prompt_token_ids else -1 for name in req_ids])

    def draft(self, sampled, model=None):
        self.calls.append(sampled)
        drafts = np.tile(np.array([7, 8, 9], np.int32), (sampled.rows.size, 1))
        return Drafts(drafts, np.full(sampled.rows.size, 2), np.ones_like(drafts, np.float32))


def proposer_of(session, requests, req_ids, verification):
    proposer = RolloutSpecProposer.__new__(RolloutSpecProposer)
    proposer.session, proposer.has_changed = session, True
    proposer._new_tokens = np.empty(1, np.int32)
    proposer._runner = SimpleNamespace(
        requests={name: SimpleNamespace(prompt_token_ids=prompt) for name, prompt in requests.items()},
        input_batch=SimpleNamespace(req_ids=req_ids),
        query_start_loc=SimpleNamespace(np=np.array([0, 3, 9, 10, 11, 99])),
        rollout_spec=SimpleNamespace(clock=SimpleNamespace(started=0.0), count_last_verification=lambda: verification),
    )
    return proposer


def test_the_session_is_told_what_each_request_said_since_it_was_seen():
    """Rows of chunks and of prompts of embeddings are not drafted for."""
    session = Session(new=3, a=4)
    requests = {"a": [1, 2], "chunk": [1] * 9, "embedded": None, "new": [3, 4, 5], "waits": [6]}
    verification = Verification(
        np.array([2, 0, 0, 0]),
        np.array([1, 0, 0, 0]),
        np.array([24, 25, 3, 99, 9, 33]),
        np.array([0, 3, 4, 5, 6]),
        np.arange(6)[:, None],
    )
    proposer = proposer_of(session, requests, ["a", "chunk", "embedded", "new", "left over"], verification)
    tokens = np.arange(40, dtype=np.int32).reshape(4, 10)
    num_tokens = np.array([6, 5, 4, 4], np.int32)
    drafts = proposer.propose([[24, 25], [], [9], [33]], num_tokens, tokens)
    assert drafts == [[7, 8], [], [], [7, 8]]
    (req_ids, has_changed), sampled = session.calls
    assert (req_ids, has_changed) == (["a", "embedded", "new"], True)
    assert [list(values) for values in sampled[:7]] == [
        [1, 0], [4, 5, 33], [0, 2, 3], [24, 25, 3, 33], [0, 3, 4], [2, 0], [1, 0],
    ]  # fmt: skip
    assert sampled.num_tokens == 11
    assert sampled.features.tolist() == [[0], [1], [2], [5]]
    proposer.propose([[24, 25], [], [9], [33]], num_tokens, tokens)
    assert session.calls[2] == (["a", "embedded", "new"], False)


def test_rows_that_are_broken_are_named_by_their_request():
    runner = Runner(DRAFTS, TARGETS)
    runner.logits[4] = float("nan")  # the first row of c
    runner.sample()
    with pytest.raises(FloatingPointError, match="1 rows .* request c"):
        told(runner)


def test_without_a_drafter_a_step_is_counted_at_its_end():
    runner = Runner(DRAFTS, TARGETS)
    runner.drafter.session.enabled = False
    runner.logits[4] = float("nan")
    with pytest.raises(FloatingPointError, match="1 rows .* request c"):
        runner.sample()
