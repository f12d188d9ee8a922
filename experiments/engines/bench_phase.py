"""Whole rollout phases at a real model's cost: what recorded rollouts would take in an engine, by drafter.

    python -m experiments.engines.bench_phase --shape 1.5b [--rollouts FILE.parquet] [--batch 1 8 64 256] [--out FILE]

An engine with a real model's shape and made-up weights samples what was recorded: one logit of each row, that of the
recorded token at the request's position, is raised above all others, end of sequence included. So a step costs what the
real model's would, drafts are accepted as often as they would be, and requests end when they ended. Where the recording
has the seeds of its noise, requests have them too; otherwise drafts are chosen and verified without noise.

`rg_llama_math.parquet` beside this file, the recording that is used unless another is named, has 32 competition
problems with eight rollouts each of Llama-3.2-3B-Instruct after 400 and after 800 steps of GRPO, temperature 0.6, top-p
0.9: 512 of mean 511 tokens, 2,049 at most. The text is from open-thought/reasoning-gym-eval (commit 5f09fec,
`reasoninggym-paper-experiments/math-evals/llama-3b-instruct`, Apache-2.0), the token ids are Llama 3's of that text.

Each mode has an engine in a process of its own: those of build.py, and

    budget-words, device-words
                 without features: history is words alone
    none-apart, device-apart
                 the engine's core in a process of its own, as servers and `vllm.LLM` have it. The others are in their
                 caller's process, as TRL's colocated engine is, which takes turns with it

For each batch size there are two phases: the first meets the problems for the first time; the second, after new
weights, has that history and samples other rollouts of the same problems. A queue is a batch larger than `--max-seqs`.
The gate: every rollout is the recorded one.

With `--together` the engines of all modes are there at once and take turns: each phase is run by one after the other,
and by `none`, if it is the first mode, once more: `times` is relative to the mean of both. Otherwise one engine runs
after the other, and a machine with other work is slower for some of them.

Reported by batch, phase and mode: seconds, also relative to `none`; the tail, seconds in which less than a quarter of
the requests were left; p20/p50/p80 of the milliseconds between steps; tokens per second; tokens per request and step;
microseconds of the host per request and step that our drafter took; the share of steps that were too large for a CUDA
graph; the time of steps by their size, on a GPU as its stream takes it; and, by `budget`, the report with the measured
cost of steps, for `rollout-spec doctor`.
The states of a model with made-up weights say little, so features show what they cost here, not what they are worth.
Other cells are run once: differences of some percent mean nothing. An engine that fails or runs out of time leaves the
rows of the phases that it has finished.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.engines import scripted
from experiments.engines.build import (
    OURS,
    SHAPES,
    WORDS_ALONE,
    Runs,
    add_arguments,
    build_engine,
    command,
    made_up_arguments,
    write_model,
    write_result,
)
from experiments.rows import append, make_parser, origin, quantiles
from experiments.traces import read_traces
from rollout_spec.estimate.recorded import Rollout, by_problem

WORDS = "-words"
"""End of the names of modes without features."""
APART = "-apart"
"""End of the names of modes whose engine core has a process of its own."""
MODES = (
    "none", "budget", "device", "budget-words", "device-words", "all", "ngram_gpu", "ngram", "suffix", "off",
    "none-apart", "device-apart",
)  # fmt: skip
DEFAULT_MODES = MODES[:9]
"""In the order in which they run: the first ones matter most, and time may run out."""
SEEDED = [mode for mode in MODES if mode.split("-")[0] in OURS]
"""Only ours get seeds: for each of them vLLM's V1 sampler runs kernels of their own."""
ROLLOUTS = Path(__file__).with_name("rg_llama_math.parquet")
GROUP = 8
"""Rollouts per problem and phase, more where there are too few problems."""
PHASES = ("first", "history")
LEFT_IN_TAIL = 0.25
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment of an engine core in a process of its own, which is told functions to call."""
WARM_UP_TOKENS = 8


def fits(recorded: list[list[Rollout]], batch: int) -> bool:
    """Whether there are rollouts for both phases of a batch size."""
    try:
        return all(Phase(recorded, batch, number) for number in range(len(PHASES)))
    except ValueError as error:
        print(f"batch {batch}: left out, {error}", flush=True)
        return False


def made_up(batch: int, vocab: int) -> list[Rollout]:
    """Rollouts of other problems, to warm up with."""
    rng = np.random.default_rng(batch)
    prompt = rng.integers(3, vocab, 32).astype(np.int32)
    texts = rng.integers(3, vocab, (batch, WARM_UP_TOKENS)).astype(np.int32)
    return [Rollout(0, prompt, text) for text in texts]


class Phase:
    """A batch of recorded rollouts as requests.

    Attributes:
        rollouts: The requests', by their number.
        problems: A number for each one's problem, the same in both phases of a batch size and in no other.
    """

    def __init__(self, recorded: list[list[Rollout]], batch: int, number: int) -> None:
        group = max(min(GROUP, batch), -(-batch // len(recorded)))
        self.rollouts: list[Rollout] = []
        self.problems: list[int] = []
        for index, problem in enumerate(recorded[: -(-batch // group)]):
            chosen = problem[number * group : (number + 1) * group]
            if len(chosen) < group:
                raise ValueError(f"{batch} requests need {2 * group} rollouts of each of {len(recorded)} problems")
            self.rollouts += chosen[: batch - len(self.rollouts)]
            self.problems += [batch * 100_000 + index] * (len(self.rollouts) - len(self.problems))


def read_recorded(path: str) -> list[list[Rollout]]:
    """The problems all of whose rollouts say something.

    Raises:
        ValueError: an environment has given some of the tokens, which no phase can repeat.
    """
    recorded = [p for p in by_problem(read_traces(path)) if all(r.token_ids.size for r in p)]
    if any(len(rollout.runs) > 1 for problem in recorded for rollout in problem):
        raise ValueError(f"{path}: an environment has given some of the tokens, which no phase can repeat")
    return recorded


def prompt_of(rollout: Rollout) -> np.ndarray:
    """A recording may have no prompt, and vLLM takes none that is empty."""
    return rollout.prompt_token_ids if rollout.prompt_token_ids.size else np.zeros(1, np.int32)


class Turns:
    """Processes with an engine each take turns. Files in a folder say which turns are over, and whose process is.

    Args:
        folder: Of all processes.
        modes: Of their engines. If `none` is the first, it has a turn before and after the others.
        cells: What all of them run, one after the other.
    """

    def __init__(self, folder: Path, modes: Sequence[str], cells: Sequence[Any]) -> None:
        self._folder = folder
        ready = [(mode, "ready", 0) for mode in modes]
        again = [mode for mode in modes[:1] if mode == "none"]  # others would know what they have just said
        self._order = ready + [(mode, cell, number) for cell in cells for number, mode in enumerate([*modes, *again])]

    def of(self, mode: str, cell: Any) -> Iterator[int]:
        """Numbers of the mode's turns at a cell, each when it has begun; asking for the next one ends it."""
        for turn, (whose, what, number) in enumerate(self._order):
            if (whose, what) == (mode, cell):
                while what != "ready" and not all(map(self._is_over, range(turn))):
                    time.sleep(0.01)
                yield number
                self._file(turn).touch()

    def _file(self, turn: int) -> Path:
        return self._folder / str(turn)

    def _is_over(self, turn: int) -> bool:
        return self._file(turn).exists() or self.gone(self._folder, self._order[turn][0]).exists()

    @staticmethod
    def gone(folder: Path, mode: str) -> Path:
        """The file that says that a mode's process has ended."""
        return folder / f"{mode}.gone"


