"""Replays: tokens per step that drafts give on recorded rollouts, by what a request drafts from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rollout_spec.drafters.base import Drafter
from rollout_spec.estimate.phases import RecordedRollout, RecordedTarget, add_rollout
from rollout_spec.loop import Decoder, StepCounts

Regime = Literal["own", "finished", "inflight", "epoch"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
"""What a request drafts from. own: its own text; finished: also samples of its problem that have ended; inflight: also
those that are decoded together with it; epoch: its own text and an earlier epoch's samples."""


@dataclass
class ReplayResult:
    """What a replay counted."""

    request_steps: int = 0
    emitted_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, counts: StepCounts) -> None:
        """Count a step."""
        self.request_steps += counts.rows.size
        self.emitted_tokens += int(counts.emitted.sum())
        self.draft_tokens += int(counts.drafted.sum())
        self.accepted_tokens += int(counts.accepted.sum())

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per request and step."""
        return self.emitted_tokens / max(self.request_steps, 1)

    @property
    def drafted_per_step(self) -> float:
        """Drafted tokens per request and step."""
        return self.draft_tokens / max(self.request_steps, 1)


def split(rollouts: Sequence[RecordedRollout], regime: Regime) -> tuple[list[RecordedRollout], list[RecordedRollout]]:
    """A problem's (earlier, live) rollouts: of its first and second policy version; of a single one, each half.

    Regimes other than `epoch` leave the earlier rollouts out.
    """
    versions = sorted({rollout.policy_version for rollout in rollouts})
    half = len(rollouts) // 2 if regime == "epoch" else 0
    earlier, live = list(rollouts[:half]), list(rollouts[half:])
    if len(versions) > 1:
        earlier, live = ([r for r in rollouts if r.policy_version == version] for version in versions[:2])
    return earlier if regime == "epoch" else [], live


def waves(problems: Sequence[list[RecordedRollout]], regime: Regime, batch: int) -> Iterator[list[RecordedRollout]]:
    """Rollouts that are decoded together, `batch` at most where the regime allows it, wave after wave.

    `own`: one after another. `inflight`: all of a problem together. `finished`, `epoch`: rollout k of `batch` problems,
    after their rollouts before k.
    """
    if regime == "own":
        yield from ([rollout] for problem in problems for rollout in problem)
    elif regime == "inflight":
        wave: list[RecordedRollout] = []
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
    problems: Sequence[Sequence[RecordedRollout]], drafter: Drafter, regime: Regime, *, batch: int = 64,
    num_speculative_tokens: int = 16, max_samples: int | None = None, knows_noise: bool = False,
) -> ReplayResult:  # fmt: skip
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
    keep = regime in ("finished", "inflight")
    for wave in waves([live[:max_samples] for _, live in parts if live], regime, batch):
        for rollout in wave:
            if rollout.token_ids.size:
                decoder.start(target.request(rollout))
        target.end_finished(decoder, keep=keep)
        while decoder.live:
            result.add(decoder.step())
            target.end_finished(decoder, keep=keep)
    return result
