"""The V2 adapter's bookkeeping between stand-ins; `tests/runners` runs it in engines."""

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

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.integrations.vllm import runner_v2
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import VerifyResult
from tests.integrations.vllm.test_session import a_listening_session, a_request, schedule

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
        output_token_ids=torch.tensor(
            [[3, 9, -1, -1, -1], [2, -1, -1, -1, -1], [6, 6, -1, -1, -1], [5, 6, 7, 4, -1]], dtype=torch.int32
        ),
        num_accepted=torch.tensor(ACCEPTED, dtype=torch.int32),
        target_token_ids=torch.tensor(TARGETS),
        logprobs=None,
        ranks=None,
        num_broken_rows=torch.tensor(num_broken_rows, dtype=torch.int32),
    )


def a_session_that_has_seen(**seen):
    """So many tokens of each request, all of which were drafted for."""
    session, drafter = a_listening_session()
    schedule(session, {name: a_request(prompt) for name, prompt in PROMPTS.items()})
    rows = session.rows_of(list(seen))
    requests = session.drafter.table.arrays
    requests.num_tokens[rows], requests.num_offered[rows] = list(seen.values()), 4
    return session, drafter


def speculator_of(session, result, features=None):
    """A speculator whose sampler has just verified the four requests."""
    speculator = runner_v2.HistorySpeculator.__new__(runner_v2.HistorySpeculator)
    speculator.session, speculator.num_draft_tokens = session, {}
    speculator._num_speculative_tokens, speculator._device = 4, torch.device("cpu")
    runner = SimpleNamespace(
        rollout_spec=SimpleNamespace(
            wants_rejected_targets=True, clock=SimpleNamespace(started=0.0), take_features=lambda: features
        ),
        sampler=SimpleNamespace(outcome=runner_v2._Verified(REQ_IDS, STARTS, torch.tensor(FIRST_POSITIONS), result)),
    )
    speculator.bind(runner)
    return speculator


def propose(speculator, num_tokens=20):
    batch = SimpleNamespace(num_reqs=4, num_tokens=num_tokens)
    num_sampled = torch.tensor([*SAMPLED, 77], dtype=torch.int32)
    return speculator.propose(batch, None, None, None, None, num_sampled).tolist()


def test_every_request_gets_its_own_outcome_and_chunks_of_prompts_none():
    """What was seen of each token is in its row of logits."""
    session, drafter = a_session_that_has_seen(c=10, a=4)
    features = torch.arange(1, 11)[:, None].expand(10, FEATURE_WORDS)
    told, learn = [], session.drafting.learn
    session.drafting.learn = lambda sampled, targets: told.append((sampled, targets)) or learn(sampled, targets)
    speculator = speculator_of(session, result_of(), features)
    drafts = propose(speculator)
    assert drafts == [[7] * 4, [7] * 4, [0] * 4, [7] * 4]
    assert drafter.extended == [("a", [3, 9]), ("b", [2]), ("c", [5, 6, 7, 4])]
    ((sampled, targets),) = told
    assert targets.tolist() == TARGETS
    assert sampled.features[sampled.starts[:-1], 0].tolist() == [1, 4, 5, 7]
    assert drafter.limits == [{"a": 4, "b": 4, "c": 4}]
    assert list(session._prompt_tokens) == [12], "20 tokens of 3 requests with 5 drafted ones"
    stats = session.stats
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 3, 2)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (5, 4, 7)
    assert speculator.num_draft_tokens == {"a": 4, "b": 4, "c": 4}
    assert propose(speculator) == [[0] * 4] * 4, "an outcome is told once"
    assert len(drafter.limits) == 1
    assert not speculator.num_draft_tokens


def test_of_a_request_that_goes_on_past_its_end_nothing_is_learned():
    """Behind a server it does so until the front end has told of its stop string."""
    session, drafter = a_session_that_has_seen(a=3)
    session.drafter.table.arrays.is_complete[session.live["a"].row] = True
    assert propose(speculator_of(session, result_of()))[:2] == [[0] * 4, [7] * 4]
    assert [name for name, _ in drafter.extended] == ["b", "c"]


def test_a_switched_off_session_counts_and_learns_nothing():
    session, drafter = a_session_that_has_seen(a=4, c=10)
    session.set_enabled(False)
    speculator = speculator_of(session, result_of())
    assert propose(speculator) == [[0] * 4] * 4
    assert not drafter.extended
    assert session.stats.draft_tokens == 5


def test_rows_that_are_broken_are_named_by_their_request():
    with pytest.raises(FloatingPointError, match="2 rows .* request chunk"):
        propose(speculator_of(a_session_that_has_seen()[0], result_of([0, 0, 1, 1])))


class _Layout(NamedTuple):
    starts: torch.Tensor
    position: torch.Tensor


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
    stats = SpeculationStats()
    sampler = runner_v2.VerifyingSampler(
        SimpleNamespace(sampling_states=SimpleNamespace(max_num_reqs=8)),
        SimpleNamespace(host_speculator=None, stats=stats),
        RolloutSpecConfig(num_speculative_tokens=4),
    )
    book(sampler, result_of())
    assert (stats.steps, stats.request_steps, stats.num_drafts) == (1, 3, 2)
    assert (stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (5, 4, 7)
    with pytest.raises(FloatingPointError, match="request c"):
        book(sampler, result_of([0, 0, 0, 1]))