class Watch:
    """When an engine's steps began, as its caller sees them."""

    def __init__(self, llm: Any) -> None:
        self.times: list[float] = []
        self.unfinished: list[int] = []
        engine = llm.llm_engine
        step = engine.step

        def watched_step(*args: Any, **kwargs: Any) -> Any:
            self.times.append(time.perf_counter())
            self.unfinished.append(engine.get_num_unfinished_requests())
            return step(*args, **kwargs)

        engine.step = watched_step

    def clear(self) -> None:
        """Begin a phase."""
        self.times.clear()
        self.unfinished.clear()

    def summary(self, num_tokens: int, ended: float) -> dict[str, Any]:
        """Of the phase that has ended at this time."""
        times, left = np.array([*self.times, ended]), np.array(self.unfinished)
        is_tail = left < LEFT_IN_TAIL * left.max()
        return {
            "seconds": round(times[-1] - times[0], 4),
            "tail_seconds": round(float(np.diff(times)[is_tail].sum()), 4),
            "step_ms": quantiles(np.diff(times) * 1e3),
            "tokens_per_second": round(num_tokens / (times[-1] - times[0]), 1),
        }


def end_token(rollouts: list[Rollout]) -> int:
    """The token with which rollouts end and which occurs nowhere else; -1 if there is none."""
    last = Counter(int(rollout.token_ids[-1]) for rollout in rollouts if rollout.token_ids.size)
    inside = {int(token) for rollout in rollouts for token in rollout.token_ids[:-1]}
    return next((token for token, _ in last.most_common() if token not in inside), -1)


