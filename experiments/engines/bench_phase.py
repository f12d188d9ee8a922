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

Each mode has an engine in a process of its own, in which it is called as TRL's colocated engine is:

    none       vLLM without speculation
    ngram-gpu  vLLM's n-gram drafter on the device as its documentation has it: K = 5, after the last four tokens
    ngram-gpu-k8  with K = 8, after the last two to five tokens
    suffix     vLLM's suffix decoding as its documentation has it: K = 32; also suffix-k8
    device     the drafter on the device, our default on a GPU, with as many forward passes per step as pay
    device-n1  the same with one; also n2 and n4
    off        ours without drafts

Peers run in the runner that vLLM chooses: `ngram_gpu` in V2 from 0.32 on, `suffix` in V1 up to 0.33.

For each batch size there are two phases: the first meets the problems for the first time; the second, after new
weights, has that history and samples other rollouts of the same problems. A queue is a batch larger than `--max-seqs`.
The gate: every rollout is the recorded one. All engines are there at once and take turns at each phase, so that other
work on the machine slows down all of them. If `none` is the first mode, it runs each phase again at the end: `times` is
relative to the mean of both. What `--out` has of this commit, device and vLLM is not run again.

Reported by batch, phase and mode: seconds, also relative to `none`, and those in which less than a quarter of the
requests are left; tokens per second; tokens per request and step; the
share of steps that were too large for a CUDA graph; the time of steps by their size, on a GPU as its stream takes it;
`peak_gib`, what torch had allocated and reserved at most in the phase, with weights, KV cache (`kv_gib`) and graphs.
Each forward pass counts as a step; `passes_per_step` is how many the scheduler's have.

Other tasks than `phase`: `start`, the same where something watches and so slows a run; `calls`, the host's microseconds
by kind of call; `drained`, batches of short rollouts that end one by one; `identical`, where recorded tokens are only
likely and the noise decides: how many rollouts equal those of `off`, and of the same engine in two batches. `off-bi`
and `device-bi` have VLLM_BATCH_INVARIANT=1.

The states of a model with made-up weights say little, so features show what they cost here, not what they are worth.
Differences of some percent mean nothing. An engine that fails or is late leaves the rows of the phases that it has run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.drafting.peers import find_arctic
from experiments.engines import scripted
from experiments.engines.build import OURS, build_engine, command
from experiments.processes import Child
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.estimate.phases import RecordedRollout, by_problem
from rollout_spec.stats import SpeculationStats

K, LARGEST_K = 8, 32
PEERS = {
    "ngram-gpu": {"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "ngram-gpu-k8": {"method": "ngram_gpu", "num_speculative_tokens": K, "prompt_lookup_min": 2,
                     "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": LARGEST_K},
    "suffix-k8": {"method": "suffix", "num_speculative_tokens": K},
}  # fmt: skip
MODES = ("none", *PEERS, "device", "device-n1", "device-n2", "device-n4", "off", "off-bi", "device-bi")
SHAPES = {
    # layers, hidden, intermediate, heads, key-value heads, vocabulary: Qwen2.5-1.5B and -7B
    "1.5b": (28, 1536, 8960, 12, 2, 151_936),
    "7b": (28, 3584, 18944, 28, 4, 152_064),
    "tiny": (2, 64, 128, 2, 1, 50_304),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "2",
}  # fmt: skip
ROLLOUTS = Path(__file__).with_name("rg_llama_math.parquet")
GROUP = 8
"""Rollouts per problem and phase, more where there are too few problems."""
PHASES = ("first", "history")
WARM_UP_TOKENS, SHORT_TOKENS, DRAINS = 8, 200, 3
START_SHARE = 0.65  # of the time that is left: an engine that takes longer to start is left out


def made_up(batch: int, vocab: int) -> list[RecordedRollout]:
    """Rollouts of other problems, to warm up with."""
    rng = np.random.default_rng(batch)
    prompt = rng.integers(3, vocab, 32).astype(np.int32)
    texts = rng.integers(3, vocab, (batch, WARM_UP_TOKENS)).astype(np.int32)
    return [RecordedRollout(0, prompt, text) for text in texts]


