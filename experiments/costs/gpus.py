"""What an engine's steps take on a GPU in each mode, put together from parts. **Estimates**: none ran on a GPU.

    python -m experiments.costs.gpus [--gpus h100 h200 a100] [--out FILE]
    python -m experiments.costs.gpus --measured FILE.csv [--out FILE]

Without drafts, and with the drafter on the device, scheduling is asynchronous: a step takes as long as the device, or
the host if that takes longer. With the drafter on the host they work one after the other. Seconds unless said
otherwise. `--measured`: beside what was measured on an A100, a file with the columns model, requests, context,
num_speculative_tokens and median_ms.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from experiments.costs.estimate import EngineCost, Floats
from experiments.rows import append, make_parser, origin
from rollout_spec.integrations.vllm.step_sizes import MEASURED_CONTEXT

Mode = Literal["none", "device", "host"]
MODES: tuple[Mode, ...] = get_args(Mode)

# The model.
PEAKS = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12), "a100": (2.04e12, 312e12)}
"""Bytes and dense bf16 operations per second in NVIDIA's data sheets, SXM, A100 with 80 GB."""
BYTES_SHARE, FLOPS_SHARE = 0.8, 0.7
"""What kernels reach of them: estimates. With these alone a step of 2,304 tokens takes an 8B model 61 ms on an H100,
and one of 256 without drafts 14, where reading vLLM's code had given 55 to 60 and 12; with MEASURED_SHARE 46 and 14."""
SHARPNESS = 4
"""Where reading weights and computing take about the same time, kernels reach less of either: the two times to this
power are added. At equal times that is 1.19 times as long as either. An estimate."""
TOKENS = np.unique(np.append(2.0 ** np.arange(0, 14.25, 0.25), 2049.0).round())
"""Points of the curves: four per doubling, and the first size beyond the largest graph."""
MEASURED_TOKENS = 1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 288, 384, 512, 768, 1024
MEASURED_SHARE = 0.98, 1.0, 1.05, 1.08, 1.17, 1.19, 1.24, 1.15, 1.17, 0.97, 1.16, 0.95, 0.92, 0.86, 0.85
"""By a step's tokens, what was measured over the formula: means of steps that verify drafts, of Qwen2.5-7B, 14B and
Llama-3.1-8B with contexts of 256 to 1,024, vLLM 0.11.2 on an A100 (arXiv:2606.18967, `sd_toggle/configs` of
github.com/furiosa-ai/EfficientRollout at 0ff0bc5). No other GPU's are known, so all get them."""
VERIFYING = {"a100": 0.55e-6}
"""Seconds per token of context that a step takes longer if a request has more than one token: with 4,096 it was 2.3 ms
there, with one request as with eight. FlashAttention 3, of Hopper, is taken to have no such loss."""
CONTEXT = 1024
"""Tokens in a request's KV cache. Longer ones take drafts and plain steps the same time more, which favours drafts."""
KERNELS_PER_LAYER, KERNEL = 10, 1.5e-6
"""Kernels of a layer, and what each begins and ends with inside a CUDA graph: estimates."""
LAUNCH = 7e-6
"""Launching one kernel, estimated by reading: 0.6 ms for the 87 kernels that we once added to a step."""
LARGEST_GRAPH = 2048
"""`LARGEST` of integrations/vllm/step_sizes.py. vLLM's own is 512, beyond which an engine without speculation never
gets here. Kernels of larger steps are launched one by one, while the device computes."""
PIECEWISE_LAUNCHES = 3
"""Launches per layer where requests have different numbers of draft tokens, and vLLM has no graph of whole steps: the
graph of what lies between two attentions, the cache's update and attention. Read in vLLM's code."""

