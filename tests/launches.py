"""Which variants of the Triton kernels are launched: each would be compiled by itself."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from triton.runtime.jit import JITFunction

from rollout_spec.launches import Launcher


def ours(*modules) -> set[str]:
    """The names of the kernels of modules, without the functions that kernels call."""
    functions = {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name for name in functions if name.endswith("_kernel")}


def _kind(value, is_constant, is_specialised):
    """What Triton compiles a kernel anew for, of one argument."""
    if is_constant or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and is_specialised:
        return "int", value == 1, value % 16 == 0
    return type(value).__name__


@contextmanager
def recorded_variants():
    """A set that grows by (kernel, kind of each argument) with every launch."""
    variants, run = set(), JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        unspecialised = [p.name for p in self.params if p.do_not_specialize]
        constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        kinds = [_kind(given[name], name in constants, name not in unspecialised) for name in self.arg_names]
        variants.add((self.fn.__name__, *kinds))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(Launcher, "__getitem__", lambda self, grid: self.kernel[grid])  # nothing is remembered
        yield variants
