"""How long rollout phases take in an engine, **simulated**: `loop.py` decodes recorded rollouts.

A draft token is accepted where it equals the recorded one. As that is a sample of the target, this estimates lossless
verification without bias. A step takes what a cost says, and prompts cost nothing. Requests wait for a free place, as
with continuous batching, and a phase ends when the last one has.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.budget import Budget
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.host.step import NO_FEATURES
from rollout_spec.estimate.costs import Cost, EngineCost, Floats
from rollout_spec.features import Features, no_features
from rollout_spec.history.folder import HistoryFolder, Origin
from rollout_spec.history.logs import Copies, read
from rollout_spec.history.store import Rollout
from rollout_spec.loop import Decoder, RequestState, Targets
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import Schedule, best_cut
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Drafts, Int32Array


class RecordedRollout(NamedTuple):
    """A recorded rollout of n tokens.

    Attributes:
        seed: Of the noise it was sampled with, where that is known.
        features: int64 [n, FEATURE_WORDS], what the target saw at each token, where that is known.
        num_prompt_tokens: Length of the whole prompt, where `prompt_token_ids` is only the end of it; otherwise 0.
    """

    problem_id: int
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    policy_version: int = 0
    seed: int | None = None
    features: Features | None = None
    num_prompt_tokens: int = 0

    @property
    def mean_context(self) -> float:
        """How many tokens precede one of `token_ids`, on average."""
        return max(self.num_prompt_tokens, self.prompt_token_ids.size) + self.token_ids.size / 2


def read_rollouts(sources: Sequence[str], tokenizer: Any = None) -> list[RecordedRollout]:
    """Rollouts of folders of history, and of files that `history import` reads, in their order and without copies.

    Says on stderr what is left out.

    Args:
        tokenizer: Of transformers. None: only token ids can be read.

    Raises:
        ValueError: nothing in them can be used, or text comes without the model's tokenizer.
        FileNotFoundError: one is not there.
    """
    bad: list[str] = []
    logged: list[tuple[RecordedRollout, tuple[int, int]]] = []  # with its step and source
    steps: defaultdict[tuple[int, int], defaultdict[int, list[Int32Array]]] = defaultdict(lambda: defaultdict(list))
    for number, source in enumerate(sources):
        for r, prompt in _logged(source, tokenizer, bad):
            length = 0 if r.root is None else r.root.length
            rollout = RecordedRollout(r.problem_id, prompt, r.tokens, r.order, None, r.features, length)
            logged.append((rollout, (r.order, number)))
            steps[r.order, number][r.problem_id].append(r.tokens)
    if not logged:
        raise ValueError(bad[0] if bad else f"no rollouts; of logs name the files, as {sources[0]}/*.parquet does")
    if bad:
        print(f"{len(bad):,} left out, first {bad[0]}", file=sys.stderr)
    copies = Copies()
    copied = {step: copies.find(steps[step]) for step in sorted(steps)}
    if copies.num_dropped:
        print(
            f"{copies.num_dropped:,} copies of rollouts are left out; the earliest step of each counts", file=sys.stderr
        )
    return [rollout for rollout, step in logged if rollout.problem_id not in copied[step]]


def _logged(source: str, tokenizer: Any, bad: list[str]) -> list[tuple[Rollout, Int32Array]]:
    """With prompts. What cannot be used is added to `bad`."""
    try:
        if "://" in source or Path(source).is_dir():
            kept = HistoryFolder(source, Origin()).all_rollouts(lambda path, why: bad.append(f"{path}: {why}"))
            return [(rollout, rollout.context) for rollout in kept]
        return list(read(Path(source), tokenizer, lambda line, why: bad.append(f"{source}:{line}: {why}")))
    except FileNotFoundError:  # a misspelt name
        raise
    except (OSError, ValueError) as error:
        bad.append(str(error))
        return []


def by_problem(rollouts: Sequence[RecordedRollout]) -> list[list[RecordedRollout]]:
    """The rollouts of each problem, in the order of their first rollouts."""
    problems: dict[int, list[RecordedRollout]] = {}
    for rollout in rollouts:
        problems.setdefault(rollout.problem_id, []).append(rollout)
    return list(problems.values())


class RecordedTarget:
    """Recorded rollouts as the target of a `Decoder`. After its `step` call `end_finished`."""

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[RecordedRollout, list[int]]] = {}  # with its tokens

    def request(self, rollout: RecordedRollout) -> RequestState:
        """A new request, which will say what was recorded."""
        req_id, prompt = str(len(self._recorded)), rollout.prompt_token_ids
        self._recorded[req_id] = rollout, rollout.token_ids.tolist()
        return RequestState(req_id, prompt.tolist(), prompt.size, rollout.seed, problem_id=rollout.problem_id)

    def __call__(self, requests: Sequence[RequestState], drafts: list[list[int]]) -> Targets:
        """See `SampleFunction`. Nothing is known after a difference from a draft."""
        num_rows = sum(map(len, drafts)) + len(drafts)
        token_ids, features, start = np.full(num_rows, PLACEHOLDER_TOKEN_ID, np.int64), no_features(num_rows), 0
        for request, draft in zip(requests, drafts, strict=True):
            rollout, tokens = self._recorded[request.req_id]
            at = len(request.token_ids) - request.num_prompt_tokens
            said = tokens[at : at + len(draft) + 1]
            differs = [token != drafted for token, drafted in zip(said, draft, strict=False)]
            said = said[: [*differs, True].index(True) + 1]
            token_ids[start : start + len(said)] = said
            if rollout.features is not None:
                features[start : start + len(said)] = rollout.features[at : at + len(said)]
            start += len(draft) + 1
        return Targets(token_ids, features=features if features.any() else NO_FEATURES)

    def end_finished(self, decoder: Decoder, *, keep: bool = True) -> list[RequestState]:
        """Stop the requests that have ended, and return them."""
        sizes = [(r, len(r.token_ids) - r.num_prompt_tokens) for r in decoder.live]
        ended = [r for r, size in sizes if size == len(self._recorded[r.req_id][1])]
        for request in ended:
            decoder.stop(request, keep=keep)
        return ended


def add_rollout(drafter: Any, rollout: RecordedRollout) -> None:
    """Put a rollout that has ended into a drafter's history."""
    drafter.start_request("earlier", rollout.prompt_token_ids, problem_id=rollout.problem_id)
    has_features = rollout.features is not None and getattr(drafter, "wants_features", False)
    drafter.extend("earlier", rollout.token_ids, *([rollout.features] if has_features else []))
    drafter.stop_request("earlier")


