"""Drafters with faults in any of their methods, in real engines: rollouts are those of an engine without drafts."""

import logging

import pytest

from tests.integrations.engines import assert_same, build, generate, mixed_params, prompts_of, stats_of, verify_all

pytestmark = pytest.mark.engine


def serve(llm, params, prompts):
    """Requests that come one by one."""
    engine, waiting, outputs = llm.llm_engine, list(enumerate(zip(prompts, params, strict=True))), {}
    draft_tokens_since_error = []
    while waiting or engine.has_unfinished_requests():
        for i, (prompt, p) in waiting[:2]:
            engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
        del waiting[:2]
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0]
        stats = stats_of(llm)
        if stats["drafter_errors"]:
            draft_tokens_since_error.append(stats["draft_tokens"])
    # In the first step after the error what had been drafted before is verified, and nothing from then on.
    assert len(set(draft_tokens_since_error[1:])) <= 1
    return [outputs[str(i)] for i in range(len(prompts))]


PARAMS = mixed_params(6, 1, max_tokens=16, ignore_eos=True)
PROMPTS = prompts_of(PARAMS)


@pytest.fixture(scope="module")
def expected(off):
    return generate(off, PARAMS, PROMPTS)


def faulty(model, method, fault, **options):
    options = {"method": method, "fault": fault, **options}
    return build(
        model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Faulty", drafter_options=options)
    )


CALLED = ["start_request", "extend", "propose", "stop_request"]


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *((method, "raises") for method in [*CALLED, "memory_bytes"]),
        ("propose", "too many"),
        ("propose", "out of vocabulary"),
    ],
)
def test_a_faulty_drafter_is_switched_off_and_nobody_notices(
    tiny_model, expected, reference_model, caplog, method, fault
):
    """Other faults: `test_session.py`."""
    first = {"start_request": 6, "extend": 12, "stop_request": 2}.get(method, 4)  # after some drafts
    llm = faulty(tiny_model, method, fault, calls=(first, 10**9))
    with caplog.at_level(logging.ERROR):
        assert_same(serve(llm, PARAMS, PROMPTS), expected, PARAMS, reference_model, PROMPTS)
    stats = stats_of(llm)
    assert stats["drafter_errors"] == 1
    assert caplog.text.count("the drafter raised: speculation is off from here on") == 1
    assert stats["draft_tokens"] > 0, "before"
    assert stats["drafter_bytes"] == 0
    generate(llm, mixed_params(2, 2, max_tokens=4))
    assert stats_of(llm)["draft_tokens"] == stats["draft_tokens"]
    llm.collective_rpc("rollout_spec", args=("set_enabled", False))
    with pytest.raises(RuntimeError, match="its drafter has raised"):
        llm.collective_rpc("rollout_spec", args=("set_enabled", True))
