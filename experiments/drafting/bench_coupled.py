"""Drafts chosen with the target's noise (coupled) against the most probable tokens (point mass).

Targets: the demo's warm-started policy at temperature 1 (`--policy DIR`, made when missing), and rollouts that were
recorded with their noise (`--recorded FILE...`, see real_policy/recording.py for their columns). Of each prompt, H
rollouts are history and `--tests` are drafted for from that history, the prompt and their own text so far. Compared, in
tokens per step, at equal K:

- point: our drafter without the noise (most probable token), with no limit on survival;
- coupled: the same with the noise;
- tree: a best-first tree of K nodes on blended counts, of which the longest branch that the target agrees with counts.

Also how often a single drafted token is accepted, at every position, beside the optimum: the expected overlap sum_v
min(p(v), q(v)) of the target's distribution p and the blended distribution q of the same texts (ORDER, KAPPA). Gains
come with 95 % bootstrap intervals over prompts. Recordings hold a few of the most probable tokens; to the others the
optimum gives no probability.

python -m experiments.drafting.bench_coupled --policy demo/policy-v1-seed0
python -m experiments.drafting.bench_coupled --history 4 16 --recorded experiments/results/real_policy/samples-*.parquet
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.rows import append, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.noise.host import derive_seed, gumbel
from rollout_spec.replay.simulate import ReplayResult, replay
from rollout_spec.replay.traces import Problem, Rollout, read_traces

ORDER = 12
"""Longest context of the tree's and the optimum's blended counts."""
KAPPA = 0.3
"""Weight of the shorter context in these counts."""


class Case(NamedTuple):
    """A prompt, its history (epoch 0) and test rollouts (epoch 1), and the target's distribution."""

    problem: Problem
    target: Callable[[Rollout], list[tuple[np.ndarray, np.ndarray]]]
    """(token ids, probabilities) at every position of a test rollout."""


# -- targets ---------------------------------------------------------------------------------------------------------


def demo_cases(directory: Path, num_prompts: int, num_history: int, num_tests: int, max_tokens: int) -> list[Case]:
    """Rollouts of the demo's policy, sampled with `rollout_spec.noise` in fp32."""
    import random

    import torch
    from transformers import AutoModelForCausalLM

    from rollout_spec.demo.policy import build_tokenizer
    from rollout_spec.demo.task import make_problem, prompt_text
    from rollout_spec.demo.warm_start import warm_start

    if not directory.exists():
        print(f"training the demo's policy into {directory} (a few minutes)")
        warm_start(directory)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), build_tokenizer()
    rng = random.Random(7)
    cases = []
    for i in range(num_prompts):
        prompt = tokenizer(prompt_text(make_problem(rng)))["input_ids"]
        count = num_history + num_tests
        seeds = [derive_seed("bench_coupled", i, k) for k in range(count)]
        tokens = torch.tensor(prompt).repeat(count, 1)
        past, feed, outputs, logits = None, tokens, [], []
        with torch.inference_mode():
            for t in range(max_tokens):
                step = model(input_ids=feed, past_key_values=past, use_cache=True)
                past, last = step.past_key_values, torch.log_softmax(step.logits[:, -1].double(), -1).numpy()
                noise = gumbel(np.array(seeds)[:, None], len(prompt) - 1 + t, np.arange(last.shape[1]))
                outputs.append((last + noise).argmax(1))
                logits.append(last[num_history:].astype(np.float32))
                feed = torch.tensor(outputs[-1])[:, None]
        texts = np.stack(outputs, 1).astype(np.int32)
        rollouts = []
        for k, text in enumerate(texts):
            ends = np.flatnonzero(text == tokenizer.eos_token_id)
            text = text[: ends[0] + 1] if ends.size else text
            rollouts.append(Rollout(k, int(k >= num_history), np.array(prompt, np.int32), text, (text.size,), seeds[k]))
        stacked = np.stack(logits, 1)

        def target(rollout: Rollout, stacked: np.ndarray = stacked) -> list[tuple[np.ndarray, np.ndarray]]:
            rows = stacked[rollout.sample_id - num_history]
            return [(np.arange(rows.shape[1]), np.exp(row)) for row in rows[: rollout.tokens.size]]

        cases.append(Case(Problem(f"demo/{i}", rollouts), target))
    return cases


