"""What an engine's steps take on a GPU: measured times, or an estimate from the model's and the GPU's sizes.

Scheduling is asynchronous: a step takes little longer than the device, or than the host if that takes longer. Seconds
unless said otherwise. `experiments/costs/beside_phases.py` shows estimates beside what was measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.checks import integer, number
from rollout_spec.step_sizes import LARGEST_CUT, LARGEST_GRAPH, MEASURED_CONTEXT, known_costs

Floats = NDArray[np.float64]

# The model.
PEAKS = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12), "a100": (2.04e12, 312e12)}
"""Bytes and dense bf16 operations per second in NVIDIA's data sheets, SXM, A100 with 80 GB."""
BYTES_SHARE, FLOPS_SHARE = 0.8, 0.7
"""What share of them kernels reach: estimates, which MEASURED_SHARE corrects."""
SHARPNESS = 4
"""Where reading weights and computing take about the same time, kernels reach less of either: the two times to this
power are added. At equal times that is 1.19 times as long as either. An estimate."""
TOKENS = np.unique(np.append(2.0 ** np.arange(0, 14.25, 0.25), 2049.0).round())
"""Points of the curves: four per doubling, and the first size beyond the largest graph."""
MAX_SIZE = 2**40
"""Of a model's sizes and a step's milliseconds; sums of larger numbers might not be finite."""
MEASURED_TOKENS = 1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 288, 384, 512, 768, 1024
LARGE_STEPS = 0.97, 1.16, 0.95, 0.92, 0.86, 0.85
MEASURED_SHARE = {
    "a100": (0.98, 1.0, 1.05, 1.08, 1.17, 1.19, 1.24, 1.15, 1.17, *LARGE_STEPS),
    "h100": (1.0, 1.01, 1.0, 1.01, 1.03, 1.06, 1.09, 1.1, 1.15, *LARGE_STEPS),
}
"""By a step's tokens, what was measured over the formula. A100: means of steps that verify drafts, of Qwen2.5-7B, 14B
and Llama-3.1-8B with contexts of 256 to 1,024, vLLM 0.11.2 (arXiv:2606.18967, `sd_toggle/configs` of
github.com/furiosa-ai/EfficientRollout at 0ff0bc5). H100: of a 7B model to 192 tokens, vLLM 0.31 (`by_size` in
experiments/results/bench_phase.jsonl, medians of quiet steps); its larger steps waited for the host, so they are the
A100's."""
VERIFYING = {"a100": 0.55e-6}
"""Seconds per token of context that a step takes longer if a request has more than one token: with 4,096 it was 2.3 ms
there, with one request as with eight. FlashAttention 3, of Hopper, is taken to have no such loss."""
CONTEXT = 1024
"""Tokens in a request's KV cache. Longer ones take drafts and plain steps the same time more, which favours drafts."""
KERNELS_PER_LAYER, KERNEL = 10, 1.5e-6
"""Kernels of a layer, and what each begins and ends with inside a CUDA graph: estimates."""
LAUNCH = 7e-6
"""Launching one kernel, estimated by reading: 0.6 ms for the 87 kernels that we once added to a step."""

# Ours on the device, as replayed from CUDA graphs on an H100 (bench_verify.jsonl, bench_device.jsonl).
SAMPLE, SCAN_ROW = 80e-6, 0.31e-6
"""Sampling per step and per row of logits, of 144 to 4,608 rows with drafts. Steps without drafts are charged the same,
though 256 and 512 rows take twice as long."""
DRAFT_CALL, DRAFT_REQUEST = 110e-6, 0.3e-6
"""Drafting, per step and per request: between what it takes with 0.1 and with 1 million tokens of rollouts."""
FEATURES = 12e-6
"""What they add to sampling, per step."""

# The host: per step, and per request of a step.
HOST_STEP, HOST_REQUEST = 2.2e-3, 35e-6
"""Scheduling, preparing, launching and reading a step in vLLM 0.31, beside an H100, for whose steps of a 1.5B model the
device waits. Lines through the medians in `by_size` of experiments/results/bench_phase.jsonl have 2.4 to 2.9 ms, which
includes what few requests take the device, and 32 to 48 us."""
HOST_STEP_WITH_DRAFTS, HOST_REQUEST_WITH_DRAFTS = 4.8e-3, 48e-6
"""With the device drafter and adaptive verification: lines have 4.7 to 5.7 ms and 44 to 57 us. Of the difference about
half is vLLM's."""
HOST_LEARNING = 0.8e-3
"""Our sampler, requests that begin and end, and learning what a step has sampled, while nothing is drafted: estimated
from what those took in steps with drafts (experiments/results/README.md)."""
FEWER_CALLS, DRAFTS_LEFT = 0.55e-3, 0.25
"""What calls towards the device were spared since then: seconds per step, and of what drafts add per step so much is
left. By counting calls, 30 in place of 80; no GPU has timed it."""
FURTHER_PASS_REQUEST = 17e-6
"""Of each further forward pass of a step (`num_passes.py`), an estimate. Besides, it has some 20 calls, which at 85 us
take 1.7 ms, and less where they are graphs."""
OVERLAP = 3
"""Where device and host take about the same time, they wait for each other: the two times to this power are added.
Chosen beside the phases of bench_phase.jsonl, for which the longer of the two was too short."""


