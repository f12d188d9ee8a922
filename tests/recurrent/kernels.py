"""vLLM's Triton kernels for recurrent layers on a CPU, in place of the C++ that its CPU build has instead.

They are emulated as ours are (`tests/emulation.py`). Chunked prefill of gated DeltaNet multiplies
matrices in shared memory, which the emulator does not know: it is the recurrence itself here.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from tests.emulation import schedule_as_on_gpus, show_vllm_a_backend


def use_gpu_kernels() -> None:
    """Call it before vLLM is imported, and after `run_kernels`."""
    show_vllm_a_backend()
    schedule_as_on_gpus()
    import vllm.v1.attention.backends.utils  # noqa: F401 -- what the modules below import, with vLLM's platform as it is
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    # They replace their functions at their end where the platform is a CPU.
    with patch.object(type(current_platform), "is_cpu", lambda self: False):
        from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm  # noqa: F401
    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):
        del _custom_ops.causal_conv1d_weight_pack  # into the layout of the CPU's convolution

    _use_gated_delta_net()
    _use_mamba2()
    _use_short_convolution()


def _use_gated_delta_net() -> None:
    torch.cuda.get_device_name = lambda *args: "NVIDIA H100"
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    layer = module.QwenGatedDeltaNetAttention
    init = layer.__init__

    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._forward_method = self.forward_cuda
        self.gdn_decode_kernel, self.enable_fused_gdn_spec_decode = "triton", False
        self.chunk_gated_delta_rule._forward_method = self.chunk_gated_delta_rule.forward_native

    layer.__init__ = __init__
    layer._warmup_prefill_kernels = lambda *args: None
    module.fla_chunk_gated_delta_rule = gated_delta_rule


def _use_mamba2() -> None:
    from vllm.config.mamba import MambaBackendEnum
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    backends = ssu_dispatch._BACKEND_REGISTRY
    backends[MambaBackendEnum.CPU] = backends[MambaBackendEnum.TRITON]


def _use_short_convolution() -> None:
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    # The CPU build's kernel takes the heads of LFM 2's q and k for positions.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

    def forward_native(self, hidden_states, output):
        result = self.forward_cuda(hidden_states=hidden_states, output=output)
        if result is not None:
            output[: result.shape[0]] = result

    ShortConv.forward_native = forward_native


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, cu_seqlens: Tensor, **_
) -> tuple[Tensor, Tensor]:
    """Yang et al., arXiv:2412.06464, equation 10, one token after the other.

    Args:
        q, k: [1, T, heads, K]; each group of `heads / value heads` shares them. Normalised here.
        v: [1, T, value heads, V].
        g, beta: [1, T, value heads], the logarithm of the decay, and how much is written.
        initial_state: [sequences, value heads, V, K].
        cu_seqlens: [sequences + 1], where each one's tokens begin.

    Returns:
        [1, T, value heads, V], and the final states.
    """
    q, k = (torch.nn.functional.normalize(x[0].float(), dim=-1) for x in (q, k))
    v, g, beta = (x[0].float() for x in (v, g, beta))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    states, outputs = initial_state.float().clone(), torch.empty_like(v)
    ends = cu_seqlens.tolist()
    for state, first, end in zip(states, ends, ends[1:], strict=False):
        for t in range(first, end):
            state *= g[t].exp()[:, None, None]
            written = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
            state += torch.einsum("hv,hk->hvk", written, k[t])
            outputs[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return outputs[None].to(v.dtype), states
