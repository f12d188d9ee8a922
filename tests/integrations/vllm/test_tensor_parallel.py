"""Two tensor-parallel ranks, each in a process of its own."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from rollout_spec import engine_kwargs
from rollout_spec.history.folder import HistoryFolder, Origin
from tests.conftest import wait_until
from tests.integrations.engines import (
    assert_same,
    build,
    every_draft,
    generate,
    mixed_params,
    own_processes,
    verify_all,
)

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, own_processes]

K = 4


@contextmanager
def two_ranks(model, **kwargs):
    llm = build(model, tensor_parallel_size=2, distributed_executor_backend="mp", num_gpu_blocks_override=100, **kwargs)
    try:
        yield llm
    finally:
        llm.llm_engine.model_executor.shutdown()  # the engine itself would take the other engines' groups with it


def ask(llm, *command):
    return llm.collective_rpc("rollout_spec", args=command)


def counts(stats):
    """What is counted, without what is timed."""
    return {name: value for name, value in stats.items() if "seconds" not in name}


class Costs:
    """For vLLM's `worker_extension_cls`."""

    def learned_costs(self):
        """What this rank's budget has learned of steps without drafts and with them."""
        sizes = self.model_runner.rollout_spec.session.budget.times._sizes
        return [[(size.tokens, size.seconds) for size in of_kind.values()] for of_kind in sizes]


def check_rollouts(llm, off, reference_model, seed):
    params = mixed_params(8, seed, max_tokens=30)
    assert_same(generate(llm, params), generate(off, params), params, reference_model)


def test_the_ranks_agree_and_the_rollouts_are_those_of_one_rank(tiny_model, off, reference_model):
    options = engine_kwargs(**every_draft(K))
    with two_ranks(tiny_model, **options) as llm:
        check_rollouts(llm, off, reference_model, 1)
        ask(llm, "set_enabled", False)
        check_rollouts(llm, off, reference_model, 2)
        before = ask(llm, "stats")
        ask(llm, "set_enabled", True)
        check_rollouts(llm, off, reference_model, 1)
        after = ask(llm, "stats")
    for first, second in (before, after):
        assert counts(first) == counts(second)
    assert after[0]["accepted_tokens"] > before[0]["accepted_tokens"]


def test_the_ranks_draft_the_same(tiny_model, off, reference_model):
    """Each rank has a budget, which learns from the first rank's times: with their own they would draft differently."""
    options = {"drafter": "tests.adversaries.SlowOnTheSecondRank"}
    extension = {"worker_extension_cls": f"{__name__}.Costs"}
    with two_ranks(tiny_model, **extension, **engine_kwargs(num_speculative_tokens=K, **options)) as llm:
        for seed in (1, 2, 3):
            check_rollouts(llm, off, reference_model, seed)
        first, second = ask(llm, "stats")
        costs = llm.collective_rpc("learned_costs")
    assert counts(first) == counts(second)
    assert first["draft_tokens"] > 0
    assert costs[0] == costs[1]
    assert all(costs[0])


def generating(llm):
    """(a thread that generates, what that has raised): it must not wait for ranks that are gone."""
    raised = []

    def run():
        try:
            generate(llm, mixed_params(8, 1, max_tokens=100, ignore_eos=True))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("drafter", ["RaisesOnTheFirstRank", "RaisesOnTheSecondRank", "RaisesInTheExchangeOfHistory"])
def test_a_drafter_that_raises_on_one_rank(tiny_model, tmp_path, drafter, capfd):
    """In the exchange the other one waits for what the first has read."""
    options = {"drafter_options": {"rank": 0}, "history_dir": str(tmp_path)} if "History" in drafter else {}
    options = verify_all(num_speculative_tokens=K, drafter=f"tests.adversaries.{drafter}", **options)
    with two_ranks(tiny_model, **options) as llm:
        thread, raised = generating(llm)
        thread.join(60)
        assert not thread.is_alive()
        assert raised
    printed = "".join(capfd.readouterr())
    if drafter == "RaisesOnTheSecondRank":  # vLLM says what the first rank raised
        assert "rank 1 cannot go on, and ends the engine" in printed
        assert "fault of the drafter" in printed
    else:
        assert "fault of the drafter" in printed + str(raised)


def test_the_ranks_have_the_same_history_of_a_folder(tiny_model, off, reference_model, tmp_path):
    """The first rank reads it, when the engine starts and between steps."""
    options = verify_all(num_speculative_tokens=K, history_dir=str(tmp_path))
    with two_ranks(tiny_model, **options) as llm:
        check_rollouts(llm, off, reference_model, 1)
        wait_until(lambda: ask(llm, "history")[0]["folder"]["rollouts_written"] >= 8)
    other = HistoryFolder(str(tmp_path), Origin())
    rollouts = other.load(10**6)
    assert len(rollouts) == 8
    with two_ranks(tiny_model, **options) as llm:
        first, second = ask(llm, "history")
        assert first.pop("folder")["rollouts_read"] == 8
        assert second.pop("folder") == {}
        assert first == second
        for rollout in rollouts[:3]:
            other.write([rollout._replace(order=1)])
        check_rollouts(llm, off, reference_model, 2)
        wait_until(lambda: ask(llm, "history")[0]["folder"]["rollouts_read"] >= 11)
        check_rollouts(llm, off, reference_model, 1)
        before, after = ask(llm, "stats")
        assert counts(before) == counts(after)
        assert before["accepted_tokens"] > 0
        first, second = ask(llm, "history")
        assert first["rollouts"] == second["rollouts"] == 8 + 3 + 16


@pytest.mark.slow
def test_a_folder_that_the_first_rank_cannot_read_and_the_first_rank_s_death(
    tiny_model, off, reference_model, tmp_path
):
    (tmp_path / "file").write_text("no folder")
    options = verify_all(num_speculative_tokens=K, history_dir=str(tmp_path / "file"))
    with two_ranks(tiny_model, **options) as llm:
        check_rollouts(llm, off, reference_model, 1)
        check_rollouts(llm, off, reference_model, 2)
        first, second = ask(llm, "stats")
        assert counts(first) == counts(second)
        assert first["drafter_errors"] == 0
        first, second = ask(llm, "history")
        assert first["rollouts"] == second["rollouts"] == 16
        wait_until(lambda: ask(llm, "history")[0]["folder"]["rollouts_waiting"] >= 16)
        thread, raised = generating(llm)
        engine = llm.llm_engine
        while not engine.has_unfinished_requests():
            time.sleep(0.01)
        os.kill(engine.model_executor.workers[0].proc.pid, signal.SIGKILL)
        thread.join(120)
        assert not thread.is_alive()
        assert raised
