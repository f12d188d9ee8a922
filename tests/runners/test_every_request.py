"""Whatever happens to requests, drafts change nothing, in both of vLLM's model runners: see `test_every_parameter`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec import engine_kwargs
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    count_preemptions,
    every_draft,
    generate,
    mixed_params,
    prompts_of,
    stats_of,
    switching_off_and_on,
    verify_all,
)

pytestmark = pytest.mark.engine

IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
RESIDENT = {"max_resident_tokens": 4096}
DRAFTING = {
    "history": verify_all(**every_draft(4)),
    "adversary": verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Adversary"),
    "device": engine_kwargs(num_speculative_tokens=4, drafter="device", drafter_options=RESIDENT),
}
NAMES = ["history", "adversary", *(["device"] if IS_V2 else [])]
ONE = DRAFTING["device" if IS_V2 else "adversary"]
"""For what needs engines of its own."""
COUNT = 8


def params(seed, **fixed):
    return mixed_params(COUNT, seed, **{"max_tokens": 30, "ignore_eos": True, **PLAIN, **fixed})


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_num_seqs=8, **engine_kwargs(speculation=False))


@pytest.fixture(scope="module", params=NAMES)
def on(request, tiny_model):
    return build(tiny_model, max_num_seqs=8, **DRAFTING[request.param])


def tokens_of(outputs):
    return [list(output.token_ids) for output in outputs]


def test_switched_off_and_on_again(on, off, reference_model):
    asked = params(3)
    prompts = prompts_of(asked)
    ours = switching_off_and_on(on, asked, prompts, [range(4, 9), range(15, 17)])
    assert_same(ours, generate(off, asked, prompts), prompts, asked, reference_model)


def test_priorities_that_preempt(tiny_model, off, reference_model):
    small = build(
        tiny_model,
        block_size=32,
        num_gpu_blocks_override=9,
        enable_prefix_caching=False,
        max_num_seqs=8,
        scheduling_policy="priority",
        **ONE,
    )
    preempted = count_preemptions(small)
    asked = params(9, max_tokens=90)
    prompts = [[1, 4 + i % 3, 9] * 4 for i in range(COUNT)]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = small.generate(requests, asked, priority=[-i for i in range(COUNT)], use_tqdm=False)
    assert preempted
    expected = generate(off, asked, prompts)
    assert_same([output.outputs[0] for output in outputs], expected, prompts, asked, reference_model)


def test_prompts_of_embeddings(tiny_model, reference_model):
    """They have no text and no history; requests with token ids in the same steps draft as always."""
    engines = [
        build(tiny_model, max_num_seqs=8, enable_prompt_embeds=True, **arguments)
        for arguments in (engine_kwargs(speculation=False), ONE)
    ]
    embed = reference_model.get_input_embeddings()
    asked = params(5)
    prompts = [
        {"prompt_token_ids": prompt} if i % 2 else {"prompt_embeds": embed(torch.tensor(prompt)).detach()}
        for i, prompt in enumerate(prompts_of(asked))
    ]
    expected, *ours = (
        tokens_of(output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False))
        for llm in (engines[0], engines[1], engines[1])
    )
    assert ours == [expected] * 2
    assert stats_of(engines[1])["drafter_errors"] == 0


def test_lora_adapters(tiny_model, tmp_path):
    """Two adapters and none in one batch; they change the LM head, too, which has a row per drafted token."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    adapters = [None]
    for i in (1, 2):
        torch.manual_seed(i)
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(tmp_path / str(i))
        adapters.append(LoRARequest(f"adapter-{i}", i, str(tmp_path / str(i))))
    engines = [
        build(tiny_model, max_num_seqs=8, enable_lora=True, max_loras=2, max_lora_rank=8, **arguments)
        for arguments in (engine_kwargs(speculation=False), ONE)
    ]
    asked = params(7)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts_of(asked)]
    lora = [adapters[i % 3] for i in range(COUNT)]
    expected, *ours = (
        tokens_of(o.outputs[0] for o in llm.generate(requests, asked, lora_request=lora, use_tqdm=False))
        for llm in (engines[0], engines[1], engines[1])
    )
    assert ours == [expected] * 2
    plain = tokens_of(generate(engines[0], asked))
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) > 2
    assert stats_of(engines[1])["drafter_errors"] == 0


def test_samples_of_one_request_have_noise_of_their_own(on, off):
    asked = [SamplingParams(n=4, seed=17, max_tokens=12, temperature=1.0, ignore_eos=True)]
    prompt = [{"prompt_token_ids": [1, 4, 9]}]
    ours, expected = (tokens_of(llm.generate(prompt, asked, use_tqdm=False)[0].outputs) for llm in (on, off))
    assert ours == expected
    assert len({tuple(tokens) for tokens in ours}) == 4


def test_without_a_seed_no_two_are_alike(on):
    outputs = generate(on, [SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)] * 6, [[1, 4, 9]] * 6)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 6
