"""Metrics and reports of a trainer with several processes: each has an engine, and the first one counts all of them."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.trainers.engines import Engines, Progress
from rollout_spec.stats import SpeculationStats


def train(rank, folder, results):
    """One of two processes. The other one's counters are there when it has said so; nobody waits for them."""
    sys.path.insert(0, str(Path(__file__).parent))
    from test_controller import Engine, Params

    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    controller, llm = EngineController(RolloutSpecConfig(), logprob_tolerance=math.inf), Engine()
    controller.begin_run(seed=3, replica=rank, num_replicas=2)
    controller.attach(llm)
    found = []
    for step in range(3):
        if rank == 0 or step < 2:
            llm.generate(["a"] * (1 + 2 * rank), Params())
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=300))
        if rank == 0:
            found.append(controller.take_metrics())
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=300))
    results.put((rank, found, controller.report()))
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
def test_the_first_process_counts_all_engines(tmp_path):
    """Each rollout has two tokens, of which one was drafted. In the last step the second engine generates nothing."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=train, args=(rank, tmp_path, results)) for rank in range(2)]
    for process in processes:
        process.start()
    answers = {rank: answer for rank, *answer in (results.get(timeout=300) for _ in processes)}
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    metrics, report = answers[0]
    assert [of_step["rollout_spec/tokens"] for of_step in metrics] == [8, 8, 2]
    assert [of_step["rollout_spec/draft_tokens"] for of_step in metrics] == [4, 4, 1]
    assert {of_step["rollout_spec/engines"] for of_step in metrics} == {2}
    assert report["stats"]["draft_tokens"] == 9
    assert [(number, tokens) for number, tokens, _ in report["engines"]] == [(0, 6), (1, 12)]
    metrics, report = answers[1]
    assert (metrics, report["stats"]["draft_tokens"]) == ([], 6), "its own alone"


def test_the_engines_of_another_trainer_in_the_same_processes_do_not_count(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    first, second = Engines(1, 2), Engines(0, 2)
    first.publish(Progress({}, 1, 1.0, 1, 1))
    assert second.others() == {}


def test_without_other_processes_nothing_is_shared(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    controller = EngineController(RolloutSpecConfig())
    controller.begin_run(seed=3, num_replicas=2)
    assert not controller._engines.are_several


def test_a_store_that_fails_ends_no_run(monkeypatch, caplog):
    def fail():
        raise RuntimeError("the store has gone")

    engines = Engines(0, 2)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", fail)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert engines.are_several
    assert engines.others() == {}
    assert not engines.are_several
    assert caplog.text.count("the store has gone") == 1


def test_engines_that_generate_at_once_take_as_long_as_the_slowest():
    """Of time and memory the most counts, of all else the sum, since the last log."""
    stats = SpeculationStats()
    stats.record([4], [3])
    controller = EngineController(RolloutSpecConfig())
    controller.llm = object()
    for times in (1, 2):
        of_both = SpeculationStats.total([stats.to_dict()] * times).to_dict()
        engines = {n: Progress(of_both, times * 10, times * (2.0 + n), (5 + n) * 10**6, 7) for n in range(2)}
        controller._all_engines = lambda engines=engines: engines
        metrics = controller.take_metrics()
        assert metrics["rollout_spec/generation_seconds"] == 3.0
        assert metrics["rollout_spec/drafter_mbytes"] == 6.0
        assert (metrics["rollout_spec/tokens"], metrics["rollout_spec/accepted_tokens"]) == (20, 6)


def test_counters_of_engines_add_up():
    first, second = SpeculationStats(), SpeculationStats()
    first.record([2], [1])
    second.record([4, 0], [3, 0])
    total = SpeculationStats.total([first.to_dict(), second.to_dict()])
    assert (total.steps, total.draft_tokens, total.drafted_per_position) == (2, 6, [2, 2, 1, 1])
    assert SpeculationStats.total([]) == SpeculationStats()
    assert SpeculationStats.between(first.to_dict(), total.to_dict()).to_dict() == second.to_dict()
