"""What an engine's steps take on a GPU, in seconds: measured, or estimated from the model's and the GPU's sizes.

`experiments/costs/beside_phases.py` shows estimates beside what was measured.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.checks import integer, number
from rollout_spec.schedule import LARGEST_GRAPH, MEASURED_CONTEXT

Floats = NDArray[np.float64]
MAX_SIZE = 2**40
"""Of a model's sizes and a step's milliseconds; sums of larger numbers might not be finite."""

# The model on the device.
PEAKS = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12), "a100": (2.04e12, 312e12)}
"""Bytes and dense bf16 operations per second in NVIDIA's data sheets, SXM, A100 with 80 GB."""
BYTES_SHARE, FLOPS_SHARE, SHARPNESS = 0.8, 0.7, 4
"""The share of them that kernels reach, and the power to which the times of reading and of computing are added, as
kernels reach less of either where both are alike. Estimates, which MEASURED_SHARE corrects."""
TOKENS = np.unique(np.append(2.0 ** np.arange(0, 14.25, 0.25), 2049.0).round())
"""Points of the curves: four per doubling, and the first size beyond the largest graph."""
MEASURED_TOKENS = 1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 288, 384, 512, 768, 1024
LARGE_STEPS = 0.97, 1.16, 0.95, 0.92, 0.86, 0.85
MEASURED_SHARE = {
    "a100": (0.98, 1.0, 1.05, 1.08, 1.17, 1.19, 1.24, 1.15, 1.17, *LARGE_STEPS),
    "h100": (1.0, 1.01, 1.0, 1.01, 1.03, 1.06, 1.09, 1.1, 1.15, *LARGE_STEPS),
}
"""By a step's tokens, what was measured over the formula. A100: means of steps that verify drafts, of Qwen2.5-7B, 14B
and Llama-3.1-8B with contexts of 256 to 1,024, vLLM 0.11.2 (arXiv:2606.18967, `sd_toggle/configs` of
github.com/furiosa-ai/EfficientRollout at 0ff0bc5). H100: of a 7B model to 192 tokens, vLLM 0.31 (`by_size` in
experiments/results/bench_phase.jsonl); its larger steps waited for the host, so they are the A100's."""
VERIFYING = {"a100": 0.55e-6}
"""Seconds per token of context that a step takes longer if a request has more than one token, measured with 4,096."""
CONTEXT = 1024
"""Tokens in a request's KV cache."""
KERNELS_PER_LAYER, KERNEL, LAUNCH, PIECEWISE_LAUNCHES = 10, 1.5e-6, 7e-6, 3
"""Estimates: kernels of a layer, what each takes besides its work in a CUDA graph, what launching one takes, and a
layer's launches where requests have different numbers of draft tokens."""
SAMPLE, SCAN_ROW, FEATURES = 80e-6, 0.31e-6, 12e-6
"""Sampling per step and row of logits, and features per step with drafts, on an H100 (bench_verify.jsonl)."""

# What follows is per step and per request of a step.
Pair = tuple[float, float]
DRAFT, HOST_DRAFT = (110e-6, 0.3e-6), (160e-6, 10.5e-6)
"""Drafting: on an H100 (bench_device.jsonl), and on the host in V2 with K = 8 (measured at 5505d49)."""
HOST, HOST_WITH_DRAFTS = (2.2e-3, 35e-6), (4.8e-3, 48e-6)
"""A step of vLLM 0.31 beside an H100, with drafts as they were measured (bench_phase.jsonl)."""
LEARNING, FEWER_CALLS, DRAFTS_LEFT = 0.8e-3, 0.55e-3, 0.25
"""Of the difference, what steps without drafts take, too (an estimate). What calls towards the device were spared since
then, and the share that is left of what drafts add: by counting 30 calls in place of 80. No GPU has timed it."""
FURTHER_PASS, FURTHER_PASS_REQUEST = 1.7e-3, 17e-6
"""Each further forward pass of a step: some 20 calls of 85 us, an estimate, and less where they are graphs."""
HOST_VERIFYING = 1.2e-3
"""What our sampler takes the host more than vLLM's, of a step of 64 requests (experiments/results/README.md)."""
OVERLAP = 3
"""Where device and host take about the same time, they wait for each other: the two times to this power are added.
Chosen beside the phases of bench_phase.jsonl, for which the longer of the two was too short."""


