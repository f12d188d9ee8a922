"""The device drafter's drafts in vLLM's V2 model runner, all kernels emulated."""

import itertools

import numpy as np
import torch

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.drafters.device import kernels
from rollout_spec.drafters.device.drafter import DeviceDrafter
from tests.integrations.engines import (
    DEVICE,
    FEW_BLOCKS,
    PLAIN,
    assert_same,
    build,
    check_features,
    generate,
    mixed_params,
    rollouts_of,
    runner_of,
    session_of,
    stats_of,
)
from tests.runners.adaptive import schedule_of

K = 3


def build_on_device(model, *, budget=False, **engine):
    options = engine_kwargs(num_speculative_tokens=K, budget=budget, **DEVICE)
    return build(model, **{"max_num_seqs": 6, **options, **engine})


def drafter_of(llm):
    return session_of(llm).drafter


def test_texts_have_room_before_they_need_it(tiny_model, monkeypatch):
    """With chunked prompts, a pause, preemptions, and many drafts accepted. Each time it is twice as much."""
    moves, rooms = [], []
    llm = build_on_device(tiny_model, max_num_batched_tokens=24, **FEW_BLOCKS)
    texts, move, extend = drafter_of(llm)._texts, kernels.move, DeviceDrafter.extend

    def extend_and_look(self, slots, num_sampled, engine, *args):
        extend(self, slots, num_sampled, engine, *args)
        lengths, capacities = (texts.documents[slots.long(), i.value] for i in (kernels.LENGTH, kernels.CAPACITY))
        assert (lengths == engine.lengths[slots.long()]).all()
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            first = int(texts.documents[slot, kernels.OFFSET.value])
            assert torch.equal(texts.tokens[first : first + length], engine.token_ids[slot, :length])
        rooms.extend((capacities - lengths).tolist())

    monkeypatch.setattr(DeviceDrafter, "extend", extend_and_look)
    monkeypatch.setattr(kernels, "move", lambda rows, texts: moves.append(len(rows)) or move(rows, texts))
    params = mixed_params(6, 5, temperature=0.0, ignore_eos=True, **{**PLAIN, "max_tokens": 40})
    for is_enabled in (False, True, True):
        generate(llm, params)
        llm.collective_rpc("rollout_spec", args=("set_enabled", is_enabled))
    assert min(rooms) > 0
    stats = stats_of(llm)
    assert stats["accepted_tokens"] > 0.3 * stats["draft_tokens"] > 0
    assert 4 * 6 < sum(moves) < 4 * 6 * 8


def lengths_of_drafts(llm):
    """A list that gets the number of verified draft tokens of each request, for each step."""
    lengths, engine = [], runner_of(llm).rollout_spec
    original = engine.sample

    def sample(logits, batch, *args):
        lengths.append((np.diff(batch.cu_num_logits_np) - 1).tolist())
        return original(logits, batch, *args)

    engine.sample = sample
    return lengths


def test_slots_follow_the_batch_size(tiny_model, off, reference_model):
    """No slots for four or more requests, K for fewer: vLLM's schedule, which it has in every version."""
    ranges = {"num_speculative_tokens_per_batch_size": [(1, 3, K), (4, 6, 0)]}
    proposer = {"model": PROPOSER_PATH, "num_speculative_tokens": K, **ranges}
    llm = build_on_device(tiny_model, speculative_config=proposer)
    lengths = lengths_of_drafts(llm)
    drafter, drafted = drafter_of(llm), []
    propose = drafter.propose
    drafter.propose = lambda slots, *args, **into: drafted.append(slots.numel()) or propose(slots, *args, **into)
    params = mixed_params(5, 6, temperature=1.0, ignore_eos=True, **{**PLAIN, "max_tokens": 10})
    for i, p in enumerate(params):
        p.max_tokens = 6 + 3 * i
    assert_same(generate(llm, params), generate(off, params), params, reference_model)
    assert {tuple(of_step) for of_step in lengths if len(of_step) == 5} == {(0,) * 5}
    assert [K] in lengths
    assert drafted, "few requests draft"
    assert max(drafted) <= 3, "where nothing will be verified, nothing is drafted"
    found = rollouts_of(llm)
    assert len(found) == 5
    num_checked, num_unknown = check_features(found, reference_model, 1.0)
    assert num_checked > 0.9 * (num_checked + num_unknown), "but it is kept what the target saw"


def test_k_may_change_from_step_to_step(tiny_model, off, reference_model, monkeypatch):
    """As it does where it follows from what steps take. The schedule counts steps among others of their K."""
    llm = build_on_device(tiny_model, budget=True)
    schedule, lengths = schedule_of(llm), lengths_of_drafts(llm)
    ks, told, observe = itertools.cycle([0, 3, 1, 0, *[3] * 6, *[1] * 5]), [], schedule.observe
    monkeypatch.setattr(schedule, "choose", lambda *of_step: next(ks))
    monkeypatch.setattr(schedule, "observe", lambda *of_step: told.append(of_step) or observe(*of_step))
    params = mixed_params(9, 6, temperature=1.0, ignore_eos=True, **{**PLAIN, "max_tokens": 20})
    for _ in range(2):
        assert_same(generate(llm, params), generate(off, params), params, reference_model)
    assert {0, 1, 3} <= {length for of_step in lengths for length in of_step}
    stats, (drafted, accepted, seconds) = stats_of(llm), zip(*told, strict=True)
    assert {tuple(set(of_step.tolist())) for of_step in drafted} == {(1,), (3,)}
    assert 0 < sum(map(np.sum, drafted)) < stats["draft_tokens"]
    assert 0 < sum(map(np.sum, accepted)) < stats["accepted_tokens"]
    assert any(of_step is not None for of_step in seconds)


def test_while_nothing_is_drafted_nothing_is_verified(tiny_model):
    llm = build_on_device(tiny_model, budget=True)
    lengths, params = lengths_of_drafts(llm), mixed_params(3, 6, temperature=1.0, **{**PLAIN, "max_tokens": 20})
    llm.collective_rpc("rollout_spec", args=("set_enabled", False))
    generate(llm, params)
    assert {length for of_step in lengths for length in of_step} == {0}
    llm.collective_rpc("rollout_spec", args=("set_enabled", True))
    generate(llm, params)
    assert any(length for of_step in lengths for length in of_step)
    assert stats_of(llm)["accepted_tokens"] > 0


def test_synchronous_scheduling_keeps_the_ranges(tiny_model):
    """vLLM verifies as many drafts as there are then, whatever its schedule says."""
    llm = build_on_device(tiny_model, budget=True, async_scheduling=False)
    assert schedule_of(llm) is None
    assert len(generate(llm, mixed_params(8, 1, max_tokens=10))) == 8