def build(args: argparse.Namespace, mode: str, has_noise: bool, **arguments: Any) -> Any:
    """The engine of a mode."""
    arguments |= made_up_arguments(args, 2000)
    options: dict[str, Any] = {"verify": "sample" if has_noise else "rejection"}
    mode = mode.removesuffix(APART)
    base = mode.removesuffix(WORDS)
    options["drafter_options"] = {} if base == mode else dict(WORDS_ALONE)
    return build_engine(args.model, base, args.k, options=options, **arguments)


def run_mode(args: argparse.Namespace, mode: str, batches: list[int]) -> None:
    """All phases of one engine; each one's row is written when it ends. Runs in a process of its own."""
    from vllm import SamplingParams

    recorded = read_recorded(args.rollouts)
    phases = {(b, name): Phase(recorded, b, n) for b in batches for n, name in enumerate(PHASES)}
    rollouts = [rollout for phase in phases.values() for rollout in phase.rollouts]
    end = end_token(rollouts)
    limit = max(rollout.token_ids.size for rollout in rollouts)
    has_noise = all(rollout.seed is not None for rollout in rollouts)
    llm = build(
        args, mode, has_noise, max_num_seqs=args.max_seqs,
        max_model_len=max(prompt_of(rollout).size for rollout in rollouts) + limit + args.k + 1,
    )  # fmt: skip
    engine = llm.llm_engine
    warm_ups = {batch: made_up(batch, SHAPES[args.shape][-1]) for batch in batches}
    all_rollouts = [*rollouts, *(rollout for made in warm_ups.values() for rollout in made)]
    texts = [[*prompt_of(rollout).tolist(), *rollout.token_ids.tolist()] for rollout in all_rollouts]
    (runner,) = llm.collective_rpc(scripted.install, args=(texts, max(end, 0)))
    watch = Watch(llm)

    def generate(rollouts: list[Rollout], problems: list[int], first_script: int) -> Any:
        prompts = [{"prompt_token_ids": prompt_of(rollout).tolist()} for rollout in rollouts]
        params = []
        for script, (rollout, problem) in enumerate(zip(rollouts, problems, strict=True), first_script):
            ends = int(rollout.token_ids[-1]) == end
            ours = {"rollout_spec": {"problem_id": problem}} if mode in SEEDED else {}
            seed = (script if rollout.seed is None else rollout.seed) if mode in SEEDED else None
            params.append(
                SamplingParams(
                    temperature=1.0, seed=seed, max_tokens=limit if ends else rollout.token_ids.size,
                    stop_token_ids=[end] if ends else None, ignore_eos=True, logprobs=0, detokenize=False,
                    extra_args={scripted.SCRIPT: script, **ours},
                )
            )  # fmt: skip
        return llm.generate(prompts, params, use_tqdm=False)

    first_scripts = np.cumsum([0, *(len(phase.rollouts) for phase in phases.values())]).tolist()
    first_script = first_scripts[-1]
    for batch, made in warm_ups.items():  # each size: kernels are compiled for kinds of sizes
        generate(made, [10**9 + batch] * batch, first_script)
        first_script += batch
    turns = Turns(args.turns, args.modes, list(phases)) if args.turns else None
    if turns is not None:
        list(turns.of(mode, "ready"))
    results = []
    last_batch = batches[0]
    for (batch, name), phase, first_script in zip(phases, phases.values(), first_scripts[:-1], strict=True):
        if batch != last_batch:
            llm.collective_rpc(scripted.forget_other_problems)
        last_batch = batch
        for _ in turns.of(mode, (batch, name)) if turns is not None else (0,):
            if mode in SEEDED:  # new weights
                command(llm, "begin_policy_version")
            before = command(llm, "stats") if mode in SEEDED else None
            llm.collective_rpc(scripted.begin_phase)
            watch.clear()
            outputs = generate(phase.rollouts, phase.problems, first_script)
            ended = time.perf_counter()
            said = [list(output.outputs[0].token_ids) for output in outputs]
            for i, (tokens, rollout) in enumerate(zip(said, phase.rollouts, strict=True)):
                if tokens != rollout.token_ids.tolist():
                    raise SystemExit(f"gate: {mode}: request {i} of {batch} is not the recorded rollout")
            num_tokens = sum(map(len, said))
            result = {
                "mode": mode, "batch": batch, "phase": name, "k": args.k, "max_seqs": args.max_seqs,
                "noise": has_noise, "runner": runner, "tokens": num_tokens,
                "async_scheduling": engine.vllm_config.scheduler_config.async_scheduling,
                **watch.summary(num_tokens, ended), **llm.collective_rpc(scripted.end_phase, args=(num_tokens,))[0],
            }  # fmt: skip
            if before is not None:
                result |= of_drafts(before, command(llm, "stats"), on_host=not mode.startswith("device"))
            results.append(result)
            if mode == "budget" and len(results) == len(phases):
                result["report"] = command(llm, "report")
            write_result(args.result, results)


