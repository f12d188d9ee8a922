"""Engines for benchmarks: `build_engine`, with one of these modes.

none         vLLM as it comes, without speculation
ngram, suffix
             vLLM's own drafters, the second where arctic-inference is installed
model        vLLM with another drafter, its option `speculative_config`
off          ours without speculation: our sampler and its noise, no drafts
all          ours with the drafter on the host, every draft verified
budget       the same under its budget, our default where none is drafted on the device
device       ours with the drafter on the device, our default on a GPU in vLLM's V2 runner
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.drafting.peers import find_arctic

OURS = ("off", "all", "budget", "device")
ROOT = Path(__file__).parents[2]


def build_engine(
    policy: str | Path, mode: str = "budget", k: int = 8, *, options: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    """A `vllm.LLM`, in float32 and without CUDA graphs unless `arguments` say otherwise.

    Args:
        policy: The model's folder.
        mode: See above.
        k: Drafted tokens per request and step.
        options: Fields of `RolloutSpecConfig` on top of the mode's.
        arguments: Of `vllm.LLM`.
    """
    from vllm import LLM

    if mode not in ("none", *OURS):
        repair_vllm_on_cpu()
    if mode == "suffix":
        find_arctic()
    defaults = {"dtype": "float32", "enforce_eager": True}
    return LLM(str(policy), **{**defaults, **mode_arguments(mode, k, **options or {}), **arguments})


def repair_vllm_on_cpu() -> None:
    """Make vLLM's own verification use each request's temperature on a CPU, as it does on a GPU.

    Its CPU build (0.31) leaves what `expand_batch_to_tokens` returns uninitialised.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)

    if not torch.cuda.is_available():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def mode_arguments(mode: str, k: int, **options: Any) -> dict[str, Any]:
    """The keyword arguments of `vllm.LLM` that make a mode."""
    from rollout_spec import engine_kwargs

    if mode == "none":
        return {}
    if mode == "ngram":
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        return {"speculative_config": {"method": mode, "num_speculative_tokens": k, **lookup}}
    if mode == "suffix":
        return {"speculative_config": {"method": mode, "num_speculative_tokens": k}}
    if mode == "model":
        return options
    if mode == "off":
        return engine_kwargs(speculation=False)
    drafter = "device" if mode == "device" else "history"
    return engine_kwargs(**{"num_speculative_tokens": k, "drafter": drafter, "budget": mode != "all", **options})


def command(llm: Any, *arguments: Any) -> Any:
    """What the first rank of one of our engines answers, e.g. to "stats"."""
    return llm.collective_rpc("rollout_spec", args=arguments)[0]
