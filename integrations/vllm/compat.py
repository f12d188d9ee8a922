"""The supported versions of vLLM, and one function for each difference between them.

Each function names the versions concerned, and the oldest supported version with which it can be removed. Three more
differences need none: `init_speculator` also gets the runner's request states, and a rejection sampler also
`invalid_drafts`, from 0.32 on, which our signatures take; and `vllm.triton_utils.dispatcher`, the module that
`survive_lazy_modules` changes, exists from 0.31 on. In V2, which we use from 0.31 on, vLLM's own noise equals ours.

This module imports neither vLLM nor torch: the plugin is loaded in every process of every engine.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_spec.installation import INSTALL_VLLM

OLDEST_VERSION, NEWEST_VERSION = (0, 24), (0, 33)
"""The range of tested vLLM versions: newer ones warn, older ones raise."""


def version_name(version: tuple[int, int]) -> str:
    """ "0.26" for (0, 26)."""
    return ".".join(map(str, version))


def check_version(version_tuple: tuple[Any, ...], version: str) -> None:
    """Warn about untested versions of vLLM.

    Raises:
        RuntimeError: the version is too old.
    """
    release = version_tuple[:2]
    if release == (0, 0):  # an editable install without a version
        return
    if release < OLDEST_VERSION:
        raise RuntimeError(
            f"rollout_spec needs vLLM {version_name(OLDEST_VERSION)} or newer and found {version}: {INSTALL_VLLM}"
        )
    if release > NEWEST_VERSION:
        warnings.warn(
            f"rollout_spec was tested with vLLM up to {version_name(NEWEST_VERSION)} and found {version}; "
            "run its tests (make test-vllm) before relying on it",
            stacklevel=2,
        )


# -- what a user can set ---------------------------------------------------------------------------------------------


def mixes_recurrent_states(version_tuple: tuple[Any, ...]) -> bool:
    """Whether a step without a draft, after one that accepted some, reads a recurrent layer's state of another token.

    So it is in both runners up to 0.31. With 0.32 as the oldest version, this can go.
    """
    return (0, 0) < version_tuple[:2] < (0, 32)


# -- the front end ---------------------------------------------------------------------------------------------------


def cuts_at_stop_strings(output_processor: Any) -> bool:
    """Whether vLLM itself drops the tokens that a step sampled after a stop string, as from 0.32 on.

    With 0.32 as the oldest version, this can go, and `stop_strings.end_outputs_at_stop_strings` with it.
    """
    return hasattr(output_processor, "_trim_surplus_tokens")


# -- V2's model runner -----------------------------------------------------------------------------------------------


def is_v2_too_old(version_tuple: tuple[Any, ...]) -> bool:
    """Whether engines run in V1, as V2's model runner lacks what ours needs, before 0.31.

    0.26's also loses tokens of rollouts that are preempted under asynchronous scheduling. With 0.31 as the oldest
    version, this can go.
    """
    return (0, 0) < version_tuple[:2] < (0, 31)


def draft_step_argument(speculator: Any, step: int) -> dict[str, int]:
    """How the step as a number is passed to vLLM's `sample_draft`, which takes it from 0.32 on.

    With 0.32 as the oldest version, pass it as `spec_step_idx`.
    """
    return {"spec_step_idx": step} if hasattr(speculator, "compute_draft_logits") else {}


def draft_logits_of(speculator: Any, hidden_states: Any, step: int) -> Any:
    """What a model drafter's logits are, float [B, vocabulary].

    From 0.32 on a speculator has a method for it, as some models have a head for each step. With 0.32 as the oldest
    version, call that.
    """
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden_states, step)
    return speculator.model.compute_logits(hidden_states)


def counts_on_host(manager: Any) -> tuple[None, ...]:
    """What `reallocate_drafts` of vLLM's adaptive verification returns as its fourth value, from 0.33 on.

    It is for batch-sharded sampling, which we refuse. With 0.33 as the oldest version, return None there.
    """
    return (None,) if hasattr(manager, "_copy_admitted_drafts_to_host") else ()


def limit_draft_graphs(speculator: Any, num_model_tokens: int) -> None:
    """Capture as many of a model drafter's steps as it drafts tokens.

    From 0.32 on the graphs of several steps have as many as the engine verifies; before, as many as the speculator has
    steps. With 0.32 as the oldest version, nothing changes here.
    """
    manager = getattr(speculator, "decode_cudagraph_manager", None)
    if manager is not None:
        manager.vllm_config = copy.copy(manager.vllm_config)
        manager.vllm_config.speculative_config = copy.copy(manager.vllm_config.speculative_config)
        manager.vllm_config.speculative_config.num_speculative_tokens = num_model_tokens


# -- CPU engines -----------------------------------------------------------------------------------------------------


def survive_lazy_modules(dispatcher: Any) -> None:
    """Make the kernel registration of `vllm.triton_utils.dispatcher` skip objects whose `__dict__` is no dict.

    It calls `vars()` on every object in every imported module. For llvmlite's library handle, which numba imports, it
    gets something else than a dict, and the engine does not start.
    """

    def instance_dict(value: Any) -> Mapping[str, Any]:
        try:  # without the object's own look-up: that of torch.distributed.reduce_op warns
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
        return attributes if isinstance(attributes, Mapping) else {}

    dispatcher.vars = instance_dict  # shadows the builtin in that module only


@contextmanager
def plain_weights() -> Iterator[None]:
    """Make engines that are built inside keep their linear weights as loaded. Does nothing off the CPU platform.

    On CPUs vLLM repacks linear weights and drops the originals, so `load_weights` fails, and with it every trainer's
    weight synchronisation.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    repack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = repack