def recorded_cases(path: Path, num_prompts: int, num_history: int, num_tests: int, max_tokens: int) -> list[Case]:
    """A recording's rollouts: the last `num_tests` of each prompt are drafted for, the first `num_history` are history.

    Raises:
        ValueError: the recording has no noise, or too few rollouts of a prompt.
    """
    from experiments.real_policy.recording import TOP_TOKENS, read_rows

    problems = read_traces(path, max_prompts=num_prompts)
    for problem in problems:
        if any(rollout.seed is None for rollout in problem.rollouts):
            raise ValueError(f"{path} was recorded without noise: it has no column of seeds")
        if len(problem.rollouts) < num_history + num_tests:
            raise ValueError(
                f"{path} has {len(problem.rollouts)} rollouts of {problem.prompt_id}: too few for --history "
                f"{num_history} and --tests {num_tests}"
            )
    tops = {
        (row["prompt_id"], row["seed"]): (
            np.array(row["top_ids"]).reshape(-1, TOP_TOKENS),
            np.exp(np.array(row["top_logprobs"], np.float64)).reshape(-1, TOP_TOKENS),
        )
        for row in read_rows([path])
    }
    cases = []
    for recorded in problems:
        history, tests = recorded.rollouts[:num_history], recorded.rollouts[-num_tests:]
        rollouts = [r._replace(epoch=0) for r in history] + [r._replace(epoch=1) for r in tests]

        def target(rollout: Rollout, prompt_id: str = recorded.prompt_id) -> list[tuple[np.ndarray, np.ndarray]]:
            return list(zip(*tops[prompt_id, rollout.seed], strict=True))

        cases.append(Case(Problem(recorded.prompt_id, rollouts), target))
    return cases


# -- the history's blended distribution, and the tree on it ----------------------------------------------------------


