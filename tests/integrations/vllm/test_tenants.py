"""Who may see what: requests with different cache salts, and with and without one, share no history."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.history.problems import Problems
from rollout_spec.integrations.vllm.hooks_front_end import TenantWatch
from rollout_spec.integrations.vllm.request_options import TENANT, request_options, tenant_of, with_tenant
from rollout_spec.integrations.vllm.speculation import Speculation
from tests.history.made_up import rollouts_in
from tests.integrations.engines import build, runner_of, verify_all
from tests.integrations.vllm.test_engine_history import history, session_of

pytestmark = pytest.mark.engine

OPTIONS = {"num_speculative_tokens": 4, "drafter_options": {"min_survival": 0.0}}
SALTS = [None, "tenant-a", "tenant-b"]
PROMPT = list(range(4, 24))
NOT_KEPT = {"extra_args": {"rollout_spec_keep_in_history": False}}


def ask(llm, prompts, salts, *, max_tokens=24, **params):
    """Greedy outputs, one request after the other."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
    said = []
    for prompt, salt in zip(prompts, salts, strict=True):
        request = {"prompt_token_ids": prompt} if salt is None else {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = llm.generate([request], params, use_tqdm=False)
        said.append(list(output.outputs[0].token_ids))
    return said


def found(llm, ask_now):
    """Of a call: [requests that found history, tokens drafted from their problem's others, from other problems]."""

    def counts():
        sources = llm.collective_rpc("rollout_spec", args=("report",))[0]["sources"]
        known = history(llm)["requests_with_history"]
        return np.array([known, *(sources.get(name, [0])[0] for name in ("problem", "shared"))])

    before = counts()
    ask_now()
    return (counts() - before).tolist()


# -- what the workers are told ---------------------------------------------------------------------------------------


def test_the_workers_are_told_a_hash_of_the_salt():
    given = {"rollout_spec": {"problem_id": 7}, "somebody_elses": 1}
    before = copy.deepcopy(given)
    args = with_tenant(given, "tenant-a")
    assert given == before
    assert {name: value for name, value in args.items() if name != TENANT} == given
    assert request_options(args) == request_options(given)
    assert 0 <= tenant_of(args) < 2**64
    assert "tenant-a" not in repr(args)
    tenants = {tenant_of(with_tenant(None, salt)) for salt in ("tenant-a", "tenant-b", "7", "\ud800", "é", None, "")}
    assert tenant_of(with_tenant(None, 7)) == tenant_of(with_tenant(None, "7")), "some trainers give numbers"
    assert len(tenants) == 6, "an empty salt is none, as it is to vLLM"
    assert tenant_of(args) == tenant_of(with_tenant({}, "tenant-a")), "in every process the same: folders last"
    assert with_tenant(None, None) is None


def test_different_salts_are_warned_of_once(caplog):
    def warnings(salts, *, ignores_tenants=False):
        caplog.clear()
        watch = TenantWatch(ignores_tenants=ignores_tenants)
        used = [watch.cache_salt_of(SimpleNamespace(cache_salt=salt)) for salt in salts]
        return used, len(caplog.records)

    assert warnings([None, "version-1", None, "version-1", ""]) == ([None, "version-1", None, "version-1", None], 0)
    assert warnings(["version-1", "version-2", "version-3"]) == (["version-1", "version-2", "version-3"], 1)
    assert "ignore_cache_salt" in caplog.text
    assert warnings(["version-1", "version-2"], ignores_tenants=True) == ([None, None], 0)


def request_of(salt, prompt=PROMPT, **options):
    params = SimpleNamespace(extra_args=with_tenant({"rollout_spec": options} if options else None, salt))
    return SimpleNamespace(sampling_params=params, lora_request=None, mm_features=None), np.array(prompt, np.int32)


def lora(request, name):
    request[0].lora_request = SimpleNamespace(lora_name=name)
    return request


def a_speculation():
    speculation = Speculation()
    speculation.problems = Problems()
    return speculation


def test_every_tenant_has_its_own_problems():
    """The same prompt or the same `problem_id` and adapter: never the same problem."""
    speculation, ids = a_speculation(), []
    for salt in (*SALTS, "7"):
        some = [
            request_of(salt),
            request_of(salt, problem_id=7),
            request_of(salt, PROMPT[::-1], problem_id=7),
            lora(request_of(salt), "cache_salt"),
        ]
        first, *more = (speculation.begin_conversation(*request).problem_id for request in some)
        ids += [first, more[0], more[2]]
        assert more[0] == more[1]
        assert first == speculation.begin_conversation(*request_of(salt)).problem_id
    assert ids[:2] == [problem_of_prompt(PROMPT), 7], "without a salt as ever"
    assert len(set(ids)) == len(ids)
    assert all(0 <= number < 2**64 for number in ids)
    assert a_speculation().begin_conversation(*request_of(None, [])).problem_id is None


@pytest.mark.parametrize("options", [{}, {"problem_id": 7}])
def test_conversations_go_on_within_a_tenant(options):
    speculation = a_speculation()
    said = np.array([5, 6, 7], np.int32)
    for number, salt in enumerate(SALTS):
        first = speculation.begin_conversation(*request_of(salt, **options))
        assert (first.is_first, first.num_known) == (True, 0)
        speculation.problems.stop(first, said)
        for other in SALTS[: number + 1]:
            later = speculation.begin_conversation(*request_of(other, [*PROMPT, *said, 9 + number], **options))
            assert (later.is_first, later.num_known) == (False, 23)
        assert later.problem_id == first.problem_id
    stranger = speculation.begin_conversation(*request_of("tenant-c", [*PROMPT, *said, 1], **options))
    assert (stranger.is_first, stranger.num_known) == (True, 0)


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on(tiny_model):
    return build(tiny_model, **verify_all(**OPTIONS))


@pytest.mark.parametrize("options", [{}, {"extra_args": {"rollout_spec": {"problem_id": 7}}}], ids=["prompt", "named"])
def test_tenants_find_their_own_history_only(on, options):
    prompt = [*PROMPT, len(options)]
    others = [[21 + i, *PROMPT] for i in range(3)]
    for salt in SALTS:
        known, of_problem, _ = found(on, lambda salt=salt: ask(on, [prompt], [salt], **options))
        assert (known, of_problem) == (0, 0)
    for salt in SALTS:
        known, of_problem, of_others = found(on, lambda salt=salt: ask(on, [prompt], [salt], **options))
        assert known == 1
        assert of_problem > 0
        assert salt is None or of_others == 0
    if not options:  # prompts that nobody has asked yet, but whose end is that of other prompts
        assert found(on, lambda: ask(on, others[:1], [None]))[2] > 0
        assert found(on, lambda: ask(on, others[1:], ["tenant-a", "tenant-c"])) == [0, 0, 0]


def test_drafts_stay_exact(on, off):
    prompts, salts = [PROMPT[i:] for i in range(6)], [*SALTS, *SALTS]
    said = ask(off, prompts, salts)
    for _ in range(2):
        assert ask(on, prompts, salts) == said


def test_several_samples_of_a_request_share(on):
    prompt = [*PROMPT, 3]
    assert found(on, lambda: ask(on, [prompt], ["tenant-a"], n=1))[0] == 0
    params = SamplingParams(n=3, seed=5, max_tokens=8, extra_args={"somebody_elses": 1})
    before = copy.deepcopy(params)
    for salt, expected in (("tenant-a", 3), ("tenant-b", 2)):  # of the latter's three the first is new
        request = {"prompt_token_ids": prompt, "cache_salt": salt}
        assert found(on, lambda request=request: on.generate([request], params, use_tqdm=False))[0] == expected
    assert repr(params) == repr(before), "the caller's own parameters"
    # vLLM's servers make new parameters for each request, and let it skip the copy.
    params.skip_clone, args = True, params.extra_args
    on.generate([{"prompt_token_ids": prompt, "cache_salt": "tenant-a"}], params, use_tqdm=False)
    assert args == {"somebody_elses": 1}


def test_a_caller_cannot_pretend_to_be_another_tenant(on):
    hashed = tenant_of(with_tenant(None, "tenant-a"))
    for extra_args in ({TENANT: hashed}, {TENANT: None}, {"rollout_spec": {"tenant": hashed}}):
        for salt in (None, "tenant-b"):
            with pytest.raises(ValueError, match="rollout_spec's own|unknown key 'tenant'"):
                ask(on, [PROMPT], [salt], extra_args=extra_args)


def test_an_engine_may_ignore_salts(tiny_model):
    llm = build(tiny_model, **verify_all(**OPTIONS, ignore_cache_salt=True))
    assert found(llm, lambda: ask(llm, [PROMPT] * 3, ["tenant-b", "tenant-a", None]))[0] == 2
    assert found(llm, lambda: ask(llm, [PROMPT[2:]], ["tenant-c"]))[2] > 0, "other problems, too"
    with pytest.raises(ValueError, match="rollout_spec's own"):
        ask(llm, [PROMPT], [None], extra_args={TENANT: 1})


def test_a_drafter_of_ones_own_need_not_know(tiny_model):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Adversary"))
    ask(llm, [PROMPT] * 2, ["tenant-a", None])
    assert llm.collective_rpc("rollout_spec", args=("stats",))[0]["drafter_errors"] == 0
    assert runner_of(llm).drafter.session.enabled


def test_a_folder_gets_nothing_of_a_tenant(tiny_model, tmp_path):
    options = verify_all(**OPTIONS, history_dir=str(tmp_path))
    first = build(tiny_model, **options)
    ask(first, [PROMPT, PROMPT[1:], PROMPT[2:], PROMPT], [*SALTS, "tenant-a"])
    session_of(first).engine_history.close()
    (rollout,) = rollouts_in(tmp_path)
    assert rollout.problem_id == problem_of_prompt([PROMPT, PROMPT[1:], PROMPT[2:]][SALTS.index(None)])
    second = build(tiny_model, **options)
    assert history(second)["rollouts"] == 1
    session_of(second).engine_history.close()
