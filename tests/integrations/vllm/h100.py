"""Prints what the engines of `h100.json` get on an H100 with ROLLOUT_SPEC={}, and without it: `h100.txt`.

vLLM's CPU build resolves their configurations and chooses attention kernels and CUDA graphs as its CUDA build does.
"""
# ruff: noqa: E402

import importlib.metadata
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import triton

import tests.conftest  # noqa: F401  brings the environment of the tests' engines
from tests.ptx.driver import Driver

FOLDER = tempfile.TemporaryDirectory()
os.environ |= {"VLLM_CACHE_ROOT": FOLDER.name, "VLLM_CONFIGURE_LOGGING": "0", "RANK": "0", "WORLD_SIZE": "1"}
# H100s, before vLLM is imported. What only its CUDA build has says yes whenever vLLM asks whether it can do something.
for name, value in {
    "is_available": True, "device_count": 8, "get_device_capability": (9, 0), "graph_pool_handle": None,
    "get_device_name": "NVIDIA H100 80GB HBM3", "get_device_properties": MagicMock(total_memory=81_559 << 20),
}.items():  # fmt: skip
    setattr(torch.cuda, name, MagicMock(return_value=value))
triton.runtime.driver.set_active(Driver(90))
version = importlib.metadata.version
importlib.metadata.version = lambda name: "a CUDA build's" if name == "vllm" else version(name)
for name in "_C_stable_libtorch", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface":
    sys.modules[f"vllm.{name}"] = MagicMock()

import vllm.platforms.cuda

vllm.platforms.cuda._cuda_device_count_stateless = torch.cuda.device_count
vllm.platforms.cuda.NonNvmlCudaPlatform.is_cumem_allocator_available = torch.cuda.is_available
vllm.platforms._current_platform = vllm.platforms.cuda.NonNvmlCudaPlatform()
import vllm._custom_ops  # describes operations of the CPU build's

torch.ops._C, torch.ops._moe_C = MagicMock(), MagicMock()

from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils, model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from rollout_spec.integrations.vllm import device
from rollout_spec.integrations.vllm.adaptive import decide_schedule
from rollout_spec.integrations.vllm.config import check_engine, config_of, shown_ranges


def resolve(variable, model, arguments):
    """(a V2 runner that has chosen its graphs, lines of the log). Raises ValueError where no engine starts."""
    os.environ["ROLLOUT_SPEC"] = variable
    said, handler, logger = [], logging.Handler(), logging.getLogger("vllm")
    handler.emit, logger.handlers = said.append, [handler]
    logger.setLevel(logging.INFO)
    vllm.logger._print_warning_once.cache_clear()
    engine = EngineArgs(model=model, skip_tokenizer_init=True, **arguments)
    vllm_config = engine.create_engine_config(UsageContext.LLM_CLASS)
    if config := config_of(vllm_config):
        check_engine(vllm_config, config)
    runner, cache = loaded_runner(vllm_config), MagicMock(kv_cache_groups=[], has_mamba_layers=False)
    model_runner.GPUModelRunner.initialize_kv_cache(runner, cache)
    decide_schedule(vllm_config, [{"is_adaptive": runner.adaptive_verification is not None}])
    said = [r for r in said if r.name == "vllm.plugins.rollout_spec" or r.levelno >= logging.WARNING]
    return runner, [f"{r.levelname.lower():12} {r.getMessage().partition('. ')[0]}" for r in said]


def loaded_runner(vllm_config):
    """One whose model is loaded, as far as `initialize_kv_cache` asks."""
    compilation, k = vllm_config.compilation_config, vllm_config.num_speculative_tokens
    loras = model_runner.get_lora_capture_cases(vllm_config.lora_config, compilation)
    runner = MagicMock(vllm_config=vllm_config, compilation_config=compilation, lora_capture_cases=loras)
    runner.decode_query_len, runner.vocab_size, runner.is_encoder_decoder = 1 + k, 1, False
    runner.speculator.enable_adaptive_verification = False
    runner.req_states.num_speculative_steps, runner.model_state.num_new_sampled_tokens_per_step = k, 1
    runner.model_state.get_additional_cg_support.return_value = AttentionCGSupport.ALWAYS, None
    return runner