# Ours on the device: reading's estimates at K = 8 and 1, 64 and 512 requests are 0.1, 0.15 and 0.7 ms for verification
# and drafter together, of which the scan of the logits takes 0.5 at 512.
SAMPLE, SCAN_ROW = 50e-6, 0.5e-3 / 4608
"""Sampling per step and per row of logits. vLLM's own sampler reads logits several times: "none" gets ours."""
DRAFT_CALL, DRAFT_REQUEST = 50e-6, 0.2e-3 / 512
FEATURES, FEATURES_ROW = 20e-6, 4e-9
"""Since features are part of the one pass: two launches, and 1,536 logits and a hidden state to read per row. The
reading's estimates (0.2 to 1.7 ms) are of the code before, so this is our own from the bytes."""
SAMPLER_LAUNCHES, OUR_LAUNCHES = 30, 19
"""Estimates: of sampling and its surroundings in any engine; ours more with drafter and features: 87 less the 70 of the
earlier features, and the two of today's."""

# The host: 20 % quantiles measured on the two busy cores of `experiments/results`.
CORES = 0.5
"""Time on a GPU server's idle cores as a share of that: an estimate."""
VLLM_STEP, VLLM_REQUEST = 0.35e-3, 28e-6
"""Scheduling, input preparation and output processing, measured in vLLM 0.31 twice: 0.32 and 0.36 ms for one request,
and 23 to 32 us more for each."""
HOST_DRAFT_CALL, HOST_DRAFT_REQUEST = 160e-6, 10.5e-6
"""bench_host.jsonl, `ours V2, indexing late`, K = 8 of 4e77bbd: 170 us for one request, 13.8 for each of 64, 10.9 of
256. What is indexed while the device computes is not in it."""


class Shape(NamedTuple):
    """What of a model its time depends on."""

    parameters: float
    layers: int
    cache_bytes: int  # of the KV cache per token, bf16
    of_experts: float = 0.0  # of the parameters
    used_experts: float = 1.0  # of all, by one token

    def read(self, num_tokens: Any) -> Any:
        """Parameters that a step reads: those of all experts that some token uses, if each chose by itself."""
        return self.parameters - self.of_experts * (1 - self.used_experts) ** num_tokens

    @property
    def active(self) -> float:
        """Parameters that a token uses."""
        return self.parameters - self.of_experts * (1 - self.used_experts)


SHAPES = {
    "1.5b": Shape(1.54e9, 28, 28 * 2 * 2 * 128 * 2),  # Qwen2.5-1.5B: two key-value heads of 128 numbers
    "7b": Shape(7.62e9, 28, 28 * 2 * 4 * 128 * 2),  # Qwen2.5-7B
    "8b": Shape(8.03e9, 32, 32 * 2 * 8 * 128 * 2),  # Llama-3.1-8B: eight
    "14b": Shape(14.77e9, 48, 48 * 2 * 8 * 128 * 2),  # Qwen2.5-14B
    "32b": Shape(32.8e9, 64, 64 * 2 * 8 * 128 * 2),  # Qwen2.5-32B
    "30b-a3b": Shape(30.5e9, 48, 48 * 2 * 4 * 128 * 2, of_experts=29.0e9, used_experts=8 / 128),  # Qwen3-30B-A3B
}


