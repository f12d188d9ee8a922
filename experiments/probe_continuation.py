"""Can history continue what a model drafted? Simulated on rollouts with their noise; no engine runs.

Of each prompt, `--history` rollouts are history and `--tests` are generated again from that history, the prompt and
their own text so far, one request at a time, with drafts of at most K tokens. A draft model drafts m tokens with the
target's noise. History, the project's default drafter, drafts from the context, and once more from the context with
the model's m tokens behind it. Compared, in tokens per step:

- history: its draft is verified in every step;
- model: its m tokens are;
- both: the draft of which more tokens are expected to be accepted: history's own confidence against the model's rates,
  which are learnt by place in the draft and by the probability that the model gave the token;
- continued: the same, where history continues the model's draft up to K tokens and its confidence counts for that;
- oracle: the two latter, where the draft of which more tokens will be accepted is known.

As in an engine a draft is graded by the tokens that the step committed, also one that was not verified. The gain of
continuing has a 95 % bootstrap interval over prompts. Speed is in tokens per unit of cost, where a step costs 1 and the
model's m passes c each (by weights, head included), in every step or only where its draft is verified.

python experiments/probe_continuation.py DEMO --demo --form "first 1"
python experiments/probe_continuation.py DEMO --demo --draft-model SMALL      # one layer, trained there when missing
python experiments/probe_continuation.py WARM --recorded experiments/results/real_policy/samples-step0000-*.parquet \\
    --form "first 5, last 15"

DEMO and WARM are the policies of probe_early_exit.py, whose forms can draft here.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench_coupled import ratio_with_interval, recorded_cases
from model_drafts import Drafts, demo_prompts, draft, load, noise_of, read, relative_costs, sample, train_small
from probe_early_exit import TEMPERATURES, forms_of
from rollout_spec.drafters import build_drafter
from rollout_spec.replay.simulate import show
from rollout_spec.replay.traces import Problem, Rollout
from rows import append, origin

K = 8
POLICIES = ("history", "model", "both", "continued", "both, oracle", "continued, oracle")
PROBABILITY_BINS = 10
ModelDrafts = dict[tuple[str, int], Drafts]
"""By prompt id and sample id of a test rollout."""


class Outcome(NamedTuple):
    """Of one policy."""

    counts: np.ndarray
    """int64 [problems, 2]: tokens, steps."""
    model_share: float
    """Of the steps, those in which the model's draft was verified."""

    @property
    def tokens_per_step(self) -> float:
        """Of all problems together."""
        tokens, steps = self.counts.sum(0)
        return float(tokens / steps)


class Rates:
    """How often the model's tokens are accepted, once they are reached."""

    def __init__(self, m: int) -> None:
        self._counts = np.ones((m, PROBABILITY_BINS, 2)) * (1, 2)  # accepted, reached

    def survival(self, probabilities: np.ndarray) -> np.ndarray:
        """Expected share of drafts that are accepted up to each token."""
        accepted, reached = self._cells(probabilities).T
        return np.cumprod(accepted / reached)

    def observe(self, probabilities: np.ndarray, tokens: np.ndarray, committed: np.ndarray) -> None:
        """Count a draft's tokens up to the first that is wrong or not known to be right."""
        for place, (token, truth) in enumerate(zip(tokens, committed, strict=False)):
            self._counts[place, self._bins(probabilities)[place]] += token == truth, 1
            if token != truth:
                break

    def _bins(self, probabilities: np.ndarray) -> np.ndarray:
        return np.minimum((probabilities * PROBABILITY_BINS).astype(int), PROBABILITY_BINS - 1)

    def _cells(self, probabilities: np.ndarray) -> np.ndarray:
        return self._counts[np.arange(probabilities.size), self._bins(probabilities)]


def num_agreeing(draft: np.ndarray, truth: np.ndarray) -> int:
    """Tokens of a draft until it differs."""
    n = min(len(draft), len(truth))
    return int(np.cumprod(draft[:n] == truth[:n]).sum())


def simulate(problems: Sequence[Problem], drafts: ModelDrafts, policy: str, m: int, features: bool) -> Outcome:
    """Generate the rollouts of epoch 1 again, those of epoch 0 being history."""
    switches = {"signatures": features, "distributions": features}
    drafter: Any = build_drafter("mixture", max_draft_tokens=K, shared=False, **switches)
    rates, counts, num_from_model = Rates(m), [], 0
    for problem in problems:
        tokens = steps = 0
        for rollout in problem.rollouts:
            is_test = rollout.epoch == 1
            seed = rollout.seed if is_test else None
            drafter.start_request("r", rollout.prompt, problem_id=problem.problem_id, seed=seed)
            at = 1 if is_test else rollout.tokens.size  # the first token is the prefill's
            show(drafter, "r", rollout, 0, at)
            while at < rollout.tokens.size:
                truth = rollout.tokens[at:]
                room = min(K, truth.size - 1)
                (by_history,) = drafter.propose(["r"], np.array([room], np.int32))
                of_model = drafts[problem.prompt_id, rollout.sample_id]
                by_model, probabilities = (
                    of_model.tokens[at, : min(m, room)],
                    of_model.probabilities[at, : min(m, room)],
                )
                survival = rates.survival(probabilities)
                joined, joined_value = by_model, float(survival.sum())
                if policy.startswith("continued") and by_model.size < room:
                    what_if = copy.deepcopy(drafter)
                    what_if.extend("r", by_model)
                    (more,) = what_if.propose(["r"], np.array([room - by_model.size], np.int32))
                    joined = np.concatenate((by_model, more.token_ids))
                    joined_value += float(survival[-1] * more.confidence.sum())
                right = num_agreeing(by_history.token_ids, truth), num_agreeing(joined, truth)
                if policy.endswith("oracle"):
                    use_model = right[1] > right[0]
                elif policy in ("history", "model"):
                    use_model = policy == "model"
                else:
                    use_model = bool(joined_value > by_history.confidence.sum())
                committed = truth[: right[use_model] + 1]
                drafter.observe(["r"], [committed], np.array([min(right[0], committed.size - 1)], np.int32))
                rates.observe(probabilities, by_model, committed)
                show(drafter, "r", rollout, at, at + committed.size)
                at += committed.size
                tokens, steps, num_from_model = tokens + committed.size, steps + 1, num_from_model + use_model
            drafter.stop_request("r", keep=not is_test)
        counts.append((tokens, steps))
    return Outcome(np.array(counts), num_from_model / max(sum(n for _, n in counts), 1))