@dataclass
class Engine:
    """What simulated steps take, and what decides how much is drafted in them. What it learns stays with it.

    Attributes:
        k: Most draft tokens of a request.
        ranges: The same by the number of requests, as of `affordable_ranges`. Empty: k.
        known: What it knows of its steps, by which drafts are cut on the device. None: they are not.
        schedule: Whether steps have drafts. None: all have.
        passes: Forward passes of a step in which no request begins. None: one, and the host hears of its tokens before
            the next step is scheduled.
        budget: Of a drafter on the host.
    """

    cost: Cost
    k: int
    ranges: Sequence[tuple[int, int, int]] = ()
    known: EngineCost | None = None
    schedule: Schedule | None = None
    passes: NumPasses | int | None = None
    budget: Budget | None = None


class Step(NamedTuple):
    """A forward pass."""

    num_requests: int
    num_draft_tokens: int
    num_accepted: int
    seconds: float
    """With drafting; an equal share of what its step of the scheduler takes."""
    tokens: int
    """Generated so far, the first one of each rollout included."""
    ended: list[tuple[RecordedRollout, float]]
    """With the seconds of each, by an equal share of its steps."""
    num_wasted: int
    """Requests that are computed though they have ended."""
    num_passes: int
    """Of its step."""


class _Cutting:
    """Cuts whole drafts as vLLM's adaptive verification does.

    How many draft tokens are kept in each pass of a step follows from the step before's last confidences, the latest
    that the host has; which ones, from these drafts'.
    """

    def __init__(self, known: EngineCost, decoder: Decoder) -> None:
        self._known, self._decoder, self._draft, self._num_kept = known, decoder, decoder.drafting.draft, 0
        self._before: dict[RequestState, Floats] = {}
        decoder.drafting.draft = self._draft_and_cut  # type: ignore[method-assign]

    def begin_step(self, k: int) -> None:
        live, new = self._decoder.live, np.ones(k)  # drafts of new requests count as certain
        survival = np.concatenate([self._before.get(request, new) for request in live])
        seconds = self._known.steps(len(live) + np.arange(survival.size + 1))
        self._num_kept = best_cut(len(live), survival, seconds)

    def _draft_and_cut(self, *args: Any, **kwargs: Any) -> Drafts:
        drafts, drafting = self._draft(*args, **kwargs), self._decoder.drafting
        if not drafting.num_asked:
            return drafts
        rows = [drafting.drafter.row_of(request.req_id) for request in self._decoder.live]
        # The probability that each drafted token is reached and right, float64 [B, K]; 0 where there is none.
        survival = drafting.drafter.table.arrays.confidence[rows].astype(np.float64)
        survival[np.arange(survival.shape[1]) >= drafts.lengths[:, None]] = 0.0
        self._before = dict(zip(self._decoder.live, survival, strict=True))
        kept = np.zeros(survival.size, bool)
        kept[np.argsort(-survival, axis=None, kind="stable")[: self._num_kept]] = True
        return drafts._replace(lengths=kept.reshape(survival.shape).sum(1))