class EngineCost(NamedTuple):
    """Seconds of a step by its tokens, interpolated linearly; beyond the last point with the upper half's mean slope.

    `tokens` and `seconds` are float64 [n] with n >= 2; tokens rise, seconds do not fall. Pairs are seconds per step and
    seconds per request of a step.
    """

    tokens: Floats
    seconds: Floats
    request_seconds: float = 0.0
    """Seconds per request in every step, besides its tokens: reading its KV cache, and what else is not hidden."""
    verify_seconds: float = 0.0
    """Extra seconds of a step with draft tokens."""
    draft_seconds: tuple[float, float] = (0.0, 0.0)
    """Of drafting, in steps that ask the drafter."""
    host_seconds: tuple[float, float] = (0.0, 0.0)
    """With asynchronous scheduling the host works while the device computes. See OVERLAP."""
    drafting_host_seconds: tuple[float, float] = (0.0, 0.0)
    """What drafts add to `host_seconds`, also if none of them is verified."""
    further_host_seconds: tuple[float, float] = (0.0, 0.0)
    """Of each forward pass of a step after the first."""

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
        times = 1, is_drafting, num_passes - 1
        parts = self.host_seconds, self.drafting_host_seconds, self.further_host_seconds
        return sum(n * (step + request * num_requests) for n, (step, request) in zip(times, parts, strict=True))

    def whole_step(
        self, num_requests: int, num_draft_tokens: int, *, is_drafting: bool = True, num_passes: int = 1
    ) -> float:
        """Seconds of a step whose passes have so many tokens each, without those of the drafter on the device."""
        seconds = self.steps(num_requests + num_draft_tokens) + self.request_seconds * num_requests
        seconds = num_passes * (seconds + self.verify_seconds * (num_draft_tokens > 0))
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
        config = config.get("text_config", config)

        def size(name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
            if default is not None and config.get(name) is None:
                return default
            return integer(f"{path}: {name}", config[name], least, most)

        hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
        kinds = " ".join(config.get("layer_types") or ())
        if config.get("kv_lora_rank") or "linear" in kinds or "mamba" in kinds:
            raise ValueError(f"{path}: compressed or recurrent attention is not estimated: give --step-times")
        kv_heads, head = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((size(name) for name in names if config.get(name)), 0)
        width = size("moe_intermediate_size", size("intermediate_size", 0))
        with_experts = max(layers - size("first_k_dense_replace", 0, least=0), 0) if experts else 0
        of_experts = with_experts * experts * 3 * hidden * width
        shared = size("shared_expert_intermediate_size", size("n_shared_experts", 0, least=0) * width, least=0)
        dense = with_experts * 3 * hidden * shared
        if layers > with_experts:
            dense += (layers - with_experts) * 3 * hidden * size("intermediate_size")
        words = size("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = of_experts + dense + words + layers * 2 * hidden * head * (heads + kv_heads)
        used = size("num_experts_per_tok", most=experts) / experts if experts else 1.0
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no config.json of a transformer: {error!r}") from error
    return Shape(parameters, layers, layers * 2 * kv_heads * head * 2, of_experts, used)


def sampling_seconds(*, drafts: bool) -> Floats:
    """Seconds of sampling after the model has run, by TOKENS; what features cost is added where there are drafts."""
    return SAMPLE + SCAN_ROW * TOKENS + FEATURES * drafts


def step_cost(
    shape: Shape, gpu: str, *, drafts: bool, context: float = CONTEXT, further_pass: float | None = None
) -> EngineCost:
    """A model's steps, estimated.

    Args:
        gpu: In PEAKS.
        drafts: Whether the device drafts, with features.
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
    # An engine without speculation, whose graphs end at 512 tokens, never gets beyond them. Where vLLM cuts drafts they
    # end at `LARGEST_CUT`, but launching those steps' kernels takes less time than the device computes.
    launches = np.where(TOKENS > LARGEST_GRAPH, KERNELS_PER_LAYER * shape.layers * LAUNCH, 0.0)
    is_measured = further_pass is None
    more = (HOST_STEP_WITH_DRAFTS - HOST_STEP - HOST_LEARNING) * (1.0 if is_measured else DRAFTS_LEFT)
    return EngineCost(
        TOKENS,
        np.maximum(device, launches) + sampling_seconds(drafts=drafts),
        request_seconds=context * shape.cache_bytes / bandwidth,
        verify_seconds=context * VERIFYING.get(gpu, 0.0),
        draft_seconds=(DRAFT_CALL * drafts, DRAFT_REQUEST * drafts),
        host_seconds=(HOST_STEP + (HOST_LEARNING - FEWER_CALLS * (not is_measured)) * drafts, HOST_REQUEST),
        drafting_host_seconds=(more * drafts, (HOST_REQUEST_WITH_DRAFTS - HOST_REQUEST) * drafts),
        further_host_seconds=(further_pass or 0.0, FURTHER_PASS_REQUEST),
    )


KnownSeconds = Callable[[int, NDArray[np.int64], int], Floats]
"""What an engine knows of forward passes: seconds, float64 [N], by their requests, their numbers of tokens and how many
a step has."""


def measured_by_vllm(shape: Shape, gpu: str, further_pass: float | None = None) -> KnownSeconds:
    """What an engine with adaptive verification measures at its start.

    With `MEASURED_CONTEXT` tokens of context for each token (`adaptive.py`), but at least the host's time
    (`host_time.py`). further_pass: As of `step_cost`.
    """
    cost = step_cost(shape, gpu, drafts=True, further_pass=further_pass)
    per_token = MEASURED_CONTEXT * shape.cache_bytes / (BYTES_SHARE * PEAKS[gpu][0])

    def seconds(num_requests: int, num_tokens: NDArray[np.int64], num_passes: int) -> Floats:
        device = cost.steps(num_tokens) + per_token * num_tokens + cost.draft_seconds[0]
        host = cost.host(num_requests, num_passes=num_passes) / num_passes
        return known_costs(device, host, num_tokens, LARGEST_CUT)

    return seconds


def measured_curve(milliseconds: Mapping[int, Mapping[int, float]]) -> KnownSeconds:
    """The same of measured steps, of which it knows the time by their tokens alone. See `MeasuredCost`."""
    times: dict[int, list[float]] = {}
    for k, of_requests in milliseconds.items():
        for num_requests, ms in of_requests.items():
            times.setdefault(num_requests * (1 + k), []).append(ms / 1e3)
    tokens = sorted(times)
    curve = EngineCost(np.array(tokens, float), np.maximum.accumulate([np.mean(times[size]) for size in tokens]))
    return lambda num_requests, num_tokens, num_passes: curve.steps(num_tokens)


class MeasuredCost:
    """Steps that were measured, by requests and draft tokens of each.

    Between them times are interpolated. With more requests a step takes as long as with the most, in proportion to the
    requests. K must not be larger than what was measured.

    Args:
        milliseconds: By K: (requests, milliseconds) of steps with so many draft tokens per request, K = 0 among them.
        drafts: Add what our drafter takes.
    """

    def __init__(self, milliseconds: Mapping[int, Mapping[int, float]], *, drafts: bool) -> None:
        self._ks = np.array(sorted(milliseconds), np.float64)
        self._curves = [np.array(sorted(milliseconds[int(k)].items())).T for k in self._ks]
        self._drafts = drafts

    def whole_step(
        self, num_requests: float, num_draft_tokens: float, *, is_drafting: bool = True, num_passes: int = 1
    ) -> float:
        """As of `EngineCost`, with the host's time in what was measured."""
        times = [np.interp(num_requests, *curve) * max(num_requests / curve[0][-1], 1.0) for curve in self._curves]
        seconds = float(np.interp(num_draft_tokens / num_requests, self._ks, times)) / 1e3
        return num_passes * (seconds + FEATURES * self._drafts)

    def drafting(self, num_requests: int) -> float:
        """As of `EngineCost`."""
        return (DRAFT_CALL + DRAFT_REQUEST * num_requests) * self._drafts


Cost = EngineCost | MeasuredCost


SIZE_COLUMNS = {"context": 0, "num_speculative_tokens": 0, "requests": 1}
"""Of a CSV of step times, with the least that each may be."""


def read_step_times(path: Path, model: str | None, context: float) -> dict[int, dict[int, float]]:
    """What `MeasuredCost` takes, from a CSV with the columns model, median_ms and those in SIZE_COLUMNS.

    Args:
        model: Whose rows; None: there is only one.
        context: Of the contexts in the file the nearest one is taken.

    Raises:
        ValueError: columns or rows are missing, or a number in them is none or impossible.
        OSError: the file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                (row["model"], [int(row[name]) for name in SIZE_COLUMNS], float(row["median_ms"]))
                for row in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has not the columns of step times, or no numbers in them: {error!r}") from error
    times: dict[str, dict[int, dict[int, dict[int, float]]]] = {}  # by model, context, K and requests
    for place, (name, sizes, ms) in enumerate(rows, 1):
        for (column, least), size in zip(SIZE_COLUMNS.items(), sizes, strict=True):
            integer(f"{path}, row {place}: {column}", size, least, MAX_SIZE)
        number(f"{path}, row {place}: median_ms", ms, lambda ms: 0 < ms < MAX_SIZE, "positive and finite")
        of_context, k, num_requests = sizes
        times.setdefault(name, {}).setdefault(of_context, {}).setdefault(k, {})[num_requests] = ms
    if model is None and len(times) == 1:
        (model,) = times
    if model not in times:
        raise ValueError(f"{path} has step times of {', '.join(sorted(times)) or 'no model'}: name one as --model")
    nearest = min(times[model], key=lambda measured: abs(measured - context))
    found = times[model][nearest]
    if 0 not in found or len(found) < 2:
        raise ValueError(f"{path} needs steps with num_speculative_tokens = 0 and with some, of a context of {nearest}")
    return found