# -- rollouts and draft models ---------------------------------------------------------------------------------------


def draft_all(model: Any, kept: Sequence[int], problems: Sequence[Problem], temperature: float, m: int) -> ModelDrafts:
    """The model's drafts on every test rollout."""

    def drafts_on(rollout: Rollout) -> Drafts:
        p, cache = read(model, rollout, temperature)
        found = draft(model, kept, cache, rollout, temperature, noise_of(rollout, p.shape[1]), m)
        return found._replace(first_logprobs=torch.zeros(0))  # as many numbers as there are tokens in the vocabulary

    return {(p.prompt_id, r.sample_id): drafts_on(r) for p in problems for r in p.rollouts if r.epoch == 1}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate every set of rollouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--demo", action="store_true", help="sample prompts of the demo's task")
    source.add_argument("--recorded", type=Path, nargs="+", help="rollouts of this policy, with their noise")
    drafting = parser.add_mutually_exclusive_group(required=True)
    drafting.add_argument("--form", nargs="+", help="layers of the policy, as probe_early_exit.py names them")
    drafting.add_argument("--draft-model", type=Path)
    parser.add_argument("-m", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--history", type=int, default=16)
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256, help="of what is sampled")
    parser.add_argument("--features", action="store_true", help="history uses what the target saw, where recorded")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.draft_model and not args.draft_model.exists():
        train_small(args.draft_model)
    policy, about = load(args.policy), origin(packages=("transformers",))
    sets: list[tuple[str, float, list[Problem]]] = []
    for path in args.recorded or ():
        cases = recorded_cases(path, args.prompts, args.history, args.tests, 0)
        sets.append((path.stem, float(path.stem.rpartition("-t")[2]), [case.problem for case in cases]))
    for temperature in TEMPERATURES if args.demo else ():
        number = args.history + args.tests
        problems = sample(policy, demo_prompts(args.prompts), number, temperature, args.max_tokens)
        split = [[r._replace(epoch=int(r.sample_id >= args.history)) for r in p.rollouts] for p in problems]
        sets.append(("sampled", temperature, [p._replace(rollouts=r) for p, r in zip(problems, split, strict=True)]))
    columns = " | ".join(("rollouts", "T", "drafter", "m", "first token", *POLICIES, "continued / both"))
    print(f"| {columns} |\n|{'---|' * (len(POLICIES) + 6)}")
    for rollouts, temperature, problems in sets:
        for form in args.form or [args.draft_model.name]:
            model = load(args.draft_model) if args.draft_model else policy
            layers = range(len(model.model.layers))
            kept = layers if args.draft_model else forms_of(len(layers))[form]
            cost = relative_costs(policy, model, len(kept))["head"]
            drafts = draft_all(model, kept, problems, temperature, max(args.m))
            tests = {(p.prompt_id, r.sample_id): r for p in problems for r in p.rollouts}
            accepted = np.concatenate([d.num_accepted(tests[key]) for key, d in drafts.items()])
            for m in args.m:
                outcomes = {name: simulate(problems, drafts, name, m, args.features) for name in POLICIES}
                gain = ratio_with_interval(outcomes["continued"].counts, outcomes["both"].counts)
                figures = {
                    name: {
                        "tokens_per_step": o.tokens_per_step,
                        "model_share": o.model_share,
                        "speed_every_step": o.tokens_per_step / (1 + cost * m * (name != "history")),
                        "speed_where_verified": o.tokens_per_step / (1 + cost * m * o.model_share),
                    }
                    for name, o in outcomes.items()
                }
                shown = " | ".join(f"{o.tokens_per_step:.2f}" for o in outcomes.values())
                print(
                    f"| {rollouts} | {temperature} | {form} | {m} | {(accepted > 0).mean():.2f} | {shown} "
                    f"| {gain[0]:.3f} ({gain[1]:.3f}–{gain[2]:.3f}) |",
                    flush=True,
                )
                row = {
                    "benchmark": "continuation",
                    "policy": args.policy.name,
                    "rollouts": rollouts,
                    "T": temperature,
                    "drafter": form,
                    "cost": cost,
                    "m": m,
                    "k": K,
                    "history": args.history,
                    "tests": args.tests,
                    "features": args.features,
                    "first_token_acceptance": float((accepted > 0).mean()),
                    "figures": figures,
                    "continued_over_both": gain,
                }
                append(args.out, row | about)


if __name__ == "__main__":
    main()
