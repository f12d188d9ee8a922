"""Launching Triton kernels with little of the host's time, for which GPUs wait where models are small."""

from __future__ import annotations

from types import ModuleType


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own wraps and unwraps its arguments, as kernels call it, too: 5 to 10 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest one that is at least `n`, which is at least 1. See `cdiv`."""
    return 1 << (n - 1).bit_length()


def trust_constants(module: ModuleType) -> None:
    """Skip Triton's check, at each launch, that a compiled kernel's module-level constants have not changed.

    A step's kernels use 124 of them. Functions that kernels call are left alone: what they use is part of the names of
    compiled kernels in Triton's cache.
    """
    for kernel in vars(module).values():
        compiled = getattr(kernel, "device_caches", {})
        if any(variants for variants, *_ in compiled.values()):  # it has been launched
            kernel.used_global_vals.clear()
