"""Drafters: propose what the target will sample next from what it sampled before.

Those on the host need NumPy and numba only; the device drafter needs torch and triton.
"""

from __future__ import annotations

if __name__ != "rollout_spec.drafters":
    raise ImportError("import this package as rollout_spec.drafters: a second identity would have caches of its own")

from rollout_spec.drafters.registry import DRAFTERS, build_drafter, check_options, find_drafter, runs_on_device

__all__ = ["DRAFTERS", "build_drafter", "check_options", "find_drafter", "runs_on_device"]
