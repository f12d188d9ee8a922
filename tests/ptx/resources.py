"""What the compiled kernels take of a GPU: registers, spills, shared memory and warps in flight.

    python -m tests.ptx.resources

writes `resources.json`, with which `test_resources.py` compares. The variants are those that our own warm-up launches
for a few engines, with the product's constants and vocabularies of real size. Launches are noted and not run, so a
second passes until they are known, and compiling them for three capabilities takes no GPU.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rollout_spec import RolloutSpecConfig
from rollout_spec.drafters.device.choice import DeviceChoice
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.drafters.device.kernels import EngineSlots
from rollout_spec.integrations.vllm.cutting import Cut
from rollout_spec.integrations.vllm.warm_up import warm_up_kernels
from rollout_spec.launches import Launcher
from rollout_spec.verify import kernel
from tests.emulation import run_kernels

STEP_DTYPES = torch.int64, torch.float32, torch.int32
RECORDED = Path(__file__).with_name("resources.json")
K, MODEL_LEN, CPU = 7, 32_768, torch.device("cpu")
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Shared memory of a multiprocessor, by capability. Each has 64 K registers in four quarters, and room for 64 warps of
at most 32 programs."""
ENGINES = {
    "device": {"vocab_size": 151_936, "mode": "processed_logprobs", "features": True, "max_num_seqs": 512},
    "model": {"vocab_size": 49_152, "mode": "raw_logprobs", "max_num_seqs": 16, "num_model_tokens": 3},
    "host": {"vocab_size": 49_152, "mode": "processed_logprobs", "features": True, "verify": "rejection"},
}
"""What drafts, and the arguments of `start`. Together they launch every kernel, with and without features."""


def start(*, vocab_size, mode, verify="sample", features=False, max_num_seqs=0, num_model_tokens=0) -> None:
    """Launch what an engine launches before it serves; without `max_num_seqs`, drafts come from the host."""
    config, hidden = RolloutSpecConfig(num_speculative_tokens=K, verify=verify), (3584, torch.bfloat16)
    of_model = {"vocab_size": vocab_size, "dtype": torch.bfloat16, "logprobs_mode": mode}
    hidden = hidden if features else None
    if not max_num_seqs:
        warm_up_kernels(config, device=CPU, hidden=hidden, **of_model)
        return
    longs, floats, ints = (torch.zeros(max_num_seqs * (K + 1), dtype=dtype) for dtype in STEP_DTYPES)
    step = kernel.StepOutput(longs, longs, floats, longs, *[ints] * 7)
    warm_up_kernels(config, device=CPU, hidden=hidden, **of_model, step=step, memory=kernel.Memory())
    sizes = {"max_requests": max_num_seqs, "max_model_len": MODEL_LEN, "max_live_tokens": 1 << 22}
    drafter = DeviceDrafter(**sizes, device=CPU, max_draft_tokens=K, features=features)
    texts, total_len = torch.zeros(max_num_seqs, MODEL_LEN).int(), torch.zeros(max_num_seqs).int()
    slots = EngineSlots(texts, total_len, total_len.long(), total_len.float())
    tables = None if num_model_tokens else (longs.view(-1, K + 1), floats.view(-1, K + 1))
    drafter.warm_up(torch.int32, slots, num_model_tokens, tables)
    if num_model_tokens:
        none, *drafts = torch.zeros(1).int(), torch.zeros(1, K), torch.zeros(1, num_model_tokens)
        choice = DeviceChoice(max_num_seqs, K, num_model_tokens, CPU)
        choice.choose(none, none, slots, *((rates.long(), rates) for rates in drafts))
    else:
        cut = Cut(torch.zeros(max_num_seqs, K), torch.zeros(max_num_seqs + 1).int())
        cut(torch.zeros(1).int(), np.array([[0], [1]], np.int32), 0)


def launched_by(engine) -> dict[tuple[str, ...], tuple[ASTSource, dict]]:
    """What is compiled when an engine starts, and the options, by kernel and what Triton tells apart of arguments."""
    backend, variants = make_backend(GPUTarget("cuda", 90, 32)), {}

    def note(kernel, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, kinds, options = binder(*args, **kwargs)
        _, *source = kernel._pack_args(backend, kwargs, bound, kinds, options)
        words = (str(known) if kind == "constexpr" else f"{kind}{known or ''}" for kind, known in kinds)
        name = f"{kernel.module.split('.')[-2]}.{kernel.__name__}"
        key = name, *map("=".join, zip(kernel.arg_names, words, strict=True))
        variants[key] = ASTSource(kernel, *source), options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        patch.setattr(Launcher, "__getitem__", lambda self, grid: self.kernel[grid])
        start(**engine)
    return variants


def find_variants() -> tuple[dict[str, tuple[ASTSource, dict]], dict[str, int]]:
    """(variants by kernel and what not all of its variants share, how many each engine compiles when it starts)."""
    engines = {name: launched_by(arguments) for name, arguments in ENGINES.items()}
    found, named = {key: variant for variants in engines.values() for key, variant in variants.items()}, {}
    for key, variant in found.items():
        shared = set.intersection(*(set(other[1:]) for other in found if other[0] == key[0]))
        named[" ".join(word for word in key if word not in shared)] = variant
    return named, {name: len(variants) for name, variants in engines.items()}


def measure(variant: tuple[ASTSource, dict], capability: int) -> dict[str, int]:
    """What a variant takes of GPUs of this capability."""
    source, options = variant
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        # As Triton calls it.
        fusion = [] if compiled.metadata.enable_fp_fusion else ["--fmad=false"]
        gpu = sm_arch_from_capability(capability)
        flags = ["-lineinfo", *fusion, "-v", "--regAllocOptLevel=2", f"--gpu-name={gpu}"]
        command = [get_ptxas(capability).path, *flags, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, shared = int(re.search(r"Used (\d+) registers", said)[1]), compiled.metadata.shared
    return {
        "registers": registers,
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared_bytes": shared,
        "warps": warps_in_flight(capability, registers, shared, compiled.metadata.num_warps),
    }


def warps_in_flight(capability: int, registers: int, shared: int, num_warps: int) -> int:
    """Warps that a multiprocessor holds at once: registers are given out by 256 per warp, a program takes 1 KiB."""
    of_quarter = (1 << 14) // (-(-registers // 8) * 8 * 32)
    by_shared = SHARED_BYTES[capability] // (-(-shared // 128) * 128 + 1024)
    return num_warps * min(4 * of_quarter // num_warps, by_shared, 64 // num_warps, 32)


def measure_all(variants: Mapping[str, tuple[ASTSource, dict]]) -> dict[str, dict[str, int]]:
    """`measure` by capability and variant. One by one: Python 3.11 may fail to parse in two threads at once."""
    rows = itertools.product(SHARED_BYTES, sorted(variants))
    return {f"sm_{capability} {name}": measure(variants[name], capability) for capability, name in rows}


def main() -> None:
    """Measure, and write what was found."""
    run_kernels()  # as tests do; then Triton calls no ptxas of its own
    variants, at_start = find_variants()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in measure_all(variants).items())
    head = f' "triton": "{triton.__version__}",\n "variants_at_start": {json.dumps(at_start)},\n'
    RECORDED.write_text(f'{{\n{head} "kernels": {{\n{rows}\n }}\n}}\n')


if __name__ == "__main__":
    main()
