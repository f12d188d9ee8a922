"""Who may see what, in vLLM's V2 model runner: drafters on the host and on the device."""

from __future__ import annotations

import itertools

import pytest

from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, verify_all
from tests.integrations.vllm.test_tenants import PROMPT, SALTS, ask, found
from tests.v2.test_engine_history_v2 import DEVICE, speculation_of

pytestmark = pytest.mark.engine

NEW_PROBLEMS = itertools.count(100)


def ask_and_end(llm, *args, **params):
    """One more request, of a new problem, ends the others where the device must tell."""
    said = ask(llm, *args, **params)
    of_its_own = {"rollout_spec_problem_id": next(NEW_PROBLEMS), "rollout_spec_keep_in_history": False}
    ask(llm, [[22, 23]], [None], max_tokens=1, extra_args=of_its_own)
    return said


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("params", [{}, {"extra_args": {"rollout_spec_problem_id": 7}}], ids=["prompt", "named"])
def test_tenants_find_their_own_history_only(tiny_model, tmp_path, options, params):
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), **options)
    llm = build(tiny_model, max_num_seqs=4, **options)
    said = []
    for expected in (0, 1):
        for salt in SALTS:
            know = found(
                llm, lambda salt=salt: said.extend(ask_and_end(llm, [PROMPT], [salt], max_tokens=10, **params))
            )
            assert know[0] == expected
            assert (know[1] > 0) == (expected > 0)
            assert salt is None or know[2] == 0
    assert said == [said[0]] * 6
    speculation_of(llm).close()
    assert len(rollouts_in(tmp_path)) == 1, "those without a salt, which said the same twice"

    again = build(tiny_model, max_num_seqs=4, **options)
    for salt in SALTS:
        known = found(again, lambda salt=salt: ask_and_end(again, [PROMPT], [salt], max_tokens=2, **params))[0]
        assert known == (salt is None)
    assert found(again, lambda: ask_and_end(again, [PROMPT], ["tenant-c"], max_tokens=10, **params)) == [0, 0, 0]
    speculation_of(again).close()


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["host", "device"])
def test_an_engine_may_ignore_salts(tiny_model, options):
    llm = build(tiny_model, max_num_seqs=4, **verify_all(num_speculative_tokens=3, ignore_cache_salt=True, **options))
    for salt, expected in (("tenant-a", 0), ("tenant-b", 1), (None, 1)):
        assert found(llm, lambda salt=salt: ask_and_end(llm, [PROMPT], [salt], max_tokens=10))[0] == expected
