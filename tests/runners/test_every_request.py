"""Whatever happens to requests, drafts change nothing, in both of vLLM's model runners: see `test_every_parameter`."""

import json
import sys
from collections import Counter

import pytest
import torch
from vllm import SamplingParams

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import compat, hooks
from tests.integrations.draft_models import write_eagle_head
from tests.integrations.engines import (
    DEVICE,
    IS_V2,
    PLAIN,
    RESIDENT,
    V2_OF_0_31,
    assert_same,
    build,
    check_features,
    count_preemptions,
    every_draft,
    generate,
    kept_by,
    mixed_params,
    prompts_of,
    rollouts_of,
    runner_of,
    session_of,
    stats_of,
    switching_off_and_on,
    verify_all,
)

K = 4
ADVERSARY = verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary")
ON_DEVICE = verify_all(num_speculative_tokens=K, **DEVICE)
DRAFTING = ["device", *(["model"] if V2_OF_0_31 else [])] if IS_V2 else ["history", "adversary"]
LEARNING = [name for name in DRAFTING if name != "adversary"]
ONE = ON_DEVICE if IS_V2 else ADVERSARY
"""For what needs engines of its own."""
NO_EMBEDDINGS = IS_V2 and compat.is_before(0, 29)
only_v1 = pytest.mark.skipif(IS_V2, reason="the drafter is on the host")

LENGTH = 48
SMALL = {
    "max_num_seqs": 6, "max_num_batched_tokens": 24, "enable_chunked_prefill": True, "max_model_len": LENGTH,
    "block_size": 32, "num_gpu_blocks_override": 9, "enable_prefix_caching": False, "scheduling_policy": "priority",
}  # fmt: skip
"""Prompts come in chunks, requests wait for a place, and the cache is full where rollouts are long."""


def outcomes_of(llm):
    """What the drafter has counted of its drafts."""
    drafter = session_of(llm).drafter
    return (drafter._counts if IS_V2 else drafter._outcomes).tolist()


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_model_len=LENGTH, **engine_kwargs(speculation=False))


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    """Small engines, by what drafts."""
    head = write_eagle_head(tiny_model, tmp_path_factory.mktemp("drafters") / "eagle")
    eagle = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    options = {
        "nothing": engine_kwargs(speculation=False),
        "history": verify_all(**every_draft(K)),
        "adversary": ADVERSARY,
        "device": ON_DEVICE,
        "model": engine_kwargs(num_speculative_tokens=K, speculative_config=eagle, **RESIDENT),
    }
    return {name: build(tiny_model, **SMALL, **options[name]) for name in ["nothing", *DRAFTING]}


def tokens_of(outputs):
    return [tuple(output.token_ids) for output in outputs]


def params(seed, count=8, **fixed):
    return mixed_params(count, seed, **{"max_tokens": 24, "ignore_eos": True, **fixed})


@pytest.mark.parametrize("name", ["nothing", *DRAFTING])
def test_more_requests_than_places(engines, off, reference_model, name):
    """Whatever they ask, up to the model's length; later ones are more urgent and preempt earlier ones.

    The second time history knows them. What is kept is what callers got, and nothing past it. At the model's end vLLM
    alone would verify zeros for all.
    """
    llm, preempted = engines[name], count_preemptions(engines[name])
    asked = [*mixed_params(9, 1), *params(9, 3, max_tokens=500)]
    prompts = [[1, *range(4, 4 + 7 * (i % 3)), 9] for i in range(12)]
    expected = generate(off, asked, prompts)
    assert LENGTH in {len(p) + len(o.token_ids) for p, o in zip(prompts, expected, strict=True)}
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    for _ in range(2):
        known = len(kept_by(llm)) if name in DRAFTING else 0
        outputs = llm.generate(requests, asked, priority=[-i for i in range(12)], use_tqdm=False)
        assert_same([output.outputs[0] for output in outputs], expected, asked, reference_model, prompts)
        if name in DRAFTING:
            missing = Counter(tokens_of(expected)) - Counter(kept_by(llm)[known:])
            # Scheduled asynchronously, a request may end while it is preempted, and leaves no rollout.
            assert missing.total() <= IS_V2
    assert preempted
    stats = stats_of(llm)
    assert name == "nothing" or min(stats["accepted_tokens"], stats["rejected_tokens"]) > 10
    assert stats["drafter_errors"] == 0


@pytest.mark.parametrize("name", DRAFTING)
def test_switched_off_and_on_again(engines, off, reference_model, name):
    """Within rollouts and between them. All that is sampled is kept."""
    llm, asked = engines[name], params(3)
    expected, known = generate(off, asked), len(kept_by(llm))
    ours = switching_off_and_on(llm, asked, [range(2, 4)])
    assert_same(ours, expected, asked, reference_model)
    assert not Counter(tokens_of(expected)) - Counter(kept_by(llm)[known:])
    for enabled in (False, True):
        llm.collective_rpc("rollout_spec", args=("set_enabled", enabled))
        before, graded = stats_of(llm)["draft_tokens"], outcomes_of(llm) if name in LEARNING else None
        assert_same(generate(llm, asked), expected, asked, reference_model)
        if not IS_V2:  # which schedules the slots all the same
            assert (stats_of(llm)["draft_tokens"] > before) == enabled
        if name in LEARNING:
            assert (outcomes_of(llm) != graded) == enabled