class Counts:
    """Blended counts of a history, by the match length of a context at every position of its texts."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        texts = [np.concatenate((r.prompt, r.tokens, [-1])) for r in rollouts]
        self._text = np.concatenate(texts)
        # The prompt's own continuations count once; every rollout's contexts reach back into it.
        hidden = [
            np.arange(t.size) < (r.prompt.size if i else 1)
            for i, (t, r) in enumerate(zip(texts, rollouts, strict=True))
        ]
        self._next = np.append(np.where(np.concatenate(hidden), -1, self._text)[1:], -1)

    def with_own(self, prompt: np.ndarray, tokens: np.ndarray) -> Counts:
        """These counts with a request's own text so far, whose last token has no continuation yet."""
        new = Counts.__new__(Counts)
        own = np.where(np.arange(prompt.size + tokens.size) < prompt.size, -1, np.concatenate((prompt, tokens)))
        new._text = np.concatenate((self._text, prompt, tokens))
        new._next = np.concatenate((self._next, own[1:], [-1]))
        return new

    def match(self, context: np.ndarray) -> np.ndarray:
        """Match length of each position with the end of `context`, int64 [n]."""
        lengths = np.zeros(self._text.size, np.int64)
        for token in context[-ORDER:]:
            lengths = self.advance(lengths, token)
        return lengths

    def advance(self, lengths: np.ndarray, token: int) -> np.ndarray:
        """Match lengths after one more token of context."""
        new = np.zeros_like(lengths)
        new[1:] = lengths[:-1]
        return np.where(self._text == token, np.minimum(new + 1, ORDER), 0)

    def distribution(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, probabilities): q_l = (c_l + KAPPA q_{l-1}) / (n_l + KAPPA)."""
        at = np.flatnonzero((lengths > 0) & (self._next >= 0))
        tokens, inverse = np.unique(self._next[at], return_inverse=True)
        q = np.zeros(tokens.size)
        for length in range(1, int(lengths[at].max(initial=0)) + 1):
            c = np.bincount(inverse[lengths[at] >= length], minlength=tokens.size)
            q = (c + KAPPA * q) / (c.sum() + (KAPPA if length > 1 else 0.0))
        return tokens, q


def tree_tokens_per_step(case: Case, k: int) -> tuple[int, int]:
    """(emitted tokens, steps) of the case's test rollouts with a best-first tree of K nodes."""
    history = Counts([r for r in case.problem.rollouts if r.epoch == 0])
    tokens = steps = 0
    for rollout in (r for r in case.problem.rollouts if r.epoch == 1):
        text, at = rollout.tokens, 1  # the prefill gives the first token
        while at < text.size:
            known = history.with_own(rollout.prompt, text[:at])
            lengths = known.match(np.concatenate((rollout.prompt, text[:at])))
            # (−probability, tie, depth, is on the true path, match lengths)
            heap: list[tuple[float, int, int, int, bool, np.ndarray]] = []
            serial = 0

            expand: tuple[float, int, bool, np.ndarray] = (1.0, 0, True, lengths)
            accepted = nodes = 0
            while nodes < k:
                reach, depth, agrees, lengths = expand
                for token, q in zip(*known.distribution(lengths), strict=True):
                    heapq.heappush(heap, (-reach * q, serial, depth, int(token), agrees, lengths))
                    serial += 1
                if not heap:
                    break
                reach, _, depth, token, agrees, lengths = heapq.heappop(heap)
                nodes += 1
                agrees = agrees and at + depth < text.size and token == text[at + depth]
                accepted = max(accepted, depth + 1) if agrees else accepted
                expand = (-reach, depth + 1, agrees, known.advance(lengths, token))
            new = min(accepted + 1, text.size - at)
            tokens, steps, at = tokens + new, steps + 1, at + new
    return tokens, steps


def overlap(case: Case) -> float:
    """Mean over positions of sum_v min(p(v), q(v)): how often any draft of one token from q can be accepted."""
    history = Counts([r for r in case.problem.rollouts if r.epoch == 0])
    values = []
    for rollout in (r for r in case.problem.rollouts if r.epoch == 1):
        for at, (ids, p) in enumerate(case.target(rollout)):
            known = history.with_own(rollout.prompt, rollout.tokens[:at])
            tokens, q = known.distribution(known.match(np.concatenate((rollout.prompt, rollout.tokens[:at]))))
            target = dict(zip(ids.tolist(), p.tolist(), strict=True))
            values.append(sum(min(target.get(t, 0.0), x) for t, x in zip(tokens.tolist(), q.tolist(), strict=True)))
    return float(np.mean(values))


# -- measuring -------------------------------------------------------------------------------------------------------


def run(
    cases: Sequence[Case], k: int, coupled: bool, min_survival: float, options: dict[str, Any]
) -> list[ReplayResult]:
    """Replay every case with one drafter, whose counters carry on from case to case."""
    drafter = build_drafter(
        "mixture", **{"max_draft_tokens": k, "min_survival": min_survival, "shared": False, **options}
    )
    return [replay([case.problem], lambda: drafter, "epoch", num_speculative_tokens=k, noise=coupled) for case in cases]


def first_token_acceptance(cases: Sequence[Case], coupled: bool, options: dict[str, Any]) -> float:
    """How often a draft of one token is accepted, asked for at every position of the test rollouts."""
    drafter = build_drafter("mixture", **{"max_draft_tokens": 1, "min_survival": 0.0, "shared": False, **options})
    one, hits, total = np.ones(1, np.int32), 0, 0
    for case in cases:
        problem = case.problem
        for rollout in problem.rollouts:
            test = rollout.epoch == 1
            seed = rollout.seed if test and coupled else None
            drafter.start_request("r", rollout.prompt, problem_id=problem.problem_id, seed=seed)
            for token in rollout.tokens if test else []:
                (draft,) = drafter.propose(["r"], one)
                hit = len(draft.token_ids) > 0 and int(draft.token_ids[0]) == token
                drafter.observe(["r"], [[int(token)]], np.zeros(1, np.int32))
                drafter.extend("r", [int(token)])
                hits, total = hits + hit, total + 1
            if not test:
                drafter.extend("r", rollout.tokens)
            drafter.stop_request("r", keep=not test)
    return hits / total


