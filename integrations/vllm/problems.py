"""Which problem a request belongs to: the one that its caller names, its conversation's, or its prompt's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.history.roots import Conversation, Roots, namespace_of
from rollout_spec.integrations.vllm.request_options import request_options, tenant_of
from rollout_spec.noise.host import derive_seed
from rollout_spec.types import Int32Array


def recognise(
    roots: Roots,
    request: Any,
    prompt_token_ids: Int32Array,
    problem_by_text: Callable[[Int32Array], int | None] | None = None,
) -> Conversation:
    """Find a new request's problem: the one that the caller names, or the one of the conversation that it continues.

    Conversations with different LoRA adapters or images are different. An adapter's versions are one adapter, as those
    of a policy are one policy. Different tenants' requests, and those with and without one, have no problem in common,
    also where the caller names it.

    Args:
        prompt_token_ids: int32 [n], the request's.
        problem_by_text: Gives the problem of which there are recordings as text. None: there are none.

    Raises:
        ValueError: the request's own options are wrong.
    """
    extra_args = request.sampling_params.extra_args
    given, tenant = request_options(extra_args).problem_id, tenant_of(extra_args)
    images = [
        (int(feature.mm_position.offset), derive_seed(str(feature.identifier))) for feature in request.mm_features or ()
    ]
    if given is not None:
        namespace, problem_id = _within(tenant, derive_seed("problem_id", str(given))), _within(tenant, given)
        return roots.start(prompt_token_ids, lambda: problem_id, namespace=namespace, images=images, is_named=True)
    namespace = _within(tenant, namespace_of(_adapter_name(request)))

    def new_problem_id() -> int | None:
        known = None
        if problem_by_text is not None and tenant is None and request.lora_request is None and not images:
            known = problem_by_text(prompt_token_ids)
        if known is not None:
            return known
        new = _new_problem_id(request, prompt_token_ids)
        return None if new is None else _within(tenant, new)

    return roots.start(prompt_token_ids, new_problem_id, namespace=namespace, images=images)


def has_tenant(request: Any) -> bool:
    """Whether no text may pass between a request and other problems, as it has a cache_salt."""
    return tenant_of(request.sampling_params.extra_args) is not None


def _within(tenant: int | None, number: int) -> int:
    """A problem's id or a namespace, 64 bits, as it is for one tenant's requests."""
    return number if tenant is None else derive_seed("cache_salt", tenant, number)


def _new_problem_id(request: Any, prompt_token_ids: Int32Array) -> int | None:
    """The id of a problem that begins with this request: a hash of prompt, LoRA adapter and images, 64 bits.

    None if there are none of these: such a request shares no history.
    """
    of_prompt = problem_of_prompt(prompt_token_ids)
    if request.lora_request is None and not request.mm_features:
        return of_prompt if len(prompt_token_ids) else None
    images = (str(feature.identifier) for feature in request.mm_features or ())
    return derive_seed(str(of_prompt), _adapter_name(request), *images)


def _adapter_name(request: Any) -> str:
    """The name of a request's LoRA adapter without its version; empty if it has none."""
    # TRL's AsyncGRPO publishes each version of its adapter under a name of its own, which ends in -v and a number.
    return "" if request.lora_request is None else re.sub(r"-v\d+$", "", request.lora_request.lora_name)
