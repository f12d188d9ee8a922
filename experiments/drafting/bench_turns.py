"""Conversations as an engine gets them, a request for each turn, whose prompt is all that was said before.

    python -m experiments.drafting.bench_turns TRACES_DIR/tau_airline_gpt4o.parquet [--drafters ...] [--out FILE.jsonl]

Three ways to give the same recorded conversations to a drafter:

- one request: a conversation is one long request, in whose output the environment's text appears, as `rollout-spec
  replay` has it;
- hashed prompts: a request for each turn, whose problem is the hash of its prompt;
- roots: a request for each turn, whose problem `rollout_spec.history.roots` finds.

In two regimes: `inflight`, in which all samples of several problems, BATCH in all, are in flight together, and `epoch`,
in which half of each problem's samples are an earlier epoch's, and only the others are counted. The first token of
every turn comes with its prompt, so that nothing is drafted for it, whichever the way. A recording's samples of a
problem begin with different words of a simulated user: here all of them have the first one's prompt, as a group of
rollouts has.

Also how long it takes to recognise a long prompt. The gate: all ways and drafters emit the same number of tokens, and
the drafters pass their integrity check.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from experiments.drafting.peers import ReferenceDrafter
from experiments.rows import append, origin, quantiles
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import problem_of_prompt, tell_outcomes
from rollout_spec.history.problems import Conversation, Problems
from rollout_spec.history.traces import read_traces
from rollout_spec.replay import Rollout, by_problem
from rollout_spec.types import Int32Array

K = 16
BATCH = 64

Way = Literal["one request", "hashed prompts", "roots"]
WAYS: tuple[Way, ...] = get_args(Way)
DRAFTERS: dict[str, Callable[[], Any]] = {
    **{name: partial(build_drafter, name, max_draft_tokens=K) for name in ("history", "suffix", "ngram")},
    "device": partial(ReferenceDrafter, max_draft_tokens=K),
}


class Turn(NamedTuple):
    """A turn's place in its conversation's tokens."""

    first: int
    end: int


class Sample(NamedTuple):
    """A recorded conversation."""

    rollout: Rollout  # its first tokens of later turns count as given
    turns: list[Turn]


def samples_of(problem: Sequence[Rollout]) -> list[Sample]:
    """A problem's conversations, without what the environment says at the end of some."""
    samples = []
    for rollout in problem:
        ends = np.cumsum(rollout.runs).tolist()
        turns = [Turn(end - run, end) for run, end in zip(rollout.runs[::2], ends[::2], strict=True) if run]
        runs = [turns[0].end]
        for before, turn in itertools.pairwise(turns):
            runs += [turn.first + 1 - before.end, turn.end - turn.first - 1]
        one_prompt = rollout._replace(
            prompt_token_ids=problem[0].prompt_token_ids,
            token_ids=rollout.token_ids[: turns[-1].end],
            runs=tuple(runs),
        )
        samples.append(Sample(one_prompt, turns))
    return samples


class Cursor:
    """Where a replayed request stands in its recording."""

    def __init__(self, rollout: Rollout) -> None:
        self._tokens = rollout.token_ids
        self._ends = list(itertools.accumulate(rollout.runs))
        self._at = 0
        self._run = 0

    @property
    def done(self) -> bool:
        """Whether the whole recording has been replayed."""
        return self._at >= self._tokens.size

    @property
    def num_said(self) -> int:
        """Tokens that are committed, the environment's included."""
        return self._at

    def expected(self, n: int) -> Int32Array:
        """The next recorded tokens, at most n and not beyond the end of the generated run."""
        return self._tokens[self._at : min(self._at + n, self._ends[self._run])]

    def num_agreeing(self, draft: Int32Array) -> int:
        """How many first tokens of a draft are the recorded ones."""
        expected = self.expected(len(draft))
        return int(np.cumprod(draft[: expected.size] == expected).sum())

    def advance(self, n: int) -> None:
        """Commit n generated tokens, fewer at the end of the run, and the environment's run after it."""
        self._at = min(self._at + n, self._ends[self._run])
        while self._run + 1 < len(self._ends) and self._at == self._ends[self._run]:
            if self._run % 2 == 0:  # a generated run has ended: the environment's follows at once
                self._at = self._ends[self._run + 1]
            self._run += 1


