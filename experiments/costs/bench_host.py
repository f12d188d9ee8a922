"""What speculation costs the host per request and step: from sampled tokens to draft tokens, with no model in between.

    python -m experiments.costs.bench_host traces/rg_llama_math.parquet --out FILE

The adapters of both runners are called as vLLM's calls them, on its data structures, with recorded rollouts in place of
a model: a drafted token is accepted where the recording says the same. The rollouts of later epochs are live, in groups
of eight per problem while there are enough problems; those of the first epoch are the history. A rollout that ends
makes room for the next one. vLLM's own proposers follow the same rollouts in the same process: `ngram` and, where
arctic-inference is found (see `peers.find_arctic`), `suffix` with the same history. `indexing late` indexes new
tokens while the forward pass would run, as on a GPU, which is reported apart (`hidden_us`). Where the recording has
what the target saw (`rollout_spec.features`), the adapters hand it on with the tokens.

Reported: p20/p50/p80 over the steps of the microseconds per request (per step at one request).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from experiments.drafting.peers import find_arctic
from experiments.rows import append, make_parser, origin, quantiles
from experiments.traces import read_traces
from rollout_spec.config import PROPOSER_PATH, RolloutSpecConfig
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.drafters.host.threads import usable_threads
from rollout_spec.estimate.recorded import Rollout, add_rollout, by_problem
from rollout_spec.features.format import no_features
from rollout_spec.integrations.vllm import runner_v1, runner_v2
from rollout_spec.integrations.vllm.session import HostSession
from rollout_spec.jit.warm_up import warm_up
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, VerifyResult

STEP_SECONDS, TOKEN_SECONDS = 8e-3, 2e-6
"""What the budget is told of steps: there is no model here, and without one no draft would be worth its cost."""
GROUP = 8
"""Live rollouts of one problem at a time, as long as there are problems enough."""
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 1 << 18
"""Above every token of the recordings."""
CONTESTANTS = ["ours", "ours, indexing late", "ours V2", "ours V2, indexing late", "ngram", "suffix"]
SKIPPED_STEPS = 8
"""The first steps read prompts and load compiled code."""


class Live:
    """A request that follows a recorded rollout."""

    def __init__(self, req_id: str, rollout: Rollout, seed: int) -> None:
        self.req_id, self.tokens, self.features = req_id, rollout.token_ids, rollout.features
        self.prompt_token_ids, self.prefill_token_ids = rollout.prompt_token_ids.tolist(), None
        self.output_token_ids: list[int] = []
        self.sampling_params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=int(rollout.token_ids.size), extra_args=None, logprobs=0
        )
        self.lora_request, self.mm_features = None, []

    @property
    def left(self) -> np.ndarray:
        """Recorded tokens to come."""
        return self.tokens[len(self.output_token_ids) :]


class Runner:
    """The parts of vLLM's V1 `GPUModelRunner` that proposers and adapters look at."""

    def __init__(self, size: int, k: int) -> None:
        self.device = torch.device("cpu")
        self.requests: dict[str, Live] = {}
        self.execute_model_state = None
        self.use_async_scheduling = False
        self.sampler = SimpleNamespace(logprobs_mode="raw_logprobs")
        self.discard_request_mask = SimpleNamespace(np=np.zeros(size, bool))
        self.query_start_loc = SimpleNamespace(np=np.zeros(size + 1, np.int32))
        self.positions = torch.zeros(size * (k + 1), dtype=torch.int64)
        sampling = SimpleNamespace(
            all_greedy=False, temperature=torch.ones(size), top_k=None, top_p=None, max_num_logprobs=None
        )
        self.input_batch = SimpleNamespace(
            req_ids=[], req_id_to_index={}, logitsprocs=SimpleNamespace(all=[]), sampling_metadata=sampling,
            num_tokens_no_spec=np.zeros(size, np.int32), num_prompt_tokens=np.zeros(size, np.int32),
            token_ids_cpu=np.zeros((size, MAX_MODEL_LEN), np.int32),
        )  # fmt: skip

    def add(self, row: int, request: Live) -> None:
        """Put a request in a row, whose request has ended."""
        batch = self.input_batch
        if row < len(batch.req_ids):
            ended = batch.req_ids[row]
            del self.requests[ended], batch.req_id_to_index[ended]
            batch.req_ids[row] = request.req_id
        else:
            batch.req_ids.append(request.req_id)
        self.requests[request.req_id] = request
        batch.req_id_to_index[request.req_id] = row
        size = len(request.prompt_token_ids)
        batch.token_ids_cpu[row, :size] = request.prompt_token_ids
        batch.num_tokens_no_spec[row] = batch.num_prompt_tokens[row] = size

    def schedule(self, num_draft_tokens: list[int]) -> None:
        """What vLLM's `_prepare_inputs` does before the forward pass."""
        self.query_start_loc.np[1 : len(num_draft_tokens) + 1] = np.cumsum(np.array(num_draft_tokens) + 1)

    def book(self, sampled: list[list[int]]) -> None:
        """What vLLM's `_bookkeeping_sync` does between sampling and drafting."""
        batch = self.input_batch
        for row, tokens in enumerate(sampled):
            start = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
            batch.num_tokens_no_spec[row] = start + len(tokens)
            self.requests[batch.req_ids[row]].output_token_ids.extend(tokens)


