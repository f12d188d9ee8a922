"""`rollout-spec doctor --device`: the check at an engine's start by hand, and what the parts of a step cost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollout_spec.drafters.device import self_check as drafter_check
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.report.explain import table
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import self_check
from rollout_spec.verify.self_check import Setting, describe

K = 8
VOCAB_SIZE, HIDDEN = 151_936, (4096, torch.bfloat16)
"""Of Qwen's larger models."""
SIZES = (1, 64, 512)
"""Rows to verify, and requests to draft for."""
REPEATS = 20
GROUP, LENGTH, MAX_LEN = 16, 1000, 1024
"""Requests of one problem that are drafted for, tokens of each, and the most that it may have."""


def run(device: torch.device | None = None, *, vocab_size: int = VOCAB_SIZE, sizes: Sequence[int] = SIZES) -> int:
    """Check and measure, and print. Returns the exit code: 1 if something disagrees with its reference."""
    device = device or torch.device("cuda", torch.cuda.current_device())
    print(describe(device))
    setting = Setting(device, vocab_size, torch.bfloat16, K, hidden=HIDDEN)
    verdict = self_check.check(setting)
    options = {"max_requests": max(sizes), "num_speculative_tokens": K, "vocab_size": vocab_size}
    drafts = drafter_check.check(device, **options, use_noise=True, options={})
    parts = {"verification": verdict.verification, "features": verdict.features, "the device drafter": drafts}
    for name, fault in parts.items():
        print(f"{'problem' if fault else 'ok':8} {name}" + (f": {fault}" if fault else ""))
    costs = zip(sizes, verification_us(setting, sizes), drafting_us(device, sizes), strict=True)
    rows = [[f"{size}", *(f"{us:.0f}" for us in (*verified, drafted))] for size, verified, drafted in costs]
    print(f"\nMicroseconds, launched from Python: {vocab_size} bf16 logits per row, {LENGTH} tokens per request")
    print(table(["rows, requests", "verification", "with features", "device drafter"], rows))
    return int(any(parts.values()))


def verification_us(setting: Setting, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Microseconds of verification without and with features, for each number of rows."""
    assert setting.hidden is not None
    device, costs = setting.device, []
    hidden_size, dtype = setting.hidden
    generator = torch.Generator(device).manual_seed(0)
    for size in sizes:
        logits = torch.empty(size, setting.vocab_size, dtype=setting.dtype, device=device)
        logits.normal_(0.0, 3.0, generator=generator)
        hidden = torch.randn(size, hidden_size, device=device, generator=generator).to(dtype)
        numbers = torch.arange(size, device=device)
        rows = SamplingBatch(torch.ones(size, dtype=torch.float32, device=device), numbers, numbers)
        nothing = torch.zeros(size, dtype=torch.int32, device=device)
        verify = functools.partial(
            self_check.verify, logits, nothing[:0], nothing, rows,
            logprobs_mode=setting.logprobs_mode, max_draft_tokens=0,
        )  # fmt: skip
        with_features = functools.partial(verify, hidden=hidden)
        costs.append((microseconds(verify, device), microseconds(with_features, device)))
    return costs


def drafting_us(device: torch.device, sizes: Sequence[int]) -> list[float]:
    """Microseconds of the device drafter's `propose`, for each number of requests."""
    most = max(sizes)
    drafter = DeviceDrafter(
        max_requests=most, max_model_len=MAX_LEN, device=device, max_draft_tokens=K, max_resident_tokens=MAX_LEN
    )
    text = np.random.default_rng(0).integers(0, 1000, (most, MAX_LEN)).astype(np.int32)
    for slot in range(most):
        drafter.start_request(slot, text[slot, :5], problem_id=slot // GROUP)
    numbers = torch.arange(most, device=device)
    slots, ones = numbers.int(), torch.ones(most, dtype=torch.int32, device=device)
    engine = torch.from_numpy(text).to(device), LENGTH * ones, numbers, ones.float()
    drafter.propose(slots, ones, *engine)
    steps = (functools.partial(drafter.propose, slots[:size], ones[:size], *engine) for size in sizes)
    return [microseconds(step, device) for step in steps]


def microseconds(step: Callable[[], object], device: torch.device) -> float:
    """The median of some calls after the first, on the device."""
    step()
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        else:
            started = time.perf_counter()
            step()
            times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times))