def step_cost(name: str, mode: Mode, gpu: str = "h100", cores: float = CORES, context: int = CONTEXT) -> EngineCost:
    """A model's steps in a mode, features on.

    Args:
        name: In SHAPES.
        gpu: In PEAKS.
        cores: Factor on what the host was measured to take.
        context: Tokens in a request's KV cache.
    """
    shape = SHAPES[name]
    bandwidth, flops = BYTES_SHARE * PEAKS[gpu][0], FLOPS_SHARE * PEAKS[gpu][1]
    weights, per_token = 2 * shape.read(TOKENS) / bandwidth, 2 * shape.active / flops
    device = np.power(weights**SHARPNESS + (per_token * TOKENS) ** SHARPNESS, 1 / SHARPNESS)
    device += shape.layers * KERNELS_PER_LAYER * KERNEL
    device = np.maximum.accumulate(device * np.interp(TOKENS, MEASURED_TOKENS, MEASURED_SHARE))
    launches = np.where(TOKENS > LARGEST_GRAPH, KERNELS_PER_LAYER, PIECEWISE_LAUNCHES * (mode == "host"))
    seconds = np.maximum(device, shape.layers * LAUNCH * launches) + SAMPLE + SCAN_ROW * TOKENS
    if mode != "none":
        seconds += FEATURES + FEATURES_ROW * TOKENS
    plain = EngineCost(
        f"{gpu} {name} {mode}", TOKENS, seconds,
        request_seconds=context * shape.cache_bytes / bandwidth, verify_seconds=context * VERIFYING.get(gpu, 0.0),
    )  # fmt: skip
    if mode == "host":
        return plain._replace(
            seconds=seconds + cores * VLLM_STEP,
            request_seconds=plain.request_seconds + cores * VLLM_REQUEST,
            draft_call_seconds=cores * HOST_DRAFT_CALL,
            draft_seconds=cores * HOST_DRAFT_REQUEST,
        )
    launches_outside = SAMPLER_LAUNCHES + OUR_LAUNCHES * (mode == "device")
    plain = plain._replace(
        host_seconds=cores * VLLM_STEP + LAUNCH * launches_outside, host_request_seconds=cores * VLLM_REQUEST
    )
    if mode == "device":
        plain = plain._replace(draft_call_seconds=DRAFT_CALL, draft_seconds=DRAFT_REQUEST)
    return plain


def measured_by_vllm(name: str, gpu: str) -> Callable[[NDArray[np.int64]], Floats]:
    """What an engine with adaptive verification measures at its start: seconds of steps by their tokens.

    See `adaptive.py`: each token has `MEASURED_CONTEXT` tokens of context, and the host's time is not seen.
    """
    cost = step_cost(name, "device", gpu)
    per_token = MEASURED_CONTEXT * SHAPES[name].cache_bytes / (BYTES_SHARE * PEAKS[gpu][0])
    return lambda num_tokens: cost.steps(num_tokens) + per_token * num_tokens + cost.draft_call_seconds


def beside_measured(path: Path) -> Iterator[dict[str, Any]]:
    """Measured times of an A100's steps and estimates, for K up to 7 and contexts of 1,024 and 4,096, milliseconds."""
    for measured in csv.DictReader(path.open()):
        model = f"{measured['model'].rsplit('-')[-1].lower()}"
        requests, context, k = (int(measured[name]) for name in ("requests", "context", "num_speculative_tokens"))
        if context not in (1024, 4096) or k > 7:
            continue
        cost = step_cost(model, "none", "a100", context=context)._replace(host_seconds=0.0, host_request_seconds=0.0)
        estimate, took = 1e3 * cost.whole_step(requests, requests * k), float(measured["median_ms"])
        row = {"requests": requests, "context": context, "k": k, "ms": took, "estimate_ms": round(estimate, 2)}
        yield {"benchmark": "modes/measured", "gpu": "a100", "model": model, **row, "ratio": round(estimate / took, 3)}


def main() -> None:
    """Print what steps take, in milliseconds: none, and K draft tokens for every request on the device and the host."""
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", nargs="+", choices=PEAKS, default=["h100"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 96, 128, 256, 512])
    parser.add_argument("-k", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--measured", type=Path, help="print estimates beside this file's times instead")
    args = parser.parse_args()
    about = origin("simulated GPU, estimates")
    if args.measured:
        for row in beside_measured(args.measured):
            append(args.out, {**row, **about})
            print(*row.values())
        return
    for gpu, model, batch in itertools.product(args.gpus, SHAPES, args.batch):
        row: dict[str, Any] = {"benchmark": "modes/steps", "gpu": gpu, "model": model, "batch": batch}
        for mode in MODES:
            cost = step_cost(model, mode, gpu)
            ks = [0] if mode == "none" else args.k
            seconds = [cost.whole_step(batch, batch * k) + cost.drafting(batch) * (k > 0) for k in ks]
            row[f"{mode}_ms"] = {str(k): round(1e3 * s, 2) for k, s in zip(ks, seconds, strict=True)}
        append(args.out, {**row, **about})
        print(*row.values())


if __name__ == "__main__":
    main()