@pytest.mark.parametrize("name", LEARNING)
def test_the_drafter_is_told_what_the_target_saw(engines, reference_model, name):
    """Also of what is sampled while nothing is drafted."""
    llm, same = engines[name], {"temperature": 0.7, **PLAIN}
    known = len(rollouts_of(llm))
    generate(llm, mixed_params(8, 3, max_tokens=20, **same), [[1, *range(4, 4 + 7 * (i % 3)), 9] for i in range(8)])
    found = rollouts_of(llm)[known:]
    num_checked, num_unknown = check_features(found, reference_model, 0.7)
    assert num_checked > 40
    assert num_unknown == 0
    asked = params(8, 3, **same)
    switching_off_and_on(llm, asked, [range(4, 7)])
    num_checked, num_unknown = check_features(rollouts_of(llm)[known + len(found) :], reference_model, 0.7)
    assert num_checked > 40
    assert num_unknown == 0


@only_v1
def test_indexing_while_the_device_computes(engines, off, reference_model, monkeypatch):
    """As on a device: what was sampled waits until the next step runs."""
    llm, asked, indexed = engines["history"], params(5), []
    session = session_of(llm)
    original = session.update_index
    monkeypatch.setattr(session.drafting, "_options", session.drafting._options._replace(index_now=False))
    note = indexed.append
    monkeypatch.setattr(session, "update_index", lambda: note(session.drafter._num_unindexed) or original())
    assert_same(generate(llm, asked), generate(off, asked), asked, reference_model)
    assert sum(indexed) > 50


def test_rejection_sampling_keeps_the_history_straight(tiny_model):
    options = DEVICE if IS_V2 else {"drafter": "tests.adversaries.Adversary"}
    llm = build(tiny_model, **verify_all(num_speculative_tokens=K, verify="rejection", **options))
    outputs = generate(llm, params(7, 4))
    assert [len(output.token_ids) for output in outputs] == [24] * 4
    assert not Counter(tokens_of(outputs)) - Counter(kept_by(llm))
    if IS_V2:
        without_noise, with_noise = session_of(llm).drafter._counts.view(2, -1).sum(1).tolist()
        assert without_noise > with_noise == 0, "its drafts ignore the noise"


@only_v1
@pytest.mark.parametrize("drafter", ["history", "tests.adversaries.Adversary"])
def test_a_budget_changes_no_rollout(tiny_model, off, reference_model, drafter):
    """It learns what steps of so many tokens take, which differs from run to run."""
    llm = build(tiny_model, **engine_kwargs(num_speculative_tokens=K, drafter=drafter))
    asked = params(40)
    prompts = prompts_of(asked)
    for _ in range(2):
        assert_same(generate(llm, asked, prompts), generate(off, asked, prompts), asked, reference_model, prompts)
    undrafted, _ = session_of(llm).budget.times._sizes
    assert all(size.seconds > 0 for size in undrafted.values())
    assert 0 < max(size.tokens for size in undrafted.values()) <= sum(map(len, prompts)) + len(prompts) * (K + 1)
    stats = stats_of(llm)
    assert stats["drafter_errors"] == 0
    assert stats["draft_tokens"] > 0
    assert stats["draft_seconds"] > 0
    (report,) = llm.collective_rpc("rollout_spec", args=("report",))
    assert json.loads(json.dumps(report)) == report
    assert report["has_budget"]


@pytest.fixture(scope="module")
def special(tiny_model):
    """Without drafts and with them: engines that take adapters, and prompts of embeddings."""
    pytest.importorskip("peft")
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prompt_embeds": not NO_EMBEDDINGS}
    return [build(tiny_model, max_num_seqs=8, **arguments, **o) for o in (engine_kwargs(speculation=False), ONE)]


def compare(special, prompts, asked, **arguments):
    """The rollouts without drafts, which are those with drafts, twice."""
    plain, drafting = special
    expected, *ours = (
        tokens_of(output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False, **arguments))
        for llm in (plain, drafting, drafting)
    )
    assert ours == [expected] * 2
    assert stats_of(drafting)["drafter_errors"] == 0
    return expected


@pytest.mark.skipif(NO_EMBEDDINGS, reason="vLLM says that its V2 takes none")
def test_prompts_of_embeddings(special, reference_model):
    """They have no text and no history; requests with token ids in the same steps draft as always."""
    embed, asked = reference_model.get_input_embeddings(), params(5)
    prompts = [
        {"prompt_token_ids": prompt} if i % 2 else {"prompt_embeds": embed(torch.tensor(prompt)).detach()}
        for i, prompt in enumerate(prompts_of(asked))
    ]
    compare(special, prompts, asked)


