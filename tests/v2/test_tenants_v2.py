"""Requests with a cache salt in vLLM's V2 model runner: drafters on the host and on the device."""

from __future__ import annotations

import pytest

from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, verify_all
from tests.integrations.vllm.test_tenants import PROMPT, ask
from tests.v2.test_engine_history_v2 import DEVICE, speculation_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_salted_request_shares_nothing_unless_salts_are_ignored(tiny_model, tmp_path, options, ignores):
    options = verify_all(num_speculative_tokens=3, history_dir=str(tmp_path), ignore_cache_salt=ignores, **options)
    llm = build(tiny_model, max_num_seqs=4, **options)
    said = []
    for salt in ("a", "a", "b", None, None):
        tokens, drafted = ask(llm, salt)
        said.append(tokens)
        is_alone = salt is not None and not ignores
        is_first = len(said) == 1 or (salt is None and not ignores and len(said) == 4)
        assert (drafted[0] > 0) == (not is_alone and not is_first), (len(said), drafted)
        ask(llm, "c", [22, 23])  # in whose step the other's end is seen
    assert said == [said[0]] * 5
    speculation_of(llm).close()
    assert any(rollout.context.tolist() == PROMPT for rollout in rollouts_in(tmp_path))
    if not ignores:
        assert {tuple(rollout.context) for rollout in rollouts_in(tmp_path)} == {tuple(PROMPT)}
