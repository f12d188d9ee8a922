"""Which steps vLLM's V2 model runner captures in CUDA graphs as a whole."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import cudagraph_utils

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import adaptive, compat, hooks
from rollout_spec.schedule import affordable_ranges
from tests.integrations.engines import V2_OF_0_31
from tests.integrations.vllm.test_graphs import config_as_on_a_gpu


class Builder:
    """Stands for an attention backend that says what its graphs can replay."""

    def __init__(self, support):
        self.support = support

    def get_cudagraph_support(self, vllm_config, kv_cache_spec):
        return self.support

    def get_varlen_cudagraph_max_query_len(self, vllm_config, kv_cache_spec):
        return None


@pytest.fixture
def captured(tiny_model, monkeypatch):
    """A function that gives vLLM's manager of V2's graphs, and the kinds of whole decode steps that it captures.

    A kind is (tokens of each request, None: any numbers; most tokens of a request, None: the same). Of each the largest
    step is given.
    """
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(type(cudagraph_utils.current_platform), "get_global_graph_pool", lambda self: None)

    def manager_of(options, support, additional="ALWAYS", **kwargs):
        config = config_as_on_a_gpu(tiny_model, options, **kwargs)
        ranges = getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None)
        # What the device could replay counts, not what a CPU can.
        group = SimpleNamespace(
            backend=Builder, kv_cache_spec=None, get_metadata_builder=lambda _: Builder(AttentionCGSupport[support])
        )
        model_state = SimpleNamespace(get_additional_cg_support=lambda: (AttentionCGSupport[additional], None))
        width = 1 + (config.num_speculative_tokens if config.speculative_config else 0)
        runner = SimpleNamespace(
            attn_groups=[[group]], model_state=model_state, vllm_config=config, decode_query_len=width,
            speculator=SimpleNamespace(), sampler=SimpleNamespace(),
            rollout_spec=SimpleNamespace(on_kv_cache=lambda: None, may_cut=True),
        )  # fmt: skip

        def initialize_kv_cache(runner):
            cuts = compat.verifies_adaptively(config.speculative_config)
            if cuts and support != "ALWAYS":
                raise ValueError("vLLM says so")
            runner.adaptive_verification = "vLLM's" if cuts else None
            mode = config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            runner.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
                config, torch.device("cpu"), mode, decode_query_len=width, **({"varlen_decode": True} if cuts else {})
            )

        hooks.initialize_kv_cache_v2(initialize_kv_cache, runner)
        manager = runner.cudagraph_manager
        assert manager.vllm_config is config
        assert getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None) == ranges
        return manager

    def capture(*args, **kwargs):
        kinds = {}
        manager = manager_of(*args, **kwargs)
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            kind = desc.uniform_token_count, getattr(desc, "max_query_len", None)  # from 0.28 on
            kinds[kind] = max(kinds.get(kind, (0, 0)), (desc.num_tokens, desc.num_reqs))
        return kinds

    capture.manager_of = manager_of
    return capture


K4 = engine_kwargs(num_speculative_tokens=4, drafter="device", budget=False)
PLAIN = {(1, None): (256, 256)}


@pytest.mark.parametrize(
    ("options", "expected"), [(K4, {(5, None): (1280, 256)}), ({}, PLAIN), (engine_kwargs(speculation=False), PLAIN)]
)
def test_whole_steps_are_captured_with_whole_drafts_or_without(captured, options, expected):
    assert captured(options, "UNIFORM_BATCH") == expected


def test_for_one_request_its_drafts_are_captured(captured):
    assert captured(engine_kwargs(num_speculative_tokens=4), "UNIFORM_BATCH", max_num_seqs=1) == {(4, None): (4, 1)}


@pytest.mark.parametrize("share", [1, 1 / 16])
@pytest.mark.parametrize("k", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("max_num_seqs", [32, 59, 96, 256])
def test_a_whole_graph_serves_every_step_of_equal_drafts(captured, monkeypatch, share, k, max_num_seqs):
    """A token of a mixture of experts uses a share of them."""
    monkeypatch.setattr(hooks, "share_of_experts", lambda vllm_config: share)
    options = engine_kwargs(drafter="device", num_speculative_tokens=k)
    manager = captured.manager_of(options, "UNIFORM_BATCH", max_num_seqs=max_num_seqs)
    manager._graphs_captured = True
    ranges = affordable_ranges(k, share_of_experts=share)
    of_batch = build_dynamic_sd_schedule_lookup(ranges, max_num_seqs, k)
    whole, replayed = manager._capture_descs[CUDAGraphMode.FULL], set()
    for num_requests in range(1, max_num_seqs + 1):
        for width in {1, 1 + of_batch[num_requests]}:
            num_tokens = num_requests * width
            largest = max(desc.num_tokens for desc in whole if desc.uniform_token_count == width)
            if num_tokens > largest:
                # 0.24 itself rounds sizes to multiples of K + 1, and drops the largest.
                assert num_requests > max_num_seqs - 8 or compat.captures_one_k()
                continue
            found = manager.dispatch(num_requests, num_tokens, width, 0)
            assert (found.cg_mode, found.uniform_token_count) == (CUDAGraphMode.FULL, width), num_requests
            assert found.num_tokens < 1.2 * num_tokens + 2 * 8 * width
            replayed.add(found)
    assert replayed == set(whole), "nothing else is captured"


@pytest.mark.skipif(not V2_OF_0_31, reason="vLLM cuts no drafts of ours")
@pytest.mark.parametrize("k", [4, 8, 16])
def test_where_vllm_cuts_drafts_one_graph_serves_all_lengths(captured, monkeypatch, k):
    monkeypatch.setattr(adaptive, "check_adaptive_verification", lambda vllm_config: None)
    options = engine_kwargs(drafter="device", num_speculative_tokens=k)
    assert set(captured(options, "ALWAYS")) == {(None, k + 1)}
    manager = captured.manager_of(options, "ALWAYS")
    manager._graphs_captured = True
    for num_requests in range(1, 257):
        for num_tokens in {num_requests, min(2 * num_requests + 1, 512)}:
            found = manager.dispatch(num_requests, num_tokens, None, 0, max_query_len=k + 1)
            assert found.cg_mode == CUDAGraphMode.FULL
            assert num_tokens <= found.num_tokens < num_tokens + 16
