"""`rollout-spec replay`: how many tokens per step drafts would give on recorded rollouts, without a model.

Recorded rollouts are the target that `loop.py` decodes: a draft token is accepted when it equals the recorded one. As
that is a sample of the target, this estimates lossless verification without bias.
"""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.host.step import NO_FEATURES
from rollout_spec.features.format import Features, no_features
from rollout_spec.imports import install
from rollout_spec.loop import Decoder, RequestState, StepCounts, Targets
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Int32Array

Regime = Literal["own", "finished", "inflight", "epoch"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
"""What a request drafts from. own: its own text; finished: also samples of its problem that have ended; inflight: also
those that are decoded together with it; epoch: its own text and an earlier epoch's samples."""


class Rollout(NamedTuple):
    """A recorded rollout of n tokens.

    Attributes:
        runs: Lengths of runs of `token_ids`, alternately sampled and given by an environment. Empty: all was sampled.
        seed: Of the noise it was sampled with, where that is known.
        features: int64 [n, FEATURE_WORDS], what the target saw at each token, where that is known.
    """

    problem_id: int
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    policy_version: int = 0
    runs: tuple[int, ...] = ()
    seed: int | None = None
    features: Features | None = None


def read_rollouts(source: str, tokenizer: str | None = None) -> list[Rollout]:
    """The rollouts of a folder of history, or of a file that `history import` reads. Says on stderr what is left out.

    Raises:
        ValueError: nothing in it can be used, or text comes without the model's tokenizer.
    """
    from rollout_spec.history.command import load_tokenizer
    from rollout_spec.history.folder import HistoryFolder, Origin
    from rollout_spec.history.logs import read

    bad: list[str] = []
    if "://" in source or Path(source).is_dir():
        kept = HistoryFolder(source, Origin()).all_rollouts(lambda path, reason: bad.append(f"{path}: {reason}"))
        found = [(rollout, rollout.context) for rollout in kept]
    else:
        loaded = None if tokenizer is None else load_tokenizer(tokenizer)
        found = list(read(Path(source), loaded, lambda number, reason: bad.append(f"{source}:{number}: {reason}")))
    if not found:
        raise ValueError(bad[0] if bad else f"{source}: no rollouts")
    if bad:
        print(f"{len(bad):,} left out, first {bad[0]}", file=sys.stderr)
    return [Rollout(k.problem_id, prompt, k.tokens, k.version, features=k.features) for k, prompt in found]


def by_problem(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each problem, in the order of their first rollouts."""
    problems: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        problems.setdefault(rollout.problem_id, []).append(rollout)
    return list(problems.values())


class RecordedTarget:
    """Recorded rollouts as the target of a `Decoder`. After its `start` and `step` call `settle`."""

    def __init__(self) -> None:
        self.num_known = np.zeros(0, np.int64)  # [B] tokens of the last step's drafts that had recorded ones
        self._recorded: dict[str, tuple[Rollout, NDArray[np.int64]]] = {}  # with the ends of its runs
        self._num_requests = 0

    def request(self, rollout: Rollout) -> RequestState:
        """A new request, which will say what was recorded."""
        self._num_requests, req_id = self._num_requests + 1, str(self._num_requests)
        self._recorded[req_id] = rollout, np.cumsum(rollout.runs or (rollout.token_ids.size,))
        prompt = rollout.prompt_token_ids
        return RequestState(req_id, prompt.tolist(), prompt.size, rollout.seed, problem_id=rollout.problem_id)

    def __call__(self, requests: Sequence[RequestState], drafts: list[list[int]]) -> Targets:
        """See `SampleFunction`. Nothing is known after a difference from a draft, and after the end of a run."""
        num_rows = sum(map(len, drafts)) + len(drafts)
        token_ids, features, start = np.full(num_rows, PLACEHOLDER_TOKEN_ID, np.int64), no_features(num_rows), 0
        self.num_known = np.zeros(len(requests), np.int64)
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            rollout, ends = self._recorded[request.req_id]
            at = len(request.token_ids) - request.num_prompt_tokens
            known = rollout.token_ids[at : min(at + len(draft) + 1, ends[np.searchsorted(ends, at, "right")])]
            self.num_known[i] = min(known.size, len(draft))
            same = int(np.cumprod(known[: len(draft)] == draft[: known.size]).sum())
            token_ids[start : start + same + 1] = np.append(known, PLACEHOLDER_TOKEN_ID)[: same + 1]
            if rollout.features is not None:
                seen = rollout.features[at : at + min(same + 1, known.size)]
                features[start : start + len(seen)] = seen
            start += len(draft) + 1
        return Targets(token_ids, features=features if features.any() else NO_FEATURES)

    def settle(self, decoder: Decoder, *, keep: bool = True) -> None:
        """Append what an environment answers, and stop the requests that have ended."""
        for request in list(decoder.live):
            rollout, ends = self._recorded[request.req_id]
            at = len(request.token_ids) - request.num_prompt_tokens
            while at < rollout.token_ids.size and (run := int(np.searchsorted(ends, at, "right"))) % 2:
                features = None if rollout.features is None else rollout.features[at : ends[run]]
                decoder.extend(request, rollout.token_ids[at : ends[run]], features)
                at = int(ends[run])
            if at == rollout.token_ids.size:
                decoder.stop(request, keep=keep)
                del self._recorded[request.req_id]


def add_rollout(drafter: Any, rollout: Rollout) -> None:
    """Put a rollout that has ended into a drafter's history."""
    drafter.start_request("earlier", rollout.prompt_token_ids, problem_id=rollout.problem_id)
    has_features = rollout.features is not None and getattr(drafter, "wants_features", False)
    drafter.extend("earlier", rollout.token_ids, *([rollout.features] if has_features else []))
    drafter.stop_request("earlier")


@dataclass
class ReplayResult:
    """What a replay measured; seconds are the drafter's.

    Attributes:
        reliability: float64 [10, 3], by confidence in bins of 0.1: drafted tokens, their summed confidence, accepted
            tokens.
    """

    request_steps: int = 0
    emitted_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    index_seconds: float = 0.0
    draft_seconds: float = 0.0
    reliability: NDArray[np.float64] = field(default_factory=lambda: np.zeros((10, 3)))

    def add(self, counts: StepCounts, decoder: Decoder, target: RecordedTarget) -> None:
        """Count a step."""
        self.request_steps += counts.rows.size
        self.emitted_tokens += int(counts.emitted.sum())
        self.draft_tokens += int(counts.drafted.sum())
        self.accepted_tokens += int(counts.accepted.sum())
        self.draft_seconds += decoder.drafting.seconds
        confidence = decoder.drafting.drafter.table.arrays.confidence[counts.rows]
        depth = np.arange(confidence.shape[1])
        is_known, is_accepted = (depth < n[:, None] for n in (target.num_known, counts.accepted))
        bins = np.minimum(confidence * 10, 9).astype(np.int64)[is_known]
        for column, weights in enumerate((None, confidence[is_known], is_accepted[is_known])):
            self.reliability[:, column] += np.bincount(bins, weights, 10)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the reliability."""
        steps = max(self.request_steps, 1)
        return {
            "tokens_per_step": self.emitted_tokens / steps,
            "drafted_per_step": self.draft_tokens / steps,
            "acceptance_rate": self.accepted_tokens / max(self.draft_tokens, 1),
            "index_us_per_request_step": 1e6 * self.index_seconds / steps,
            "draft_us_per_request_step": 1e6 * self.draft_seconds / steps,
            **{name: value for name, value in vars(self).items() if name != "reliability"},
        }


def split(rollouts: Sequence[Rollout], regime: Regime) -> tuple[list[Rollout], list[Rollout]]:
    """A problem's (earlier, live) rollouts: of its first and second policy version; of a single one, each half.

    Regimes other than `epoch` leave the earlier rollouts out.
    """
    versions = sorted({rollout.policy_version for rollout in rollouts})
    half = len(rollouts) // 2 if regime == "epoch" else 0
    earlier, live = list(rollouts[:half]), list(rollouts[half:])
    if len(versions) > 1:
        earlier, live = ([r for r in rollouts if r.policy_version == version] for version in versions[:2])
    return earlier if regime == "epoch" else [], live


def waves(problems: Sequence[list[Rollout]], regime: Regime, batch: int) -> Iterator[list[Rollout]]:
    """Rollouts that are decoded together, `batch` at most where the regime allows it, wave after wave.

    `own`: one after another. `inflight`: all of a problem together. `finished`, `epoch`: rollout k of `batch` problems,
    after their rollouts before k.
    """
    if regime == "own":
        yield from ([rollout] for problem in problems for rollout in problem)
    elif regime == "inflight":
        wave: list[Rollout] = []
        for problem in problems:
            if wave and len(wave) + len(problem) > batch:
                yield wave
                wave = []
            wave = wave + problem
        yield wave
    else:
        for start in range(0, len(problems), batch):
            for together in itertools.zip_longest(*problems[start : start + batch]):
                yield [rollout for rollout in together if rollout is not None]


def replay(
    problems: Sequence[Sequence[Rollout]],
    drafter: Drafter,
    regime: Regime,
    *,
    num_speculative_tokens: int = 16,
    batch: int = 64,
    max_samples: int | None = None,
    knows_noise: bool = False,
) -> ReplayResult:
    """Replay recorded rollouts, given by problem, in one regime.

    Args:
        num_speculative_tokens: Most tokens drafted per request and step, K.
        batch: Requests that advance together, where the regime allows it.
        max_samples: Live rollouts of each problem, and earlier ones. None: all.
        knows_noise: Whether the drafter is told the seeds of the rollouts' noise.
    """
    target, result = RecordedTarget(), ReplayResult()
    decoder = Decoder(drafter, target, num_speculative_tokens, knows_noise=knows_noise)
    parts = [split(problem, regime) for problem in problems]
    for earlier, _ in parts:
        for rollout in earlier[:max_samples]:
            add_rollout(decoder.drafting.drafter, rollout)
    if regime == "epoch":
        drafter.begin_policy_version(1)
    keep = regime in ("finished", "inflight")
    for wave in waves([live[:max_samples] for _, live in parts if live], regime, batch):
        for rollout in wave:
            if rollout.token_ids.size:
                decoder.start(target.request(rollout))
        target.settle(decoder, keep=keep)
        while decoder.live:
            result.add(decoder.step(), decoder, target)
            target.settle(decoder, keep=keep)
    result.index_seconds = decoder.index_seconds
    return result


def run(args: Namespace) -> int:
    """Replay in every regime and print a table. Returns the exit code; 2, with a line on stderr, for bad input."""
    k = args.num_speculative_tokens
    try:
        if find_spec("pyarrow") is None:
            raise ImportError(f"recordings are read with pyarrow: {install('replay')}")
        if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"-k must be between 1 and {MAX_SPECULATIVE_TOKENS} (vLLM's limit), got {k}")
        options = {"max_draft_tokens": k} if args.drafter in DRAFTERS else {}
        build_drafter(args.drafter, **options)
        rollouts = [rollout for path in args.paths for rollout in read_rollouts(path, args.tokenizer)]
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"rollout-spec replay: {error}", file=sys.stderr)
        return 2
    problems, rows = by_problem(rollouts), []
    print(f"{len(rollouts):,} rollouts of {len(problems):,} problems")
    print("drafts from  tokens/step  drafted/step  accepted")
    for regime in REGIMES:
        result = replay(problems, build_drafter(args.drafter, **options), regime, num_speculative_tokens=k)
        rows.append(row := {"regime": regime, **result.to_dict()})
        figures = f"{row['tokens_per_step']:11.3f}  {row['drafted_per_step']:12.2f}  {row['acceptance_rate']:8.1%}"
        print(f"{regime:11}  {figures}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0