class EngineCost(NamedTuple):
    """Seconds of a step by its tokens, interpolated linearly; beyond the last point with the upper half's mean slope.

    Attributes:
        tokens, seconds: float64 [n] with n >= 2; tokens rise, seconds do not fall.
        request_seconds: Per request in every step: reading its KV cache, and what else is not hidden.
        verify_seconds: More of a step with draft tokens.
        draft_seconds: Of drafting, in steps that ask the drafter.
        host_seconds: Of every step, more with drafts (also if none is verified), and of each forward pass after the
            first. The host works while the device computes; see OVERLAP.
    """

    tokens: Floats
    seconds: Floats
    request_seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: Pair = (0.0, 0.0)
    host_seconds: tuple[Pair, Pair, Pair] = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))

    def steps(self, num_tokens: Any) -> Floats:
        """Seconds of steps without drafts, float64 of the shape of `num_tokens`."""
        half = (self.tokens.size - 1) // 2  # not the last two points alone: measured times may be equal there
        slope = (self.seconds[-1] - self.seconds[half]) / (self.tokens[-1] - self.tokens[half])
        beyond = np.maximum(np.asarray(num_tokens, np.float64) - self.tokens[-1], 0.0)
        return np.asarray(np.interp(num_tokens, self.tokens, self.seconds) + slope * beyond)

    def drafting(self, num_requests: int) -> float:
        """Seconds of asking the drafter in a step."""
        return self.draft_seconds[0] + self.draft_seconds[1] * num_requests

    def host(self, num_requests: int, *, is_drafting: bool = True, num_passes: int = 1) -> float:
        """Seconds of the host."""
        parts = zip((1, is_drafting, num_passes - 1), self.host_seconds, strict=True)
        return sum(n * (step + request * num_requests) for n, (step, request) in parts)

    def whole_step(self, num_requests: int, num_drafts: int, *, is_drafting: bool = True, num_passes: int = 1) -> float:
        """Seconds of a step whose passes have so many draft tokens each, without drafting on the device."""
        seconds = self.steps(num_requests + num_drafts) + self.request_seconds * num_requests
        seconds = num_passes * (seconds + self.verify_seconds * (num_drafts > 0))
        host = self.host(num_requests, is_drafting=is_drafting, num_passes=num_passes)
        return float((seconds**OVERLAP + host**OVERLAP) ** (1 / OVERLAP))


UNIT_COST = EngineCost(np.array([1.0, 2.0]), np.ones(2))
"""Every step takes a second, for those who count steps alone."""


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


SHAPES = {
    "0.5b": Shape(0.494e9, 24, 24 * 2 * 2 * 64 * 2),  # Qwen2.5-0.5B
    "1.5b": Shape(1.54e9, 28, 28 * 2 * 2 * 128 * 2),  # Qwen2.5-1.5B: two key-value heads of 128 numbers
    "7b": Shape(7.62e9, 28, 28 * 2 * 4 * 128 * 2),  # Qwen2.5-7B
    "8b": Shape(8.03e9, 32, 32 * 2 * 8 * 128 * 2),  # Llama-3.1-8B: eight
    "14b": Shape(14.77e9, 48, 48 * 2 * 8 * 128 * 2),  # Qwen2.5-14B
    "32b": Shape(32.8e9, 64, 64 * 2 * 8 * 128 * 2),  # Qwen2.5-32B
    "30b-a3b": Shape(30.5e9, 48, 48 * 2 * 4 * 128 * 2, of_experts=29.0e9, used_experts=8 / 128),  # Qwen3-30B-A3B
}