class Phase:
    """A batch of recorded rollouts as requests.

    Attributes:
        rollouts: The requests', by their number.
        problems: A number for each one's problem, the same in both phases of a batch size and in no other.
    """

    def __init__(self, recorded: list[list[RecordedRollout]], batch: int, number: int) -> None:
        group = max(min(GROUP, batch), -(-batch // len(recorded)))
        self.rollouts: list[RecordedRollout] = []
        self.problems: list[int] = []
        for index, problem in enumerate(recorded[: -(-batch // group)]):
            chosen = problem[number * group : (number + 1) * group]
            if len(chosen) < group:
                raise ValueError(f"{batch} requests need {2 * group} rollouts of each of {len(recorded)} problems")
            self.rollouts += chosen[: batch - len(self.rollouts)]
            self.problems += [batch * 100_000 + index] * (len(self.rollouts) - len(self.problems))


def read_recorded(path: str) -> list[list[RecordedRollout]]:
    """The problems all of whose rollouts say something."""
    return [p for p in by_problem(read_traces(path)) if all(r.token_ids.size for r in p)]


def prompt_of(rollout: RecordedRollout) -> np.ndarray:
    """A recording may have no prompt, and vLLM takes none that is empty."""
    return rollout.prompt_token_ids if rollout.prompt_token_ids.size else np.zeros(1, np.int32)


def end_token(rollouts: list[RecordedRollout]) -> int:
    """The token with which rollouts end and which occurs nowhere else; -1 if there is none."""
    last = Counter(int(rollout.token_ids[-1]) for rollout in rollouts if rollout.token_ids.size)
    inside = {int(token) for rollout in rollouts for token in rollout.token_ids[:-1]}
    return next((token for token, _ in last.most_common() if token not in inside), -1)


def write_model(shape: str, folder: Path) -> None:
    """A Llama configuration of the given shape; vLLM makes the weights up."""
    layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def serve(
    args: argparse.Namespace, mode: str, batches: list[int], model: Path
) -> Generator[dict[str, Any] | None, tuple[int, str], None]:
    """The process of an engine: runs the phase that it is sent, a batch size and a name, and answers with its row."""
    if mode in PEERS:  # vLLM chooses their runner
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        find_arctic()
    from vllm import SamplingParams

    recorded = read_recorded(args.rollouts)
    phases = {(b, name): Phase(recorded, b, n) for b in batches for n, name in enumerate(PHASES)}
    rollouts = [rollout for phase in phases.values() for rollout in phase.rollouts]
    end = end_token(rollouts)
    limit = max(rollout.token_ids.size for rollout in rollouts)
    has_noise = all(rollout.seed is not None for rollout in rollouts)
    decides = args.task == "identical"  # the noise
    kind, _, num_passes = mode.removesuffix("-bi").partition("-n")
    is_ours = kind in OURS
    options: dict[str, Any] = {"verify": "sample" if has_noise or decides else "rejection"}
    if num_passes:
        options["sub_steps"] = int(num_passes)
    if mode in PEERS:
        kind, options = "model", {"speculative_config": PEERS[mode]}
    most = args.max_seqs or min(max(batches), 256)
    memory: dict[str, Any] = {"num_gpu_blocks_override": 2000}
    if torch.cuda.is_available():  # nothing is measured then, so other engines may start meanwhile
        memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(args.kv_gib * 2**30)}
    llm = build_engine(
        model, kind, K, options=options, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=0,
        enforce_eager=args.eager, logprobs_mode="processed_logprobs", max_num_seqs=most,
        max_model_len=max(prompt_of(rollout).size for rollout in rollouts) + limit + LARGEST_K + 1, **memory,
    )  # fmt: skip
    scheduling = llm.llm_engine.vllm_config.scheduler_config
    warm_ups = {batch: made_up(batch, SHAPES[args.shape][-1]) for batch in batches}
    all_rollouts = [*rollouts, *(rollout for made in warm_ups.values() for rollout in made)]
    texts = [[*prompt_of(rollout).tolist(), *rollout.token_ids.tolist()] for rollout in all_rollouts]
    raised = scripted.LIKELY if decides else scripted.ABOVE_ALL
    (watched,) = llm.collective_rpc(scripted.install, args=(texts, max(end, 0), raised))

    def generate(rollouts: list[RecordedRollout], problems: list[int], first_script: int) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt_of(rollout).tolist()} for rollout in rollouts]
        params = []
        for script, (rollout, problem) in enumerate(zip(rollouts, problems, strict=True), first_script):
            ends = int(rollout.token_ids[-1]) == end
            ours = {"rollout_spec": {"problem_id": problem}} if is_ours else {}
            # Stock vLLM gets none: requests with seeds may take a slower way through its sampler.
            seed = (script if rollout.seed is None else rollout.seed) if is_ours else None
            params.append(
                SamplingParams(
                    temperature=1.0, seed=seed, max_tokens=limit if ends else rollout.token_ids.size,
                    stop_token_ids=[end] if ends else None, ignore_eos=True, logprobs=0, detokenize=False,
                    extra_args={scripted.SCRIPT: script, **ours},
                )
            )  # fmt: skip
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    def check(said: list[list[int]], rollouts: list[RecordedRollout]) -> None:
        """The gate."""
        for i, (tokens, rollout) in enumerate(zip(said, rollouts, strict=True)):
            if tokens != rollout.token_ids.tolist():
                raise SystemExit(f"gate: {mode}: request {i} of {len(said)} is not the recorded rollout")

    counts = [0, *(len(phase.rollouts) for phase in phases.values()), *batches]
    first_scripts = dict(zip([*phases, *batches], np.cumsum(counts).tolist(), strict=False))
    for batch, made in warm_ups.items():  # each size: kernels are compiled for kinds of sizes
        generate(made, [10**9 + batch] * batch, first_scripts[batch])
    row: dict[str, Any] = {}
    while True:
        last_batch, (batch, name) = row.get("batch"), (yield row or None)
        if batch != last_batch:
            watched.forget_other_problems()
        phase, first = phases[batch, name], first_scripts[batch, name]
        row = {"mode": mode, "batch": batch, "phase": name}
        if args.task == "calls":
            begun = [r._replace(token_ids=r.token_ids[:SHORT_TOKENS]) for r in phase.rollouts]
            watched.clear()
            calls = calls_by_kind(functools.partial(generate, begun, phase.problems, first))
            num_steps = sum(watched.passes)
            per_step = {kind: [round(x / num_steps, 1) for x in of_kind] for kind, of_kind in sorted(calls.items())}
            passes = round(num_steps / len(watched.passes), 2)
            row |= {"steps": num_steps, "calls_per_step": per_step, "passes_per_step": passes}
            continue
        if args.task == "drained":
            lengths = np.linspace(1, SHORT_TOKENS, batch).astype(int)
            begun = [r._replace(token_ids=r.token_ids[:n]) for r, n in zip(phase.rollouts, lengths, strict=True)]
            for _ in range(DRAINS):
                check(generate(begun, phase.problems, first), begun)
            row |= {"drains": DRAINS, "cuts_drafts": watched.cuts_drafts}
            continue
        if decides:
            said, places = generate(phase.rollouts, phase.problems, first), (0, -(-batch // 2), batch)
            halves = [generate(phase.rollouts[a:b], phase.problems[a:b], first + a) for a, b in pairwise(places)]
            again = sum(map(list.__eq__, said, chain(*halves)))
            row |= {"said": said, "identical_in_halves": again, "cuts_drafts": watched.cuts_drafts}
            continue
        before = command(llm, "stats") if is_ours else None
        watched.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        said = generate(phase.rollouts, phase.problems, first)
        seconds = time.perf_counter() - started
        check(said, phase.rollouts)
        num_tokens = sum(map(len, said))
        row |= {
            "k": PEERS.get(mode, {}).get("num_speculative_tokens", K), "noise": has_noise, "runner": watched.runner,
            "max_seqs": scheduling.max_num_seqs, "async_scheduling": scheduling.async_scheduling, "tokens": num_tokens,
            "seconds": round(seconds, 4), "tokens_per_second": round(num_tokens / seconds, 1),
            **watched.summary(num_tokens),
        }  # fmt: skip
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            row |= {"peak_gib": [round(number / 2**30, 2) for number in peak], "kv_gib": args.kv_gib}
        if before is not None:
            stats = SpeculationStats.between(before, command(llm, "stats"))
            row["acceptance_rate"] = round(stats.acceptance_rate, 3)


def calls_by_kind(run: Callable[[], Any]) -> dict[str, list[float]]:
    """[how many, microseconds of the host] of each CUDA function that is called while `run` runs, and of ATen."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds[: 1 + torch.cuda.is_available()]) as profile:
        run()
    found: dict[str, list[float]] = {}
    for event in profile.key_averages():
        kind = "aten" if event.key.startswith("aten::") else event.key if event.key.startswith("cu") else "other"
        of_kind = found.setdefault(kind, [0, 0.0])
        of_kind[0] += event.count
        of_kind[1] += event.self_cpu_time_total
    return found


def write_step_times(path: Path, shape: str, context: int, rows: Sequence[dict[str, Any]]) -> None:
    """The least median of steps whose requests have on average a whole number of draft tokens, at most K.

    Other work makes some phases slow, so that a step takes no longer than a larger one did.
    """
    least: dict[tuple[int, int], float] = {}
    for row in rows:
        for requests, tokens, _, ms in row["by_size"]:
            k, rest = divmod(tokens - requests, requests)
            if not rest and k <= K:
                least[k, requests] = min(ms, least.get((k, requests), ms))
    for larger, size in pairwise(sorted(least, reverse=True)):
        if size[0] == larger[0]:
            least[size] = min(least[size], least[larger])
    with path.open("w") as file:
        print("model,requests,context,num_speculative_tokens,median_ms", file=file)
        for (k, requests), ms in sorted(least.items()):
            print(shape, requests, context, k, ms, sep=",", file=file)


def known_rows(path: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of this commit, device, recording and these versions."""
    rows = map(json.loads, path.read_text().splitlines() if path and path.exists() else ())
    same = about.keys() - {"argv"}
    return [row for row in rows if all(row.get(name) == about[name] for name in same)]


def compare(rows: list[dict[str, Any]], known: list[dict[str, Any]]) -> None:
    """Add to rows of one phase what they say beside each other, or beside `none` of earlier runs."""
    for some in (known, rows):
        if seconds := [row["seconds"] for row in some if row["mode"] == "none" and "seconds" in row]:
            for row in rows:
                row["times_as_fast"] = round(float(np.mean(seconds)) / row["seconds"], 3)
    said = {row["mode"]: row.pop("said") for row in rows if "said" in row}
    for row in rows:
        if other := said.get(row["mode"].replace("device", "off")):
            row |= {"rollouts": len(other), "identical": sum(map(list.__eq__, said[row["mode"]], other))}


def summary(rows: list[dict[str, Any]]) -> str:
    """A line about all modes."""
    parts: dict[str, str] = {}
    for row in rows:
        if "calls_per_step" in row:
            calls = row["calls_per_step"]
            count = sum(number for kind, (number, _) in calls.items() if kind.startswith("cu"))
            said = f"{count:.0f} calls {sum(us for _, us in calls.values()):.0f} us"
        elif "drains" in row:
            said = f"{row['drains']} drained" + ("" if row["cuts_drafts"] else ", but no drafts are cut here")
        elif "identical_in_halves" in row:
            said = f"{row.get('identical')} of {row.get('rollouts')}, in halves {row['identical_in_halves']}"
        else:
            said = f"{row['seconds']:.2f} s x{row.get('times_as_fast', 0):.2f}"
        peak = f" {row['peak_gib'][0]:.1f} GiB" if "peak_gib" in row else ""
        name = f"{row['batch']} {row['mode']}:"
        parts[name] = f"{parts.get(name, name)} {said}{peak};"
    return " ".join(parts.values()).rstrip(";")


def main() -> None:
    """Run all modes and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollouts", default=str(ROLLOUTS), help="a Parquet file, see experiments/traces.py")
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 16, 256])
    parser.add_argument("--max-seqs", type=int, help="default: the largest batch, at most 256")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["none", "device"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--kv-gib", type=float, default=14, help="GiB of each engine's KV cache on a GPU")
    parser.add_argument("--task", choices=("phase", "start", "calls", "drained", "identical"), default="phase")
    parser.add_argument("--hang-seconds", type=float, default=60, help="in which batches of `drained` must end")
    parser.add_argument("--until", type=float, help="by this time, as `date +%%s` says it, stop")
    parser.add_argument("--logs", type=Path, help="keep all that the engines print in this folder")
    parser.add_argument("--step-times", type=Path, help="write them here for `rollout-spec estimate --step-times`")
    args = parser.parse_args()
    recorded = read_recorded(args.rollouts)
    batches = args.batch
    phases = [Phase(recorded, size, n) for size in batches for n in range(len(PHASES))]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {"benchmark": args.task, "shape": args.shape, "rollouts": Path(args.rollouts).name, **origin(device)}
    rows = [] if args.task == "identical" else known_rows(args.out, about)
    cells = {(row["mode"], row["batch"]) for row in rows if row["phase"] == PHASES[-1]}
    todo = [mode for mode in args.modes if any((mode, batch) not in cells for batch in batches)]
    if missing := [mode for mode in todo if mode.startswith("suffix") and find_arctic() is None]:
        print(f"{', '.join(missing)}: left out, as arctic-inference is not installed", flush=True)
    todo = [mode for mode in todo if mode not in missing]
    children: dict[str, Child] = {}
    failed: list[str] = []

    def answer(mode: str, until: float | None, what: str = "") -> Any:
        """A mode's next answer. None: it has failed or is late, and takes part no longer."""
        try:
            return children[mode].answer(None if until is None else max(until - time.time(), 0))
        except RuntimeError as error:
            print(f"{mode}: {error}", flush=True)
            children.pop(mode).kill()
            failed.append(f"{mode}{what}")
            return None

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(args.shape, folder)  # one folder: modes with steps of the same sizes share a compiled model
        logs = args.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        for mode in todo:
            environment = {**ENVIRONMENT, "VLLM_BATCH_INVARIANT": str(int(mode.endswith("-bi")))}
            child = Child(serve, args, mode, batches, folder, log=logs / f"{mode}.log", environment=environment)
            children[mode] = stack.enter_context(child)
        late, ends = args.until and time.time() + START_SHARE * (args.until - time.time()), args.until
        for mode in todo:
            answer(mode, late, " did not start")
        what = " (a batch that does not drain: vLLM's issue 54011?)" if args.task == "drained" else ""
        for phase in product(batches, PHASES):
            of_phase: list[dict[str, Any]] = []
            for mode in (*todo, *(mode for mode in todo[:1] if (mode, args.task) == ("none", "phase"))):
                if mode in children and (mode, phase[0]) not in cells:
                    children[mode].send(phase)
                    if args.task == "drained":
                        ends = time.time() + args.hang_seconds
                    of_phase += filter(None, [answer(mode, ends, what)])
            compare(of_phase, [row for row in rows if (row["batch"], row["phase"]) == phase])
            for row in of_phase:
                append(args.out, {**about, **row})
                print(json.dumps({name: of_row for name, of_row in row.items() if name != "by_size"}), flush=True)
            rows += of_phase
    if args.step_times is not None:
        context = round(np.mean([rollout.mean_context for phase in phases for rollout in phase.rollouts]))
        write_step_times(args.step_times, args.shape, context, [row for row in rows if row["mode"] not in PEERS])
    if failed:
        raise SystemExit(f"stopped early: {', '.join(failed)}")
    print(summary(rows) if rows else "nothing to run")


if __name__ == "__main__":
    main()
