"""What vLLM does before an engine serves: made-up requests, and the last moment to compile kernels."""

from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

from rollout_spec import engine_kwargs
from rollout_spec.drafters.device import choice, kernels
from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.plugin import HOOKS
from rollout_spec.verify import kernel
from tests.integrations.draft_models import write_eagle_head
from tests.integrations.engines import (
    DEVICE,
    V2_OF_0_31,
    build,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
    verify_all,
)
from tests.launches import ours, recorded_variants

K = 4
ON_DEVICE = verify_all(num_speculative_tokens=K, **DEVICE)
OURS = ours(kernel, kernels, choice)


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


class Worker:
    """Profiles memory as vLLM 0.33 does on a GPU: its requests have no seeds."""

    rank = 0

    def __init__(self, runner):
        self.model_runner, self.vllm_config = runner, runner.vllm_config

    def load_model(self):
        """Not called: the runner has its model."""

    def determine_available_memory(self):
        sampler, count = self.model_runner.sampler, 3
        for i in range(count):
            params = SamplingParams(temperature=0.9, repetition_penalty=1.1)
            sampler.add_request(i, *([5] if compat.is_before(0, 31) else []), params)
        sampler.apply_staged_writes()
        sampler(torch.zeros(count, 24), InputBatch.make_dummy(count, count, self.model_runner.input_buffers))
        return 17

    def compile_or_warm_up_model(self):
        return self.determine_available_memory()


@pytest.mark.parametrize("options", [ON_DEVICE, engine_kwargs(speculation=False)])
def test_memory_is_profiled_with_requests_that_have_no_seeds(tiny_model, options):
    llm = build(tiny_model, **options)
    runner = runner_of(llm)
    worker = type("Worker", (Worker,), dict(vars(Worker)))
    with pytest.raises(RuntimeError, match="has no seed"):
        worker(runner).determine_available_memory()
    for hook in HOOKS:
        if hook.module == "vllm.v1.worker.gpu_worker":
            hook.apply(SimpleNamespace(Worker=worker))
    assert worker(runner).determine_available_memory() == 17
    assert worker(runner).compile_or_warm_up_model() == 17
    assert stats_of(llm)["request_steps"] == 0
    assert len(generate(llm, mixed_params(2, 1, max_tokens=4))) == 2


def test_vllms_own_profiling_as_on_a_gpu(tiny_model, monkeypatch):
    """From 0.33 on it adds requests, though not on a CPU."""
    runner = runner_of(build(tiny_model, **ON_DEVICE))
    if hasattr(model_runner, "current_platform"):
        monkeypatch.setattr(model_runner, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    hidden = torch.zeros(3, runner.vllm_config.model_config.get_hidden_size())
    with runner.rollout_spec.ignoring_requests():
        runner._dummy_sampler_run(hidden)
    if vllm.__version_tuple__[:2] >= (0, 33):
        with pytest.raises(RuntimeError, match="has no seed"):
            runner._dummy_sampler_run(hidden)


@pytest.mark.parametrize(
    "options",
    [ON_DEVICE, engine_kwargs(speculation=False), *(["model"] * V2_OF_0_31)],
    ids=["device", "off", *(["model"] * V2_OF_0_31)],
)
def test_nothing_is_compiled_while_the_engine_serves(tiny_model, options, monkeypatch, tmp_path):
    """Whatever requests there are, with and without drafts, in chunks of prompts and switched off.

    Before, vLLM has run made-up requests without seeds through the runner, as it does on GPUs.
    """
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # torch's CUDA build looks for a device
    if options == "model":  # for 3 or 4 requests kernels are others than for the 1, 2 and 6 of vLLM's made-up steps
        monkeypatch.setattr(kernels, "SPLITS", (2, 4, 8))
        monkeypatch.setattr(kernels, "TARGET_PROGRAMS", 16)
        head = {"method": "eagle", "model": str(write_eagle_head(tiny_model, tmp_path / "eagle"))}
        options = engine_kwargs(num_speculative_tokens=K, speculative_config={**head, "num_speculative_tokens": 2})
    with recorded_variants() as compiled:
        llm = build(tiny_model, **options, max_num_seqs=6, max_num_batched_tokens=32)
        worker = worker_of(llm)
        worker.compile_or_warm_up_model()  # what a GPU's worker does in any version
        with runner_of(llm).rollout_spec.ignoring_requests():
            run_mixed_prefill_decode_warmup(runner_of(llm), worker.execute_model, worker.sample_tokens, 8)
    adapter = runner_of(llm).rollout_spec
    assert not adapter.warming_up
    assert stats_of(llm)["request_steps"] == stats_of(llm)["live_requests"] == 0, "it leaves no trace"
    assert not {"_scan_kernel", "_accept_kernel", "_rank_kernel"} - {name for name, *_ in compiled}
    with recorded_variants() as launched:
        for seed, fixed in enumerate(
            (
                {"temperature": 1.0, "logprobs": 0},
                {"temperature": 0.0, "logprobs": None},
                {"logprobs": 0, "repetition_penalty": 1.2},
                {"logprobs": 1},
            )
        ):
            params = mixed_params(7, seed, **{"max_tokens": 12, "top_k": 0, "top_p": 1.0, **fixed})
            generate(llm, params, [prompt * (1 + 9 * (i == 3)) for i, prompt in enumerate(prompts_of(params))])
        for size in range(1, 6):
            generate(llm, mixed_params(size, size, max_tokens=6, ignore_eos=True, top_k=0, top_p=1.0))
        if "speculative_config" in options:
            llm.collective_rpc("rollout_spec", args=("set_enabled", False))
            generate(llm, mixed_params(2, 5, max_tokens=4, top_k=0, top_p=1.0))
    assert not {variant for variant in launched - compiled if variant[0] in OURS}
    assert len({variant for variant in launched if variant[0] in OURS}) > 4
