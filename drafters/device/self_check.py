"""The device drafter's kernels on made-up texts whose continuation is certain: what they must draft is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest
from rollout_spec.features.format import SIGNATURE_WORDS, pack

PERIOD = 61
"""A text repeats so many distinct tokens: each is always followed by the same one."""
LONG, MAX_LEN = 1500, 1800
"""Tokens of the rollout that ends, more than the kernels compare at once, and of the longest text."""
PROMPT = 5
BATCHES = (7, 63, 95)
"""Requests that are drafted for at once: by their number one of three variants of the kernels is launched."""


def check(
    device: torch.device,
    *,
    max_requests: int,
    num_speculative_tokens: int,
    vocab_size: int,
    use_noise: bool,
    options: Mapping[str, Any],
) -> str | None:
    """Say where a small drafter with these options errs; None: nowhere. Waits for the device.

    Requests of one problem are at different places of one text, with and without temperature. One of them ends. In the
    text of another request, the last one, nothing repeats, so there is nothing to draft.

    Args:
        max_requests: Of the engine; larger batches than it can have are left out.
        options: Of the engine's drafter.
    """
    k, size = num_speculative_tokens, max(3, min(max_requests, 1 + BATCHES[-1]))
    drafter = DeviceDrafter(
        max_requests=size,
        max_model_len=MAX_LEN,
        device=device,
        max_draft_tokens=k,
        use_noise=use_noise,
        **{**options, "max_resident_tokens": 2 * MAX_LEN, "max_problem_tokens": MAX_LEN},
    )
    drafter.record_rollouts()
    rng, stranger = np.random.default_rng(0), size - 1
    cycle = rng.choice(vocab_size, min(PERIOD, vocab_size), replace=False).astype(np.int32)
    text = np.resize(cycle, MAX_LEN)
    lengths = rng.integers(2 * PERIOD, 3 * PERIOD, size).astype(np.int32)
    lengths[0], lengths[stranger] = LONG, cycle.size
    drafter.start_request(stranger, text[:PROMPT], problem_id=1)
    for slot in range(stranger):
        drafter.start_request(slot, text[:PROMPT], problem_id=0)

    def upload(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    slots, total_len = upload(np.arange(size, dtype=np.int32)), upload(lengths)
    temperature = np.resize(np.array((0.0, 0.8), np.float32), size)
    engine = upload(np.tile(text, (size, 1))), total_len, upload(np.arange(size)), upload(temperature)
    features = first_rows = None
    num_sampled = np.maximum(lengths - PROMPT, 1)
    if drafter.wants_features:
        signatures = rng.integers(0, 2**63, (cycle.size, SIGNATURE_WORDS)).astype(np.uint64)
        places = np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, num_sampled, strict=True)]) % cycle.size
        top_ids, top_logprobs = np.zeros((places.size, 3), np.int32), np.full((places.size, 3), -np.inf)
        top_ids[:, 0], top_logprobs[:, 0] = cycle[places], 0.0
        features = upload(pack(signatures[places], top_ids, top_logprobs))
        first_rows = upload((np.cumsum(num_sampled) - num_sampled).astype(np.int32))
    drafter.propose(slots, upload(num_sampled), *engine, features, first_rows)

    drafter.stop_requests([EndedRequest(0, LONG)])
    (ended,) = drafter.take_recorded(wait=True)
    if not np.array_equal(ended.tokens, text[PROMPT:LONG]):
        return "a rollout that ended is not what the request said"
    ones = torch.ones_like(slots)
    expected = np.stack([text[n : n + k] for n in lengths])
    expected[stranger] = text[lengths[stranger] - 1]
    for batch in sorted({min(n, size - 1) for n in BATCHES}):
        served = upload(np.arange(size - batch, size, dtype=np.int32))
        drafts, rates = (found.cpu().numpy() for found in drafter.propose(served, ones[:batch], *engine))
        again, same_rates = (found.cpu().numpy() for found in drafter.propose(served, ones[:batch], *engine))
        if not np.array_equal(drafts, again) or not np.array_equal(rates, same_rates):
            return f"for {batch} requests two equal calls draft differently"
        wrong = np.flatnonzero((drafts != expected[size - batch :]).any(1))
        if wrong.size:
            row = int(wrong[0])
            return f"for {batch} requests, request {row}: {drafts[row]} for {expected[size - batch + row]}"
        if not ((rates[:-1] > 0) & (rates[:-1] <= 1)).all() or rates[-1].any():
            return f"for {batch} requests some confidences are wrong"
    total_len.add_(k + 1)  # all drafts were right, and one token came after them
    drafter.propose(served, ones[:batch], *engine)
    (drafted, right) = np.sum(list(drafter.source_counts().values()), 0)
    if drafted != k * (batch - 1) or right != drafted:
        return f"of {k * (batch - 1)} right drafts {drafted} were counted, {right} of them as right"
    return None
