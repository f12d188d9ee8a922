"""History, model drafters and both, on a policy and draft models that were really trained, counted in vLLM's engine.

    python -m experiments.engines.bench_model_drafters [--modes none history greedy:mtp] [--out FILE]

The policy is the demo's (POLICY, trained when missing: two minutes). From the same warm-start texts this trains a small
separate model and an MTP layer (see trained_drafters.py), some minutes each on one core, and keeps them in MODELS.
Their training leaves out the problems that are measured. Groups of rollouts of the same problems are then generated in
several epochs with new seeds, in fp32 on the CPU engine, each mode in a process of its own:

    none                  no speculation, our sampler: whose rollouts all modes with its noise must repeat
    history               our drafter on earlier rollouts, no model
    greedy:METHOD         vLLM's own speculation with the draft model's most probable tokens, vLLM's default
    probabilistic:METHOD  vLLM's own, drafts sampled, rejection sampling (`draft_sample_method="probabilistic"`)
    both:METHOD           history and the draft model, whose drafts are drawn with the target's noise

with METHOD draft_model or mtp. Printed: request-steps (how often a request was in an engine step that sampled for it)
and tokens per request-step, by epoch.

With VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/gpu_stand_in:. engines have the V2 runner, whose kernels are emulated,
and history is on the device. The modes are `none`, `history` and `both:METHOD`: the emulator does not know all
instructions of vLLM's own rejection sampling. In V1 they are all but `both:METHOD`, which V2 alone has.

Gates, before any figure of a mode: its rollouts are what the policy samples under their noise, but for tokens whose
choice was within GAP. vLLM's own modes have other noise; their rollouts' log-probability must be what samples of the
policy have.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.demo import ENVIRONMENT
from examples.demo.policy import build_tokenizer, warm_start
from examples.demo.task import make_prompt
from experiments.engines.build import build_engine
from experiments.engines.trained_drafters import run_target, save, train
from experiments.processes import Child
from experiments.rows import RESULTS, append, make_parser, origin
from rollout_spec.noise.host import derive_seed, gumbel

POLICY, MODELS = Path("demo", "policy-v1-seed0"), Path("demo", "draft-models")
TRAIN_STEPS = 500
METHODS = ("draft_model", "mtp")
IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
MODES = ("none", "history", *(f"{kind}:{m}" for kind in ("greedy", "probabilistic", "both") for m in METHODS))
STOCK = ("greedy", "probabilistic")
HELD_OUT = 64
"""Problems that no draft model is trained on."""
PROMPTS_PER_BATCH = 2
GROUP, EPOCHS, MAX_TOKENS = 8, 3, 384
"""Rollouts of a problem in an epoch, epochs, and the most tokens of a rollout."""
MODEL_K, HISTORY_K = 3, 8
"""Tokens that a draft model and history draft."""
GAP = 1e-3
"""An engine's logits vary by about 1e-6 with the batch: a token may differ only where the choice was this close."""
MAX_SURPRISE = 4.0
"""Standard errors."""


def held_out_prompts() -> list[list[int]]:
    """The first HELD_OUT problems, as token ids."""
    rng, tokenizer = random.Random("bench_model_drafters"), build_tokenizer()
    prompts: dict[str, None] = {}  # keeps the order and drops repeats
    while len(prompts) < HELD_OUT:
        prompts[make_prompt(rng)] = None
    return [tokenizer.encode(prompt) for prompt in prompts]


def seed_of(epoch: int, problem: int, member: int) -> int:
    return derive_seed("bench_model_drafters", epoch, problem, member)


# -- the engine, in a process of its own -----------------------------------------------------------------------------


def build(mode: str) -> Any:
    """The engine of a mode."""
    kind, _, method = mode.partition(":")
    own = {"method": method, "num_speculative_tokens": MODEL_K}
    if method == "draft_model":
        own["model"] = str(model_folder(method))
    mode_of_engine, options = {
        "none": ("off", {}),
        "history": ("device" if IS_V2 else "all", {"budget": False, "sub_steps": 1}),  # whose steps are counted
        "both": ("device", {"budget": False, "speculative_config": own}),
    }.get(kind, ("model", {"speculative_config": {**own, "draft_sample_method": kind}}))
    return build_engine(
        model_folder("mtp") if method == "mtp" else POLICY, mode_of_engine, HISTORY_K, options=options,
        max_model_len=MAX_TOKENS + 64, max_num_seqs=PROMPTS_PER_BATCH * GROUP, seed=0,
    )  # fmt: skip


