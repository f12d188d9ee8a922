"""Rollouts of models with recurrent layers do not depend on drafts, in both of vLLM's model runners."""

import pytest
import vllm
from vllm import SamplingParams

from rollout_spec import engine_kwargs
from tests.integrations.engines import DEVICE, IS_V2, OF_RUNNER, build, generate, set_step_times, stats_of
from tests.recurrent import drafter

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(vllm.__version_tuple__[:2] < (0, 32), reason="refused: this vLLM mixes up recurrent states"),
]
only_v1 = pytest.mark.skipif(IS_V2, reason="its drafter is on the host")
only_v2 = pytest.mark.skipif(not IS_V2, reason="needs the V2 runner")

K = 4
PREFIX = [4 + i * i % 60 for i in range(280)]
"""More than a block of recurrent states, for prefix caching."""
PROMPTS = [[1, 4 + i, 9, 5 + i % 2, 11, 20 + i] for i in range(6)]
PARAMS = [
    SamplingParams(temperature=i % 2, max_tokens=16 + i % 3, seed=100 + i, ignore_eos=True, logprobs=0)
    for i in range(len(PROMPTS))
]


def build_recurrent(model, **arguments):
    return build(model, **{"max_model_len": 512, "max_num_batched_tokens": 1024, **arguments})


@pytest.fixture(scope="module")
def off(model):
    return build_recurrent(model, enable_prefix_caching=False, **engine_kwargs(speculation=False))


def check(llm, off, prompts=PROMPTS, *, run=generate):
    """An engine's rollouts are those of one that drafts nothing. The drafter of this folder knows them from then on."""
    expected = generate(off, PARAMS, prompts)
    for prompt, output in zip(prompts, expected, strict=True):
        drafter.OUTPUTS[tuple(prompt)] = list(output.token_ids)
    for ours, plain in zip(run(llm, PARAMS, prompts), expected, strict=True):
        assert list(ours.token_ids) == list(plain.token_ids)
        logprobs = [[next(iter(p.values())).logprob for p in output.logprobs] for output in (ours, plain)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


@only_v1
@pytest.mark.parametrize("pattern", ["every other step", "some requests", "any length", "wrong"])
def test_drafts_of_any_length(model, off, pattern):
    options = {"drafter": "tests.recurrent.drafter.Cut", "drafter_options": {"pattern": pattern}, "budget": False}
    llm = build_recurrent(model, enable_prefix_caching=False, **engine_kwargs(num_speculative_tokens=K, **options))
    check(llm, off)
    assert stats_of(llm)["rejected_tokens" if pattern == "wrong" else "accepted_tokens"] > 20


def test_history_and_its_budget(model, off, monkeypatch):
    """With what a user gets: the second epoch is drafted from the first, and some steps have no draft."""
    set_step_times(monkeypatch)
    llm = build_recurrent(model, **engine_kwargs(**OF_RUNNER))
    check(llm, off)
    check(llm, off)
    assert stats_of(llm)["accepted_tokens"] > 0


def test_prefix_caching(model, off):
    """Which keeps recurrent states at some positions of a prompt."""
    if model.name.startswith("mamba2"):
        pytest.skip("the CPU build's prefill of Mamba-2 gives no states within a prompt")
    of_v1 = {"drafter": "tests.recurrent.drafter.Cut", "drafter_options": {"pattern": "some requests"}, "budget": False}
    llm = build_recurrent(
        model,
        enable_prefix_caching=True,
        mamba_cache_mode="align",
        **engine_kwargs(num_speculative_tokens=K, **(OF_RUNNER or of_v1)),
    )
    prompts = [[1, *PREFIX, *prompt] for prompt in PROMPTS]
    check(llm, off, prompts)
    check(llm, off, prompts)
    again = llm.generate([{"prompt_token_ids": prompts[0]}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert again[0].num_cached_tokens > 0
    assert stats_of(llm)["accepted_tokens"] > 20


@only_v2
@pytest.mark.parametrize("after", [3, 4, 6])
def test_the_device_drafter_stops_as_a_batch_grows(model, off, after):
    """Its K falls to 0 where requests that have accepted drafts get company."""
    ranges = [(1, 2, K), (3, 64, 0)]
    arguments = engine_kwargs(num_speculative_tokens=K, **DEVICE)
    arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    llm = build_recurrent(model, **arguments)

    def staggered(llm, params, prompts):
        engine, outputs, step = llm.llm_engine, {}, 0
        requests = enumerate(zip(prompts, params, strict=True))
        waiting = [(str(i), {"prompt_token_ids": prompt}, p) for i, (prompt, p) in requests]
        while waiting or engine.has_unfinished_requests():
            for request in waiting[: 2 if step == 0 else len(waiting) if step == after else 0]:
                engine.add_request(*request)
                waiting.remove(request)
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output.outputs[0]
            step += 1
        return [outputs[str(i)] for i in range(len(prompts))]

    check(llm, off, run=staggered)
    check(llm, off, run=staggered)
    assert stats_of(llm)["accepted_tokens"] > 0
