"""What drafts are made of: earlier turns, others' text unless a request has a salt, and what a folder has of others."""

from unittest.mock import patch

import pytest
from vllm import SamplingParams

from rollout_spec.history.problems import problem_of_prompt
from tests.conftest import wait_until
from tests.history.made_up import rollouts_in
from tests.integrations.engines import (
    DEVICE,
    FIRST_PROMPTS,
    IS_V2,
    LAST,
    OF_RUNNER,
    PLAIN,
    assert_same,
    build,
    generate,
    history_of,
    mixed_params,
    prompts_of,
    session_of,
    stats_of,
    verify_all,
)

K = 3
PROMPT = list(range(4, 24))


def num_known(llm):
    return history_of(llm)["requests_with_history"]


def test_later_turns_draft_from_earlier_ones(tiny_model, off, reference_model):
    """A later turn's prompt is the earlier one, the rollout and a tool's answer."""
    on = build(tiny_model, **verify_all(num_speculative_tokens=K, **(DEVICE if IS_V2 else {"drafter": "suffix"})))
    conversations, known = [*FIRST_PROMPTS], []
    for turn in range(3):
        asked = mixed_params(3, turn, temperature=0.5, max_tokens=16, ignore_eos=True)
        before, outputs = num_known(on), generate(on, asked, conversations)
        known.append(num_known(on) - before)
        assert_same(outputs, generate(off, asked, conversations), asked, reference_model, conversations)
        generate(on, [LAST])
        said = [list(output.token_ids) for output in outputs]
        conversations = [
            [*before, *tokens, 3, sum(tokens) % 7, 5] for before, tokens in zip(conversations, said, strict=True)
        ]
    assert known == [0, 3, 3]
    drafter = session_of(on).drafter
    drafter.check_integrity()
    problems = {problem_of_prompt(prompt) for prompt in FIRST_PROMPTS}
    if IS_V2:
        assert {rollout.problem_id for rollout in drafter.rollouts.by_age} == problems
        return
    assert set(drafter._problems) == problems | {problem_of_prompt([1, 4, 9])}  # of LAST
    # A turn's prompt adds the tool's answer, and up to 32 tokens of context.
    assert drafter._store.num_tokens <= 3 * 19 + 2 * 3 * (3 + 32) + 3 * 3 * 16 + 3 + 2 * 3


def ask(llm, salt, **params):
    """(Greedy output, whether its problem has history, whether it is drafted from its own text alone)."""
    before, salted = num_known(llm), {} if salt is None else {"cache_salt": salt}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **params)
    drafter = session_of(llm).drafter
    with patch.object(drafter, "start_request", wraps=drafter.start_request) as start:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT, **salted}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), num_known(llm) > before, start.call_args.kwargs["own_only"]


@pytest.mark.parametrize("ignores", [False, True])
def test_a_salted_request_shares_nothing_unless_salts_are_ignored(tiny_model, tmp_path, ignores):
    options = verify_all(num_speculative_tokens=K, history_dir=str(tmp_path), ignore_cache_salt=ignores, **OF_RUNNER)
    llm, said = build(tiny_model, max_num_seqs=4, **options), []
    named = {"extra_args": {"rollout_spec": {"problem_id": 7}}}
    for salt, of_request in (("a", {}), ("a", {}), ("b", named), (None, named), ("b", named), (None, {}), (None, {})):
        tokens, is_known, own_only = ask(llm, salt, **of_request)
        said.append(tokens)
        is_first = len(said) in ((1, 3) if ignores else (4, 6))  # of a problem, as far as salts let one know
        is_alone = salt is not None and not ignores
        assert (is_known, own_only) == (not is_alone and not is_first, is_alone), len(said)
    assert said == [said[0]] * 7
    session_of(llm).close()
    assert {rollout.problem_id == 7 for rollout in rollouts_in(tmp_path)} == {True, False}
    # What is written is counted, not what is there: of equal rollouts those that end apart are one file.
    assert session_of(llm).engine_history.stats()["rollouts_written"] == (7 if ignores else 3)


def test_history_lasts_and_is_shared(tiny_model, off, reference_model, tmp_path):
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), **OF_RUNNER)
    engines = [build(tiny_model, max_num_seqs=6, **options) for _ in range(2)]
    params = mixed_params(6, 1, max_tokens=20, **PLAIN)
    expected = generate(off, params)
    assert_same(generate(engines[0], params), expected, params, reference_model)
    generate(engines[0], mixed_params(1, 9, max_tokens=2, **PLAIN))  # ends the others where the device must tell

    def has_written():
        session_of(engines[0]).exchange_history()  # once the copies have arrived
        return history_of(engines[0])["folder"]["rollouts_written"] >= 6

    def has_read():
        generate(engines[1], mixed_params(3, 7, max_tokens=2, **PLAIN))
        return history_of(engines[1])["folder"]["rollouts_read"] >= 6

    wait_until(has_written)
    assert history_of(engines[1])["folder"]["rollouts_read"] == 0, "it was not asked for these problems"
    wait_until(has_read)
    before, accepted = history_of(engines[1])["requests_with_history"], stats_of(engines[1])["accepted_tokens"]
    assert_same(generate(engines[1], params), expected, params, reference_model)
    assert history_of(engines[1])["requests_with_history"] == before + 6
    generate(engines[1], mixed_params(1, 9, max_tokens=2, **PLAIN))
    first, second = (stats_of(llm)["accepted_tokens"] for llm in engines)
    second -= accepted
    assert second > 1.2 * first, "it drafts from what the other engine has said"
    for llm in engines:
        session_of(llm).engine_history.close()
    kept = rollouts_in(tmp_path)
    assert all(rollout.features is not None and rollout.features.any() for rollout in kept if rollout.tokens.size > 1)
    assert {tuple(rollout.context.tolist()) for rollout in kept} == {tuple(prompt) for prompt in prompts_of(params)}
    third = build(tiny_model, max_num_seqs=6, **options)
    assert history_of(third)["rollouts"] == history_of(third)["folder"]["rollouts_read"] == len(kept) >= 12
    assert_same(generate(third, params), expected, params, reference_model)
    assert stats_of(third)["accepted_tokens"] > 1.2 * first


@pytest.mark.skipif(not IS_V2, reason="V1 has no drafter on the device")
def test_the_device_leaves_the_last_generation_behind_when_the_engine_ends(tiny_model, tmp_path):
    """No step follows it, which would say what has ended; what a request has said so far is left, too."""
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), **DEVICE)
    llm = build(tiny_model, max_num_seqs=7, **options)
    said = generate(llm, mixed_params(6, 1, max_tokens=20, **PLAIN))
    params = mixed_params(6, 2, max_tokens=20, **PLAIN) + mixed_params(1, 3, max_tokens=60, ignore_eos=True, **PLAIN)
    for number, (prompt, of_request) in enumerate(zip(prompts_of(params), params, strict=True)):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, of_request)
    last = {}
    while sum(output.finished for output in last.values()) < 6:
        last |= {output.request_id: output for output in llm.llm_engine.step()}
    assert llm.llm_engine.has_unfinished_requests()
    session_of(llm).close()
    kept = [r.tokens.tolist() for r in rollouts_in(tmp_path)]
    done = [output.outputs[0] for output in last.values() if output.finished]
    assert len(kept) == 13
    assert all(list(output.token_ids) in kept for output in (*said, *done))
