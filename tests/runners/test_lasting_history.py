"""History that lasts and is shared, through a folder."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.conftest import wait_until
from tests.history.made_up import rollouts_in
from tests.integrations.engines import (
    DEVICE,
    IS_V2,
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

pytestmark = pytest.mark.engine


def test_history_lasts_and_is_shared(tiny_model, off, reference_model, tmp_path):
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), **OF_RUNNER)
    engines = [build(tiny_model, max_num_seqs=6, **options) for _ in range(2)]
    params = mixed_params(6, 1, max_tokens=20, **PLAIN)
    expected = generate(off, params)
    assert_same(generate(engines[0], params), expected, prompts_of(params), params, reference_model)
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
    assert_same(generate(engines[1], params), expected, prompts_of(params), params, reference_model)
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
    assert_same(generate(third, params), expected, prompts_of(params), params, reference_model)
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
