"""Can the policy draft for itself, by some of its own layers? Nobody would have to train a drafter or keep it in step.

A form of a policy of L layers is its first n ones (early exit), or its first a and last b ones (layer skipping), with
the policy's final norm, head and KV cache. It drafts for the whole policy on rollouts that were recorded, or are
sampled here, with `rollout_spec.noise`. No engine runs. Of each form:

- overlap: mean of sum_v min(p(v), q(v)) of the policy's distribution p and the form's q: the most that any draft of one
  token from q can be accepted;
- greedy: mean probability under p of q's most probable token, the acceptance of drafts without noise;
- coupled: how often the rollout's token is argmax(log q + noise), the acceptance of drafts with the target's noise;
- tokens per step of coupled drafts of k = 1 to MAX_K tokens, each rollout from its second token to its end;
- speed: tokens per unit of cost, where a forward pass of the policy costs 1 whatever the number of tokens in it
  (memory-bound), a drafted token costs c, and plain decoding has speed 1. `layers`: c = layers kept / L; `head`: the
  weights of the head are read, too. Launches and the drafter's other work cost nothing. `fixed`: with the best k in
  hindsight; at k = 1 it is above 1 where the acceptance is above c. `stopped`: drafts end behind the first token for
  which the form's highest probability, as it is in a draft of one token, is below a threshold; with the best k and
  threshold in hindsight. `perfect`: drafts are as long as what is accepted of them, which no drafter can know.

python experiments/probe_early_exit.py DEMO --demo --max-tokens 256
python experiments/probe_early_exit.py SMOLLM2 --prompts-of experiments/results/real_policy/samples-step0000-t1.parquet
python experiments/probe_early_exit.py WARM --recorded experiments/results/real_policy/samples-step0000-*.parquet

DEMO is a folder of rollout_spec.demo.warm_start.warm_start, SMOLLM2 one of real_policy.model.make_model, and WARM one
of real_policy.warm_up.warm_up on SMOLLM2. Training it again gives nearly the policy of the recordings of step 0; the
rows say how nearly: `agreement` is how often it would have sampled the recorded token with the recorded noise, and
`logprob_error` the mean absolute difference of the log-probability of the recording's most probable token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench_coupled import Case, recorded_cases
from model_drafts import demo_prompts, draft, load, noise_of, read, relative_costs, sample
from rollout_spec.replay.traces import Problem, Rollout, read_traces
from rows import append, origin

MAX_K = 8
TEMPERATURES = (0.6, 1.0)
EXITS = (0.1, 0.2, 1 / 3, 0.5, 2 / 3, 5 / 6, 14 / 15, 29 / 30)
"""Shares of the layers that are kept, from the first on."""
SKIPS = (
    (0.2, 0.2),
    (1 / 6, 1 / 3),
    (1 / 3, 1 / 3),
    (1 / 2, 1 / 6),
    (1 / 6, 1 / 2),
    (1 / 6, 0.6),
    (0.4, 0.4),
    (13 / 30, 0.5),
)
"""Shares that are kept at the start and at the end."""
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)


class Drafted(NamedTuple):
    """What a form drafts at each of a rollout's n tokens. Arrays of length n."""

    overlap: np.ndarray
    greedy: np.ndarray
    """Probability under the policy of the form's most probable token."""
    confidence: np.ndarray
    """The form's highest probability."""
    accepted: np.ndarray
    """Accepted tokens of a draft of MAX_K tokens chosen with the noise."""