def of_drafts(before: dict[str, Any], after: dict[str, Any], *, on_host: bool) -> dict[str, Any]:
    """What statistics say of a phase's drafts."""
    during = {name: after[name] - before[name] for name in ("request_steps", "accepted_tokens", "draft_tokens")}
    drafting = after["draft_seconds"] - before["draft_seconds"]
    return {
        "host_us": round(drafting / max(during["request_steps"], 1) * 1e6, 1) if on_host else None,
        "acceptance_rate": round(during["accepted_tokens"] / max(during["draft_tokens"], 1), 3),
    }


def write_step_times(path: Path, shape: str, context: int, most: int, rows: Sequence[dict[str, Any]]) -> None:
    """The least median of steps whose requests have on average a whole number of draft tokens, at most `most`.

    Other work makes some phases slow, so that a step takes no longer than a larger one did.
    """
    least: dict[tuple[int, int], float] = {}
    for row in rows:
        if remembers_others(row["mode"]):  # drafts on the host have lengths of their own
            continue
        for requests, tokens, _, ms in row["by_size"]:
            k, rest = divmod(tokens - requests, requests)
            if not rest and k <= most:
                least[k, requests] = min(ms, least.get((k, requests), ms))
    for larger, size in pairwise(sorted(least, reverse=True)):
        if size[0] == larger[0]:
            least[size] = min(least[size], least[larger])
    with path.open("w") as file:
        print("model,requests,context,num_speculative_tokens,median_ms", file=file)
        for (k, requests), ms in sorted(least.items()):
            print(shape, requests, context, k, ms, sep=",", file=file)


