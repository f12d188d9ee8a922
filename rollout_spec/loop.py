"""One decode step over any target: the whole system on one page.

The plugin does the same around vLLM's forward pass. This version is for reading and for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.decide import Budget
from rollout_spec.budget.estimates import flatten
from rollout_spec.drafters.base import Drafter
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Draft, Float32Array, Int32Array, SamplingBatch
from rollout_spec.verify import reference
from rollout_spec.verify.reference import VerifyMethod

LogitsFunction = Callable[[list[list[int]]], Float32Array]
"""contexts (token lists) -> next-token logits, float32 [len(contexts), vocabulary]."""


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

    @property
    def finished(self) -> bool:
        """Whether the request has reached its stop token or its length."""
        output = self.output_token_ids
        return len(output) >= self.max_tokens or (bool(output) and output[-1] == self.stop_token_id)

    def trim(self, new_token_ids: Sequence[int]) -> list[int]:
        """The tokens that count: a step may sample past the request's end."""
        kept: list[int] = []
        for token in new_token_ids[: self.max_tokens - len(self.output_token_ids)]:
            kept.append(int(token))
            if token == self.stop_token_id:
                break
        return kept


def decode_step(
    requests: Sequence[RequestState],
    drafter: Drafter,
    target: LogitsFunction,
    num_speculative_tokens: int,
    *,
    verify: VerifyMethod = "sample",
    budget: Budget | None = None,
) -> None:
    """Advance every request by one step. `requests` must be started in the drafter and unfinished; they are mutated.

    Args:
        budget: Decides how much of each draft is verified, and learns from the step. None: all of it.

    Raises:
        FloatingPointError: a row of logits holds NaN or +inf, or only -inf. No token is committed then.

    Cost: one `target` call with sum(len(draft) + 1) contexts, O(K) drafter work per request.
    """
    started = time.perf_counter()
    req_ids = [request.req_id for request in requests]

    # 1. Draft, where that pays. A request's last token needs no draft: the step samples one token in any case.
    drafts = [Draft(np.zeros(0, np.int32), np.zeros(0, np.float32)) for _ in requests]
    asked = budget is None or budget.wants_drafts(len(requests))
    if asked:
        room = [min(num_speculative_tokens, r.max_tokens - len(r.output_token_ids) - 1) for r in requests]
        drafts = drafter.propose(req_ids, np.array(room, np.int32))
    confidence, proposed = flatten(drafts)
    num_draft_tokens: NDArray[np.int64] = np.diff(proposed)
    if asked and budget is not None:
        num_draft_tokens = budget.decide(confidence, proposed, num_tokens=len(requests))
        drafts = [Draft(d.token_ids[:n], d.confidence[:n]) for d, n in zip(drafts, num_draft_tokens, strict=True)]
    drafting = time.perf_counter() - started

    # 2. One forward pass over every drafted position and the one after it.
    contexts = [
        request.token_ids + draft.token_ids[:n].tolist()
        for request, draft in zip(requests, drafts, strict=True)
        for n in range(len(draft.token_ids) + 1)
    ]
    logits = target(contexts)

    # 3. Verify: sample the target at every position with its request's noise; accept drafts while they equal that.
    drafted: Int32Array = np.concatenate([draft.token_ids for draft in drafts]).astype(np.int32)
    result = reference.verify(
        logits,
        drafted,
        np.cumsum(num_draft_tokens),
        SamplingBatch(
            temperature=np.array([r.temperature for r in requests], np.float32),
            seeds=np.array([r.seed for r in requests], np.int64),
            positions=np.array([len(r.token_ids) - 1 for r in requests], np.int64),
        ),
        method=verify,
        logprobs_mode="processed_logprobs",
        after_difference=bool(getattr(drafter, "wants_rejected_targets", False)),
    )

    if num_invalid := int(result.num_invalid_rows.sum()):
        raise FloatingPointError(
            f"{num_invalid} rows of logits are NaN, +inf or all -inf, and nothing can be sampled from them"
        )

    # 4. Commit, and tell the drafter what became of its drafts before it sees the tokens.
    ends = np.cumsum(num_draft_tokens + 1)
    starts = ends - (num_draft_tokens + 1)
    targets = [result.target_token_ids[a:b] for a, b in zip(starts, ends, strict=True)]
    if asked:
        drafter.observe(req_ids, [t[t != PLACEHOLDER_TOKEN_ID] for t in targets], result.num_accepted)
    for i, request in enumerate(requests):
        output = result.output_token_ids[i]
        new = request.trim(output[output != PLACEHOLDER_TOKEN_ID].tolist())
        request.token_ids.extend(new)
        request.logprobs.extend(result.logprobs[starts[i] : starts[i] + len(new)].tolist())
        drafter.extend(request.req_id, new)
        if request.finished:
            drafter.stop_request(request.req_id)

    # 5. Learn the step's time, and how many drafts were accepted.
    if budget is not None:
        budget.survival.observe(confidence, proposed, num_draft_tokens, result.num_accepted.astype(np.int64))
        budget.observe_step(
            len(contexts),
            time.perf_counter() - started,
            drafted=drafted.size > 0,
            num_asked=len(requests) if asked else 0,
            draft_seconds=drafting,
        )


def generate(
    requests: Sequence[RequestState],
    drafter: Drafter,
    target: LogitsFunction,
    num_speculative_tokens: int,
    *,
    verify: VerifyMethod = "sample",
    budget: Budget | None = None,
) -> int:
    """Decode until every request is finished. Returns the number of steps."""
    for request in requests:
        seed = request.seed if request.temperature > 0 and verify == "sample" else None
        drafter.start_request(request.req_id, request.token_ids[: request.num_prompt_tokens], seed=seed)
    steps = 0
    while live := [request for request in requests if not request.finished]:
        decode_step(live, drafter, target, num_speculative_tokens, verify=verify, budget=budget)
        steps += 1
    return steps
