"""How long a rollout phase would take on an engine whose steps cost what a curve says, for a policy of draft lengths.

**Simulated**: `loop.py` decodes recorded rollouts, accepting a draft token where it equals the recorded one. As that is
a sample of the target, this estimates lossless verification without bias. A step takes what the curve says for its
tokens, and prompts cost nothing. Requests wait for a free place, as with continuous batching, and the phase ends when
the last one has. A step of the scheduler may have several forward passes (`num_passes.py`).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.budget import Budget
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.host.step import NO_FEATURES
from rollout_spec.estimate.costs import Cost, Floats, KnownSeconds
from rollout_spec.features import Features, no_features
from rollout_spec.history.logs import Copies, read
from rollout_spec.loop import Decoder, RequestState, Targets
from rollout_spec.measured_schedule import MeasuredSchedule
from rollout_spec.num_passes import NumPasses
from rollout_spec.step_sizes import CHEAP_TOKENS, CHEAP_TOKENS_A100, MOST_CUT_REQUESTS, affordable_ranges
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Drafts, Int32Array


class RecordedRollout(NamedTuple):
    """A recorded rollout of n tokens.

    Attributes:
        runs: Lengths of runs of `token_ids`, alternately sampled and given by an environment. Empty: all was sampled.
        seed: Of the noise it was sampled with, where that is known.
        features: int64 [n, FEATURE_WORDS], what the target saw at each token, where that is known.
        num_prompt_tokens: Length of the whole prompt, where `prompt_token_ids` is only the end of it; otherwise 0.
    """

    problem_id: int
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    policy_version: int = 0
    runs: tuple[int, ...] = ()
    seed: int | None = None
    features: Features | None = None
    num_prompt_tokens: int = 0

    @property
    def mean_context(self) -> float:
        """How many tokens precede one of `token_ids`, on average."""
        return max(self.num_prompt_tokens, self.prompt_token_ids.size) + self.token_ids.size / 2


def read_rollouts(source: str, tokenizer: Any = None) -> list[RecordedRollout]:
    """The rollouts of a folder of history, or of a file that `history import` reads. Says on stderr what is left out.

    Args:
        tokenizer: Of transformers. None: only token ids can be read.

    Raises:
        ValueError: nothing in it can be used, or text comes without the model's tokenizer.
    """
    from rollout_spec.history.folder import HistoryFolder, Origin

    bad: list[str] = []
    if "://" in source or Path(source).is_dir():
        kept = HistoryFolder(source, Origin()).all_rollouts(lambda path, reason: bad.append(f"{path}: {reason}"))
        found = [(rollout, rollout.context) for rollout in kept]
    else:
        found = list(read(Path(source), tokenizer, lambda number, reason: bad.append(f"{source}:{number}: {reason}")))
    if not found:
        hint = "" if Path(source).is_file() else ", as history is kept; name log files one by one, as *.parquet does"
        raise ValueError(bad[0] if bad else f"{source}: no rollouts{hint}")
    if bad:
        print(f"{len(bad):,} left out, first {bad[0]}", file=sys.stderr)
    return [
        RecordedRollout(
            k.problem_id, prompt, k.tokens, k.order, features=k.features,
            num_prompt_tokens=0 if k.root is None else k.root.length,
        )
        for k, prompt in found
    ]  # fmt: skip


def without_copies(logs: Sequence[Sequence[RecordedRollout]]) -> tuple[list[RecordedRollout], int]:
    """The rollouts of several logs in their order, without copies, and how many were copies. See `Copies`."""
    steps: defaultdict[tuple[int, int], defaultdict[int, list[Int32Array]]] = defaultdict(lambda: defaultdict(list))
    for number, log in enumerate(logs):
        for rollout in log:
            steps[rollout.policy_version, number][rollout.problem_id].append(rollout.token_ids)
    copies = Copies()
    copied = {(step, problem_id) for step in sorted(steps) for problem_id in copies.find(steps[step])}
    kept = [
        rollout
        for number, log in enumerate(logs)
        for rollout in log
        if ((rollout.policy_version, number), rollout.problem_id) not in copied
    ]
    return kept, copies.num_dropped


def by_problem(rollouts: Sequence[RecordedRollout]) -> list[list[RecordedRollout]]:
    """The rollouts of each problem, in the order of their first rollouts."""
    problems: dict[int, list[RecordedRollout]] = {}
    for rollout in rollouts:
        problems.setdefault(rollout.problem_id, []).append(rollout)
    return list(problems.values())


class RecordedTarget:
    """Recorded rollouts as the target of a `Decoder`. After its `step` call `end_finished`.

    After its `start`, too, where the first run of a rollout may have a single token.
    """

    def __init__(self) -> None:
        # With its tokens and the ends of its runs.
        self._recorded: dict[str, tuple[RecordedRollout, list[int], list[int]]] = {}
        self._num_requests = 0

    def request(self, rollout: RecordedRollout) -> RequestState:
        """A new request, which will say what was recorded."""
        self._num_requests, req_id = self._num_requests + 1, str(self._num_requests)
        ends = np.cumsum(rollout.runs or (rollout.token_ids.size,)).tolist()
        self._recorded[req_id] = rollout, rollout.token_ids.tolist(), ends
        prompt = rollout.prompt_token_ids
        return RequestState(req_id, prompt.tolist(), prompt.size, rollout.seed, problem_id=rollout.problem_id)

    def __call__(self, requests: Sequence[RequestState], drafts: list[list[int]]) -> Targets:
        """See `SampleFunction`. Nothing is known after a difference from a draft, and after the end of a run."""
        num_rows = sum(map(len, drafts)) + len(drafts)
        token_ids, features, start = np.full(num_rows, PLACEHOLDER_TOKEN_ID, np.int64), no_features(num_rows), 0
        for request, draft in zip(requests, drafts, strict=True):
            rollout, tokens, ends = self._recorded[request.req_id]
            at = len(request.token_ids) - request.num_prompt_tokens
            said = tokens[at : min(at + len(draft) + 1, ends[bisect_right(ends, at)])]
            differs = [token != drafted for token, drafted in zip(said, draft, strict=False)]
            said = said[: [*differs, True].index(True) + 1]
            token_ids[start : start + len(said)] = said
            if rollout.features is not None:
                features[start : start + len(said)] = rollout.features[at : at + len(said)]
            start += len(draft) + 1
        return Targets(token_ids, features=features if features.any() else NO_FEATURES)

    def end_finished(self, decoder: Decoder, *, keep: bool = True) -> None:
        """Append what an environment answers, and stop the requests that have ended."""
        for request in list(decoder.live):
            rollout, _, ends = self._recorded[request.req_id]
            at = len(request.token_ids) - request.num_prompt_tokens
            while at < rollout.token_ids.size and (run := bisect_right(ends, at)) % 2:
                features = None if rollout.features is None else rollout.features[at : ends[run]]
                decoder.extend(request, rollout.token_ids[at : ends[run]], features)
                at = ends[run]
            if at == rollout.token_ids.size:
                decoder.stop(request, keep=keep)
                del self._recorded[request.req_id]


def add_rollout(drafter: Any, rollout: RecordedRollout) -> None:
    """Put a rollout that has ended into a drafter's history."""
    drafter.start_request("earlier", rollout.prompt_token_ids, problem_id=rollout.problem_id)
    has_features = rollout.features is not None and getattr(drafter, "wants_features", False)
    drafter.extend("earlier", rollout.token_ids, *([rollout.features] if has_features else []))
    drafter.stop_request("earlier")


