"""Speculative decoding of any target: the whole system on one page.

The engine's model runners do the same around vLLM's forward pass: they call the same verifier, `verify_rows`, and the
same drafting, `Drafting.draft` and `Drafting.learn`. In `estimate/phases.py` recorded rollouts are the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.checks import shown_array
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.host.requests import UNLIMITED
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled
from rollout_spec.drafting import Drafting
from rollout_spec.features import Features
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Float32Array, SamplingBatch, VerifyMethod

LogitsFunction = Callable[[list[list[int]]], Float32Array]
"""contexts (token lists) -> next-token logits, float32 [len(contexts), vocabulary]."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A request while it is decoded.

    Attributes:
        token_ids: Prompt and output so far.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        seed: Of the request's noise (see `rollout_spec.noise`); None: it is not known.
        max_tokens: Output tokens after which the request ends.
        stop_token_id: Token that ends the request, or None.
        problem_id: As for `Drafter.start_request`.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int | None
    max_tokens: int = UNLIMITED
    temperature: float = 1.0
    stop_token_id: int | None = None
    problem_id: int | None = None


class Targets(NamedTuple):
    """What the target samples in a step: for each request one row per drafted position, and one after them. N rows."""

    token_ids: NDArray[np.int64]
    """int64 [N]. PLACEHOLDER_TOKEN_ID where nothing was sampled: after a rollout's end, and after the first difference
    from a draft in recordings and under rejection sampling."""
    features: Features = NO_FEATURES
    """int64 [N, FEATURE_WORDS], what the target saw at these rows; of length 0 where it is not known."""


SampleFunction = Callable[[Sequence[RequestState], list[list[int]]], Targets]
"""(requests, each one's draft) -> what the target samples."""


class StepCounts(NamedTuple):
    """What a step of B requests did, int64 [B] each. Request i drafted in row `rows[i]` of `drafter.table`."""

    rows: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    emitted: NDArray[np.int64]


class Decoder:
    """Decodes requests together. Call `start` for new ones at any time, and `step` while there are `live` ones.

    Attributes:
        live: The requests that are not complete, in the order in which they started.
        drafting: The drafter and its budget.

    Args:
        sample: The target.
        knows_noise: Whether the requests' seeds tell the drafter the noise that the target samples with.
        budget: Decides how much of each draft is verified; the caller tells it what steps take. None: all of it.
    """

    def __init__(
        self,
        drafter: Drafter,
        sample: SampleFunction,
        num_speculative_tokens: int,
        *,
        knows_noise: bool = True,
        budget: Budget | None = None,
    ) -> None:
        self.drafting = Drafting(
            drafter, num_speculative_tokens, max_model_len=UNLIMITED, vocab_size=UNLIMITED, budget=budget
        )
        self.live: list[RequestState] = []
        self._sample, self._knows_noise = sample, knows_noise
        self._wants_features = bool(getattr(self.drafting.drafter, "wants_features", False))
        self._limits: dict[str, int] = {}  # see `Learned`

    def start(self, request: RequestState) -> None:
        """Begin a request. Its first token comes with the prompt and is not drafted.

        Raises:
            FloatingPointError: as `step`.
        """
        drafter, r = self.drafting.drafter, request
        seed = r.seed if self._knows_noise and r.temperature > 0 else None
        drafter.start_request(r.req_id, r.token_ids[: r.num_prompt_tokens], problem_id=r.problem_id, seed=seed)
        stops = [] if r.stop_token_id is None else [r.stop_token_id]
        drafter.table.limit(drafter.row_of(r.req_id), max_tokens=r.max_tokens, min_tokens=0, stop_token_ids=stops)
        self.live.append(r)
        self._limits[r.req_id] = 0
        self._advance([r], [[]])

    def step(self, max_draft_tokens: int = UNLIMITED) -> StepCounts:
        """Advance every request by a token or more; drafts have at most `max_draft_tokens` tokens.

        Raises:
            FloatingPointError: a row of logits holds NaN or +inf, or only -inf. No token is committed then.
        """
        # 1. Draft, as much as pays.
        limits = np.array([min(self._limits[r.req_id], max_draft_tokens) for r in self.live])
        token_ids, lengths = self.drafting.draft(self._rows(self.live), limits, num_tokens=len(self.live))
        drafts = [tokens[:n] for tokens, n in zip(token_ids.tolist(), lengths.tolist(), strict=True)]
        return self._advance(list(self.live), drafts)

    def _advance(self, requests: list[RequestState], drafts: list[list[int]]) -> StepCounts:
        # 2. Sample the target at every drafted position and the one after it: one forward pass.
        targets = self._sample(requests, drafts)

        # 3. Verify: accept drafts while they equal what the target samples. Its next token comes on top.
        size, longest = len(requests), max(map(len, drafts)) + 1
        drafted = np.array([len(draft) for draft in drafts])
        starts = np.concatenate(([0], np.cumsum(drafted + 1)))
        accepted, emitted = np.zeros(size, np.int64), np.zeros(size, np.int64)
        output = np.full((size, longest), PLACEHOLDER_TOKEN_ID, np.int32)
        for i, draft in enumerate(drafts):
            sampled = targets.token_ids[starts[i] : starts[i + 1]]
            n = accepted[i] = np.cumprod(sampled[:-1] == draft).sum()
            emitted[i] = n + (sampled[n] != PLACEHOLDER_TOKEN_ID)  # a recording may end with an accepted token
            output[i, : emitted[i]] = sampled[: emitted[i]]

        # 4. Learn: what became of the drafts, and the tokens up to each request's end.
        rows, first = self._rows(requests), np.array([len(r.token_ids) for r in requests])
        drafting = self.drafting
        learned = drafting.learn(
            Sampled(
                rows, np.arange(size), output, first, (first + emitted).astype(np.int32), drafted, emitted - 1, starts,
                targets.features if self._wants_features else NO_FEATURES,
            ),
            targets.token_ids if drafting.wants_rejected_targets else None,
        )  # fmt: skip
        table = drafting.drafter.table.arrays
        kept, is_complete = (table.num_tokens[rows] - first).tolist(), table.is_complete[rows].tolist()
        for i, request in enumerate(requests):
            request.token_ids.extend(output[i, : kept[i]].tolist())
            self._limits[request.req_id] = int(learned.limits[i])
            if is_complete[i]:
                self.stop(request)
        return StepCounts(rows, drafted, accepted, emitted)

    def observe_step(self, counts: StepCounts, seconds: float, draft_seconds: float) -> None:
        """Tell the budget what the last step took, with drafting, and what that took."""
        if self.drafting.budget is not None:
            num_draft_tokens = int(counts.drafted.sum())
            self.drafting.budget.observe_step(
                counts.rows.size + num_draft_tokens,
                seconds,
                drafted=num_draft_tokens > 0,
                num_asked=self.drafting.num_asked,
                draft_seconds=draft_seconds,
            )

    def stop(self, request: RequestState, *, keep: bool = True) -> None:
        """End a live request. `keep`: as for `Drafter.stop_request`."""
        self.drafting.drafter.stop_request(request.req_id, keep=keep)
        self.live.remove(request)
        del self._limits[request.req_id]

    def _rows(self, requests: Sequence[RequestState]) -> NDArray[np.int64]:
        return np.array([self.drafting.drafter.row_of(r.req_id) for r in requests], np.int64)


