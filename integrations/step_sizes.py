"""How many tokens an engine's steps may have: up to K drafted ones and one more for every request.

vLLM captures CUDA graphs for steps of up to 512 tokens (1,024 on Blackwell), which suffices without speculation. With
K = 8 that is 56 requests, and launching the kernels of a larger step one by one costs more than the drafts gain.
"""

from __future__ import annotations

from typing import Any

USUAL_LARGEST = 512
"""vLLM's own largest graph."""
LARGEST = 4096
"""Larger steps keep a GPU busy for longer than launching their kernels takes, and their graphs would need memory."""
SIZES_PER_DOUBLING = 8
"""Above vLLM's own sizes, so that at most an eighth of a step is padding; 24 more graphs at most."""


def capture_sizes(max_num_seqs: int, num_speculative_tokens: int) -> list[int] | None:
    """The numbers of tokens for which to capture graphs, rising; None: vLLM's own suffice.

    Args:
        max_num_seqs: Most requests of a step.
        num_speculative_tokens: K.
    """
    largest = min(max_num_seqs * (num_speculative_tokens + 1), LARGEST)
    if largest <= USUAL_LARGEST:
        return None
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, USUAL_LARGEST, 16)]  # vLLM's own
    first = USUAL_LARGEST
    while first < largest:
        sizes += range(first, min(2 * first, largest), first // SIZES_PER_DOUBLING)
        first *= 2
    return [*sizes, largest]


def ask_for_graphs(vllm_config: Any, num_speculative_tokens: int, *, uses_graphs: bool) -> str | None:
    """Give vLLM the sizes of graphs that an engine's steps may need, unless the user has given some.

    Called before vLLM chooses them.

    Returns:
        What to tell the user; None: nothing has been changed, and all steps have room.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    width = num_speculative_tokens + 1
    most, room = scheduler.max_num_seqs * width, scheduler.max_num_batched_tokens
    steps = f"steps of up to {scheduler.max_num_seqs} requests with {width} tokens each, {most} in all"
    remarks = []
    sizes = None
    if uses_graphs and compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        sizes = capture_sizes(scheduler.max_num_seqs, num_speculative_tokens)
    if sizes is not None:
        compilation.cudagraph_capture_sizes = [size for size in sizes if size <= room]
        remarks.append(
            f"{len(compilation.cudagraph_capture_sizes)} CUDA graphs for up to {min(sizes[-1], room)} tokens"
        )
    if most > room:
        remarks.append(
            f"but max_num_batched_tokens={room} leaves no room for the drafts of more than {room // width} requests: "
            "raise it if so many run at once"
        )
    return f"{steps}: {', '.join(remarks)}" if remarks else None


def max_num_batched_tokens(given: int, max_num_seqs: int | None, num_speculative_tokens: int) -> int:
    """`given`, or more if `max_num_seqs` requests with K drafted tokens each need it; None: their number is not known.

    What does not fit into a step waits for the next one, the requests at the end of vLLM's list every time.
    """
    return max(given, (max_num_seqs or 0) * (num_speculative_tokens + 1))
