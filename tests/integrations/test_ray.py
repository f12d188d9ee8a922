"""Engines of OpenRLHF and verl under Ray, on three nodes: rollouts, a common history, and what dies.

`make test-frameworks` makes an environment with Ray and the frameworks; elsewhere these tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError

from tests.integrations.framework_engines import seeds_of
from tests.integrations.ray_engines import (
    NODE,
    cluster_of_three,
    job,
    openrlhf_engines,
    verl_engines,
    wait_until,
)
from tests.integrations.test_frameworks import openrlhf_variable_of_a_job, verl_variable, with_options

pytestmark = [pytest.mark.slow, pytest.mark.engine]

FIRST, LATER = seeds_of(0), seeds_of(1)
RUNNING, LONG = range(100, 160), {"max_tokens": 240, "ignore_eos": True}
"""Rollouts that are seconds away from their end when something dies."""
ASKING = RUNNING[::5][:3]
"""One rollout of each prompt. An engine reads what others have said of a prompt while requests of it run."""
WARM = 2
"""An engine that has others' history of the same rollouts has more than so many times the tokens per step."""


@pytest.fixture(scope="module")
def cluster():
    with cluster_of_three() as cluster:
        yield cluster


@contextlib.contextmanager
def engine_without_drafts(cluster, model, make):
    """An engine that has the same noise as the others and drafts nothing."""
    with job(cluster, {"ROLLOUT_SPEC": '{"speculation": false}'}):
        (engine,) = make(model, 1)
        yield engine
        assert engine.command("stats")["draft_tokens"] == 0


def common_history(folder):
    """Options. With a budget, how much is drafted would depend on how busy the machine is."""
    return {"history_dir": str(folder), "budget": False}


def num_read(engine):
    """Rollouts of earlier runs and of other engines that an engine has found in the folder."""
    return engine.command("history")["folder"]["rollouts_read"]


def num_written(engine):
    """Rollouts that are in the folder, and can be read by others."""
    return engine.command("history")["folder"]["rollouts_written"]


def is_running(engine, before):
    return engine.command("stats")["emitted_tokens"] > before["emitted_tokens"]


def assert_rollouts(engine, seeds, expected, than=0.0):
    """An engine's rollouts, by seed, are the expected ones and took more tokens per step, which are returned."""
    rollouts, tokens_per_step = engine.rollouts(seeds)
    assert rollouts == [expected[seed] for seed in seeds]
    assert tokens_per_step > than
    print(len(rollouts), "rollouts identical;", f"{tokens_per_step:.2f} tokens per step")
    return tokens_per_step


class TestOpenRLHF:
    @pytest.fixture(scope="class")
    def expected(self, cluster, tiny_model):
        """The rollouts that there must be, by seed."""
        pytest.importorskip("openrlhf")
        expected = {}
        with engine_without_drafts(cluster, tiny_model, openrlhf_engines) as engine:
            for seeds, changes in ([*FIRST, *LATER], {}), (RUNNING, LONG):
                expected.update(zip(seeds, engine.rollouts(seeds, **changes)[0], strict=True))
        return expected

    @pytest.fixture(scope="class")
    def engines(self, cluster, tiny_model, tmp_path_factory, expected):
        """Two on different nodes, of which the first has generated FIRST, and its tokens per step."""
        variable = with_options(openrlhf_variable_of_a_job(), **common_history(tmp_path_factory.mktemp("history")))
        with job(cluster, {"ROLLOUT_SPEC": variable}):
            first, second = openrlhf_engines(tiny_model, 2)
            yield first, second, assert_rollouts(first, FIRST, expected)

    def test_engines_on_different_nodes_share_history(self, engines, expected):
        first, second, cold = engines
        assert first.place()[0] != second.place()[0]
        wait_until(lambda: num_written(first) >= len(FIRST))
        assert second.rollouts(ASKING, **LONG)[0] == [expected[seed] for seed in ASKING]
        assert num_read(second) >= len(FIRST)
        assert_rollouts(second, FIRST, expected, than=WARM * cold)

    @pytest.mark.parametrize("way", ["ray.kill", "SIGKILL"])
    def test_a_restarted_actor_is_warm(self, engines, expected, way):
        first, _, cold = engines
        before, (node, process) = first.command("stats"), first.place()
        running = first.start(RUNNING, **LONG)
        wait_until(lambda: is_running(first, before))
        if way == "ray.kill":
            ray.kill(first.actor, no_restart=False)
        else:
            os.kill(process, signal.SIGKILL)
        with pytest.raises(RayActorError):
            first.tokens(running)
        assert first.place()[0] == node
        assert first.place()[1] != process
        assert first.command("history")["requests"] == 0
        assert num_read(first) >= len(FIRST)
        assert_rollouts(first, FIRST, expected, than=WARM * cold)

    def test_a_lost_node_costs_its_running_rollouts(self, cluster, engines, expected):
        first, second, cold = engines
        (node,) = (node for node in cluster.worker_nodes if node.node_id == second.place()[0])
        num_known, num_before = num_read(first), num_written(second)
        assert second.rollouts(LATER)[0] == [expected[seed] for seed in LATER]
        wait_until(lambda: num_written(second) >= num_before + len(LATER))
        before = second.command("stats")
        lost, kept = second.start(RUNNING, **LONG), first.start(RUNNING, **LONG)
        wait_until(lambda: is_running(second, before))
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(RayActorError):
            second.tokens(lost)
        assert first.tokens(kept) == [expected[seed] for seed in RUNNING]
        assert num_read(first) >= num_known + len(LATER)
        assert_rollouts(first, LATER, expected, than=WARM * cold)

        cluster.add_node(**NODE)
        assert second.place()[0] != node.node_id
        assert second.command("history")["requests"] == 0
        assert_rollouts(second, LATER, expected, than=WARM * cold)


class TestVerl:
    def test_servers_on_different_nodes(self, cluster, tiny_model, tmp_path):
        pytest.importorskip("verl")
        with engine_without_drafts(cluster, tiny_model, verl_engines) as engine:
            expected = dict(zip(FIRST, engine.rollouts(FIRST)[0], strict=True))
            engine.update_weights(tiny_model)
            expected.update(zip(LATER, engine.rollouts(LATER)[0], strict=True))

        models = [str(tiny_model.parent / "*")]  # the documented ones are Qwen's
        variable = with_options(verl_variable(), models=models, **common_history(tmp_path / "history"))
        with job(cluster, {"ROLLOUT_SPEC": variable}):
            first, second = verl_engines(tiny_model, 2)
            assert first.place()[0] != second.place()[0]
            cold = assert_rollouts(first, FIRST, expected)
            wait_until(lambda: num_written(first) >= len(FIRST))
            second.rollouts(ASKING)
            assert num_read(second) >= len(FIRST)
            assert_rollouts(second, FIRST, expected, than=WARM * cold)
            second.update_weights(tiny_model)
            assert_rollouts(second, LATER, expected)
            assert second.command("stats")["policy_version"] == 1
