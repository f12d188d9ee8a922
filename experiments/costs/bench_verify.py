"""Our verifier against vLLM's, on this machine's device, after a correctness gate.

    python -m experiments.costs.bench_verify [--out FILE] [--repeats 20]

The verifiers take the same logits and point-mass drafts, return tokens and (where a cell asks for them) the emitted
tokens' log-probabilities, and alternate within one process: our verifier as the V1 runner calls it, with and without
features of what the target saw, and vLLM's V1 sampler, or its rejection sampler where there are drafts; on a GPU also
our sampler as the V2 runner calls it and vLLM's. One JSONL row per cell: p20/p50/p80 of each verifier in microseconds
(device events around the call, launches included), ours also replayed from a CUDA graph, and the bandwidth of reading
every logit once in that time as a share of the measured copy bandwidth.

The logits resemble a language model's: normally distributed, with 20 tokens above the rest; four in five drafts are
what the target samples. Two cells have flat logits, the worst case for a scan that skips tokens that cannot win.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm  # noqa: F401
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from experiments.rows import append, make_parser, origin, quantiles
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm import plugin
from rollout_spec.integrations.vllm.sampling import keep_broken, truncate
from rollout_spec.noise import host as noise
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import reference
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.layout import Layout, lay_out

BASE = {
    "batch": 256, "k": 8, "vocab": 151_936, "temperature": 1.0, "top_p": 1.0, "logprobs": True, "ragged": False,
    "logits": "peaked", "dtype": "bfloat16",
}  # fmt: skip
CHANGES = ({"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95},
           {"logprobs": False}, {"ragged": True}, {"vocab": 32_000}, {"logits": "flat"})  # fmt: skip
GPU_CELLS = [
    *({"batch": batch, "k": k} for batch in (1, 64, 512) for k in (0, 8)),  # first what matters most: time may run out
    *({"batch": batch, "k": k} for batch in (16, 256) for k in (0, 4, 8, 16)),
    *({"batch": batch, "k": k} for batch in (1, 64, 512) for k in (4, 16)),
    *({"batch": batch, **change} for batch in (256, 16) for change in CHANGES),
]
CPU_CELLS = [
    {"batch": batch, "k": k, "vocab": vocab, "dtype": dtype, **change}
    for vocab in (40, 49_152, 151_936)
    for dtype in ("float32", "bfloat16")
    for batch, k in ((1, 0), (1, 8), (16, 0), (16, 8))
    for change in ({}, {"logprobs": False})
] + [
    {"batch": 16, "k": 8, "vocab": 49_152, "dtype": "float32", **change}
    for change in ({"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.95}, {"ragged": True}, {"logits": "flat"})
]
HIDDEN_SIZE = 1536
POSITION = 100
NEAR = 1e-3
"""The device's logarithms differ from NumPy's by 1e-5; a token may differ where two scores were this close."""


class Case:
    """One cell's inputs, for every verifier."""

    def __init__(
        self, device: torch.device, *, batch: int, k: int, vocab: int, temperature: float, top_p: float,
        logprobs: bool, ragged: bool, logits: str, dtype: str,
    ) -> None:  # fmt: skip
        self.device, self.batch, self.k, self.logprobs = device, batch, k, logprobs
        self.temperature, self.top_p = temperature, top_p
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(0, k + 1, batch) if ragged else np.full(batch, k)
        num_rows = int(self.lengths.sum()) + batch
        generator = torch.Generator(device).manual_seed(0)
        kind = getattr(torch, dtype)
        self.logits = torch.empty(num_rows, vocab, dtype=kind, device=device)
        self.hidden = torch.randn(num_rows, HIDDEN_SIZE, generator=generator, device=device).to(kind)
        for row in self.logits:  # row by row: a float32 copy of all would not fit
            bulk = torch.randn(vocab, generator=generator, device=device) * (2.5 if logits == "peaked" else 0.1)
            if logits == "peaked":
                top = torch.randint(vocab, (20,), generator=generator, device=device)
                bulk[top] = (
                    22 - 1.2 * torch.arange(20, device=device) + torch.randn(20, generator=generator, device=device)
                )
            row.copy_(bulk)
        self.scratch = self.logits.clone()
        """vLLM's samplers may change their input: they take this copy, which is restored outside the clock."""
        self.starts = np.concatenate(([0], np.cumsum(self.lengths + 1))).astype(np.int32)
        self.cu = torch.from_numpy(np.cumsum(self.lengths).astype(np.int32)).to(device)
        self.is_bonus = np.zeros(num_rows, bool)
        self.is_bonus[self.starts[1:] - 1] = True
        self.rows = SamplingBatch(
            temperature=torch.full((batch,), temperature, device=device),
            seeds=torch.arange(batch, device=device),
            positions=torch.full((batch,), POSITION, device=device),
        )
        self.limit = torch.full((batch,), top_p, device=device) if top_p < 1 else None
        self.drafts = torch.zeros(num_rows - batch, dtype=torch.int32, device=device)
        wish = self.ours_v1(after_difference=True).target_token_ids[torch.from_numpy(~self.is_bonus).to(device)]
        wrong = torch.from_numpy(rng.random(num_rows - batch) < 0.2).to(device)
        self.drafts = torch.where(wrong, (wish + 1) % vocab, wish).int()

    # -- ours --------------------------------------------------------------------------------------------------------

    def ours_v1(self, **options: Any) -> Any:
        """As `RunnerAdapterV1` calls it: where tokens are removed, after vLLM's code for that."""
        mode = "processed_logprobs" if self.logprobs else None
        logits, layout = self._processed(self.logits, lay_out(self.cu, self.drafts, self.rows))
        return verify_rows(logits, layout, logprobs_mode=mode, max_draft_tokens=self.k, **options)

    def _processed(self, logits: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        if self.limit is None:
            return logits, layout
        some = logits.to(torch.float32, copy=True)
        processed = truncate(some, self.rows.temperature, layout.request, top_p=self.limit)
        return keep_broken(processed, logits), layout.of_processed()

    def with_features(self) -> Any:
        """`ours_v1`, and the features of the emitted tokens."""
        return self.ours_v1(hidden=self.hidden)

    def make_v2(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """(our sampler, vLLM's rejection sampler), as the V2 runner calls them."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler as RejectionSamplerV2
        from vllm.v1.worker.gpu.states import RequestState

        from rollout_spec.integrations.vllm.runner_v2 import VerifyingSampler
        from rollout_spec.integrations.vllm.step_clock import StepClock

        size, vocab = self.batch, self.logits.shape[1]
        states = RequestState(
            max_num_reqs=size, max_model_len=POSITION + self.k + 8, max_num_batched_tokens=len(self.logits),
            num_speculative_steps=max(self.k, 1), vocab_size=vocab, device=self.device,
        )  # fmt: skip
        values = {
            "vllm_config": SimpleNamespace(reasoning_config=None), "max_num_reqs": size, "vocab_size": vocab,
            "device": self.device, "req_states": states, "logprobs_mode": "processed_logprobs",
            "num_speculative_tokens": self.k + 1,
        }  # fmt: skip
        inner = SamplerV2(**values)
        config = RolloutSpecConfig(num_speculative_tokens=max(self.k, 1))
        stats = SpeculationStats()
        clock = StepClock(self.device, stats)
        adapter = SimpleNamespace(
            config=config, warming_up=False, stats=stats, clock=clock, host_speculator=None,
            wants_rejected_targets=False, is_serving=lambda req_ids: True, take_hidden=lambda input_batch: None,
        )  # fmt: skip
        ours = VerifyingSampler(inner, adapter)  # type: ignore[arg-type]
        prompt = list(range(POSITION))
        for i in range(size):
            states.add_request(f"r{i}", POSITION, prompt, POSITION, 1000)
            params = SamplingParams(
                temperature=self.temperature, top_p=self.top_p, seed=i, logprobs=0 if self.logprobs else None
            )
            ours.add_request(states.req_id_to_index[f"r{i}"], params)
        states.apply_staged_writes()
        inner.apply_staged_writes()
        slots = np.array([states.req_id_to_index[f"r{i}"] for i in range(size)], np.int32)
        num_rows = len(self.logits)
        offset = np.concatenate([np.arange(n + 1) for n in self.lengths]).astype(np.int32)
        input_ids = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        is_draft = torch.from_numpy(np.flatnonzero(offset > 0)).to(self.device)
        input_ids[is_draft] = self.drafts

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

        batch = SimpleNamespace(
            req_ids=[f"r{i}" for i in range(size)],
            num_reqs=size,
            num_draft_tokens=int(self.lengths.sum()),
            input_ids=input_ids,
            positions=tensor(POSITION + offset.astype(np.int64)),
            logits_indices=torch.arange(num_rows, device=self.device),
            idx_mapping=tensor(slots),
            idx_mapping_np=slots,
            expanded_idx_mapping=tensor(np.repeat(slots, self.lengths + 1)),
            expanded_local_pos=tensor(offset),
            cu_num_logits=tensor(self.starts),
            cu_num_logits_np=self.starts,
            seq_lens=tensor((POSITION + 1 + self.lengths).astype(np.int32)),
            seq_lens_cpu_upper_bound=torch.from_numpy((POSITION + 1 + self.lengths).astype(np.int32)),
            is_prefilling_np=np.zeros(size, bool),
            num_computed_tokens_np=np.full(size, POSITION),
            num_scheduled_tokens=self.lengths + 1,
            prefill_len_np=np.full(size, POSITION),
        )
        method = SimpleNamespace(
            num_speculative_tokens=max(self.k, 1),
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            # Read from 0.33 on, for another method.
            fly_entropy_threshold=0.3,
            fly_entropy_top_k=1,
        )
        theirs = RejectionSamplerV2(inner, method, self.device) if self.k else inner
        return lambda: ours(self.logits, batch), lambda: theirs(self.scratch, batch)

    # -- vLLM's ------------------------------------------------------------------------------------------------------

    def make_v1(self) -> Callable[[], Any]:
        """vLLM's V1 rejection sampler; its sampler where there are no drafts."""
        empty = torch.empty(0, device=self.device)
        is_random = self.temperature > 0
        sampling = SamplingMetadata(
            temperature=self.rows.temperature if is_random else None, all_greedy=not is_random, all_random=is_random,
            top_p=self.limit if is_random else None, top_k=None, generators={},
            max_num_logprobs=0 if self.logprobs else None, no_penalties=True, prompt_token_ids=None,
            frequency_penalties=empty, presence_penalties=empty, repetition_penalties=empty,
            output_token_ids=[[] for _ in range(self.batch)], allowed_token_ids_mask=None, bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )  # fmt: skip
        sampler = Sampler(logprobs_mode="processed_logprobs")
        if self.k == 0:
            return lambda: sampler(self.scratch, sampling)
        per_request = np.split(self.drafts.cpu().numpy(), np.cumsum(self.lengths)[:-1])
        metadata = SpecDecodeMetadata.make_dummy([d.tolist() for d in per_request], self.device)
        rows = torch.arange(len(self.logits), dtype=torch.int32, device=self.device)
        is_bonus = torch.from_numpy(self.is_bonus).to(self.device)
        metadata.target_logits_indices, metadata.bonus_logits_indices = rows[~is_bonus], rows[is_bonus]
        rejection = RejectionSampler(sampler)
        return lambda: rejection(metadata, None, self.scratch, sampling)

    # -- the gate ----------------------------------------------------------------------------------------------------

    def gate(self, *outputs: torch.Tensor) -> None:
        """Check that the first requests' tokens are the reference's, except where scores are too close to tell."""
        count = min(self.batch, 3)
        end = int(self.starts[count])
        rows = SamplingBatch(*(getattr(self.rows, name)[:count] for name in SamplingBatch.__slots__))
        layout = reference.lay_out_on_host(self.cu[:count], self.drafts[: end - count], rows)
        found = reference.verify_rows(*self._processed(self.logits[:end], layout), max_draft_tokens=self.k)
        expected = found.output_token_ids.cpu().numpy()
        logits = self.logits[:end].float().cpu().numpy()
        for output in outputs:
            got = output[:count].cpu().numpy()[:, : expected.shape[1]]
            for request, j in zip(*np.nonzero((got != expected) & (expected >= 0)), strict=True):
                score = logits[self.starts[request] + j] / max(self.temperature, 1e-9)
                if self.temperature > 0:
                    score = score + noise.gumbel(int(request), POSITION + int(j), np.arange(len(score)))
                a, b = score[got[request, j]], score[expected[request, j]]
                if abs(a - b) > NEAR * max(1.0, abs(b)):
                    raise SystemExit(f"gate: request {request}, token {j}: {got[request]} for {expected[request]}")
                break  # what follows a different token may differ


def clock(run: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of one call."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def replayed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Times of a CUDA graph of one call. Capturing it is also a test: nothing in it may wait for the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return [clock(graph.replay, torch.device("cuda")) for _ in range(repeats + 3)][3:]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [clock(lambda: target.copy_(source), device) for _ in range(12)][2:]
    return 2 * 2**31 / float(np.median(times)) * 1e6


def measure(case: Case, repeats: int) -> dict[str, list[float] | None]:
    """Quantiles of each verifier's time, alternating; None where it ran out of memory."""
    runs: dict[str, Callable[[], Any]] = {
        "ours": case.ours_v1, "features": case.with_features, "vllm_v1": case.make_v1(),
    }  # fmt: skip
    if case.device.type == "cuda":
        runs["ours_v2"], runs["vllm_v2"] = case.make_v2()
        case.gate(case.ours_v1().output_token_ids, runs["ours_v2"]().sampled_token_ids)
    else:
        case.gate(case.ours_v1().output_token_ids)
    times: dict[str, list[float] | None] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, run in runs.items():
            collected = times[name]
            if collected is None:
                continue
            case.scratch.copy_(case.logits)
            try:
                microseconds = clock(run, case.device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                times[name] = None
                continue
            if repeat >= 3:
                collected.append(microseconds)
    result = {name: None if values is None else quantiles(values) for name, values in times.items()}
    if case.device.type == "cuda":
        result["ours_graph"] = quantiles(replayed(case.ours_v1, repeats))
        result["features_graph"] = quantiles(replayed(case.with_features, repeats))
    return result


def main(argv: list[str] | None = None) -> None:
    """Run the cells of this machine's device."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cells", type=int, help="only the first ones")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plugin.register()
    name, bandwidth = None, None
    if device.type == "cuda":
        name, bandwidth = torch.cuda.get_device_name(), copy_bandwidth(device)
        print(f"{name}: copy moves {bandwidth / 1e12:.2f} TB/s, read and written")
    else:  # what an engine's worker does when it starts
        torch.set_num_threads(1)
        current_platform.register_triton_kernel_overrides()
    about = origin(name)
    names = ["ours", "features", "vllm_v1"]
    names += ["ours_v2", "vllm_v2", "ours_graph", "features_graph"] if bandwidth else []
    columns = "  ".join(f"{n:>10}" for n in names)
    print(f"batch  K  vocab    T  top_p logprobs ragged logits    dtype  {columns}  of copy")
    with torch.inference_mode():
        for changes in (GPU_CELLS if bandwidth else CPU_CELLS)[: args.cells]:
            cell = {**BASE, **changes}
            case = Case(device, **cell)
            times = measure(case, args.repeats)
            row: dict[str, Any] = {"benchmark": "verify", **cell, "unit": "us", **times}
            shown = ""
            if bandwidth and times["ours_graph"]:
                read = case.logits.numel() * case.logits.element_size()
                row["copy_bytes_per_second"] = round(bandwidth)
                row["share_of_copy"] = round(read / times["ours_graph"][1] * 1e6 / bandwidth, 3)
                shown = f"{row['share_of_copy']:8.2f}"
            append(args.out, {**row, **about})
            medians = (times.get(n) for n in names)
            print(
                f"{cell['batch']:5d} {cell['k']:2d} {cell['vocab']:6d} {cell['temperature']:4.1f} {cell['top_p']:6.2f} "
                f"{cell['logprobs']!s:>8} {cell['ragged']!s:>6} {cell['logits']:>6} {cell['dtype']:>8}  "
                + "  ".join(f"{m[1]:10.0f}" if m else f"{'-':>10}" for m in medians)
                + shown,
                flush=True,
            )


if __name__ == "__main__":
    main()
