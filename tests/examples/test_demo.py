"""The demo's task, policy and picture; the demo itself is run by `make demo`."""

from __future__ import annotations

import io
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.__main__ import main
from examples.demo.policy import (
    build_tokenizer,
    warm_start,
)
from examples.demo.task import OPERATORS, make_prompt, parse_prompt, reward, trace_text, word

FIXED = settings(deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
PROMPT = "numbers 7 3 5 target 22 :"
TOKENIZER = build_tokenizer()


@FIXED
@given(SEEDS)
def test_a_trace_is_true_and_rewarded_exactly_when_it_claims_a_hit(seed):
    rng = random.Random(seed)
    prompt = make_prompt(rng)
    numbers, _ = parse_prompt(prompt)
    assert len(set(numbers)) == 3
    trace = trace_text(prompt, rng)
    assert ("answer" in trace) != trace.endswith(" stop")
    assert reward(prompt, trace) == float("answer" in trace)
    tries = [words.split() for words in trace.split("try ")[1:]]
    assert len({tuple(words) for words in tries}) == len(tries)
    for words in tries:
        for i in (i for i, text in enumerate(words) if text == "="):
            assert words[i + 1] == word(OPERATORS[words[i - 2]](int(words[i - 3]), int(words[i - 1])))


@FIXED
@given(SEEDS)
def test_the_tokenizer_knows_every_word_and_round_trips(seed):
    rng = random.Random(seed)
    prompt = make_prompt(rng)
    text = f"{prompt} {trace_text(prompt, rng)}"
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.split())
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("answer ( 5 * 3 ) + 7", 1.0),
        ("try 3 - 7 = out no answer 7 + ( 3 * 5 )", 1.0),
        ("answer ( 7 * 3 ) - 5", 0.5 * (1 - 6 / 20)),
        ("answer ( 7 + 3 ) - 5", 0.5 * (1 - 17 / 20)),
        ("answer ( 7 * 5 ) * 3", 0.0),  # misses by more than the scale
        ("", 0.0),
        ("( 5 * 3 ) + 7", 0.0),
        ("answer ( 5 * 3 ) + 7 try", 0.0),
        ("answer answer ( 5 * 3 ) + 7", 0.0),
        ("answer ( 7 + 3 ) * 5 answer ( 5 * 3 ) + 7", 0.0),
        ("answer ( 5 * 3 + 7", 0.0),
        ("answer ( 5 * 3 ) / 7", 0.0),
        ("answer ( 9 + 9 ) + 4", 0.0),
    ],
)
def test_reward_of_an_answer(completion, expected):
    assert reward(PROMPT, completion) == pytest.approx(expected)


def test_a_piped_warm_start_says_how_far_it_is_and_writes_the_same_policy_again(tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))  # shows only what was flushed, as a pipe
    for name in "ab":
        warm_start(tmp_path / name, seed=5, steps=10, batch_size=4)
    lines = written.getvalue().decode().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"  step {step} of 10" for step in range(1, 11)] * 2
    assert float(lines[9].split()[-1]) < float(lines[0].split()[-1])
    saved, repeated = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    for weight, twin in zip(saved.parameters(), repeated.parameters(), strict=True):
        assert weight.equal(twin)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.padding_side == "left"
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--seed", "-1"], "--seed fit in 32 bits"),
        (["--out", "/dev/null/demo"], "--out: "),
        ([], "pip install 'rollout-spec[demo]', and vLLM: "),
    ],
)
def test_what_would_fail_late_is_refused_at_once(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("examples.demo.__main__.ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
