"""Launching Triton kernels with little of the host's time, for which GPUs wait where models are small."""

from __future__ import annotations

from types import ModuleType


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own also works inside kernels, so on the host it wraps its arguments: 5 to 10 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest one that is at least `n`, which is at least 1. See `cdiv`."""
    return 1 << (n - 1).bit_length()


def freeze_constants(module: ModuleType) -> None:
    """Skip a check that Triton makes at each launch: whether a compiled kernel's module-level constants have changed.

    Ours never change, and a step's kernels use 124. Functions that kernels call keep their lists, from which Triton
    makes the names of compiled kernels in its cache.
    """
    for kernel in vars(module).values():
        compiled = getattr(kernel, "device_caches", {})
        if any(variants for variants, *_ in compiled.values()):  # it has been launched
            kernel.used_global_vals.clear()
