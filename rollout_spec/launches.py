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
    """Let Triton no longer check, at each launch of a module's compiled kernels, that their constants are as before.

    These are constants, and a step's kernels use 124 of them, which takes as long as half of all else that a launch
    does in Python.
    """
    for kernel in vars(module).values():
        if getattr(kernel, "hash", None) is not None:  # of a kernel that has been compiled
            kernel.used_global_vals.clear()
