"""Speculative decoding of any target: the whole system on one page.

The engine's model runners do the same around vLLM's forward pass: they call the same verifier, `verify`, and the same
drafting, `Drafting.learn` and `Drafting.draft`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_spec.budget.decide import Budget
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.host.step import Sampled
from rollout_spec.drafting import Drafting
from rollout_spec.types import Drafts, Float32Array, SamplingBatch
from rollout_spec.verify.api import verify
from rollout_spec.verify.reference import VerifyMethod

LogitsFunction = Callable[[list[list[int]]], Float32Array]
"""contexts (token lists) -> next-token logits, float32 [len(contexts), vocabulary]."""
MAX_MODEL_LEN = VOCAB_SIZE = 1 << 31
"""No bounds: the target says nothing of itself."""


@dataclass(slots=True)
class RequestState:
    """A request while it is decoded.

    Attributes:
        token_ids: Prompt and output so far.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        seed: Of the request's noise (see `rollout_spec.noise`).
        max_tokens: Output tokens after which the request ends.
        stop_token_id: Token that ends the request, or None.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    max_tokens: int
    temperature: float = 1.0
    stop_token_id: int | None = None
    logprobs: list[float] = field(default_factory=list)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


def decode_step(
    requests: Sequence[RequestState],
    rows: NDArray[np.int64],
    drafts: Drafts,
    drafting: Drafting,
    target: LogitsFunction,
    *,
    method: VerifyMethod = "sample",
) -> Drafts:
    """Advance every request by one step.

    Args:
        requests: None of them complete; they are mutated.
        rows: int64 [B], theirs in `drafting.drafter.table`.
        drafts: For this step.

    Returns:
        The drafts for the next step. No request is drafted for that is complete now.

    Raises:
        FloatingPointError: a row of logits holds NaN or +inf, or only -inf. No token is committed then.

    Cost: one `target` call with sum(drafts.lengths + 1) contexts.
    """
    started = time.perf_counter()

    # 1. One forward pass over every drafted position and the one after it.
    drafted = [tokens[:length] for tokens, length in zip(drafts.token_ids.tolist(), drafts.lengths, strict=True)]
    contexts = [
        r.token_ids + tokens[:n] for r, tokens in zip(requests, drafted, strict=True) for n in range(len(tokens) + 1)
    ]
    logits = target(contexts)

    # 2. Verify: sample the target at every position with its request's noise; accept drafts while they equal that.
    result = verify(
        torch.from_numpy(logits),
        torch.tensor([token for tokens in drafted for token in tokens], dtype=torch.int32),
        torch.from_numpy(np.cumsum(drafts.lengths)),
        SamplingBatch(
            temperature=torch.tensor([r.temperature for r in requests], dtype=torch.float32),
            seeds=torch.tensor([r.seed for r in requests]),
            positions=torch.tensor([len(r.token_ids) - 1 for r in requests]),
        ),
        method=method,
        logprobs_mode="processed_logprobs",
        after_difference=drafting.wants_rejected_targets,
    )
    if num_invalid := int(result.num_invalid_rows.sum()):
        raise FloatingPointError(
            f"{num_invalid} rows of logits are NaN, +inf or all -inf, and nothing can be sampled from them"
        )

    # 3. Learn: what became of the drafts, and the tokens up to each request's end.
    num_accepted, first = result.num_accepted.numpy().astype(np.int64), np.array([len(r.token_ids) for r in requests])
    starts = np.concatenate(([0], np.cumsum(drafts.lengths + 1)))
    sampled = Sampled(
        rows,
        np.arange(rows.size),
        result.output_token_ids.numpy(),
        first,
        (first + num_accepted + 1).astype(np.int32),
        drafts.lengths,
        num_accepted,
        starts,
    )
    learned = drafting.learn(sampled, result.target_token_ids.numpy() if drafting.wants_rejected_targets else None)
    num_kept = drafting.drafter.table.arrays.num_tokens[rows] - first
    for i, (request, n) in enumerate(zip(requests, num_kept.tolist(), strict=True)):
        request.token_ids.extend(result.output_token_ids[i, :n].tolist())
        request.logprobs.extend(result.logprobs[starts[i] : starts[i] + n].tolist())

    # 4. Draft for the next step, as much as pays, which the time of this one helps to tell.
    if drafting.budget is not None:
        drafting.budget.observe_step(
            len(contexts),
            time.perf_counter() - started + drafting.seconds,
            drafted=bool(drafts.lengths.any()),
            num_asked=drafting.num_asked,
            draft_seconds=drafting.seconds,
        )
    return drafting.draft(rows, learned, num_tokens=learned.num_live)


def generate(
    requests: Sequence[RequestState],
    drafter: Drafter,
    target: LogitsFunction,
    num_speculative_tokens: int,
    *,
    method: VerifyMethod = "sample",
    budget: Budget | None = None,
) -> int:
    """Decode until every request is complete. Returns the number of steps.

    Args:
        budget: Decides how much of each draft is verified, and learns from the steps. None: all of it.
    """
    drafting = Drafting(
        drafter, num_speculative_tokens, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, budget=budget
    )
    drafter, table = drafting.drafter, drafting.drafter.table
    for request in requests:
        seed = request.seed if request.temperature > 0 and method == "sample" else None
        drafter.start_request(request.req_id, request.token_ids[: request.num_prompt_tokens], seed=seed)
        stops = [] if request.stop_token_id is None else [request.stop_token_id]
        table.limit(drafter.row_of(request.req_id), max_tokens=request.max_tokens, min_tokens=0, stop_token_ids=stops)
    live, steps = [request for request in requests if request.max_tokens > 0], 0
    drafts = drafting.no_drafts(len(live))
    while live:
        rows = np.array([drafter.row_of(request.req_id) for request in live])
        drafts = decode_step(live, rows, drafts, drafting, target, method=method)
        steps += 1
        is_live = ~table.arrays.is_complete[rows]
        for request, goes_on in zip(live, is_live, strict=True):
            if not goes_on:
                drafter.stop_request(request.req_id)
        live = [request for request, goes_on in zip(live, is_live, strict=True) if goes_on]
        drafts = Drafts(drafts.token_ids[is_live], drafts.lengths[is_live])
    return steps