class Speaker:
    """A conversation in flight: passes on to a drafter what was said, in one of the ways."""

    def __init__(self, name: str, sample: Sample, drafter: Any, way: Way, roots: Problems) -> None:
        self.cursor = Cursor(sample.rollout)
        self._name, self._sample, self._drafter, self._way, self._roots = name, sample, drafter, way, roots
        self._turn = 0
        self._conversation: Conversation | None = None
        self._start(sample.rollout.prompt_token_ids)
        self.advance(1)

    @property
    def req_id(self) -> str:
        """The request that is in flight."""
        return f"{self._name}/{self._turn}"

    def advance(self, count: int) -> None:
        """Say so many more tokens, and what the environment answers."""
        said, tokens = self.cursor.num_said, self._sample.rollout.token_ids
        self.cursor.advance(count)
        if self._way != "one request":
            turns = self._sample.turns
            while self._turn + 1 < len(turns) and self.cursor.num_said > turns[self._turn + 1].first:
                self._drafter.extend(self.req_id, tokens[said : turns[self._turn].end])
                self.stop()
                self._turn += 1
                said = turns[self._turn].first
                self._start(np.concatenate((self._sample.rollout.prompt_token_ids, tokens[:said])))
        self._drafter.extend(self.req_id, tokens[said : self.cursor.num_said])

    def _start(self, prompt: np.ndarray) -> None:
        known: dict[str, int] = {}
        problem_id = problem_of_prompt(prompt)
        if self._way == "roots":
            self._conversation = self._roots.start(prompt)
            assert self._conversation.problem_id is not None
            problem_id = self._conversation.problem_id
            if hasattr(self._drafter, "output_of"):
                known = {"num_known": self._conversation.num_known}
        self._drafter.start_request(self.req_id, prompt, problem_id=problem_id, **known)

    def stop(self) -> None:
        """The request that is in flight ends."""
        if self._conversation is not None:
            turn = self._sample.turns[self._turn]
            self._roots.stop(self._conversation, self._sample.rollout.token_ids[turn.first : turn.end])
        self._drafter.stop_request(self.req_id)


def speak(samples: Sequence[Sample], drafter: Any, way: Way, roots: Problems, first: int) -> np.ndarray:
    """Conversations in lock step, until all have ended. Requests' names begin with numbers from `first` on.

    Returns:
        int64 [3]: emitted tokens, drafted tokens, requests summed over steps.
    """
    counts = np.zeros(3, np.int64)
    live = [Speaker(str(first + i), sample, drafter, way, roots) for i, sample in enumerate(samples)]
    while live := [speaker for speaker in live if not _has_ended(speaker)]:
        req_ids = [speaker.req_id for speaker in live]
        drafts = drafter.propose(req_ids, np.full(len(live), K, np.int32))
        accepted = [s.cursor.num_agreeing(draft) for s, (draft, _) in zip(live, drafts, strict=True)]
        targets = [s.cursor.expected(n + 1) for s, n in zip(live, accepted, strict=True)]
        # At the end of a turn there is no token after the accepted ones.
        outcomes = np.array([min(n, t.size - 1) for n, t in zip(accepted, targets, strict=True)], np.int32)
        tell_outcomes(drafter, req_ids, targets, outcomes)
        for speaker, n in zip(live, accepted, strict=True):
            speaker.advance(n + 1)
        counts += sum(t.size for t in targets), sum(len(draft.token_ids) for draft in drafts), len(live)
    return counts


def _has_ended(speaker: Speaker) -> bool:
    if speaker.cursor.done:
        speaker.stop()
    return speaker.cursor.done