def rollouts_of(problems: list[list[Rollout]], size: int) -> tuple[list[Rollout], Iterator[Rollout]]:
    """(history, newest last; live rollouts in the order in which they start)."""
    chosen = problems[: max(1, size // GROUP)]
    first = min(rollout.policy_version for problem in chosen for rollout in problem)
    history = [r for p in chosen for r in p if r.policy_version == first]
    live = [[r for r in p if r.policy_version > first and r.token_ids.size > 16] for p in chosen]
    group = -(-size // len(chosen))

    def in_order() -> Iterator[Rollout]:
        start = 0
        while True:
            for of_problem in live:
                for i in range(group):
                    yield of_problem[(start + i) % len(of_problem)]
            start += group

    return history, in_order()


class Verification:
    """One step's drafts held against the recording."""

    def __init__(self, runner: Runner, drafts: list[list[int]]) -> None:
        self.num_draft_tokens = [len(draft) for draft in drafts]
        self.sampled: list[list[int]] = []
        targets: list[int] = []
        features: list[np.ndarray] = []
        accepted = []
        for req_id, draft in zip(runner.input_batch.req_ids, drafts, strict=True):
            request = runner.requests[req_id]
            said, left = len(request.output_token_ids), request.left[: len(draft) + 1].tolist()
            count = 0
            while count < min(len(draft), len(left) - 1) and draft[count] == left[count]:
                count += 1
            accepted.append(count)
            self.sampled.append(left[: count + 1])
            targets += left + [0] * (len(draft) + 1 - len(left))
            if request.features is not None:
                features += [request.features[said : said + len(left)], no_features(len(draft) + 1 - len(left))]
        size, width = len(drafts), max(self.num_draft_tokens, default=0) + 1
        output = torch.full((size, width), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        for row, tokens in enumerate(self.sampled):
            output[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        zeros = torch.zeros(size, dtype=torch.int32)
        num_accepted = torch.tensor(accepted, dtype=torch.int32)
        self.result = VerifyResult(output, num_accepted, torch.tensor(targets), None, None, zeros)
        self.features = torch.from_numpy(np.concatenate(features)) if features else None
        self.metadata = SpecDecodeMetadata.make_dummy(drafts, runner.device) if any(drafts) else None


def engine_config(k: int, size: int) -> Any:
    """The parts of vLLM's configuration that proposers read."""
    config = RolloutSpecConfig(num_speculative_tokens=k, drafter="history")
    return SimpleNamespace(
        additional_config={"rollout_spec": config.to_dict()},
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: VOCAB_SIZE, get_hidden_size=lambda: 64,
            dtype=torch.float32,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=size, max_num_scheduled_tokens=None, max_num_batched_tokens=size * (k + 1)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, world_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=SimpleNamespace(
            model=PROPOSER_PATH, method="custom_class", num_speculative_tokens=k, prompt_lookup_min=2,
            prompt_lookup_max=5, suffix_decoding_max_tree_depth=24, suffix_decoding_max_cached_requests=10_000,
            suffix_decoding_max_spec_factor=1.0, suffix_decoding_min_token_prob=0.1,
        ),
    )  # fmt: skip


def prepare(session: HostSession, history: list[Rollout], *, index_late: bool) -> None:
    """Show a session's drafter the history."""
    if index_late:
        session.drafting.index_late()
    drafter: Any = session.drafter
    for rollout in history:
        add_rollout(drafter, rollout._replace(problem_id=problem_of_prompt(rollout.prompt_token_ids)))
    budget: Any = session.budget
    observe_step = budget.observe_step

    def observe_modelled_step(num_tokens: int, seconds: float, **kwargs: Any) -> None:
        observe_step(num_tokens, STEP_SECONDS + TOKEN_SECONDS * num_tokens + kwargs["draft_seconds"], **kwargs)

    budget.observe_step = observe_modelled_step


class Ours:
    """Our V1 adapter and proposer."""

    def __init__(self, runner: Runner, k: int, history: list[Rollout], *, index_late: bool) -> None:
        config = engine_config(k, len(runner.discard_request_mask.np))
        runner.vllm_config = config  # type: ignore[attr-defined]
        runner.drafter = runner_v1.RolloutSpecProposer(config)  # type: ignore[attr-defined]
        self.adapter = runner_v1.RunnerAdapterV1(
            runner, RolloutSpecConfig.from_dict(config.additional_config["rollout_spec"])
        )
        assert self.adapter.session is not None
        self.runner, self.session = runner, self.adapter.session
        prepare(self.session, history, index_late=index_late)

    def schedule(self, new: list[Live], finished: list[str]) -> None:
        """A step is scheduled, and these requests come and have ended."""
        self.adapter.begin_step(
            SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=finished, preempted_req_ids=None)
        )

    def compute(self) -> None:
        """What is done while a device computes is timed apart."""
        self.adapter.on_forward()
        self.session.update_index()

    def sample(self, verification: Verification) -> None:
        """The adapter's part of sampling, with the verifier's own work left out."""
        features = verification.features if self.adapter.wants_features else None
        result = verification.result._replace(features=features)
        runner_v1.verify_rows = lambda *args, **kwargs: result  # type: ignore[assignment]
        self.adapter.sample(torch.zeros(1, 1), verification.metadata)

    def propose(self, sampled: list[list[int]]) -> list[list[int]]:
        """As the runner calls it."""
        batch = self.runner.input_batch
        return self.runner.drafter.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)  # type: ignore[attr-defined,no-any-return]


class OursV2:
    """Our speculator for the V2 runner, whose drafts go to the scheduler as lists, too."""

    def __init__(self, runner: Runner, k: int, history: list[Rollout], *, index_late: bool) -> None:
        config = engine_config(k, len(runner.discard_request_mask.np))
        self.speculator = runner_v2.HostSpeculator(config, torch.device("cpu"))
        self.runner, self.session = runner, self.speculator.session
        clock = SimpleNamespace(started=0.0)
        self.adapter = SimpleNamespace(clock=clock, wants_rejected_targets=False)
        runner.sampler, runner.rollout_spec = SimpleNamespace(outcome=None), self.adapter  # type: ignore[attr-defined]
        self.speculator.bind(runner)
        self.new: list[Live] = []
        prepare(self.session, history, index_late=index_late)

    def schedule(self, new: list[Live], finished: list[str]) -> None:
        """A step is scheduled, and these requests come and have ended."""
        self.session.finish_requests(finished, ())
        self.new = new

    def compute(self) -> None:
        """What is done while a device computes is timed apart."""
        self.session.start_requests(self.new)
        self.session.update_index()

    def sample(self, verification: Verification) -> None:
        """What our sampler keeps; the kernels that it launches are left out."""
        batch, starts = self.runner.input_batch, np.cumsum([0, *(n + 1 for n in verification.num_draft_tokens)])
        positions = torch.from_numpy(batch.num_tokens_no_spec - 1).long()
        wanted = getattr(self.session.drafter, "wants_features", False)
        self.adapter.take_features = lambda: verification.features if wanted else None
        self.runner.sampler.outcome = runner_v2._Verified(list(batch.req_ids), starts, positions, verification.result)

    def propose(self, sampled: list[list[int]]) -> list[list[int]]:
        """As the runner calls it, with the drafts as the scheduler gets them."""
        req_ids = self.runner.input_batch.req_ids
        num_tokens = int(self.runner.query_start_loc.np[len(sampled)])
        batch = SimpleNamespace(num_reqs=len(sampled), num_tokens=num_tokens)
        num_sampled = self.runner.sampler.outcome.result.num_accepted + 1
        drafts = self.speculator.propose(batch, None, None, None, None, num_sampled).tolist()
        lengths = self.speculator.num_draft_tokens
        return [tokens[: lengths.get(req_id, 0)] for req_id, tokens in zip(req_ids, drafts, strict=True)]


class Stock:
    """A proposer of vLLM's own."""

    def __init__(self, propose: Callable[[list[list[int]]], list[list[int]]]) -> None:
        self.propose = propose

    def schedule(self, new: list[Live], finished: list[str]) -> None:
        """vLLM's proposers read from the runner who is there."""

    def compute(self) -> None:
        """The forward pass runs."""

    def sample(self, verification: Verification) -> None:
        """vLLM's sampler is not on the way from sampled tokens to drafts."""


def make(name: str, runner: Runner, k: int, history: list[Rollout]) -> Any:
    """A contestant; None where it is not installed."""
    size = len(runner.discard_request_mask.np)
    batch = runner.input_batch
    if name.startswith("ours"):
        return (OursV2 if "V2" in name else Ours)(runner, k, history, index_late="late" in name)
    if name == "ngram":
        ngram = NgramProposer(engine_config(k, size))
        return Stock(lambda sampled: ngram.propose(k, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu))
    if find_arctic() is None:
        return None
    suffix = SuffixDecodingProposer(engine_config(k, size))
    for number, rollout in enumerate(history):
        suffix.suffix_cache.start_request(f"history {number}", rollout.prompt_token_ids.tolist())
        suffix.suffix_cache.add_active_response(f"history {number}", rollout.token_ids.tolist())
        suffix.suffix_cache.stop_request(f"history {number}")
    return Stock(lambda sampled: suffix.propose(k, batch, sampled))


def measure(
    name: str, problems: list[list[Rollout]], size: int, k: int, steps: int, num_history: int
) -> dict[str, Any] | None:
    """One cell: figures of `steps` steps of `size` requests."""
    runner = Runner(size, k)
    history, live = rollouts_of(problems, size)
    spread = np.linspace(0, len(history) - 1, min(num_history, len(history))).astype(int)
    contestant = make(name, runner, k, [history[i] for i in spread])
    if contestant is None:
        return None
    count = 0
    drafts: list[list[int]] = [[] for _ in range(size)]
    times: list[float] = []
    hidden: list[float] = []
    drafted = accepted = 0
    for step in range(SKIPPED_STEPS + steps):
        new: list[Live] = []
        finished: list[str] = []
        for row in range(size):
            full = row < len(runner.input_batch.req_ids)
            if not full or not runner.requests[runner.input_batch.req_ids[row]].left.size:
                rollout = next(live)
                seed = count if rollout.seed is None else rollout.seed
                if full:
                    finished.append(runner.input_batch.req_ids[row])
                new.append(Live(f"r{count}", rollout, seed))
                runner.add(row, new[-1])
                drafts[row] = []
                count += 1
        started = time.perf_counter()
        contestant.schedule(new, finished)
        scheduling = time.perf_counter() - started
        contestant.compute()
        hidden.append(time.perf_counter() - started - scheduling)
        verification = Verification(runner, drafts)
        runner.schedule(verification.num_draft_tokens)
        started = time.perf_counter()
        contestant.sample(verification)
        sampling = time.perf_counter() - started
        runner.book(verification.sampled)
        started = time.perf_counter()
        drafts = contestant.propose(verification.sampled)
        if step >= SKIPPED_STEPS:
            times.append(time.perf_counter() - started + scheduling + sampling)
            drafted += sum(verification.num_draft_tokens)
            accepted += int(verification.result.num_accepted.sum())
    per_request = 1e6 / size
    return {
        "us_per_request": quantiles([t * per_request for t in times]),
        "hidden_us": quantiles([t * per_request for t in hidden[SKIPPED_STEPS:]]),
        "num_threads": usable_threads() if name.startswith("ours") else 1,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": round(1 + accepted / (steps * size), 3),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every cell and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, help="recorded rollouts of two epochs or more; see experiments/traces.py")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--history", type=int, default=450, help="finished rollouts known at the start")
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    problems = by_problem(read_traces(args.trace))
    warm_up(RolloutSpecConfig(drafter="history"))
    about = {**origin(), "trace": args.trace.name, "history": args.history, "steps": args.steps}
    print("batch  K  proposer               us/request p20    p50    p80  hidden  tokens/step")
    for k in args.k:
        for size in args.batch:
            for name in args.contestants:
                figures = measure(name, problems, size, k, args.steps, args.history)
                if figures is None:
                    continue
                append(args.out, {"benchmark": "host", "batch": size, "k": k, "proposer": name, **figures, **about})
                low, middle, high = figures["us_per_request"]
                print(
                    f"{size:5d} {k:2d}  {name:22} {low:14.1f} {middle:6.1f} {high:6.1f}  "
                    f"{figures['hidden_us'][1]:6.1f}  {figures['tokens_per_step']:11.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
