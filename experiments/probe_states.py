"""What else the states that are kept with the history can tell (see docs/target-features.md).

Rollouts recorded with their noise and features. Of each prompt, H rollouts are history and `--tests` are looked at,
token by token. A state is compared with another by the number of bits in which their signatures differ; the state that
is compared is the one that predicted the last known token. Measured:

- branches: of history's positions whose last MATCH tokens agree, how many of the next K agree, by differing bits;
- retrieval: how often the next token of the position of the most similar state is right, where the last token or the
  last two have no match, beside that of the longest match of words;
- failure: whether the differing bits tell when a draft of one token fails, beyond its confidence: mean log-loss of
  acceptance by confidence alone and by both, by tables of bins that are filled from the other half of the prompts;
- remaining length: mean error of the remaining length of the most similar states' rollouts, beside the mean remaining
  length of history's rollouts that were as long.

python experiments/probe_states.py experiments/results/real_policy/samples-step0040-t1.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench_coupled import recorded_cases
from bench_features import make
from rollout_spec.features.format import SIGNATURE_BITS, unpack
from rollout_spec.replay.simulate import show
from rollout_spec.replay.traces import Problem, Rollout
from rows import append, origin

K = 8
MATCH = 4
"""Tokens of context that must agree where branches are told apart."""
MAX_MATCH = 12
NEAREST = 8
BITS = (0, 5, 10, 20, 30, 45)
"""Lower ends of the bins of differing bits."""


class History:
    """The texts of a problem, one behind the other, with what was seen at each token."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.text = np.concatenate([np.append(r.tokens, -1) for r in rollouts])
        """int64 [n]: the completions, each followed by -1."""
        self.signatures = np.concatenate([np.pad(signatures(r), ((0, 1), (0, 0))) for r in rollouts])
        self.left = np.concatenate([np.arange(r.tokens.size, -1, -1) for r in rollouts])
        """int64 [n]: tokens from each position to the end of its rollout."""

    def match(self, context: np.ndarray) -> np.ndarray:
        """How many tokens before each position agree with the end of `context`, int64 [n]."""
        lengths = np.zeros(self.text.size, np.int64)
        alive = np.ones(self.text.size, bool)
        for back in range(1, min(context.size, MAX_MATCH) + 1):
            alive[back:] &= self.text[:-back] == context[-back]
            alive[:back] = False
            lengths += alive
        return lengths

    def differing(self, signature: np.ndarray) -> np.ndarray:
        """Bits in which the state that predicted the token before each position differs, int64 [n]."""
        bits = np.full(self.text.size, SIGNATURE_BITS)
        bits[1:] = np.bitwise_count(self.signatures[:-1] ^ signature).sum(1)
        bits[np.flatnonzero(self.text[:-1] < 0) + 1] = SIGNATURE_BITS  # a rollout's first token has no state before it
        return bits


class Position(NamedTuple):
    """One token of a test rollout."""

    prompt: int
    at: int
    """Tokens before it."""
    next_tokens: np.ndarray
    """The next K, fewer at the end."""
    left: int
    """Tokens from here to the end."""
    lengths: np.ndarray
    """Match length of each position of the history."""
    differing: np.ndarray
    """Differing bits of each position of the history."""
    history: History
    confidence: float
    """Of a draft of one token; 0 without a draft."""
    accepted: bool


def signatures(rollout: Rollout) -> np.ndarray:
    """uint64 [n, SIGNATURE_WORDS] of its tokens."""
    assert rollout.features is not None
    return unpack(rollout.features)[0]


def positions(problems: Sequence[Problem]) -> Iterator[Position]:
    """Every token of the test rollouts but the first ones, drafted by the default drafter with the target's noise."""
    drafter: Any = make("mixture", 1, {})
    one = np.ones(1, np.int32)
    for number, problem in enumerate(problems):
        known = [r for r in problem.rollouts if r.epoch == 0]
        history = History(known)
        for i, rollout in enumerate(known):
            drafter.start_request(str(i), rollout.prompt, problem_id=problem.problem_id)
            show(drafter, str(i), rollout, 0, rollout.tokens.size)
            drafter.stop_request(str(i))
        for rollout in (r for r in problem.rollouts if r.epoch == 1):
            drafter.start_request("r", rollout.prompt, problem_id=problem.problem_id, seed=rollout.seed)
            show(drafter, "r", rollout, 0, 1)
            for at in range(1, rollout.tokens.size):
                (draft,) = drafter.propose(["r"], one)
                accepted = len(draft.token_ids) > 0 and draft.token_ids[0] == rollout.tokens[at]
                drafter.observe(["r"], [rollout.tokens[at : at + 1]], np.zeros(1, np.int32))
                yield Position(
                    number,
                    at,
                    rollout.tokens[at : at + K],
                    rollout.tokens.size - at,
                    history.match(rollout.tokens[:at]),
                    history.differing(signatures(rollout)[at - 1]),
                    history,
                    float(draft.confidence[0]) if len(draft.token_ids) else 0.0,
                    bool(accepted),
                )
                show(drafter, "r", rollout, at, at + 1)
            drafter.stop_request("r", keep=False)


