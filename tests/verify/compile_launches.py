"""Compile every kernel launch of the verifier and of the device drafter to machine code, without a GPU.

    python -m tests.verify.compile_launches [80] [90] [100]

For these compute capabilities, Hopper's if none is named. The interpreter runs kernels as Python and accepts what the
compiler does not (a variable that changes its shape in a loop, branches of different types). Prints a row per kernel:
its variants, and the most registers per thread and spilled bytes (stores and loads) of any.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}
capability = 90
compiled: dict[tuple, tuple[int, int]] = {}
"""Registers and spilled bytes by (kernel, types, constants)."""


def compile_launch(function, *args, grid, warmup, **kwargs):
    """Stands in for `JITFunction.run`: compiles for the arguments' types as a launch would."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion") if name in kwargs}
    values = dict(zip(function.arg_names, args, strict=False)) | kwargs
    assert list(values) == function.arg_names, "a launch must name every argument"
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value = values[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = (function.__name__, tuple(signature.items()), tuple(constants.items()))
    if key not in compiled:
        source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled[key] = registers_and_spills(result.asm["ptx"], options.get("maxnreg"))


def registers_and_spills(ptx: str, max_registers: int | None) -> tuple[int, int]:
    """What ptxas says of a kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        limit = [] if max_registers is None else [f"--maxrregcount={max_registers}"]
        name = re.search(r"\.target (\w+)", ptx)[1]
        ptxas = get_ptxas(capability).path
        command = [ptxas, "-v", f"--gpu-name={name}", *limit, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), sum(map(int, spills))


def launch_all() -> None:
    from rollout_spec.types import SamplingBatch
    from rollout_spec.verify import kernel
    from tests.verify.batches import kernel_verify

    batch, drafts, vocab = 3, 6, 5000
    cases = (
        # dtype, log-probabilities, method
        (torch.bfloat16, "processed_logprobs", "sample"),
        (torch.bfloat16, "raw_logprobs", "sample"),
        (torch.float32, "processed_logprobs", "rejection"),
        (torch.float16, "raw_logprobs", "rejection"),
        (torch.bfloat16, None, "sample"),
    )
    rows = SamplingBatch(torch.ones(batch), torch.arange(batch), torch.arange(batch))
    for dtype, mode, method in cases:
        kernel_verify(
            torch.zeros(batch + drafts, vocab, dtype=dtype),
            torch.zeros(drafts, dtype=torch.int32),
            torch.tensor([2, 4, 6], dtype=torch.int32),
            rows,
            method=method,
            logprobs_mode=mode,
            hidden=torch.zeros(batch + drafts, 64, dtype=dtype),
        )
    ids, index = torch.zeros(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    kernel.gather_layout(ids, ids.long(), index, index, index, index, index, torch.ones(4), index.long())

    from rollout_spec.drafters.device.drafter import DeviceDrafter

    size = 512
    words_alone = {"features": False}
    for k, dtype, options in ((8, torch.int32, {}), (16, torch.int64, {}), (8, torch.int32, words_alone)):
        drafter = DeviceDrafter(
            max_requests=size,
            max_model_len=64,
            device=torch.device("cpu"),
            max_draft_tokens=k,
            **options,
        )
        history = torch.zeros(size, 64, dtype=torch.int32)
        lengths = torch.zeros(size, dtype=torch.int32)
        drafter.warm_up(dtype, history, lengths, torch.arange(size), torch.ones(size), num_given_tokens=2)


def main() -> None:
    """Print a table for each compute capability."""
    global capability
    JITFunction.run = compile_launch
    for argument in sys.argv[1:] or ["90"]:
        capability = int(argument)
        compiled.clear()
        launch_all()
        print(f"sm_{capability}: kernel, variants, registers, spilled bytes")
        for name in dict.fromkeys(key[0] for key in compiled):
            found = [values for key, values in compiled.items() if key[0] == name]
            print(f"{name}: {len(found)}, {max(r for r, _ in found)}, {max(spill for _, spill in found)}")


if __name__ == "__main__":
    main()
