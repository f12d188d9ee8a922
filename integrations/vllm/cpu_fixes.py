"""Fixes for vLLM's CPU engine, each applied only where it is needed.

`survive_lazy_modules`: from 0.31 on, vLLM registers its CPU kernels by calling `vars()` on every object in every
imported module, and expects a dict. For llvmlite's library handle, which numba imports, it gets something else, and the
engine does not start.

`plain_weights`: on CPUs vLLM repacks linear weights and drops the originals, so `load_weights` fails, and with it
every trainer's weight synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def survive_lazy_modules(dispatcher: Any) -> None:
    """Make the kernel registration of `vllm.triton_utils.dispatcher` skip objects whose `__dict__` is no dict."""

    def instance_dict(value: Any) -> Mapping[str, Any]:
        try:  # without the object's own look-up: that of torch.distributed.reduce_op warns
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
        return attributes if isinstance(attributes, Mapping) else {}

    dispatcher.vars = instance_dict  # shadows the builtin in that module only


@contextmanager
def plain_weights() -> Iterator[None]:
    """Make engines that are built inside keep their linear weights as loaded. Does nothing off the CPU platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    repack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = repack
