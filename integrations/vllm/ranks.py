"""What tensor-parallel ranks must do alike, and what happens when one of them cannot."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def _ranks_of(vllm_config: Any) -> Any:
    """vLLM's group of tensor-parallel ranks; None for a single rank."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def is_first_rank(vllm_config: Any) -> bool:
    """Whether this is the first of the tensor-parallel ranks."""
    ranks = _ranks_of(vllm_config)
    return ranks is None or bool(ranks.rank_in_group == 0)


def sharing_from_first_rank(vllm_config: Any) -> Callable[[Any], Any] | None:
    """A function that returns the first tensor-parallel rank's object on every rank; None for a single rank."""
    ranks = _ranks_of(vllm_config)
    return None if ranks is None else lambda value: ranks.broadcast_object(value, src=0)


def is_true_on_any_rank(vllm_config: Any, is_true: bool) -> bool:
    """Whether this is True on any tensor-parallel rank. All ranks must call it alike."""
    ranks = _ranks_of(vllm_config)
    if ranks is None:
        return is_true
    import torch

    votes = torch.tensor([int(is_true)])
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
    return bool(votes)


def broadcasting_from_first_rank(vllm_config: Any, device: Any) -> Callable[[Any], Any]:
    """A function that returns the first tensor-parallel rank's tensor on every rank, without waiting for the device.

    Broadcasts once here, on all ranks, so that what the backend sets up for it takes neither time nor memory later.
    """
    ranks = _ranks_of(vllm_config)
    if ranks is None:
        return lambda tensor: tensor
    import torch

    ranks.broadcast(torch.zeros(1, dtype=torch.int64, device=device), src=0)
    return lambda tensor: ranks.broadcast(tensor, src=0)


def end_if_unheard(vllm_config: Any, error: Exception) -> None:
    """End this process if vLLM would only log what it raises, as it does for all ranks but the first.

    A rank whose step has failed half way may hold other drafts than the others, which would then sample from logits of
    mixed inputs. vLLM notices that a worker has ended, and ends the engine with an error. The process ends at once,
    because an orderly shutdown could wait for ranks that wait for this one.
    """
    is_external = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
    if is_external or is_first_rank(vllm_config):
        return
    rank = _ranks_of(vllm_config).rank_in_group
    logger.critical("tensor-parallel rank %d cannot go on, and ends the engine", rank, exc_info=error)
    time.sleep(2)  # what fails on all ranks alike, such as broken logits, is told by the first one, if it comes first
    os._exit(1)