class Adaptive(MeasuredSchedule):
    """Cuts whole drafts as vLLM's adaptive verification does: by the drafter's confidences and what steps cost.

    How many draft tokens a step keeps in each of its passes is decided by the previous step's last confidences, the
    latest that the host has; which ones, by these drafts'.

    Args:
        seconds: Of steps, as the engine knows them.
        num_speculative_tokens: Of whole drafts.
        batch: Most requests of a step.
    """

    def __init__(self, seconds: KnownSeconds, num_speculative_tokens: int, batch: int) -> None:
        super().__init__([num_speculative_tokens * (n <= MOST_CUT_REQUESTS) for n in range(batch + 1)])
        self._seconds = seconds
        self._before: dict[RequestState, Floats] = {}
        self._num_passes, self._pass, self._num_kept = 1, 0, 0  # of the step

    def begin_step(self, num_passes: int) -> None:
        """The next drafts are those of a step that has so many forward passes."""
        self._num_passes, self._pass = num_passes, 0

    def cut(self, drafts: Drafts, decoder: Decoder) -> Drafts:
        """These drafts with the lengths that are verified."""
        drafting = decoder.drafting
        if not drafting.num_asked:
            return drafts
        rows = [drafting.drafter.row_of(request.req_id) for request in decoder.live]
        # The probability that each drafted token is reached and right, float64 [B, K]; 0 where there is none.
        survival = drafting.drafter.table.arrays.confidence[rows].astype(np.float64)
        survival[np.arange(survival.shape[1]) >= drafts.lengths[:, None]] = 0.0
        if self._pass == 0:
            new = np.ones(survival.shape[1])  # drafts of new requests count as certain
            before = np.array([self._before.get(request, new) for request in decoder.live])
            emitted = len(rows) + np.append(0.0, np.cumsum(-np.sort(-before, axis=None)))
            sizes = len(rows) + np.arange(emitted.size)
            self._num_kept = int(np.argmax(emitted / self._seconds(len(rows), sizes, self._num_passes)))
        self._pass += 1
        if self._pass == self._num_passes:
            self._before = dict(zip(decoder.live, survival, strict=True))
        kept = np.zeros(survival.size, bool)
        kept[np.argsort(-survival, axis=None, kind="stable")[: self._num_kept]] = True
        return drafts._replace(lengths=kept.reshape(survival.shape).sum(1))