class StepCounter:
    """Counts request-steps: requests of which an engine step sampled at least one token, summed over steps."""

    def __init__(self, scheduler: Any) -> None:
        self.count = 0
        original = scheduler.update_from_output

        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            sampled = zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids or [], strict=False)
            self.count += sum(len(ids) > 0 and req_id in scheduler.requests for req_id, ids in sampled)
            return original(scheduler_output, model_runner_output)

        scheduler.update_from_output = update_from_output


def run_mode(mode: str, temperature: float, num_problems: int) -> Generator[list[dict[str, Any]], None, None]:
    """The process of one engine: yields each epoch's request-steps and rollouts [problem x member]."""
    from vllm import SamplingParams

    torch.set_num_threads(1)
    llm = build(mode)
    counter = StepCounter(llm.llm_engine.engine_core.engine_core.scheduler)
    prompts = held_out_prompts()[:num_problems]
    epochs = []
    for epoch in range(EPOCHS):
        counter.count, rollouts = 0, []
        for first in range(0, len(prompts), PROMPTS_PER_BATCH):
            pairs = [
                (problem, member)
                for problem in range(first, min(first + PROMPTS_PER_BATCH, len(prompts)))
                for member in range(GROUP)
            ]
            params = [
                SamplingParams(temperature=temperature, seed=seed_of(epoch, *pair), max_tokens=MAX_TOKENS,
                               detokenize=False)
                for pair in pairs
            ]  # fmt: skip
            requests = [{"prompt_token_ids": prompts[problem]} for problem, _ in pairs]
            outputs = llm.generate(requests, params, use_tqdm=False)
            rollouts += [list(output.outputs[0].token_ids) for output in outputs]
        epochs.append({"request_steps": counter.count, "rollouts": rollouts})
    yield epochs


# -- models ----------------------------------------------------------------------------------------------------------


def model_folder(method: str) -> Path:
    """Of a trained draft model."""
    return MODELS / f"{POLICY.name}-{method}-{TRAIN_STEPS}"