def waves(problems: Sequence[Sequence[Rollout]], part: slice, batch: int) -> Iterator[list[Sample]]:
    """Some of each problem's samples, together with those of other problems, `batch` at most."""
    wave: list[Sample] = []
    for problem in problems:
        samples = samples_of(problem)[part]
        if wave and len(wave) + len(samples) > batch:
            yield wave
            wave = []
        wave += samples
    yield wave


def measure(problems: Sequence[Sequence[Rollout]], make: Callable[[], Any], way: Way, regime: str) -> dict[str, Any]:
    """What a drafter gains in one way, and what it holds at the end."""
    drafter, roots = make(), Problems()
    half = len(problems[0]) // 2
    parts = [slice(None)] if regime == "inflight" else [slice(half), slice(half, None)]
    num_started, started = 0, time.perf_counter()
    for epoch, part in enumerate(parts):
        drafter.begin_policy_version(epoch)
        counts = np.zeros(3, np.int64)
        for wave in waves(problems, part, BATCH):
            counts += speak(wave, drafter, way, roots, num_started)
            num_started += len(wave)
    drafter.check_integrity()
    emitted, drafted, steps = counts.tolist()
    figures = {
        "tokens_per_step": emitted / steps,
        "drafted_per_step": drafted / steps,
        "emitted_tokens": emitted,
        "memory_bytes": drafter.memory_bytes(),
        "seconds": time.perf_counter() - started,
    }
    if hasattr(drafter, "source_counts"):
        figures["sources"] = drafter.source_counts()
    return figures


def recognition_us(num_texts: int, num_tokens: int, repeats: int = 300) -> list[float]:
    """Microseconds in which a prompt is recognised that continues one of many known texts: p20, p50, p80."""
    rng, roots = np.random.default_rng(0), Problems()
    known = rng.integers(0, 50_000, (num_texts, 64)).astype(np.int32)
    for first in known:
        roots.start(first)
    took = []
    for first in known[-repeats:]:
        prompt = np.concatenate((first, rng.integers(0, 50_000, num_tokens - first.size).astype(np.int32)))
        started = time.perf_counter()
        found = roots.start(prompt)
        took.append(1e6 * (time.perf_counter() - started))
        assert found.num_known == first.size, "the known text was not recognised"
    return quantiles(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="recorded conversations, whose gen_runs tell the environment's text")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--prompts", type=int, help="how many problems; default: all")
    parser.add_argument("--out", type=Path, help="JSONL file to append rows to")
    args = parser.parse_args()
    problems = by_problem(read_traces(args.traces))[: args.prompts]
    about = origin()
    sizes = {"num_texts": 50_000, "num_tokens": 8_000}
    microseconds = recognition_us(**sizes)
    append(args.out, {"benchmark": "turns/recognition", **sizes, "us": microseconds, **about})
    print(f"A prompt is recognised in {microseconds} µs (p20, p50, p80): {sizes}")
    print("| regime | drafter | " + " | ".join(WAYS) + " | roots / one request |")
    print("|---|---|" + "---|" * (len(WAYS) + 1))
    for regime in ("inflight", "epoch"):
        totals = set()
        for name in args.drafters:
            figures = {way: measure(problems, DRAFTERS[name], way, regime) for way in WAYS}
            totals |= {figure["emitted_tokens"] for figure in figures.values()}
            assert len(totals) == 1, f"different numbers of tokens were emitted: {totals}"
            for way, figure in figures.items():
                about_it = {"set": args.traces.stem, "regime": regime, "drafter": name, "way": way}
                append(args.out, {"benchmark": "turns", **about_it, "prompts": len(problems), **figure, **about})
            rates = {way: figure["tokens_per_step"] for way, figure in figures.items()}
            cells = [f"{rate:.3f} ({figures[way]['drafted_per_step']:.1f})" for way, rate in rates.items()]
            print(
                f"| {regime} | {name} | {' | '.join(cells)} | {rates['roots'] / rates['one request']:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
