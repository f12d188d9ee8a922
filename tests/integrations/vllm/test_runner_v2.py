"""The V2 adapter's bookkeeping between stand-ins; `tests/v2` runs it in engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

import vllm

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.compat import lacks_v2_interfaces

if lacks_v2_interfaces(vllm.__version_tuple__):
    pytest.skip("this vLLM's V2 runner is not supported", allow_module_level=True)

from rollout_spec.integrations.vllm import runner_v2
from rollout_spec.report.stats import SpeculationStats
from rollout_spec.types import Drafts, VerifyResult

# Four requests: "b" has no draft, "chunk" is in the middle of its prompt and what it samples is discarded.
REQ_IDS = ["a", "b", "chunk", "c"]
STARTS = np.array([0, 3, 4, 6, 10], np.int32)
TARGETS = [3, 9, 1, 2, 6, 6, 5, 6, 7, 4]
ACCEPTED = [1, 0, 1, 3]
SAMPLED = [2, 1, 0, 4]
PROMPTS = {"a": [1, 2], "b": [1] * 5, "chunk": [1] * 9, "c": [1, 2, 3]}
FIRST_POSITIONS = [3, 4, 6, 9]


def result_of(num_broken_rows=(0, 0, 0, 0)):
    return VerifyResult(
        output_token_ids=torch.zeros(4, 5, dtype=torch.int32),
        num_accepted=torch.tensor(ACCEPTED, dtype=torch.int32),
        target_token_ids=torch.tensor(TARGETS),
        logprobs=None,
        ranks=None,
        num_invalid_rows=torch.zeros(4, dtype=torch.int32),
        num_broken_rows=torch.tensor(num_broken_rows, dtype=torch.int32),
    )


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
        self.calls, self.num_updates = [], 0

    def update_index(self):
        self.num_updates += 1

    def pause(self):
        self.calls.append("pause")

    def follow(self, req_ids, requests, *, has_changed):
        self.calls.append((req_ids, has_changed))
        return np.array([self.names.index(name) for name in req_ids])

    def draft(self, sampled):
        self.calls.append(sampled)
        drafts = np.tile(np.array([7, 8, 9, 0], np.int32), (sampled.rows.size, 1))
        return Drafts(drafts, np.full(sampled.rows.size, 2), np.ones_like(drafts, np.float32))


def speculator_of(session, result):
    """A speculator whose sampler has just verified the four requests."""
    speculator = runner_v2.HistorySpeculator.__new__(runner_v2.HistorySpeculator)
    speculator.session, speculator.stats, speculator.num_draft_tokens = session, SpeculationStats(), {}
    speculator._num_speculative_tokens, speculator._device = 4, torch.device("cpu")
    all_token_ids = torch.arange(100).reshape(4, 25)
    runner = SimpleNamespace(
        req_states=SimpleNamespace(
            req_id_to_index={"c": 1},
            total_len=SimpleNamespace(gpu=torch.tensor([0, 14, 0, 0])),
            all_token_ids=SimpleNamespace(gpu=all_token_ids),
        )
    )
    adapter = SimpleNamespace(
        requests={req_id: SimpleNamespace(prompt_token_ids=prompt) for req_id, prompt in PROMPTS.items()},
        requests_have_changed=True,
        clock=SimpleNamespace(started=0.0),
        take_features=lambda: None,
    )
    outcome = runner_v2._Verified(REQ_IDS, STARTS, torch.tensor(FIRST_POSITIONS), result)
    speculator.bind(runner, adapter, SimpleNamespace(outcome=outcome))
    return speculator


def propose(speculator, num_tokens=20):
    batch = SimpleNamespace(num_reqs=4, num_tokens=num_tokens)
    num_sampled = torch.tensor([*SAMPLED, 77], dtype=torch.int32)
    return speculator.propose(batch, None, None, None, None, num_sampled).tolist()


def test_every_request_gets_its_own_outcome_and_chunks_of_prompts_none():
    session = Session(c=10, a=4, b=5)
    speculator = speculator_of(session, result_of())
    drafts = propose(speculator)
    followed, sampled = session.calls
    assert followed == (["a", "b", "c"], True)
    assert [values.tolist() for values in sampled[:7]] == [
        [1, 2, 0], [3, 9, 2, 5, 6, 7, 4], [0, 2, 3, 7], [3, 9, 1, 2, 5, 6, 7, 4], [0, 3, 4, 8], [2, 0, 3], [1, 0, 3],
    ]  # fmt: skip
    assert sampled.num_tokens == 20
    assert session.num_updates == 1
    stats = speculator.stats
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 3, 2)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (5, 4, 7)
    assert drafts == [[7, 8, 0, 0], [7, 8, 0, 0], [0] * 4, [7, 8, 0, 0]]
    assert speculator.num_draft_tokens == {"a": 2, "b": 2, "c": 2}
    assert propose(speculator) == [[0] * 4] * 4, "an outcome is told once"
    assert len(session.calls) == 2
    assert not speculator.num_draft_tokens


def test_what_was_missed_is_read_from_the_runner():
    """Drafting was off for some steps: the session has seen 12 of the 14 tokens of c, of which the last are new."""
    session = Session(a=4, b=5, c=12)
    propose(speculator_of(session, result_of()))
    _, sampled = session.calls
    assert sampled.token_ids.tolist() == [3, 9, 2, 37, 38]
    assert sampled.starts.tolist() == [0, 2, 3, 5]


def test_a_switched_off_session_counts_and_learns_nothing():
    session = Session(a=4, c=10)
    session.enabled = False
    speculator = speculator_of(session, result_of())
    assert propose(speculator) == [[0] * 4] * 4
    assert session.calls == ["pause"]
    assert speculator.stats.draft_tokens == 5


def test_rows_that_are_broken_are_named_by_their_request():
    with pytest.raises(FloatingPointError, match="2 rows .* request chunk"):
        propose(speculator_of(Session(), result_of([0, 0, 1, 1])))


class _Layout(NamedTuple):
    starts: torch.Tensor
    position: torch.Tensor


def sampler_of(host_speculator=None):
    sampler = runner_v2.VerifyingSampler(
        SimpleNamespace(sampling_states=SimpleNamespace(max_num_reqs=8)),
        SimpleNamespace(host_speculator=host_speculator, stats=SpeculationStats()),
        RolloutSpecConfig(num_speculative_tokens=4),
    )
    return sampler, sampler._adapter.stats


def book(sampler, result):
    """Of the four requests "b" has read the last of its prompt and "chunk" has not."""
    batch = SimpleNamespace(
        req_ids=REQ_IDS,
        cu_num_logits_np=STARTS,
        is_prefilling_np=np.array([False, True, True, False]),
        num_computed_tokens_np=np.array([4, 2, 4, 10]),
        num_scheduled_tokens=np.array([3, 3, 4, 4]),
        prefill_len_np=np.array([2, 5, 9, 3]),
    )
    sampler._book(batch, _Layout(torch.from_numpy(STARTS), torch.arange(50, 60)), result)


def test_without_a_drafter_on_the_host_chunks_are_not_counted_either():
    sampler, stats = sampler_of()
    book(sampler, result_of())
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 3, 2)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (5, 4, 7)
    with pytest.raises(FloatingPointError, match="request c"):
        book(sampler, result_of([0, 0, 0, 1]))


def test_a_drafter_on_the_host_gets_the_outcome():
    sampler, stats = sampler_of(host_speculator=object())
    book(sampler, result_of())
    assert sampler.outcome.first_positions.tolist() == [50, 53, 54, 56]
    assert sampler.outcome.req_ids == REQ_IDS
    assert stats.steps == 0