def prepare_models(methods: Sequence[str]) -> tuple[Any, list[dict[str, Any]]]:
    """Train what is missing. Returns the policy, and a row on each draft model's training."""
    from transformers import AutoModelForCausalLM

    tokenizer = build_tokenizer()
    if not POLICY.exists():
        print(f"training the policy into {POLICY} (some minutes)", flush=True)
        warm_start(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    rows = []
    for method in methods:
        folder = model_folder(method)
        if not folder.exists():
            print(f"training {method} into {folder} (some minutes)", flush=True)
            began = time.perf_counter()
            model, losses = train(policy, tokenizer, method, steps=TRAIN_STEPS, held_out=held_out_prompts())
            tenth = max(1, len(losses) // 10)
            row = {
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "losses": [round(float(np.mean(losses[i : i + tenth])), 4) for i in range(0, len(losses), tenth)],
                "seconds": round(time.perf_counter() - began),
            }
            unfinished = folder.with_suffix(".tmp")
            save(model, policy, tokenizer, unfinished)
            (unfinished / "training.json").write_text(json.dumps(row))
            unfinished.rename(folder)
        row = json.loads((folder / "training.json").read_text())
        rows.append({"method": method, **row})
        print(f"{method}: {row['parameters']} parameters, loss {row['losses'][0]} -> {row['losses'][-1]}, "
              f"{row['seconds']} s")  # fmt: skip
    return policy, rows


# -- the gate --------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """Token ids of a prompt and of what was sampled after it with a seed."""

    prompt: list[int]
    tokens: list[int]
    seed: int


def rollouts_of(epochs: Sequence[dict[str, Any]]) -> list[Rollout]:
    """A mode's rollouts with their prompts and seeds."""
    prompts = held_out_prompts()
    return [
        Rollout(prompts[i // GROUP], tokens, seed_of(number, i // GROUP, i % GROUP))
        for number, epoch in enumerate(epochs)
        for i, tokens in enumerate(epoch["rollouts"])
    ]


def log_probabilities(policy: Any, rollout: Rollout, temperature: float) -> np.ndarray:
    """The policy's for each token of a rollout, float64 [tokens, V]."""
    logits = run_target(policy, torch.tensor([rollout.prompt + rollout.tokens])).logits
    return (logits[0, len(rollout.prompt) - 1 : -1].double() / temperature).log_softmax(-1).numpy()


def noise_mismatches(policy: Any, rollouts: Sequence[Rollout], temperature: float) -> int:
    """Tokens that lie further than GAP below the best one under the rollout's noise."""
    wrong = 0
    for rollout in rollouts:
        logprobs = log_probabilities(policy, rollout, temperature)
        positions = len(rollout.prompt) - 1 + np.arange(len(logprobs))
        scores = logprobs + gumbel(rollout.seed, positions[:, None], np.arange(logprobs.shape[1])).astype(np.float64)
        said = np.take_along_axis(scores, np.array(rollout.tokens)[:, None], 1)[:, 0]
        wrong += int((scores.max(-1) - said > GAP).sum())
    return wrong


def surprise(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """How many standard errors rollouts' log-probability lies from its expectation under the policy.

    A sampler that is too greedy, or drafts that are accepted too often, make it positive.

    Args:
        samples: (tokens [n], the policy's log-probabilities [n, V]) of each rollout.
    """
    excess = variance = 0.0
    for tokens, logprobs in samples:
        probabilities = np.exp(logprobs)
        safe = np.where(probabilities > 0, logprobs, 0.0)
        mean = (probabilities * safe).sum(-1)
        excess += (np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0] - mean).sum()
        variance += ((probabilities * safe**2).sum(-1) - mean**2).sum()
    return float(excess / np.sqrt(variance))


def check(mode: str, policy: Any, rollouts: Sequence[Rollout], temperature: float) -> float | None:
    """The gate. Returns the surprise of vLLM's own modes, None for ours.

    Raises:
        SystemExit: a rollout is not what the policy says.
    """
    for rollout in rollouts:
        if len(rollout.tokens) != MAX_TOKENS and rollout.tokens[-1] != policy.config.eos_token_id:
            raise SystemExit(f"gate: {mode}: a rollout of {len(rollout.tokens)} tokens did not end")
    if mode.partition(":")[0] in STOCK:
        errors = surprise((np.array(r.tokens), log_probabilities(policy, r, temperature)) for r in rollouts)
        if abs(errors) > MAX_SURPRISE:
            raise SystemExit(f"gate: {mode}: rollouts are no samples of the policy: {errors:.1f} standard errors")
        return errors
    if wrong := noise_mismatches(policy, rollouts, temperature):
        raise SystemExit(f"gate: {mode}: {wrong} tokens are not what the policy samples under its noise")
    return None


# -- the benchmark ---------------------------------------------------------------------------------------------------


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    line = f"{row['mode']:26} {sum(row['request_steps']):13d}  {row['tokens_per_step']!s:30}"
    if "surprise_z" in row:
        return line + f"  log-probability {row['surprise_z']} standard errors off"
    return line + f"  {row['parted']} rollouts parted at a tie"


def main() -> None:
    """Train, run all modes at all temperatures, and print tables."""
    parser = make_parser(__doc__)
    parser.set_defaults(out=RESULTS / "bench_model_drafters.jsonl")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--problems", type=int, default=12, help=f"at most {HELD_OUT}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    MODELS.mkdir(parents=True, exist_ok=True)
    about = origin(packages=("transformers",))
    policy, training = prepare_models([m for m in METHODS if any(mode.endswith(f":{m}") for mode in args.modes)])
    common = {"benchmark": "model_drafters", "policy": POLICY.name, "train_steps": TRAIN_STEPS}
    for row in training:
        append(args.out, {**common, "mode": "training", **row, **about})
    common |= {"problems": args.problems, "group": GROUP, "max_tokens": MAX_TOKENS, "model_k": MODEL_K}
    common |= {"history_k": HISTORY_K, "runner": "V2" if IS_V2 else "V1"}
    environment = {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(IS_V2))}
    for temperature in args.temperatures:
        print(f"\nT = {temperature}\n{'mode':26} request-steps  tokens per request-step")
        plain: list[list[list[int]]] = []
        for mode in sorted({"none", *args.modes}, key=MODES.index):
            if mode.partition(":")[0] in (STOCK if IS_V2 else ("both",)):
                continue
            log = MODELS / f"{mode.replace(':', '_')}_{temperature}.log"
            with Child(run_mode, mode, temperature, args.problems, log=log, environment=environment) as child:
                epochs = child.answer()
                child.stop()
            errors = check(mode, policy, rollouts_of(epochs), temperature)
            row = {"mode": mode, "request_steps": [epoch["request_steps"] for epoch in epochs]}
            row["tokens"] = [sum(map(len, epoch["rollouts"])) for epoch in epochs]
            row["tokens_per_step"] = [round(t / s, 3) for t, s in zip(row["tokens"], row["request_steps"], strict=True)]
            if mode == "none":
                plain = [epoch["rollouts"] for epoch in epochs]
            if errors is None:
                pairs = [zip(epoch["rollouts"], other, strict=True) for epoch, other in zip(epochs, plain, strict=True)]
                row["parted"] = sum(a != b for pair in pairs for a, b in pair)
            else:
                row["surprise_z"] = round(errors, 2)
            append(args.out, {**common, "temperature": temperature, **row, **about})
            print(describe(row), flush=True)


if __name__ == "__main__":
    main()
