"""Compile every kernel launch of the verifier and of the device drafter to Hopper machine code, without a GPU.

The interpreter runs kernels as Python and accepts what the compiler does not (a variable that changes its shape in a
loop, branches of different types). Run as a script, in a process without TRITON_INTERPRET; prints a line per kernel.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}
compiled: dict[tuple, str] = {}


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
        result = triton.compile(source, target=TARGET, options=options)
        compiled[key] = f"{function.__name__}: {len(result.asm['cubin'])} bytes"


def main() -> None:
    JITFunction.run = compile_launch
    from rollout_spec.types import SamplingBatch
    from rollout_spec.verify import kernel

    batch, drafts, vocab = 3, 6, 5000
    cases = (
        # dtype, log-probabilities, truncation, method, all greedy
        (torch.bfloat16, "processed_logprobs", False, "sample", False),
        (torch.bfloat16, "raw_logprobs", True, "sample", False),
        (torch.float32, "processed_logprobs", True, "rejection", False),
        (torch.float16, "raw_logprobs", False, "dense", False),
        (torch.float32, None, True, "dense", False),
        (torch.bfloat16, None, False, "sample", True),
    )
    for dtype, mode, truncate, method, greedy in cases:
        rows = SamplingBatch(
            temperature=torch.ones(batch),
            seeds=None if greedy else torch.arange(batch),
            positions=torch.arange(batch),
            top_k=torch.ones(batch, dtype=torch.int32) if truncate else None,
            top_p=torch.ones(batch) if truncate else None,
            min_p=torch.ones(batch) if truncate else None,
        )
        kernel.verify(
            torch.zeros(batch + drafts, vocab, dtype=dtype),
            torch.zeros(drafts, dtype=torch.int32),
            torch.tensor([2, 4, 6], dtype=torch.int32),
            rows,
            method="rejection" if method == "dense" else method,
            draft_probs=torch.zeros(drafts, vocab) if method == "dense" else None,
            logprobs_mode=mode,
            max_draft_tokens=2,
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
            inverse_temperature=1.4,
            **options,
        )
        history = torch.zeros(size, 64, dtype=torch.int32)
        lengths = torch.zeros(size, dtype=torch.int32)
        drafter.warm_up(dtype, history, lengths, torch.arange(size), torch.ones(size))
    print("\n".join(compiled.values()))


if __name__ == "__main__":
    main()
