"""What we say in vLLM's log."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from rollout_spec import __version__
from rollout_spec.config import RolloutSpecConfig


def say(message: str) -> None:
    """One line in vLLM's log, which shows only what its own loggers say."""
    logging.getLogger("vllm.plugins.rollout_spec").info("%s", message)


def describe_engine(vllm_config: Any, config: RolloutSpecConfig, *, has_model: bool) -> str:
    """What speculation an engine has, and what it lacks, in one line.

    Args:
        vllm_config: The engine's, complete.
        has_model: Whether vLLM drafts with a model of its own.
    """
    scheduling = "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous"
    is_v2 = vllm_config.use_v2_model_runner
    parts, lacks = [], []
    if config.speculation:
        drafters = [repr(config.drafter)]
        drafters += [f"the model of {vllm_config.speculative_config.method!r}"] if has_model else []
        ranges = getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None) or ()
        most = ranges[0][2] if ranges else config.max_draft_tokens
        k = f"up to {most} draft tokens per request and step"
        fewer = [f"{k_of_range} from {first} requests on" for first, _, k_of_range in ranges[1:]]
        parts.append(f"{', '.join([k, *fewer])}, drafted by {' and '.join(drafters)}")
        cuts = config.budget and config.drafts_on_host
        parts.append("a budget decides how many are verified" if cuts else "all are verified")
        parts.append(f"history in {config.history_dir}" if config.history_dir else "history ends with the engine")
        if config.drafts_on_host:
            lacks.append("asynchronous scheduling")
        else:
            lacks.append("a budget")
        if config.verify == "rejection":
            lacks.append("rollouts that do not depend on drafts")
    else:
        parts.append("no drafts (speculation=False)")
    if not is_v2:
        lacks.append("logprob_token_ids and logits processors of your own")
    parts.append(f"{scheduling} scheduling in the {'V2' if is_v2 else 'V1'} model runner")
    line = f"rollout_spec {__version__} is on: {'; '.join(parts)}"
    return f"{line}. Not here: {', '.join(lacks)}" if lacks else line


def describe_states(specs: Iterable[Any], vllm_config: Any) -> str | None:
    """What drafts cost a model with recurrent layers in memory, in one line; None without either.

    Args:
        specs: vLLM's `KVCacheSpec` of each layer, as they are once it has aligned the sizes of their blocks.
    """
    with_drafts = [spec for spec in specs if getattr(spec, "num_speculative_blocks", 0)]
    if not with_drafts:
        return None
    without = [dataclasses.replace(spec, num_speculative_blocks=0) for spec in with_drafts]
    now, before = (sum(s.max_memory_usage_bytes(vllm_config) for s in some) / 2**20 for some in (with_drafts, without))
    return (
        f"rollout_spec: each request holds {with_drafts[0].num_speculative_blocks} more states of its recurrent layers "
        f"as it may have so many drafted tokens: {now:.1f} MiB on each rank instead of {before:.1f}. If that leaves "
        "room for too few requests, lower num_speculative_tokens"
    )