class LogitsTarget:
    """A function's logits as a target: samples them with each request's noise, as an engine's verifier does."""

    def __init__(self, logits: LogitsFunction, method: VerifyMethod = "sample") -> None:
        self._logits, self._method = logits, method

    def __call__(self, requests: Sequence[RequestState], drafts: list[list[int]]) -> Targets:
        """See `SampleFunction`. Cost: one call with sum(len(draft) + 1) contexts.

        Raises:
            FloatingPointError: a row of logits holds NaN or +inf, or only -inf.
            ValueError: there is not a row of logits for each context.
        """
        import torch  # replays do without it

        from rollout_spec.verify.api import verify_rows
        from rollout_spec.verify.reference import lay_out

        contexts = [
            r.token_ids + draft[:n] for r, draft in zip(requests, drafts, strict=True) for n in range(len(draft) + 1)
        ]
        rows = SamplingBatch(
            temperature=torch.tensor([r.temperature for r in requests], dtype=torch.float32),
            seeds=torch.tensor([r.seed if r.temperature > 0 else 0 for r in requests]),
            positions=torch.tensor([len(r.token_ids) - 1 for r in requests]),
        )
        logits, lengths = self._logits(contexts), [len(draft) for draft in drafts]
        if logits.ndim != 2 or len(logits) != len(contexts) or not logits.size:
            raise ValueError(f"logits must be float [{len(contexts)}, vocabulary], got {shown_array(logits)}")
        draft_token_ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
        result = verify_rows(
            torch.from_numpy(logits),
            lay_out(torch.tensor(lengths).cumsum(0), draft_token_ids, rows),
            method=self._method,
            after_difference=True,
            max_draft_tokens=max(lengths),
        )
        last = result.output_token_ids.gather(1, result.num_accepted.long()[:, None])
        if num_invalid := int((last == PLACEHOLDER_TOKEN_ID).sum()):
            raise FloatingPointError(
                f"{num_invalid} rows of logits are NaN, +inf or all -inf, and nothing can be sampled from them"
            )
        return Targets(result.target_token_ids.numpy())


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
    sample, knows_noise = LogitsTarget(target, method), method == "sample"
    decoder = Decoder(drafter, sample, num_speculative_tokens, knows_noise=knows_noise, budget=budget)
    for request in requests:
        if request.max_tokens > 0:
            decoder.start(request)
    steps = 1
    while decoder.live:
        started = time.perf_counter()
        counts = decoder.step()
        decoder.observe_step(counts, time.perf_counter() - started, decoder.drafting.seconds)
        steps += 1
    return steps
