"""How many tokens an engine's steps may have, and what they count as: what is decided before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LARGEST_GRAPH = 2048
"""Larger steps keep a GPU busy for longer than launching their kernels takes, and their graphs would need memory."""
CHEAP_TOKENS, CHEAP_TOKENS_A100 = 192, 144
"""Verifying this many tokens takes about as long as reading the weights, at short contexts: see `modes_simulated.jsonl`
in experiments/results/README.md."""
EXPERTS_WEIGHTS = 0.5
"""Where a token uses one expert in 16, a step computes 16 EXPERTS_WEIGHTS times as many tokens while it reads the
weights: an estimate, and a cautious one, as the layers besides the experts make it 0.57 to 0.9 in today's models."""
MEASURED_CONTEXT = 512
"""Tokens of context of each token in the steps that vLLM measures for its adaptive verification. With 256 to 1,024 of
them, a step of more requests took on an A100 what verifying as many draft tokens took (experiments/results/README.md).
"""
LARGEST_CUT = 1024
"""Tokens of the largest CUDA graph for steps whose drafts vLLM cuts. With 256 requests and a small model, verifying so
many takes a GPU less time than the host needs for the step."""
MOST_CUT_REQUESTS = 512
"""Most requests of a step whose drafts vLLM cuts: an estimate. With more, sorting confidences on the host would take
milliseconds."""
HOST_SHARE = 0.9
"""Steps are filled up to this share of the host's time. The device then still finishes first, which is how the host's
time is measured."""


def affordable_ranges(
    num_speculative_tokens: int, max_tokens: int = CHEAP_TOKENS, share_of_experts: float = 1.0
) -> list[tuple[int, int, int]]:
    """K by the number of requests: the largest of 1, 3, 7, ... with which a step has at most `max_tokens`, or 0.

    Requests of a step then have 2, 4, 8, … tokens each, which divide the numbers of tokens that vLLM captures CUDA
    graphs for, so that steps are padded little.

    A token of a mixture of experts uses few of its weights, so reading takes longer than computing up to more tokens.

    Args:
        max_tokens: Of a step of a dense model.
        share_of_experts: How many of them a token uses, of all; 1 for a dense model.

    Returns:
        (first, last, K) of ranges of requests, rising, as vLLM takes them; K of the last one is 0.
    """
    if share_of_experts < 1:
        max_tokens = int(max_tokens * max(1.0, EXPERTS_WEIGHTS / share_of_experts))
    ks = [(1 << bits) - 1 for bits in range((num_speculative_tokens + 1).bit_length() - 1, 0, -1)]
    return ranges_of(ks, max_tokens)


def ranges_of(ks: Sequence[int], max_tokens: int, most_requests: int = 1 << 31) -> list[tuple[int, int, int]]:
    """The largest K with which a step has at most `max_tokens` tokens, by the number of requests.

    Args:
        ks: Falling.
        most_requests: With more of them K is 0.

    Returns:
        As `affordable_ranges`.
    """
    ranges, first = [], 1
    for k in ks:
        last = min(max_tokens // (k + 1), most_requests)
        if last >= first:
            ranges.append((first, last, k))
            first = last + 1
    return [*ranges, (first, first, 0)]


def one_k(ranges: Sequence[tuple[int, int, int]], max_num_seqs: int) -> int:
    """The K of these ranges that pays over a whole rollout phase, at least 1, where it must be the same in each step.

    By simulation (`experiments/costs/simulate_modes.py`, policy `constant`) that is the one for half as many requests
    as can run, as fewer and fewer are left.
    """
    return max(1, next(k for first, _, k in reversed(ranges) if first <= max(max_num_seqs // 2, 1)))


def known_costs(
    on_device: NDArray[np.float64], host: float, num_tokens: NDArray[np.int64], largest_graph: int
) -> NDArray[np.float64]:
    """What steps count as: up to `largest_graph` tokens the longer of both times, above it their sum.

    Args:
        on_device: float64 [N], what steps take the device.
        host: What a step takes the host, in the same unit; HOST_SHARE of it counts.
        num_tokens: int64 [N], the steps' tokens.
        largest_graph: Most tokens of a CUDA graph. The host launches the kernels of larger steps one after another.
    """
    filled = HOST_SHARE * host
    return np.where(num_tokens > largest_graph, on_device + filled, np.maximum(on_device, filled))