def remembers_others(mode: str) -> bool:
    """Whether its drafter, on the host, remembers other problems: those of other batch sizes have the same rollouts."""
    return mode.removesuffix(WORDS) in ("suffix", "all", "budget")


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    speedup = f"{row['times_as_fast']:6.2f}" if "times_as_fast" in row else "     -"
    host = f"{row['host_us']:8.1f}" if row.get("host_us") is not None else "       -"
    return (
        f"{row['batch']:8d} {row['phase']:8} {row['mode']:13} {row['seconds']:8.3f} {speedup} "
        f"{row['tail_seconds']:8.3f} {row['tokens_per_second']:9.0f} {row['tokens_per_step']:7.2f} "
        f"{row['verified_per_step']:8.2f} {host} {row['steps_without_graph']:8.2f}"
    )


HEADER = "requests phase    mode           seconds  times     tail  tokens/s  tok/step verified  host µs no graph"


def main(argv: list[str] | None = None) -> None:
    """Run all modes and print a table."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", default=str(ROLLOUTS), help="a Parquet file, see experiments/traces.py")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--max-seqs", type=int, help="default: the largest batch, at most 256")
    add_arguments(parser, MODES)
    parser.set_defaults(modes=list(DEFAULT_MODES))
    parser.add_argument("--step-times", type=Path, help="write them here for `rollout-spec estimate --step-times`")
    parser.add_argument("--together", action="store_true", help="all engines at once, their phases in turns")
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only:
        run_mode(args, args.only, args.batch)
        return
    recorded = read_recorded(args.rollouts)
    sizes = [batch for batch in args.batch if fits(recorded, batch)]
    if not sizes:
        raise SystemExit("no batch size is left")
    if args.together and len(sizes) > 1 and any(map(remembers_others, args.modes)):
        raise SystemExit("one of these modes remembers other batch sizes' rollouts: give one --batch, or no --together")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {"benchmark": "phase", "shape": args.shape, "rollouts": Path(args.rollouts).name, **origin(device)}
    runs = Runs("experiments.engines.bench_phase", argv, args.logs, args.until)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(args.modes)) as pool:
        write_model(args.shape, Path(folder))  # one folder: modes with steps of the same sizes share a compiled model

        def run(mode: str) -> list[dict[str, Any]]:
            print(f"phase_{args.shape}_{mode}", flush=True)
            is_apart, found = remembers_others(mode), []
            try:
                for batches in [[batch] for batch in sizes] if is_apart else [sizes]:
                    again = ["--only", mode, "--model", folder, "--batch", *map(str, batches)]
                    again += ["--max-seqs", str(args.max_seqs or min(max(sizes), 256))]
                    again += ["--turns", folder] if args.together else []
                    name = f"phase_{args.shape}_{mode}" + (f"_{batches[0]}" if len(batches) < len(sizes) else "")
                    found += runs.run(name, *again, environment=OWN_PROCESS if mode.endswith(APART) else {}) or []
            finally:  # the others wait for its turns
                Turns.gone(Path(folder), mode).touch()
            return found

        rows = [row for found in (pool.map if args.together else map)(run, args.modes) for row in found]
    for row in rows:
        cell = row["batch"], row["phase"]
        none = "none" + APART * row["mode"].endswith(APART)
        baseline = [r["seconds"] for r in rows if (r["batch"], r["phase"], r["mode"]) == (*cell, none)]
        if baseline:
            row["times_as_fast"] = round(float(np.mean(baseline)) / row["seconds"], 3)
        append(args.out, {**about, **row})
    if args.step_times is not None:
        phases = [
            rollout for size in sizes for n in range(len(PHASES)) for rollout in Phase(recorded, size, n).rollouts
        ]
        context = round(np.mean([r.prompt_token_ids.size + r.token_ids.size / 2 for r in phases]))
        write_step_times(args.step_times, args.shape, context, args.k, rows)
    print(HEADER)
    for row in sorted(rows, key=lambda row: (row["batch"], row["phase"], args.modes.index(row["mode"]))):
        print(describe(row))
    runs.finish()


if __name__ == "__main__":
    main()