Policy = Budget | MeasuredSchedule | Callable[[int], int]
"""How many tokens are drafted for each request of a step: as many as pay, as engines decide on the host or in the
scheduler, where the device may cut them (`Adaptive`); or K by the number of requests, 0 to switch drafts off."""


def k_by_requests(gpu: str | None, num_speculative_tokens: int, used_experts: float, batch: int) -> list[int]:
    """The most tokens that engines draft for each of 0, 1, ... `batch` requests, where vLLM does not cut drafts.

    Args:
        gpu: A name in `costs.PEAKS`; None: not an A100.
        used_experts: Share of its experts that a token of the model uses.
    """
    cheap = CHEAP_TOKENS_A100 if gpu == "a100" else CHEAP_TOKENS
    ranges = affordable_ranges(num_speculative_tokens, cheap, used_experts)  # without gaps; the last has no end
    return [next((k for first, _, k in reversed(ranges) if first <= n), 0) for n in range(batch + 1)]


class Step(NamedTuple):
    """A forward pass of a simulated engine."""

    num_requests: int
    num_draft_tokens: int
    num_accepted: int
    seconds: float
    """Those of drafting included; an equal share of what its step of the scheduler takes."""
    tokens: int
    """Generated so far, the first one of each rollout included."""
    ended: list[tuple[RecordedRollout, float]]
    """The rollouts that have ended, and the seconds of each, by an equal share of its steps."""
    num_wasted: int = 0
    """Requests that it computes though they have ended."""
    num_passes: int = 1
    """Of its step."""


