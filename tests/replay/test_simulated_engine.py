"""The simulated engine: what a phase takes under each policy of draft budgets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollout_spec import cli
from rollout_spec.drafters import build_drafter
from rollout_spec.replay.cost import EngineCost, read_cost
from rollout_spec.replay.engine import (
    FixedK,
    Learned,
    LengthClasses,
    NoDrafts,
    Oracle,
    Ranges,
    Step,
    compare,
    run_phase,
)
from rollout_spec.replay.simulate import Request
from rollout_spec.replay.traces import Problem, Rollout, read_traces

FLAT = EngineCost("flat", np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0, 0.0)
STEEP = EngineCost("steep", np.array([1.0, 2.0]), np.array([1.0, 2.0]), 0.0, 0.0)


def phase_requests(num_problems=3, samples=6, tokens=120, seed=0):
    """Rollouts of a problem that are mostly alike, of different lengths."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(num_problems):
        base = rng.integers(0, 200, tokens)
        rollouts = []
        for sample in range(samples):
            text = np.where(rng.random(tokens) < 0.15, rng.integers(0, 200, tokens), base)
            text = text[: int(rng.integers(tokens // 2, tokens))].astype(np.int32)
            rollouts.append(Rollout(sample, 0, np.array([number, 7], np.int32), text, (text.size,)))
        problem = Problem(str(number), rollouts)
        requests += [Request(problem, rollout) for rollout in rollouts]
    return requests


def simulate(policy, cost, requests, batch=4, k=4):
    drafter = partial(build_drafter, "suffix", max_draft_tokens=k)
    return run_phase(requests, drafter, policy, cost, num_speculative_tokens=k, batch=batch)


def test_without_drafts_a_phase_takes_its_steps():
    requests = phase_requests()
    phase = simulate(NoDrafts(), FLAT, requests, batch=len(requests))
    longest = max(request.rollout.tokens.size for request in requests)
    assert phase.steps == phase.seconds == longest - 1  # the first token comes with the prompt
    assert phase.tokens == sum(request.rollout.tokens.size for request in requests)
    assert phase.drafted == 0


def test_every_policy_generates_the_same_tokens():
    requests = phase_requests()
    results = compare([requests], STEEP, num_speculative_tokens=4, batch=5)
    tokens = sum(request.rollout.tokens.size for request in requests)
    assert set(results) == {
        "none", "K=1", "K=2", "K=4", "all drafts", "threshold 0.05", "threshold 0.1", "threshold 0.3", "threshold 0.6",
        "classes 0-1-4", "classes 1-2-4", "ours", "oracle",
    }  # fmt: skip
    for name, phase in results.items():
        assert phase.tokens == tokens, name
        assert phase.accepted <= phase.drafted
        assert phase.steps >= 1


def test_ours_pays_where_tokens_are_free_and_stays_out_where_they_are_not():
    free = compare([phase_requests(seed=1), phase_requests()], FLAT, num_speculative_tokens=4, batch=6)
    assert free["ours"].seconds < 0.8 * free["none"].seconds
    assert free["ours"].seconds < 1.1 * min(free[f"K={k}"].seconds for k in (1, 2, 4))
    dear = compare([phase_requests(seed=1), phase_requests()], STEEP, num_speculative_tokens=4, batch=6)
    assert dear["ours"].seconds < 1.02 * dear["none"].seconds
    assert dear["K=4"].seconds > 1.2 * dear["none"].seconds
    assert dear["oracle"].seconds <= dear["none"].seconds


def test_the_price_of_drafting_counts():
    requests = phase_requests()
    fixed = FLAT._replace(drafted_seconds=0.5)
    plain, dear = simulate(FixedK(4), FLAT, requests), simulate(FixedK(4), fixed, requests)
    assert plain.steps == dear.steps
    assert plain.seconds < dear.seconds <= 1.5 * plain.seconds
    asked = simulate(FixedK(0), FLAT._replace(draft_seconds=0.1), requests, batch=1)
    assert asked.seconds == pytest.approx(1.1 * asked.steps)


def test_a_step_takes_what_its_requests_cost_and_no_less_than_the_host():
    cost = STEEP._replace(drafted_seconds=0.5, request_seconds=10.0, host_seconds=30.0, host_request_seconds=2.0)
    assert cost.whole_step(1, 0) == 32
    assert cost.whole_step(4, 0) == 4 + 40
    assert cost.whole_step(4, 8) == 12 + 40 + 0.5
    assert cost._replace(draft_call_seconds=3.0, draft_seconds=0.5).drafting(4) == 5


def test_ranges_draft_by_the_number_of_requests():
    requests = phase_requests()
    policy = Ranges([(1, 2, 4), (3, 4, 2), (6, 8, 0)])
    assert [policy.k(n) for n in range(1, 11)] == [4, 4, 2, 2, 0, 0, 0, 0, 0, 0]
    assert Ranges([(1, 2, 4)]).k(1000) == 4, "the last range has no upper end"
    phase = simulate(policy, FLAT, requests, batch=6)
    assert simulate(NoDrafts(), FLAT, requests, batch=6).steps > phase.steps
    assert policy.seconds(FLAT) == phase.steps, "one second each"


def test_the_device_pays_for_drafts_that_are_not_there():
    """Every request carries K tokens, however long its draft is."""
    strange = [
        Request(Problem(str(n), [r]), r)
        for n, tokens in enumerate((range(20, 31), range(50, 61)))
        for r in [Rollout(0, 0, np.zeros(1, np.int32), np.array(tokens, np.int32), (11,))]
    ]
    policy = Ranges([(1, 1, 4), (2, 2, 2)])
    phase = simulate(policy, STEEP, strange, batch=2)
    assert phase.drafted == 0
    assert phase.seconds == 10 * 2
    assert policy.seconds(STEEP) == 10 * 2 * 3
    assert policy.seconds(STEEP._replace(draft_call_seconds=1.0)) == 10 * (2 * 3 + 1)


def test_classes_follow_the_lengths_of_a_problem():
    policy = LengthClasses((0, 2, 4))
    for problem, length in ((1, 10), (2, 50), (3, 100)):
        policy.on_finish(problem, length)
    step = Step(np.ones(16, np.float32), np.arange(5) * 4, [1, 2, 3, 9], np.zeros(4, np.int64))
    assert policy.decide(step).tolist() == [0, 2, 4, 2]


def test_thresholds_and_oracles_cut_each_draft():
    confidence = np.float32([0.9, 0.7, 0.2, 0.5, 0.4, 0.95])
    starts = np.array([0, 3, 3, 5, 6])
    step = Step(confidence, starts, [1, 2, 3, 4], np.array([1, 0, 2, 0]))
    assert FixedK(4, 0.6).decide(step).tolist() == [2, 0, 0, 1]
    assert FixedK(1).decide(step).tolist() == [1, 0, 1, 1]
    assert Oracle(FLAT).decide(step).tolist() == [1, 0, 2, 0]
    assert Oracle(STEEP).decide(step).tolist() == [0, 0, 0, 0]


def test_who_learns_has_learned_in_the_phases_before(monkeypatch):
    ended = []
    on_finish = LengthClasses.on_finish
    monkeypatch.setattr(LengthClasses, "on_finish", lambda self, *a: (ended.append(self), on_finish(self, *a)))
    phases = [phase_requests(2, 3, 30, seed=1), phase_requests(2, 3, 30)]
    results = compare(phases, FLAT, num_speculative_tokens=4, batch=6)
    assert len(ended) == 2 * 12, "both classes have seen both phases"
    assert "ours, new" in results


def test_tails():
    """One rollout after the other: what is left at the end is known."""
    requests = phase_requests(1, 10, 50)
    phase = simulate(NoDrafts(), FLAT, requests, batch=1)
    lengths = [request.rollout.tokens.size for request in requests]
    assert phase.seconds == sum(lengths) - 10
    assert phase.tail_seconds == lengths[-1] - 1
    steps_to_ninety = next(n for n in range(sum(lengths)) if said_after(n, lengths) >= 0.9 * sum(lengths))
    assert phase.token_tail_seconds == phase.seconds - steps_to_ninety


def said_after(steps, lengths):
    """Tokens of a phase of one request at a time after so many steps: the first of each comes with its prompt."""
    said = 0
    for length in lengths:
        if steps <= 0:
            return said
        said += min(length, steps + 1)
        steps -= length - 1
    return said


def test_rollouts_of_one_token_take_no_step():
    requests = phase_requests(1, 3, 30)
    short = [
        request._replace(rollout=request.rollout._replace(tokens=request.rollout.tokens[:1])) for request in requests
    ]
    assert simulate(NoDrafts(), FLAT, short).steps == 0
    mixed = simulate(FixedK(4), FLAT, short + requests)
    assert mixed.tokens == 3 + sum(request.rollout.tokens.size for request in requests)


def test_beyond_the_curve_goes_on_as_its_upper_half():
    cost = EngineCost("x", np.array([1.0, 10.0, 20.0, 30.0]), np.array([1.0, 1.0, 2.0, 2.0]), 0.0, 0.0)
    assert cost.step(50) == pytest.approx(2.0 + 20 * 1.0 / 20)


def test_curves_are_checked(tmp_path):
    path = tmp_path / "cost.json"
    for bad in (
        "{",
        '{"name": "x"}',
        '{"name": "x", "tokens": [1, 1], "seconds": [1, 2]}',
        '{"name": "x", "tokens": [1, 2], "seconds": [2, 1]}',
        '{"name": "x", "tokens": [1], "seconds": [1]}',
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"cost\.json"):
            read_cost(path)
    path.write_text(json.dumps({"name": "ok", "tokens": [1, 10], "seconds": [1, 1.9], "drafted_seconds": 0.1}))
    cost = read_cost(path)
    assert cost.step(1) == 1
    assert cost.step(20) == pytest.approx(2.9)
    assert cost.drafted_seconds == 0.1


def test_the_command_says_that_it_is_simulated(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    requests = phase_requests(2, 4, 40)
    pq.write_table(
        pa.table(
            {
                "prompt_id": [request.problem.prompt_id for request in requests],
                "sample_id": [request.rollout.sample_id for request in requests],
                "prompt_tokens": [request.rollout.prompt.tolist() for request in requests],
                "completion_tokens": [request.rollout.tokens.tolist() for request in requests],
            }
        ),
        tmp_path / "rollouts.parquet",
    )
    curve = tmp_path / "cost.json"
    curve.write_text(json.dumps({"name": "tiny", "tokens": [1, 10], "seconds": [1, 1.1]}))
    out = tmp_path / "out.json"
    arguments = ["replay", str(tmp_path / "rollouts.parquet"), "--engine-cost", str(curve), "-k", "4"]
    assert cli.main([*arguments, "--batch", "4", "--json", str(out)]) == 0
    assert "Simulated" in capsys.readouterr().out
    rows = {row["policy"]: row for row in json.loads(out.read_text())}
    assert rows["none"]["speedup"] == 1
    assert rows["ours"]["simulated"]
    assert cli.main([*arguments, "--drafter", "ngram"]) == 2
    assert "drafter of its own" in capsys.readouterr().err
    curve.write_text("{}")
    assert cli.main(arguments) == 2
    assert "no cost curve" in capsys.readouterr().err


COLD = EngineCost("cold", np.array([1.0, 16.0, 144.0]), np.array([2.6e-3, 4.8e-3, 7e-3]), 0.0, 2e-5, 2e-4, 9e-3)
"""Like the demo's policy on a CPU, where the first step of each number of tokens takes 9 ms longer."""
RECORDED = Path(__file__).parents[2] / "experiments" / "results" / "real_policy" / "rollouts.parquet"


@pytest.mark.parametrize(("batch", "least_speedup"), [(1, 1.3), (16, 1.3), (64, 1.0)])
def test_first_phases_with_cold_sizes_are_alike(batch, least_speedup):
    """A new engine, twenty times with other noise. Fixed K = 8 is slower than no drafts at 16 and 64 requests."""
    pytest.importorskip("pyarrow")
    problems = read_traces(RECORDED, max_prompts=8)
    requests = [Request(p, r) for p in problems for r in p.rollouts[:16]][: 16 if batch == 1 else None]
    drafter = partial(build_drafter, "suffix", max_draft_tokens=8)
    run = partial(run_phase, requests, drafter, cost=COLD, num_speculative_tokens=8, batch=batch)
    phases = []
    for seed in range(20):
        noise = np.exp(np.abs(np.random.default_rng(seed).normal(0, 0.15, 4096)))
        phases.append(run(policy=Learned(), slowdowns=iter(noise)).seconds)
    assert run(policy=NoDrafts()).seconds / max(phases) > least_speedup
    assert max(phases) / min(phases) < 1.2


def test_the_first_step_of_a_size_takes_longer():
    cost = STEEP._replace(cold_seconds=5.0)
    requests = phase_requests()
    warm, cold = (simulate(NoDrafts(), c, requests, batch=1) for c in (STEEP, cost))
    assert cold.seconds == pytest.approx(warm.seconds + 5.0)