def forms_of(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The layers that each form keeps, by its name."""
    layers = tuple(range(num_layers))
    kept = [layers[: round(share * num_layers)] for share in EXITS]
    forms = {f"first {len(chosen)}": chosen for chosen in kept if 0 < len(chosen) < num_layers}
    for start, end in SKIPS:
        a, b = round(start * num_layers), round(end * num_layers)
        if a > 0 and b > 0 and a + b < num_layers:
            forms[f"first {a}, last {b}"] = layers[:a] + layers[num_layers - b :]
    return forms


def walk(accepted: np.ndarray, confidence: np.ndarray, k: int, threshold: float = 0.0) -> tuple[int, int, int, int]:
    """Generate a rollout, whose first token is the prefill's, with drafts of k tokens or fewer.

    Args:
        accepted: Tokens that are accepted of a long draft at each token.
        confidence: What is compared with the threshold, at each token.

    Returns:
        Tokens, steps, drafted tokens, accepted tokens.
    """
    at, steps, num_drafted, num_accepted = 1, 0, 0, 0
    while at < accepted.size:
        length = min(k, accepted.size - at - 1)  # a step samples one token in any case
        unsure = np.flatnonzero(confidence[at : at + length] < threshold)
        length = min(length, int(unsure[0]) + 1) if unsure.size else length
        right = min(int(accepted[at]), length)
        at, steps = at + right + 1, steps + 1
        num_drafted, num_accepted = num_drafted + length, num_accepted + right
    return max(accepted.size - 1, 0), steps, num_drafted, num_accepted


def chains(accepted: Sequence[np.ndarray], confidence: Sequence[np.ndarray], costs: dict[str, float]) -> dict[str, Any]:
    """Tokens per step for each k, and the speeds for each way to count costs, of some rollouts together."""

    def total(k: int, threshold: float = 0.0) -> list[int]:
        walks = [walk(a, c, k, threshold) for a, c in zip(accepted, confidence, strict=True)]
        return np.array(walks).sum(0).tolist()

    fixed = {k: total(k) for k in range(1, MAX_K + 1)}
    stopped = [total(k, threshold) for k in fixed for threshold in THRESHOLDS]
    found: dict[str, Any] = {"tokens_per_step": [n[0] / n[1] for n in fixed.values()], "speed": {}}
    for name, c in costs.items():
        speeds = {k: n[0] / (n[1] + c * n[2]) for k, n in fixed.items()}
        found["speed"][name] = {
            "fixed": max(speeds.values()),
            "fixed_k": max(speeds, key=speeds.__getitem__),
            "stopped": max(n[0] / (n[1] + c * n[2]) for n in stopped),
            "perfect": fixed[MAX_K][0] / (fixed[MAX_K][1] + c * fixed[MAX_K][3]),
        }
    return found


def measure(model: Any, rollouts: Sequence[Rollout], temperature: float) -> Iterator[dict[str, Any]]:
    """A row of each form."""
    forms = forms_of(len(model.model.layers))
    seen: dict[str, list[Drafted]] = {name: [] for name in forms}
    for rollout in rollouts:
        p, cache = read(model, rollout, temperature)
        noise = noise_of(rollout, p.shape[1])
        for name, kept in forms.items():
            coupled = draft(model, kept, cache, rollout, temperature, noise, MAX_K, only_accepted=True)
            q = coupled.first_logprobs
            best = q.max(1)
            values = (
                torch.minimum(p, q).exp().sum(1),
                p.gather(1, best.indices[:, None])[:, 0].exp(),
                best.values.exp(),
            )
            seen[name].append(Drafted(*(value.numpy() for value in values), coupled.num_accepted(rollout)))
    for name, kept in forms.items():
        yield row_of(model, name, kept, seen[name])


def row_of(model: Any, name: str, kept: Sequence[int], seen: Sequence[Drafted]) -> dict[str, Any]:
    """What was measured of a form."""
    costs = relative_costs(model, model, len(kept))
    together = Drafted(*(np.concatenate(values) for values in zip(*seen, strict=True)))
    return {
        "form": name,
        "layers": len(kept),
        "cost": costs,
        "positions": together.overlap.size,
        "overlap": float(together.overlap.mean()),
        "greedy": float(together.greedy.mean()),
        "coupled": float((together.accepted > 0).mean()),
        **chains([d.accepted for d in seen], [d.confidence for d in seen], costs),
    }


def agreement(model: Any, cases: Sequence[Case], temperature: float) -> dict[str, float]:
    """How well a policy agrees with what was recorded of it."""
    same, errors = [], []
    for case in cases:
        for rollout in (r for r in case.problem.rollouts if r.epoch == 1):
            p, _ = read(model, rollout, temperature)
            same.append((p + noise_of(rollout, p.shape[1])).argmax(1).numpy() == rollout.tokens)
            ids, recorded = (np.array(values) for values in zip(*case.target(rollout), strict=True))
            errors.append(np.abs(p.gather(1, torch.from_numpy(ids[:, :1])).numpy() - np.log(recorded[:, :1]))[:, 0])
    return {"agreement": float(np.concatenate(same).mean()), "logprob_error": float(np.concatenate(errors).mean())}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a policy and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--demo", action="store_true", help="sample prompts of the demo's task")
    source.add_argument("--prompts-of", type=Path, help="sample the prompts of this Parquet file")
    source.add_argument("--recorded", type=Path, nargs="+", help="rollouts of this policy, with their noise")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96, help="of what is sampled")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, about = load(args.policy), origin(packages=("transformers",))
    sets: list[tuple[dict[str, Any], list[Problem]]] = []
    for path in args.recorded or ():
        cases = recorded_cases(path, args.prompts, 1, args.rollouts, 0)
        temperature = float(path.stem.rpartition("-t")[2])
        found = {"rollouts": path.stem, "T": temperature} | agreement(model, cases, temperature)
        sets.append((found, [case.problem for case in cases]))
    if not sets:
        recorded = read_traces(args.prompts_of, max_prompts=args.prompts) if args.prompts_of else []
        prompts = {p.prompt_id: p.rollouts[0].prompt.tolist() for p in recorded} or demo_prompts(args.prompts)
        for temperature in TEMPERATURES:
            sampled = sample(model, prompts, args.rollouts, temperature, args.max_tokens)
            sets.append(({"rollouts": "sampled", "T": temperature}, sampled))
    for known, problems in sets:
        print(f"\n{args.policy.name}: {known}\n")
        print("| form | c | overlap | greedy | coupled | tokens per step, k = 1, 4, 8 | fixed | stopped | perfect |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in measure(model, [r for p in problems for r in p.rollouts[-args.rollouts :]], known["T"]):
            tokens = ", ".join(f"{row['tokens_per_step'][k - 1]:.2f}" for k in (1, 4, MAX_K))
            speed = row["speed"]["head"]
            print(
                f"| {row['form']} | {row['cost']['head']:.2f} | {row['overlap']:.3f} | {row['greedy']:.3f} "
                f"| {row['coupled']:.3f} | {tokens} | {speed['fixed']:.2f} (k = {speed['fixed_k']}) "
                f"| {speed['stopped']:.2f} | {speed['perfect']:.2f} |",
                flush=True,
            )
            append(args.out, {"benchmark": "early_exit", "policy": args.policy.name} | known | row | about)


if __name__ == "__main__":
    main()