def simulate(
    rollouts: Sequence[RecordedRollout],
    drafter: Drafter,
    policy: Policy,
    cost: Cost,
    *,
    num_speculative_tokens: int,
    batch: int,
    passes: NumPasses | int | None = None,
) -> Iterator[Step]:
    """Decode recorded rollouts, `batch` at a time, and yield the forward passes.

    Args:
        policy: A `Budget` learns from these steps, and may know others.
        num_speculative_tokens: Most tokens drafted per request and step, K.
        passes: Of each step in which no request begins. A request that ends is then computed to the end of the next
            step, too, which was scheduled before the host heard of it. None: of each step one, and that is free.
    """
    target, budget = RecordedTarget(), policy if isinstance(policy, Budget) else None
    decoder = Decoder(drafter, target, num_speculative_tokens, knows_noise=False, budget=budget)
    if isinstance(policy, Adaptive):
        draft: Any = decoder.drafting.draft
        decoder.drafting.draft = lambda *args, **kwargs: policy.cut(draft(*args, **kwargs), decoder)  # type: ignore[method-assign]
    waiting = [rollout for rollout in reversed(rollouts) if rollout.token_ids.size]
    tokens, clock = 0, 0.0  # the seconds of a request that was there from the beginning
    started: dict[RequestState, tuple[RecordedRollout, float]] = {}
    late = 0  # requests of the next step that have ended
    timed: deque[tuple[int, int, int, float | None]] = deque(maxlen=3)  # K, passes, requests and seconds of steps
    while waiting or decoder.live:
        num_before = len(decoder.live)
        late *= num_before > 0
        while waiting and len(decoder.live) + late < batch:
            rollout = waiting.pop()
            tokens += 1  # the first one comes with the prompt
            if rollout.token_ids.size > 1:
                request = target.request(rollout)
                started[request] = rollout, clock
                decoder.start(request)
        num_started = len(decoder.live)
        if not num_started:
            return
        num_requests, k = num_started + late, num_speculative_tokens
        if isinstance(policy, MeasuredSchedule):
            k = policy.choose(num_requests)
        elif not isinstance(policy, Budget):
            k = policy(num_requests)
        has_prompts, num_passes, is_trial = num_started > num_before, 1, False
        if isinstance(passes, NumPasses) and not has_prompts:
            num_passes, is_trial = passes.choose(num_requests, k > 0), passes.is_trial
        elif isinstance(passes, int) and not has_prompts:
            num_passes = passes
        if isinstance(policy, Adaptive):
            policy.begin_step(num_passes)
        seconds = 0.0
        for number in range(num_passes):
            num_live, num_accepted = len(decoder.live), 0
            if num_live:
                counts = decoder.step(k)
                num_accepted = int(counts.accepted.sum())
                tokens += int(counts.emitted.sum())
            if number == 0:  # the others have as many tokens
                num_draft_tokens = int(counts.drafted.sum())
                if not isinstance(policy, Budget | Adaptive):
                    num_draft_tokens = k * num_requests  # where there is no draft something else is verified
                draft_seconds = cost.drafting(num_requests) * (decoder.drafting.num_asked > 0)
                seconds = draft_seconds + (
                    cost.whole_step(num_requests, num_draft_tokens, is_drafting=k > 0, num_passes=num_passes)
                    / num_passes
                )
                decoder.observe_step(counts, seconds, draft_seconds)
            if num_live and isinstance(policy, MeasuredSchedule):
                is_timed = passes is None or not (has_prompts or is_trial)
                policy.observe(np.full(num_live, k), counts.accepted, seconds if is_timed else None)
            target.end_finished(decoder)
            clock += seconds / max(num_live, 1)
            left = started.keys() - set(decoder.live)
            ended = [(rollout, clock - start) for rollout, start in map(started.pop, left)]
            num_wasted = num_requests - num_live
            yield Step(num_live, num_draft_tokens, num_accepted, seconds, tokens, ended, num_wasted, num_passes)
        if passes is not None:
            late = num_started - len(decoder.live)
        # As `sub_steps.Steps` does: a step counts among others like it.
        timed.append((k, num_passes, num_requests, None if has_prompts else num_passes * seconds))
        if isinstance(passes, NumPasses) and len({step[:2] for step in timed}) == 1 and len(timed) == 3:
            _, _, num_requests, took = timed[1]
            if took is not None:
                passes.observe(num_requests, k > 0, num_passes, took)