def ratio_with_interval(new: np.ndarray, old: np.ndarray) -> tuple[float, float, float]:
    """Ratio of tokens per step, and its 95 % bootstrap interval over prompts. Columns: tokens, steps."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(new), (2000, len(new)))

    def ratio(rows: np.ndarray) -> np.ndarray:
        a, b = new[rows].sum(-2), old[rows].sum(-2)
        return (a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1])

    low, high = np.percentile(ratio(picks), [2.5, 97.5])
    return float(ratio(np.arange(len(new)))), float(low), float(high)


def reliability_error(results: Sequence[ReplayResult]) -> float:
    """Mean |confidence - acceptance| over drafted tokens, by bins of confidence."""
    table = sum(result.reliability for result in results)
    return float(np.abs(table[:, 1] - table[:, 2]).sum() / max(table[:, 0].sum(), 1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="directory of the demo's policy; trained there when missing")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="Parquet files of rollouts with noise")
    parser.add_argument("--history", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("-k", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256, help="of the demo policy's rollouts")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="of the drafter")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    words_alone = {"signatures": False, "distributions": False}  # bench_features.py compares what features give
    options = words_alone | {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    about = origin()
    columns = "target, H, K, point, coupled, tree, coupled / point, coupled / tree, 1st: point, coupled, optimum"
    print("|" + "|".join(columns.split(",")) + "|")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for source in [*([args.policy] if args.policy else []), *args.recorded]:
        for h in args.history:
            make = demo_cases if source == args.policy else recorded_cases
            cases = make(source, args.prompts, h, args.tests, args.max_tokens)
            best = float(np.mean([overlap(case) for case in cases]))
            first_point = first_token_acceptance(cases, False, options)
            first = first_token_acceptance(cases, True, options)
            for k in args.k:
                point, coupled = run(cases, k, False, 0.0, options), run(cases, k, True, 0.0, options)
                counts = [
                    np.array([[r.stats.emitted_tokens, r.stats.request_steps] for r in results])
                    for results in (point, coupled)
                ]
                counts.append(np.array([tree_tokens_per_step(case, k) for case in cases]))
                p, c, t = (x[:, 0].sum() / x[:, 1].sum() for x in counts)
                against_point = ratio_with_interval(counts[1], counts[0])
                against_tree = ratio_with_interval(counts[1], counts[2])
                name = "demo policy" if source == args.policy else source.stem
                print(
                    f"| {name} | {h} | {k} | {p:.2f} | {c:.2f} | {t:.2f} "
                    f"| {against_point[0]:.3f} ({against_point[1]:.3f}–{against_point[2]:.3f}) "
                    f"| {against_tree[0]:.3f} ({against_tree[1]:.3f}–{against_tree[2]:.3f}) "
                    f"| {first_point:.3f} | {first:.3f} | {best:.3f} |",
                    flush=True,
                )
                row = {
                    "benchmark": "coupled",
                    "target": name,
                    "history": h,
                    "k": k,
                    "prompts": len(cases),
                    "tests": args.tests,
                    "tokens_per_step": {"point": p, "coupled": c, "tree": t},
                    "coupled_over_point": against_point,
                    "coupled_over_tree": against_tree,
                    "first_token_acceptance": {"point": first_point, "coupled": first},
                    "first_token_optimum": best,
                    "calibration_error": {"point": reliability_error(point), "coupled": reliability_error(coupled)},
                    **about,
                }
                append(args.json, row)


if __name__ == "__main__":
    main()