def simulate(rollouts: Sequence[RecordedRollout], drafter: Drafter, engine: Engine, *, batch: int) -> Iterator[Step]:
    """Decode recorded rollouts, `batch` at a time, and yield the forward passes.

    With a number of passes a request that ends is computed to the end of the next step, which is scheduled ahead.
    """
    target = RecordedTarget()
    decoder = Decoder(drafter, target, engine.k, knows_noise=False, budget=engine.budget)
    cutting = None if engine.known is None else _Cutting(engine.known, decoder)
    waiting = deque(rollout for rollout in rollouts if rollout.token_ids.size)
    started: dict[RequestState, tuple[RecordedRollout, float]] = {}
    tokens, clock = 0, 0.0  # the seconds of a request that was there from the beginning
    late, last = 0, (0, 0)  # requests of the next step that have ended; K and passes of the last one
    while waiting or decoder.live:
        num_before = len(decoder.live)
        late *= num_before > 0
        while waiting and len(decoder.live) + late < batch:
            rollout = waiting.popleft()
            tokens += 1  # the first one comes with the prompt
            if rollout.token_ids.size > 1:
                request = target.request(rollout)
                started[request] = rollout, clock
                decoder.start(request)
        num_started = len(decoder.live)
        if not num_started:
            return
        num_requests, has_prompts = num_started + late, num_started > num_before
        k = next((k for first, _, k in reversed(engine.ranges) if first <= num_requests), engine.k)
        if engine.schedule is not None:
            k = engine.schedule.choose(num_requests, k)
        n, is_timed = 1, engine.passes is None or not has_prompts
        if isinstance(engine.passes, NumPasses) and not has_prompts:
            n = engine.passes.choose(num_requests, k > 0)
            is_timed = not engine.passes.is_trial
        elif isinstance(engine.passes, int) and not has_prompts:
            n = engine.passes
        if cutting is not None:
            cutting.begin_step(engine.k)
        seconds = 0.0
        for number in range(n):
            num_live, num_accepted = len(decoder.live), 0
            if num_live:
                counts = decoder.step(k)
                num_accepted = int(counts.accepted.sum())
                tokens += int(counts.emitted.sum())
            if number == 0:  # the others have as many tokens
                num_drafts = k * num_requests  # where there is no draft something else is verified
                if cutting is not None or engine.budget is not None:
                    num_drafts = int(counts.drafted.sum())
                drafting = engine.cost.drafting(num_requests) * (decoder.drafting.num_asked > 0)
                whole = engine.cost.whole_step(num_requests, num_drafts, is_drafting=k > 0, num_passes=n)
                seconds = drafting + whole / n
                decoder.observe_step(counts, seconds, drafting)
            if num_live and engine.schedule is not None:
                engine.schedule.observe(np.full(num_live, k), counts.accepted, seconds if is_timed else None)
            clock += seconds / max(num_live, 1)
            ended = [(rollout, clock - start) for rollout, start in map(started.pop, target.end_finished(decoder))]
            yield Step(num_live, num_drafts, num_accepted, seconds, tokens, ended, num_requests - num_live, n)
        if engine.passes is not None:
            late = num_started - len(decoder.live)
        # As engines do: a step counts among others like it.
        if isinstance(engine.passes, NumPasses) and not has_prompts and (k, n) == last:
            engine.passes.observe(num_requests, k > 0, n, n * seconds)
        last = k, n