def shape_of(model: str) -> Shape:
    """A model's sizes: a name in SHAPES, or a path of its config.json or of the folder that has it.

    Raises:
        ValueError: it is neither, or its layers are of a kind that this does not know.
        OSError: the file cannot be read.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
    if not path.exists():
        raise ValueError(f"--model must be one of {', '.join(SHAPES)} or a path of a config.json, got {model!r}")
    try:
        config = json.loads(path.read_text())
        return _shape_of_config(config.get("text_config", config))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no config.json of a transformer that can be estimated: {error!r}") from error


def _shape_of_config(config: Mapping[str, Any]) -> Shape:
    def size(name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = config.get(name) or default
        return integer(name, config[name] if value is None else value, int(default is None), most)

    kinds = " ".join(config.get("layer_types") or ())
    if config.get("kv_lora_rank") or "linear" in kinds or "mamba" in kinds:
        raise ValueError("with compressed or recurrent attention give --step-times")
    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    kv_heads, head = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
    experts = size("num_experts", size("num_local_experts", size("n_routed_experts", 0)))
    width = size("moe_intermediate_size", size("intermediate_size", 0))
    with_experts = max(layers - size("first_k_dense_replace", 0), 0) if experts else 0
    shared = size("shared_expert_intermediate_size", size("n_shared_experts", 0) * width)
    dense = (layers - with_experts) * size("intermediate_size") if layers > with_experts else 0
    of_experts = 3 * hidden * width * with_experts * experts
    words = size("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = layers * 2 * hidden * head * (heads + kv_heads)
    parameters = of_experts + 3 * hidden * (with_experts * shared + dense) + words + attention
    used = size("num_experts_per_tok", most=experts) / experts if experts else 1.0
    return Shape(parameters, layers, layers * 2 * kv_heads * head * 2, of_experts, used)


Place = Literal["device", "host"]


def step_cost(
    shape: Shape,
    gpu: str,
    drafter: Place | None,
    *,
    context: float = CONTEXT,
    further_pass: float | None = FURTHER_PASS,
) -> EngineCost:
    """A model's steps, estimated. With the drafter on the host, host and device work one after the other.

    Args:
        gpu: In PEAKS.
        drafter: Where it runs, with features; None: stock vLLM.
        context: Tokens in a request's KV cache.
        further_pass: What a step's further forward passes take the host, each. None: steps have one pass and, with
            drafts, as many calls as when they were measured.
    """
    bandwidth, flops = BYTES_SHARE * PEAKS[gpu][0], FLOPS_SHARE * PEAKS[gpu][1]
    share = MEASURED_SHARE.get(gpu, MEASURED_SHARE["h100"])
    weights, per_token = 2 * shape.read(TOKENS) / bandwidth, 2 * shape.read(1) / flops
    device = np.power(weights**SHARPNESS + (per_token * TOKENS) ** SHARPNESS, 1 / SHARPNESS)
    device += shape.layers * KERNELS_PER_LAYER * KERNEL
    device = np.maximum.accumulate(device * np.interp(TOKENS, MEASURED_TOKENS, share))
    # Graphs end earlier without speculation, whose steps are smaller, and where vLLM cuts drafts, but there launching
    # takes less time than the device computes.
    launches = np.where(TOKENS > LARGEST_GRAPH, KERNELS_PER_LAYER * shape.layers * LAUNCH, 0.0)
    sampling = SAMPLE + SCAN_ROW * TOKENS + FEATURES * (drafter is not None)
    cost = EngineCost(
        TOKENS,
        np.maximum(device, launches) + sampling,
        request_seconds=context * shape.cache_bytes / bandwidth,
        verify_seconds=context * VERIFYING.get(gpu, 0.0),
        host_seconds=(HOST, (0.0, 0.0), (further_pass or 0.0, FURTHER_PASS_REQUEST)),
    )
    if drafter == "host":
        launching = shape.layers * LAUNCH * PIECEWISE_LAUNCHES + sampling
        return cost._replace(
            seconds=np.maximum(cost.seconds, launching) + HOST[0] + HOST_VERIFYING,
            request_seconds=cost.request_seconds + HOST[1],
            draft_seconds=HOST_DRAFT,
            host_seconds=UNIT_COST.host_seconds,
        )
    if drafter == "device":
        spared, left = (0.0, 1.0) if further_pass is None else (FEWER_CALLS, DRAFTS_LEFT)
        of_drafts = (HOST_WITH_DRAFTS[0] - HOST[0] - LEARNING) * left, HOST_WITH_DRAFTS[1] - HOST[1]
        every_step = HOST[0] + (LEARNING - spared), HOST[1]
        return cost._replace(draft_seconds=DRAFT, host_seconds=(every_step, of_drafts, cost.host_seconds[2]))
    return cost


def measured_by_vllm(shape: Shape, gpu: str) -> EngineCost:
    """What an engine knows: vLLM measures passes at its start, with `MEASURED_CONTEXT` tokens of context per token."""
    cost = step_cost(shape, gpu, "device")
    per_token = MEASURED_CONTEXT * shape.cache_bytes / (BYTES_SHARE * PEAKS[gpu][0])
    return EngineCost(TOKENS, cost.seconds + per_token * TOKENS + cost.draft_seconds[0])


class MeasuredCost:
    """Steps that were measured, by requests and draft tokens of each, and interpolated between them.

    With more requests a step takes as long as with the most, in proportion to the requests. K must not be larger than
    what was measured.

    Args:
        milliseconds: By K and requests, K = 0 among them.

    Attributes:
        by_tokens: The same, by the tokens of a step alone.
    """

    def __init__(self, milliseconds: Mapping[int, Mapping[int, float]]) -> None:
        self._ks = np.array(sorted(milliseconds), np.float64)
        self._curves = [np.array(sorted(milliseconds[int(k)].items())).T for k in self._ks]
        times: defaultdict[int, list[float]] = defaultdict(list)
        for k, of_requests in milliseconds.items():
            for num_requests, ms in of_requests.items():
                times[num_requests * (1 + k)].append(ms / 1e3)
        tokens, means = np.array([(size, np.mean(times[size])) for size in sorted(times)]).T
        self.by_tokens = EngineCost(tokens, np.maximum.accumulate(means))

    def whole_step(self, num_requests: int, num_drafts: int, *, is_drafting: bool = True, num_passes: int = 1) -> float:
        """As of `EngineCost`, with the host's time in what was measured."""
        times = [np.interp(num_requests, *curve) * max(num_requests / curve[0][-1], 1.0) for curve in self._curves]
        return num_passes * float(np.interp(num_drafts / num_requests, self._ks, times)) / 1e3

    def drafting(self, num_requests: int) -> float:
        """As of `EngineCost`, with features."""
        return FEATURES + DRAFT[0] + DRAFT[1] * num_requests


