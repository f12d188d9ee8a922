"""Recorded rollouts as the target that `loop.py` decodes: a draft token is accepted when it equals the recorded one.

As that is a sample of the target, this estimates lossless verification without bias.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.drafters.host.step import NO_FEATURES
from rollout_spec.features import Features, no_features
from rollout_spec.history.logs import Copies, read
from rollout_spec.loop import Decoder, RequestState, Targets
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Int32Array


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
            known = tokens[at : min(at + len(draft) + 1, ends[bisect_right(ends, at)])]
            num_known = min(len(known), len(draft))
            same = next((j for j in range(num_known) if known[j] != draft[j]), num_known)
            token_ids[start : start + len(known[: same + 1])] = known[: same + 1]
            if rollout.features is not None:
                seen = rollout.features[at : at + len(known[: same + 1])]
                features[start : start + len(seen)] = seen
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