def bin_of(bits: Any) -> Any:
    """Index into BITS."""
    return np.searchsorted(BITS, bits, side="right") - 1


def measure(problems: Sequence[Problem]) -> dict[str, Any]:
    """All four measurements."""
    agreeing = np.zeros((len(BITS), 2))
    retrieval: dict[str, list[tuple[bool, bool]]] = {"no match": [], "one token": [], "longer": []}
    outcomes: list[tuple[int, float, int, bool]] = []
    errors: list[tuple[float, float]] = []
    for position in positions(problems):
        history, differing = position.history, position.differing
        text, next_token = history.text, position.next_tokens[0]
        for at in np.flatnonzero(position.lengths >= MATCH):
            theirs = text[at : at + position.next_tokens.size]
            same = theirs == position.next_tokens[: theirs.size]
            agreeing[bin_of(differing[at])] += 1, same.size if same.all() else np.argmin(same)
        longest = int(position.lengths.max())
        where = "longer" if longest > 1 else "one token" if longest else "no match"
        by_state = text[np.argmin(differing)] == next_token
        by_words = longest > 0 and text[np.argmax(position.lengths)] == next_token
        retrieval[where].append((by_words, by_state))
        same_words = differing[position.lengths == longest] if longest else differing
        outcomes.append((position.prompt, position.confidence, int(bin_of(same_words.min())), position.accepted))
        nearest = np.argpartition(differing, NEAREST)[:NEAREST]
        of_history = history.left[np.flatnonzero(np.append(-1, text[:-1]) < 0)]
        as_long = of_history[of_history > position.at] - position.at
        guesses = float(as_long.mean()) if as_long.size else 0.0, float(history.left[nearest].mean())
        errors.append((abs(guesses[0] - position.left), abs(guesses[1] - position.left)))
    return {
        "branches": {
            str(low): {"pairs": int(n), "agreeing": total / max(n, 1)}
            for low, (n, total) in zip(BITS, agreeing, strict=True)
        },
        "retrieval": {
            where: {
                "share": len(hits) / len(outcomes),
                "by_words": float(np.mean([a for a, _ in hits])) if hits else None,
                "by_state": float(np.mean([b for _, b in hits])) if hits else None,
            }
            for where, hits in retrieval.items()
        },
        "failure_log_loss": {"confidence": log_loss(outcomes, False), "with_bits": log_loss(outcomes, True)},
        "remaining_length_error": {
            "as_long": float(np.mean([a for a, _ in errors])),
            "by_state": float(np.mean([b for _, b in errors])),
        },
    }


def log_loss(outcomes: Sequence[tuple[int, float, int, bool]], use_bits: bool) -> float:
    """Mean log-loss of acceptance, in nats, by tables over bins, each half of the prompts by the other's table."""
    prompt, confidence, bits, accepted = (np.array(values) for values in zip(*outcomes, strict=True))
    cell = np.minimum((confidence * 10).astype(int), 9) * len(BITS) + bits * use_bits
    losses = []
    for half in (0, 1):
        fit, test = prompt % 2 != half, prompt % 2 == half
        hits = np.bincount(cell[fit], accepted[fit], minlength=10 * len(BITS)) + 1
        rate = (hits / (np.bincount(cell[fit], minlength=10 * len(BITS)) + 2))[cell[test]]
        losses.append(-np.log(np.where(accepted[test], rate, 1 - rate)))
    return float(np.concatenate(losses).mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each recording and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, nargs="+", help="Parquet files of rollouts with noise and features")
    parser.add_argument("--history", type=int, default=16)
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    for path in args.recorded:
        cases = recorded_cases(path, args.prompts, args.history, args.tests, 0)
        found = measure([case.problem for case in cases])
        append(args.out, {"benchmark": "states", "target": path.stem, "history": args.history, **found, **origin()})
        print(path.stem)
        for name, value in found.items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