Cost = EngineCost | MeasuredCost
SIZE_COLUMNS = {"context": 0, "num_speculative_tokens": 0, "requests": 1}
"""Of a CSV of step times, with the least that each may be."""


def read_step_times(path: Path, model: str | None, context: float) -> dict[int, dict[int, float]]:
    """What `MeasuredCost` takes, from a CSV with the columns model, median_ms and those of SIZE_COLUMNS.

    Args:
        model: Whose rows; None: there is only one.
        context: Of the contexts in the file the nearest one is taken.

    Raises:
        ValueError: columns or rows are missing, or a number in them is none or impossible.
        OSError: the file cannot be read.
    """
    times: dict[str, dict[int, dict[int, dict[int, float]]]] = {}  # by model, context, K and requests
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    for place, row in enumerate(rows, 1):
        try:
            sizes = [integer(name, int(row[name]), least, MAX_SIZE) for name, least in SIZE_COLUMNS.items()]
            of_context, k, num_requests = sizes
            ms = number("median_ms", float(row["median_ms"]), lambda ms: 0 < ms < MAX_SIZE, "positive and finite")
            times.setdefault(row["model"], {}).setdefault(of_context, {}).setdefault(k, {})[num_requests] = ms
        except (KeyError, TypeError, ValueError) as error:
            what = f"has no column {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
            raise ValueError(f"{path}, row {place} {what}") from error
    if model is None and len(times) == 1:
        (model,) = times
    if model not in times:
        raise ValueError(f"{path} has step times of {', '.join(sorted(times)) or 'no model'}: name one as --model")
    nearest = min(times[model], key=lambda measured: abs(measured - context))
    found = times[model][nearest]
    if 0 not in found or len(found) < 2:
        raise ValueError(f"{path} needs steps with num_speculative_tokens = 0 and with some, of a context of {nearest}")
    return found
