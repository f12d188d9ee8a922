"""Which rollouts of a batch end first, with drafts and without. **Simulated**, by estimated step times of an H100.

    python -m experiments.drafting.finish_order TRACES_DIR [--out FILE]

Trainers that take the rollouts that have ended, and go on with the others later, get others with drafts: those that
repeat earlier ones end sooner. All requests start together, 16 per prompt, and the drafter knows 16 earlier rollouts of
each. Reported for the first quarter, half and three quarters that end: how many are the same as without drafts, where
the shortest end first, and how long they are on average, relative to those.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.drafting.regimes import split
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.costs import SHAPES, measured_by_vllm, step_cost
from rollout_spec.estimate.phases import Engine, add_rollout, by_problem, simulate

SETS = "rg_llama_math", "tot_text_gpt4", "r1v_grpo_log"
SAMPLES, K, MODEL, GPU = 16, 8, "7b", "h100"
BATCHES, SHARES = (64, 256), (0.25, 0.5, 0.75)


def main() -> None:
    """Simulate each set and batch size, and print a line for each."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path)
    args = parser.parse_args()
    for name in SETS:
        parts = [split(problem, "epoch") for problem in by_problem(read_traces(args.traces / f"{name}.parquet"))[:256]]
        for batch in BATCHES:
            rollouts = [rollout for _, live in parts for rollout in live[:SAMPLES]][:batch]
            problems = {rollout.problem_id for rollout in rollouts}
            drafter = build_drafter("history", max_draft_tokens=K, min_survival=0.0)
            for earlier in (old for part, _ in parts for old in part[:SAMPLES] if old.problem_id in problems):
                add_rollout(drafter, earlier)
            engine = Engine(step_cost(SHAPES[MODEL], GPU, "device"), K, known=measured_by_vllm(SHAPES[MODEL], GPU))
            steps = simulate(rollouts, drafter, engine, batch=batch)
            ended = [rollout for step in steps for rollout, _ in step.ended]
            shortest = sorted(ended, key=lambda rollout: rollout.token_ids.size)
            row = {"benchmark": "finish_order", "set": name, "batch": batch, "same": [], "length": []}
            for count in (int(share * len(ended)) for share in SHARES):
                same = {id(rollout) for rollout in ended[:count]} & {id(rollout) for rollout in shortest[:count]}
                lengths = [np.mean([r.token_ids.size for r in first[:count]]) for first in (ended, shortest)]
                row["same"].append(round(len(same) / count, 3))
                row["length"].append(round(float(lengths[0] / lengths[1]), 3))
            append(args.out, {**row, **origin("simulated GPU, estimates")})
            print(name, batch, "the same", row["same"], "as long", row["length"], flush=True)


if __name__ == "__main__":
    main()