def test_lora_adapters(special, tiny_model, tmp_path):
    """Two adapters and none in one batch; they change the LM head, too, which has a row per drafted token."""
    import peft
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    adapters = [None]
    for i in (1, 2):
        torch.manual_seed(i)
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(tmp_path / str(i))
        adapters.append(LoRARequest(f"adapter-{i}", i, str(tmp_path / str(i))))
    asked = params(7)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts_of(asked)]
    adapted = compare(special, requests, asked, lora_request=[adapters[i % 3] for i in range(len(asked))])
    plain = compare(special, requests, asked)
    assert sum(a != b for a, b in zip(adapted, plain, strict=True)) > 2


def test_an_engine_with_a_seed_repeats_itself(tiny_model, monkeypatch):
    """With drafts and without, as stock vLLM does; vLLM's default is 0, which nobody chose."""
    said = []
    monkeypatch.setattr(hooks, "say", said.append)

    def outputs(options, seed):
        llm = build(tiny_model, seed=seed, **options)
        return tokens_of(generate(llm, [SamplingParams(max_tokens=30, ignore_eos=True)] * 4, [[1, 4, 9]] * 4))

    first = outputs(ONE, 42)
    assert outputs(engine_kwargs(speculation=False), 42) == first
    assert sum("requests without a seed get theirs from the engine's, 42" in line for line in said) == 2
    said.clear()
    assert len({*first, *outputs(ONE, 0)}) == 8
    assert not any("without a seed" in line for line in said)


@pytest.mark.parametrize("name", ["nothing", *DRAFTING])
def test_a_session_goes_on_with_its_new_parameters(engines, off, name):
    """The same request in the same row, with another seed and min-p: what was kept of the first chunk's is renewed."""
    from vllm.v1.request import RequestStatus

    engine = engines[name].llm_engine
    client, tasks = engine.engine_core, engine.get_supported_tasks()
    requests = client.engine_core.scheduler.requests
    chunks = [([1, 4, 9], SamplingParams(seed=1, max_tokens=12, ignore_eos=True))]
    chunks += [([3, 5], SamplingParams(seed=2, max_tokens=12, min_p=0.9, ignore_eos=True))]
    chunks += [([6], SamplingParams(seed=3, max_tokens=12, temperature=1.3, ignore_eos=True))]
    prompts, said = [], []
    if IS_V2 and compat.is_v2_old() and name != "nothing":
        with pytest.raises(ValueError, match="streaming sessions .* install vLLM 0.31, take V1 .*, or set spec"):
            engine.input_processor.process_inputs(
                "s", {"prompt_token_ids": [4]}, SamplingParams(), supported_tasks=tasks, resumable=True
            )
        return
    for chunk, asked in chunks:
        update = engine.input_processor.process_inputs(
            "s", {"prompt_token_ids": chunk}, asked, supported_tasks=tasks, resumable=True
        )
        client.add_request(update)
        prompts.append(list(requests["s"].prompt_token_ids))
        said.append([])
        while requests["s"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            said[-1] += [token for output in client.get_output().outputs for token in output.new_token_ids]
    client.abort_requests(["s"])
    expected = generate(off, [asked for _, asked in chunks], prompts)
    assert said == [list(output.token_ids) for output in expected]


@pytest.mark.parametrize("name", DRAFTING)
def test_what_frameworks_send_stays_on_the_fast_path(engines, off, reference_model, monkeypatch, name):
    """The most probable token besides (SkyRL, open-instruct), and some tokens at least (OpenRLHF).

    vLLM's own code for the former copies all logits, and its processors are needed until requests are long enough.
    """
    runner, processed, scored = runner_of(engines[name]), [], []
    spied = [(runner.rollout_spec, "_process", processed), (runner.sampler, "gather_logprobs", scored)]
    if IS_V2:
        module = sys.modules[type(runner.sampler).__module__]
        spied = [(runner.rollout_spec, "_process", processed), (module, "scaled", scored)]
    for owner, function, calls in spied:
        original = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *args, c=calls, f=original: c.append(1) or f(*args))
    asked = params(9, 5, logprobs=1, min_tokens=3, **PLAIN)
    expected = generate(off, asked)
    for _ in range(2):  # the second time in places that earlier requests had
        processed.clear()
        ours = generate(engines[name], asked)
        assert not scored
        assert 0 < len(processed) <= 7, "until each request has said three tokens"
        assert_same(ours, expected, asked, reference_model)


@pytest.mark.parametrize("speculation", [True, False])
def test_invalid_logits_raise(tiny_model, speculation):
    llm = build(tiny_model, **(ONE if speculation else engine_kwargs(speculation=False)))
    with torch.no_grad():
        for parameter in runner_of(llm).model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"rows of logits .* request \S+\), and nothing can be sampled"):
        generate(llm, [SamplingParams(max_tokens=4)])