def init_attn_backend(kv_cache_config, vllm_config, *args, **kwargs):
    """vLLM's asks the model's layers."""
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(model.get_head_size(), model.dtype, cache_dtype, use_mla=model.use_mla)
    builder = backend.get_builder_cls()
    groups = [[MagicMock(backend=backend, kv_cache_spec=None, get_metadata_builder=lambda _: builder)]]
    return groups, attn_utils.get_attn_cg_support(groups, vllm_config), []


model_runner.init_attn_backend = init_attn_backend
model_runner.BlockTables = model_runner.pcp = adaptive_verification.AdaptiveVerificationManager = MagicMock()
model_runner.init_kv_cache = model_runner.has_compiled_submodule = cudagraph_utils.get_pp_group = MagicMock()
device.sharing_from_first_rank = lambda vllm_config: None
registry._run_in_subprocess = lambda inspect: inspect()  # another process would see no H100s


def memory_of_tables(vllm_config, config):
    """Bytes."""
    runner = SimpleNamespace(vllm_config=vllm_config, device=torch.device("meta"))
    return device.DeviceSession(config, runner).memory_bytes()


def graphs_of(runner):
    """In words. Whole ones capture attention, too, and are for steps in which no request reads its prompt."""
    mode, captured = runner.compilation_config.cudagraph_mode.name, runner.cudagraph_manager._capture_descs
    whole, piecewise = captured[CUDAGraphMode.FULL], captured[CUDAGraphMode.PIECEWISE]
    widths = ", ".join(sorted({str(desc.uniform_token_count or f"1 to {desc.max_query_len}") for desc in whole}))
    whole = f"{len(whole)} whole (tokens per request: {widths})"
    return f"{mode}, {whole}, {len(piecewise)} piecewise, up to {piecewise[0].num_tokens} tokens"


def describe(model, arguments):
    """Lines about one engine."""
    stock, said_anyway = resolve("", model, arguments)
    try:
        runner, said = resolve("{}", model, arguments)
    except ValueError as error:
        return [f"refused      {error}"]
    vllm_config, speculative = runner.vllm_config, runner.vllm_config.speculative_config
    config, is_synchronous = config_of(vllm_config), not vllm_config.scheduler_config.async_scheduling
    ranges = speculative.num_speculative_tokens_per_batch_size or [(1, 1, speculative.num_speculative_tokens)]
    how = "a budget" if config.drafts_on_host else "a schedule" if config.budget else "all"
    how = "adaptive" if runner.adaptive_verification else how
    tables = memory_of_tables(vllm_config, config) if config.drafts_on_device else 0
    return [
        f"drafter      {config.drafter}, up to {max(k for *_, k in ranges)} tokens, {tables / 2**20:.1f} MiB of tables",
        f"verification {how}, at most {shown_ranges(ranges)}",
        f"scheduling   {'synchronous' if is_synchronous else 'asynchronous'}",
        f"graphs       {graphs_of(runner)}",
        f"  stock      {graphs_of(stock)}",
        *[line for line in said if line not in said_anyway],
    ]


recorded = json.loads(Path(__file__).with_suffix(".json").read_text())
os.chdir(FOLDER.name)
for model, config in recorded["models"].items():
    Path(model).mkdir()
    Path(model, "config.json").write_text(json.dumps(config))
print(f"vLLM {vllm.__version__}, {torch.cuda.get_device_name()}; stock: without ROLLOUT_SPEC")
for name, case in recorded["cases"].items():
    print("", name, *(f"    {line}" for line in describe(*case)), sep="\n")
