"""CUDA graphs for steps with drafts: up to K drafted tokens and one more for every request.

vLLM captures CUDA graphs for steps of up to 512 tokens (1,024 on Blackwell), which suffices without speculation. With
K = 8 that is 56 requests. The kernels of a larger step are launched one by one, which takes time that the drafts were
meant to save.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.config import chooses_k, is_a100
from rollout_spec.schedule import LARGEST_CUT, LARGEST_GRAPH, MOST_CUT_REQUESTS

SIZES_PER_DOUBLING = 8
"""Above vLLM's own sizes, so that at most about an eighth of a step is padding; 17 more sizes at most."""


def larger_sizes(usual_largest: int, most_tokens: int, width: int) -> list[int]:
    """Numbers of tokens above vLLM's own for which to capture graphs, rising; empty where vLLM's suffice.

    All are multiples of `width`, to which vLLM rounds them, dropping what is then too large.

    Args:
        usual_largest: vLLM's own largest.
        most_tokens: Of a step.
        width: Tokens of a request with a whole draft.
    """
    largest = min(most_tokens, LARGEST_GRAPH) // width * width
    sizes: set[int] = set()
    first = usual_largest
    while first < largest:
        sizes.update(range(first, min(2 * first, largest), max(first // SIZES_PER_DOUBLING, 1)))
        first *= 2
    rounded = {-(-size // width) * width for size in sizes}
    return sorted(size for size in {*rounded, largest} if usual_largest < size <= largest)


def most_tokens(max_num_seqs: int, ranges: Sequence[tuple[int, int, int]]) -> int:
    """The most tokens of a step in which every request has a whole draft. Of the last range K holds without end."""
    # In a gap between ranges the lower one's K holds.
    after = [first for first, _, _ in ranges[1:]] + [max_num_seqs + 1]
    return max(
        min(end - 1, max_num_seqs) * (k + 1)
        for (first, _, k), end in zip(ranges, after, strict=True)
        if first <= max_num_seqs
    )


def add_graphs(vllm_config: Any, set_sizes: Callable[[], None]) -> str | None:
    """Let vLLM choose the sizes of its CUDA graphs, and add those that steps with drafts need, unless some are given.

    Args:
        set_sizes: vLLM's choice, which takes sizes that are there already.

    Returns:
        What to tell the user; None: nothing has been added, and all steps have room.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    ranges = speculative.num_speculative_tokens_per_batch_size or [(1, 1, speculative.num_speculative_tokens)]
    width = 1 + max(k for _, _, k in ranges)
    most, max_step_tokens = most_tokens(scheduler.max_num_seqs, ranges), scheduler.max_num_batched_tokens
    largest, most_of_one = most, width
    may_cut = chooses_k(vllm_config) and not compat.is_v2_old()  # see `adaptive.py`
    if may_cut and vllm_config.lora_config is None and not is_a100():
        most_of_one = 1 + speculative.num_speculative_tokens
        whole = min(scheduler.max_num_seqs, MOST_CUT_REQUESTS) * most_of_one
        largest, most = max(most, min(whole, LARGEST_CUT)), max(most, whole)
    are_given = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
    set_sizes()
    own = compilation.cudagraph_capture_sizes or []  # empty without graphs
    remarks = []
    added = larger_sizes(max(own), min(largest, max_step_tokens), width) if own and not are_given else []
    if added:
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [*own, *added], None
        set_sizes()
        remarks.append(f"CUDA graphs for up to {added[-1]} tokens instead of {max(own)}, {len(added)} sizes more")
    if most > max_step_tokens:
        remarks.append(
            f"max_num_batched_tokens={max_step_tokens} leaves no room for all drafts of {scheduler.max_num_seqs} "
            "requests: raise it if so many run at once"
        )
    steps = f"steps of up to {scheduler.max_num_seqs} requests with up to {most_of_one} tokens each, {most} in all"
    return f"{steps}: {'; '.join(remarks)}" if remarks else None


def choose_graphs(runner: Any) -> None:
    """Let V2's whole decode steps replay CUDA graphs with drafts of any length that a step's requests may have.

    vLLM captures those in which each request has K draft tokens, by number of requests where there is a schedule. Ours
    gives all of them fewer at times, and the kernels of these steps' attention would be launched one by one.

    Args:
        runner: vLLM's, which has chosen what it will capture.
    """
    manager, vllm_config = runner.cudagraph_manager, runner.vllm_config
    speculative = vllm_config.speculative_config
    if compat.adaptive_verification(runner):  # each of its graphs takes any lengths
        return
    if chooses_k(vllm_config):
        ranges = speculative.num_speculative_tokens_per_batch_size
        manager.vllm_config = _with_steps_of(vllm_config, sorted({k for _, _, k in ranges}))
    compat.choose_captured(manager)
    manager.vllm_config = vllm_config
    _drop_graphs_of_no_step(manager)
    _find_nearest_graphs(manager)


def _with_steps_of(vllm_config: Any, ks: Sequence[int]) -> Any:
    """A copy for which vLLM captures the steps of each K, as a schedule of K by batch size may ask for them.

    Args:
        ks: Rising. Where they are more than there can be requests, only the largest ones count.
    """
    changed, speculative = copy.copy(vllm_config), copy.copy(vllm_config.speculative_config)
    most = vllm_config.scheduler_config.max_num_seqs
    schedule = [(n, n, k) for n, k in enumerate(ks[-most:], 1)]
    schedule[-1] = (schedule[-1][0], most, ks[-1])
    speculative.num_speculative_tokens_per_batch_size = schedule
    changed.speculative_config = speculative
    return changed


def _drop_graphs_of_no_step(manager: Any) -> None:
    """Where K follows the number of requests, capture only what some number of requests can replay.

    vLLM would capture every size for each K that occurs. A step has the K of its number of requests, or no drafts
    (`schedule.Schedule`). Only right after requests have started or ended it may have another one's; it then runs
    piecewise.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    whole, speculative = manager._capture_descs.get(CUDAGraphMode.FULL), manager.vllm_config.speculative_config
    ranges = speculative.num_speculative_tokens_per_batch_size
    if not whole or not ranges:
        return
    max_num_seqs = manager.vllm_config.scheduler_config.max_num_seqs
    k_of_batch = build_dynamic_sd_schedule_lookup(ranges, max_num_seqs, speculative.num_speculative_tokens)
    used: dict[int | None, range] = {}  # by tokens per request, sizes that are captured
    for width in {desc.uniform_token_count for desc in whole} - {None}:
        numbers = [n for n in range(1, max_num_seqs + 1) if width - 1 in (k_of_batch[n], 0)]
        if numbers:
            sizes = [desc.num_reqs for desc in whole if desc.uniform_token_count == width]
            largest = min((size for size in sizes if size >= numbers[-1]), default=numbers[-1])
            used[width] = range(numbers[0], largest + 1)
    manager._capture_descs[CUDAGraphMode.FULL] = [
        desc
        for desc in whole
        if desc.uniform_token_count is None or desc.num_reqs in used.get(desc.uniform_token_count, ())
    ]


def _find_nearest_graphs(manager: Any) -> None:
    """Let V2's manager of CUDA graphs find, for each number of tokens, the next larger graph of every kind.

    vLLM looks at the next captured number of tokens alone, which may have no graph for as many tokens per request: with
    9 for each, 87 numbers of requests of 256 without drafts would be without one. In `_candidates`, by (tokens, LoRA
    adapters), whole graphs come first.
    """
    from vllm.config import CUDAGraphMode

    manager._candidates = {}
    first: defaultdict[Any, int] = defaultdict(int)  # number of tokens that a kind's next graph serves
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        for desc in sorted(manager._capture_descs.get(mode, ()), key=lambda desc: desc.num_tokens):
            kind = dataclasses.replace(desc, num_tokens=0, num_reqs=None)
            for num_tokens in range(first[kind], desc.num_tokens + 1):
                manager._candidates.setdefault((num_tokens, kind.num_active_loras), []).append(desc)
            first[kind] = desc.num_tokens + 1
