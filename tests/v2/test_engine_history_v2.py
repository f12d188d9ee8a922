"""History that lasts and is shared, in vLLM's V2 model runner: drafters on the host and on the device."""

from __future__ import annotations

import time

import pytest

from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
    verify_all,
)

pytestmark = pytest.mark.engine

DEVICE = {"drafter": "device", "drafter_options": {"max_resident_tokens": 4096}}


def history(llm):
    return llm.collective_rpc("rollout_spec", args=("history",))[0]


def speculation_of(llm):
    return runner_of(llm).rollout_spec._speculation


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["host", "device"])
def test_history_lasts_and_is_shared(tiny_model, stock, reference_model, tmp_path, options):
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), **options)
    engines = [build(tiny_model, max_num_seqs=6, **options) for _ in range(2)]
    params = mixed_params(6, 1, max_tokens=20, **PLAIN)
    expected = generate(stock, params)
    assert_same(generate(engines[0], params), expected, prompts_of(params), params, reference_model)
    generate(engines[0], mixed_params(1, 9, max_tokens=2, **PLAIN))  # ends the others where the device must tell
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and history(engines[1])["folder"]["rollouts_read"] < 6:
        time.sleep(0.1)
        speculation_of(engines[0]).exchange_history()  # the copies have arrived
    assert_same(generate(engines[1], params), expected, prompts_of(params), params, reference_model)
    # On the device the step's requests have begun before the step takes in what has come meanwhile.
    assert history(engines[1])["requests_with_history"] in (3, 6)
    generate(engines[1], mixed_params(1, 9, max_tokens=2, **PLAIN))
    first, second = (stats_of(llm)["accepted_tokens"] for llm in engines)
    assert second > 1.2 * first, "it drafts from what the other engine has said"
    for llm in engines:
        speculation_of(llm).engine_history.close()
    third = build(tiny_model, max_num_seqs=6, **options)
    assert history(third)["rollouts"] >= 12
    assert_same(generate(third, params), expected, prompts_of(params), params, reference_model)
    assert stats_of(third)["accepted_tokens"] > 1.2 * first
