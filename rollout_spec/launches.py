"""Launching Triton kernels with little of the host's time, for which GPUs wait where models are small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own also works inside kernels, so on the host it wraps its arguments: 5 to 10 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest one that is at least `n`, which is at least 1. See `cdiv`."""
    return 1 << (n - 1).bit_length()


class Launcher:
    """Launches a Triton kernel, `launcher[grid](*arguments, **constants)`, and remembers its compiled variants.

    Triton compiles a kernel for each combination of dtypes, pointers that 16 divides, integers that are 1 or that 16
    divides, and constants. To find the variant it looks at every argument in Python, and compares the module's
    constants, which never change here: 23 µs per launch. The key made here takes half of that, as integers that vary
    from step to step are exempt from specialisation (`do_not_specialize`).

    Args:
        kernel: A `triton.jit` function. Its constants come after its other parameters.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._variants: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._varying = frozenset(parameter.num for parameter in kernel.params if parameter.do_not_specialize)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        device = driver.active.get_current_device()
        key: list[Any] = [device, *constants.values()]
        for number, value in enumerate(arguments):
            if isinstance(value, Tensor):
                key.append(value.dtype)
                key.append(value.data_ptr() & 15)
            else:
                key.append(value >> 31 if number in self._varying else value)
        variant = self._variants.get(tuple(key))
        hooks = knobs.runtime
        if variant is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # as of profilers
            compiled = self.kernel[grid](*arguments, **constants)
            of_parameters = [constants[parameter.name] for parameter in self.kernel.params[len(arguments) :]]
            self._variants[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata, of_parameters
            return
        run, function, metadata, of_parameters = variant
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *of_parameters)
