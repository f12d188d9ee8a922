"""Our verifier against vLLM's, on this machine's device, after a correctness gate.

    python -m experiments.costs.bench_verify [--out FILE] [--repeats 20]

The verifiers take the same logits and point-mass drafts, return tokens and (where a cell asks for them) the emitted
tokens' log-probabilities, and alternate within one process: our verifier as the V1 runner calls it, with and without
features of what the target saw, and vLLM's V1 sampler, or its rejection sampler where there are drafts. One JSONL row
per cell: p20/p50/p80 of each verifier in microseconds (on a GPU device events around the call, launches included), on a
GPU ours also replayed from a CUDA graph, and the bandwidth of reading every logit once in that time as a share of the
measured copy bandwidth.

The logits resemble a language model's: normally distributed, with 20 tokens above the rest; four in five drafts are
what the target samples. One cell has flat logits, the worst case for a scan that skips tokens that cannot win.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm  # noqa: F401
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from experiments.check_gpu import captured
from experiments.engines.build import repair_vllm_on_cpu
from experiments.engines.scripted import marks, milliseconds_between
from experiments.rows import append, make_parser, origin, quantiles
from rollout_spec.integrations.vllm import plugin
from rollout_spec.integrations.vllm.sampling import keep_broken, truncate
from rollout_spec.noise import host as noise
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import reference
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.reference import Layout, lay_out

BASE = {
    "batch": 256, "k": 8, "vocab": 151_936, "temperature": 1.0, "top_p": 1.0, "logprobs": True, "ragged": False,
    "logits": "peaked", "dtype": "bfloat16",
}  # fmt: skip
GPU_CELLS = [
    *({"batch": batch, "k": k} for batch in (1, 64, 512) for k in (0, 8)),  # first what matters most: time may run out
    *({"batch": batch, "k": k} for batch in (16, 256) for k in (0, 4, 8, 16)),
    *({"batch": batch, "k": k} for batch in (1, 64, 512) for k in (4, 16)),
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
        """As `EngineV1` calls it: where tokens are removed, after vLLM's code for that."""
        mode = "processed_logprobs" if self.logprobs else None
        logits, layout = self._processed(self.logits, lay_out(self.cu, self.drafts, self.rows))
        return verify_rows(logits, layout, logprobs_mode=mode, max_draft_tokens=self.k, **options)

    def _processed(self, logits: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        if self.limit is None:
            return logits, layout
        some = logits.to(torch.float32, copy=True)
        processed = truncate(some, self.rows.temperature, layout.places()[0], top_p=self.limit)
        return keep_broken(processed, logits), layout.with_temperature_applied()

    def with_features(self) -> Any:
        """`ours_v1`, and the features of the emitted tokens."""
        return self.ours_v1(hidden=self.hidden)

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

    def gate(self, output: torch.Tensor) -> None:
        """Check that the first requests' tokens are the reference's, except where scores are too close to tell."""
        count = min(self.batch, 3)
        end = int(self.starts[count])
        rows = SamplingBatch(*(getattr(self.rows, name)[:count] for name in SamplingBatch.__slots__))
        layout = lay_out(self.cu[:count], self.drafts[: end - count], rows)
        found = reference.verify_rows(*self._processed(self.logits[:end], layout), max_draft_tokens=self.k)
        expected = found.output_token_ids.cpu().numpy()
        logits = self.logits[:end].float().cpu().numpy()
        got = output[:count].cpu().numpy()[:, : expected.shape[1]]
        for request, j in zip(*np.nonzero((got != expected) & (expected >= 0)), strict=True):
            score = logits[self.starts[request] + j] / max(self.temperature, 1e-9)
            if self.temperature > 0:
                score = score + noise.gumbel(int(request), POSITION + int(j), np.arange(len(score)))
            a, b = score[got[request, j]], score[expected[request, j]]
            if abs(a - b) > NEAR * max(1.0, abs(b)):
                raise SystemExit(f"gate: request {request}, token {j}: {got[request]} for {expected[request]}")
            break  # what follows a different token may differ


def clock(run: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    mark = marks()
    begun = mark()
    run()
    return float(1e3 * milliseconds_between([begun, mark()])[0])


def replayed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Times of a CUDA graph of one call."""
    graph, _ = captured(run)
    return [clock(graph.replay) for _ in range(repeats + 3)][3:]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [clock(lambda: target.copy_(source)) for _ in range(12)][2:]
    return 2 * 2**31 / float(np.median(times)) * 1e6


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Quantiles of each verifier's time, alternating."""
    case.gate(case.ours_v1().output_token_ids)
    runs = {"ours": case.ours_v1, "features": case.with_features, "vllm_v1": case.make_v1()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, run in runs.items():
            case.scratch.copy_(case.logits)
            microseconds = clock(run)
            if repeat >= 3:
                times[name].append(microseconds)
    if case.device.type == "cuda":
        times["ours_graph"] = replayed(case.ours_v1, repeats)
        times["features_graph"] = replayed(case.with_features, repeats)
    return {name: quantiles(values) for name, values in times.items()}


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
        repair_vllm_on_cpu()
    about = origin(name)
    names = ["ours", "features", "vllm_v1"]
    names += ["ours_graph", "features_graph"] if bandwidth else []
    columns = "  ".join(f"{n:>10}" for n in names)
    print(f"batch  K  vocab    T  top_p logprobs ragged logits    dtype  {columns}  of copy")
    with torch.inference_mode():
        for changes in (GPU_CELLS if bandwidth else CPU_CELLS)[: args.cells]:
            cell = {**BASE, **changes}
            case = Case(device, **cell)
            times = measure(case, args.repeats)
            row: dict[str, Any] = {"benchmark": "verify", **cell, "unit": "us", **times}
            shown = ""
            if bandwidth:
                read = case.logits.numel() * case.logits.element_size()
                row["copy_bytes_per_second"] = round(bandwidth)
                row["share_of_copy"] = round(read / times["ours_graph"][1] * 1e6 / bandwidth, 3)
                shown = f"{row['share_of_copy']:8.2f}"
            append(args.out, {**row, **about})
            print(
                f"{cell['batch']:5d} {cell['k']:2d} {cell['vocab']:6d} {cell['temperature']:4.1f} {cell['top_p']:6.2f} "
                f"{cell['logprobs']!s:>8} {cell['ragged']!s:>6} {cell['logits']:>6} {cell['dtype']:>8}  "
                + "  ".join(f"{times[n][1]:10.0f}" for n in names)
                + shown,
                flush=True,
            )


if __name__ == "__main__":
    main()
