"""A request with a cache salt is drafted from its own text alone, and leaves nothing for others."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, verify_all
from tests.integrations.vllm.test_engine_history import history, session_of

pytestmark = pytest.mark.engine

PROMPT = list(range(4, 24))


def ask(llm, salt, prompt=PROMPT, **params):
    """(Greedy output, [tokens drafted from the problem's other texts, from other problems])."""

    def counts():
        sources = llm.collective_rpc("rollout_spec", args=("report",))[0]["sources"]
        return np.array([sources.get(name, [0])[0] for name in ("problem", "shared")])

    before, salted = counts(), {} if salt is None else {"cache_salt": salt}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **params)
    (output,) = llm.generate([{"prompt_token_ids": prompt, **salted}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), (counts() - before).tolist()


def test_a_salted_request_shares_nothing(tiny_model, tmp_path):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, history_dir=str(tmp_path)))
    named = {"extra_args": {"rollout_spec": {"problem_id": 7}}}
    for options in ({}, named):
        said = [ask(llm, salt, **options) for salt in ("a", "a", "b", None)]
        assert [drafted for _, drafted in said[:3]] == [[0, 0]] * 3
        ((salted, _),) = {(tuple(tokens), tuple(drafted)) for tokens, drafted in said[:3]}
        assert list(salted) == said[3][0], "drafts change no token"
    assert said[3][1][0] == 0, "the problem was named before by salted requests only"
    again = [ask(llm, salt)[1] for salt in ("a", None)]
    assert again[0] == [0, 0]
    assert again[1][0] > 0
    assert ask(llm, "a", [3, *PROMPT])[1] == [0, 0], "a prompt that ends as others"
    session_of(llm).engine_history.close()
    assert [rollout.problem_id == 7 for rollout in rollouts_in(tmp_path)].count(True) == 1
    assert (history(llm)["rollouts"], len(rollouts_in(tmp_path))) == (3, 2), "one was said twice"


@pytest.mark.parametrize("drafter", ["auto", "tests.adversaries.Adversary"])
def test_an_engine_may_ignore_salts_and_a_drafter_need_not_know_of_them(tiny_model, drafter):
    llm = build(
        tiny_model, **verify_all(num_speculative_tokens=4, ignore_cache_salt=drafter == "auto", drafter=drafter)
    )
    assert ask(llm, "a")[0] == ask(llm, "a")[0]
    if drafter == "auto":
        assert ask(llm, "b")[1][0] > 0
    assert llm.collective_rpc("rollout_spec", args=("stats",))[0]["drafter_errors"] == 0
