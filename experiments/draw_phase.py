"""Draws docs/phase.svg: how many requests of a rollout phase still run, with stock vLLM and with ours.

    python -m experiments.draw_phase [POLICY_DIR]    # with the policy of `make demo`, a new row; draws the last one

A phase samples the demo's task as TRL would: 8 rollouts of 8 prompts, all requested at once. Before it an engine
samples other prompts, to warm up, and the same ones with other seeds, as in an earlier epoch. Stock vLLM would draw
other random numbers, and is slow with seeds: its requests have none, and end after as many tokens as ours. New engines
for each turn find no rollouts of the turn before in history. The fastest turn is drawn: other processes slow some down.

Gate: all rollouts are the same with drafts and without, in all turns.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from examples.demo import ENVIRONMENT
from examples.demo.task import make_prompt
from experiments.engines.build import ROOT, build_engine
from experiments.rows import RESULTS, append, make_parser, origin

PROMPTS, GROUP_SIZE, MAX_TOKENS, K, TURNS = 8, 8, 384, 8, 5
MODES = {"off": "off", "stock": "none", "ours": "budget"}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 320" font-family="sans-serif" font-size="14">
  <rect width="880" height="320" fill="#ffffff"/>
  <text x="20" y="28" font-weight="bold">{requests} rollouts at once: how many still run</text>
  <path d="M 60 60 V 280 H 850" fill="none" stroke="#8c959f"/>
  <path d="M 60 225 H 850" stroke="#8c959f" stroke-dasharray="3 4"/>
  <text x="850" y="243" text-anchor="end">the last {few}</text>
  <text x="432" y="130">all {requests} rollouts identical to our engine's without drafts</text>"""


def sample(llm: Any, prompts: list[str], seed: int, lengths: list[int] | None) -> tuple[list[Any], list[list[int]]]:
    """[seconds, running requests] of each step after which fewer ran, and the rollouts. `lengths`: without seeds."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=MAX_TOKENS, logprobs=0, seed=1000 * seed + i) for i in range(len(prompts))]
    if lengths is not None:
        params = [SamplingParams(max_tokens=length, logprobs=0, ignore_eos=True) for length in lengths]
    engine, curve = llm.llm_engine, [[0.0, len(prompts)]]

    def step() -> Any:
        outputs = type(engine).step(engine)
        if (running := engine.get_num_unfinished_requests()) < curve[-1][1]:
            curve.append([round(time.perf_counter() - started, 4), running])
        return outputs

    engine.step = step
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return curve, [list(output.outputs[0].token_ids) for output in outputs]


def measure(policy: Path) -> dict[str, Any]:
    """Each engine's fastest curve, and the seconds of all turns."""
    arguments = {"logprobs_mode": "processed_logprobs", "max_model_len": 448, "num_gpu_blocks_override": 1200}
    other, same = ([make_prompt(rng) for _ in range(PROMPTS)] * GROUP_SIZE for rng in map(random.Random, range(2)))
    rollouts, curves = [], {name: [] for name in MODES}
    for turn in range(TURNS):
        for name, mode in MODES.items():
            llm = build_engine(policy, mode, K, max_num_seqs=len(same), **arguments)
            lengths = list(map(len, rollouts)) if name == "stock" else None
            for seed, prompts in enumerate((other, same, same)):
                curve, found = sample(llm, prompts, seed, lengths)
            rollouts = rollouts or found
            is_same = list(map(len, found)) == lengths if lengths else found == rollouts
            if not is_same:
                raise SystemExit(f"gate: {name} in turn {turn} has other rollouts than the first without drafts")
            curves[name].append(curve)
    seconds = {name: [curve[-1][0] for curve in curves[name]] for name in MODES}
    fastest = {name: curves[name][seconds[name].index(min(seconds[name]))] for name in MODES}
    sizes = {"requests": len(same), "tokens": sum(map(len, rollouts)), "k": K, "turns": TURNS}
    return {"benchmark": "draw_phase", **sizes, "identical": len(same), "seconds": seconds, "fastest": fastest}


def draw(row: dict[str, Any]) -> str:
    """A row's curves as SVG: seconds to the right, running requests upwards."""
    total, end, few = row["requests"], row["fastest"]["stock"][-1][0], row["requests"] // 4
    lines = [f'<text x="50" y="{285 - 55 * i}" text-anchor="end">{few * i}</text>' for i in range(5)]
    for i in range(int(4 * end) + 1):
        lines.append(f'<text x="{60 + 790 * i / 4 / end:.0f}" y="300" text-anchor="middle">{i / 4:g} s</text>')
    for name, label, color, top in (("stock", "stock vLLM", "#57606a", 82), ("ours", "rollout_spec", "#1a7f37", 106)):
        curve = row["fastest"][name]
        tail = curve[-1][0] - next(seconds for seconds, running in curve if running <= few)
        steps = " ".join(f"H {60 + 790 * s / end:.0f} V {280 - 220 * n / total:.0f}" for s, n in curve)
        look = f'fill="{color}" fill-opacity="0.2" stroke="{color}" stroke-width="2"'
        text = f"{label}: {curve[-1][0]:.2f} s, of which {tail:.2f} s for the last {few}"
        lines += [f'<path {look} d="M 60 280 {steps}"/>', f'<path {look} d="M 400 {top - 5} h 24"/>']
        lines.append(f'<text x="432" y="{top}">{text}</text>')
    return "\n  ".join([HEAD.format(requests=total, few=few), *lines]) + "\n</svg>\n"


def main() -> None:
    """Measure where there is a policy, and draw."""
    parser = make_parser(__doc__)
    parser.set_defaults(out=RESULTS / "phase.jsonl")
    parser.add_argument("policy", type=Path, nargs="?")
    args = parser.parse_args()
    if args.policy:
        os.environ.update({**ENVIRONMENT, **os.environ})
        append(args.out, {**measure(args.policy), **origin()})
    (ROOT / "docs" / "phase.svg").write_text(draw(json.loads(args.out.read_text().splitlines()[-1])))


if __name__ == "__main__":
    main()
