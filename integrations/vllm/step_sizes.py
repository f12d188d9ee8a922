"""How many tokens an engine's steps may have: up to K drafted ones and one more for every request.

vLLM captures CUDA graphs for steps of up to 512 tokens (1,024 on Blackwell), which suffices without speculation. With
K = 8 that is 56 requests. The kernels of a larger step are launched one by one, which takes time that the drafts were
meant to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LARGEST = 2048
"""Larger steps keep a GPU busy for longer than launching their kernels takes, and their graphs would need memory."""
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
    largest = min(most_tokens, LARGEST) // width * width
    sizes: set[int] = set()
    first = usual_largest
    while first < largest:
        sizes.update(range(first, min(2 * first, largest), max(first // SIZES_PER_DOUBLING, 1)))
        first *= 2
    rounded = {-(-size // width) * width for size in sizes}
    return sorted(size for size in {*rounded, largest} if usual_largest < size <= largest)


def add_graphs(vllm_config: Any, width: int, set_sizes: Callable[[], None]) -> str | None:
    """Let vLLM choose the sizes of its CUDA graphs, and add those that steps with drafts need, unless some are given.

    Args:
        width: Tokens of a request with a whole draft.
        set_sizes: vLLM's choice, which takes sizes that are there already.

    Returns:
        What to tell the user; None: nothing has been added, and all steps have room.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    most, room = scheduler.max_num_seqs * width, scheduler.max_num_batched_tokens
    are_given = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
    set_sizes()
    own = compilation.cudagraph_capture_sizes or []  # empty without graphs
    remarks = []
    added = larger_sizes(max(own), min(most, room), width) if own and not are_given else []
    if added:
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [*own, *added], None
        set_sizes()
        remarks.append(f"CUDA graphs for up to {added[-1]} tokens instead of {max(own)}, {len(added)} sizes more")
    if most > room:
        remarks.append(
            f"max_num_batched_tokens={room} leaves no room for the drafts of more than {room // width} requests: raise "
            "it if so many run at once"
        )
    steps = f"steps of up to {scheduler.max_num_seqs} requests with {width} tokens each, {most} in all"
    return f"{steps}: {'; '.join(remarks)}" if remarks else None


def max_num_batched_tokens(given: int, max_num_seqs: int | None, num_speculative_tokens: int) -> int:
    """`given`, or more if `max_num_seqs` requests with K drafted tokens each need it; None: their number is not known.

    What does not fit into a step waits for the next one, the requests at the end of vLLM's list every time.
    """
    return max(given, (max_num_seqs or 0) * (num_speculative_tokens + 1))
