"""The demo's task and policy; the demo itself is run by `make demo`."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from rollout_spec.demo import task
from rollout_spec.demo.policy import build_model, build_tokenizer
from rollout_spec.demo.report import plot_rollouts
from rollout_spec.demo.run import _warm_start
from rollout_spec.demo.warm_start import STEPS, trace_batches, warm_start


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_traces_earn_what_they_claim(seed):
    rng = random.Random(seed)
    problem = task.make_problem(rng)
    prompt = task.prompt_text(problem)
    assert task.parse_prompt(prompt) == problem
    trace = task.trace_text(problem, rng)
    if trace.endswith(task.GIVE_UP):
        assert task.reward(prompt, trace) == 0.0
    else:
        assert task.reward(prompt, trace) == task.reward(problem, trace) == 1.0
        answer = trace.split("answer ")[1]
        for tampered in (answer.replace("(", "", 1), answer + " + 1", answer.replace(answer.split()[-1], "31", 1)):
            assert task.reward(problem, f"answer {tampered}") == 0.0
    tokenizer = _tokenizer()
    ids = tokenizer.encode(f"{prompt} {trace}")
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == f"{prompt} {trace}"


def _tokenizer(cache=[]):  # noqa: B006
    if not cache:
        cache.append(build_tokenizer())
    return cache[0]


def test_rewards():
    problem = task.Problem((7, 3, 5), 22)
    assert task.reward(problem, "try anything answer ( 3 * 5 ) + 7") == 1.0
    assert task.reward(problem, "answer 7 + ( 3 * 5 )") == 1.0
    assert task.reward(problem, "answer ( 7 * 3 ) - 5") == pytest.approx(0.5 * (1 - 6 / 20))
    assert task.reward(problem, "answer ( 7 * 5 ) * 3") == 0.0  # misses by more than the scale
    assert task.reward(problem, "answer ( 7 * 3 ) + 3") == 0.0
    assert task.reward(problem, "answer ( 7 * 3 + 5") == 0.0
    with pytest.raises(ValueError, match="prompt must read"):
        task.reward("numbers one two", "answer")
    with pytest.raises(ValueError, match="operator"):
        task.apply("/", 1, 2)


def test_policy_depends_on_the_seed_alone():
    tokenizer = _tokenizer()
    a, b, c = (build_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert a.equal(b)
    assert not a.equal(c)


def test_warm_start_writes_a_policy(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen = []
    stats = warm_start(tmp_path / "policy", steps=2, batch_size=2, progress=lambda step, loss: seen.append(step))
    assert seen == [1, 2]
    assert stats["tokens"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").get_vocab() == _tokenizer().get_vocab()
    for options in ({"steps": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            warm_start(tmp_path, **options)


def test_a_piped_demo_says_how_far_it_is(tmp_path, monkeypatch):
    """Where no bar is drawn, the warm start would be silent for minutes."""
    lines_before_the_end = []

    def stub(path, *, seed, progress):
        path.mkdir()
        for step in range(1, STEPS + 1):
            progress(step, 1.0)
        lines_before_the_end.extend(written.getvalue().splitlines())
        return {"parameters": 1.0, "tokens": 1.0, "seconds": 1.0, "loss": 1.0}

    written = io.StringIO()
    monkeypatch.setattr("rollout_spec.demo.warm_start.warm_start", stub)
    _warm_start(tmp_path / "policy", 0, Console(file=written))
    assert sum(f"of {STEPS}, loss 1.000" in line for line in lines_before_the_end) >= 10


def test_labels_leave_out_prompts_and_padding():
    input_ids, labels = next(trace_batches(_tokenizer(), random.Random(0), 4))
    learned = labels != -100
    assert (labels[learned] == input_ids[learned]).all()
    assert not learned[:, :7].any()
    assert (input_ids[~learned][:, None] != _tokenizer().eos_token_id).all()


def test_the_picture_of_the_readme_is_drawn_from_a_report(tmp_path):
    pytest.importorskip("matplotlib")
    recorded = Path(__file__).parents[2] / "experiments/results/demo_cpu.json"
    plot_rollouts(json.loads(recorded.read_text()), tmp_path / "rollouts.png")
    assert (tmp_path / "rollouts.png").stat().st_size > 10_000
