"""Counts the instructions of the scan kernel's machine code for Hopper; needs no GPU.

    python -m experiments.costs.count_instructions [--dtype bf16]

Compiles `_scan_kernel` as `verify_rows` launches it (plain temperature, processed log-probabilities), disassembles it
and prints each basic block of more than 60 instructions by opcode. The loop over tiles is: one block that loads a tile
of ROWS x BLOCK logits and sums its exponentials (MUFU), one that hashes it and takes the hashes' minimum (VIMNMX), then
the blocks that run only where a token may win. The line below the table divides the first two by the logits per thread.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_spec.verify import kernel

INTEGER_PIPE = {
    "SHF", "LOP3", "IADD3", "LEA", "PRMT", "VIMNMX", "VIMNMX3", "FMNMX", "ISETP", "FSETP", "SEL", "FSEL", "PLOP3",
    "I2FP", "VIADD", "MOV",
}  # fmt: skip
"""Opcodes that share the pipe of 64 lanes per clock (as far as is known; NVIDIA does not document it)."""


def compile_scan(dtype: str) -> bytes:
    """Machine code of the scan for sm_90."""
    floats, integers = "*fp32", "*i32"
    types = {
        "logits_ptr": f"*{dtype}", "logits_stride": "i32", "position_ptr": "*i64",
        "draft_ptr": integers, "temperature_ptr": floats, "seed_ptr": "*i64", "score_ptr": floats,
        "token_ptr": integers, "high_ptr": floats, "mass_ptr": floats, "raw_high_ptr": floats, "raw_mass_ptr": floats,
        "num_rows": "i32", "vocab_size": "i32", "tokens_per_split": "i32",
    }  # fmt: skip
    constants = {
        "cutoff_ptr": None, "cut_token_ptr": None, "DOMAIN": 0, "EXCLUDE_DRAFT": False, "RAW": False,
        "ROWS": kernel.ROWS, "BLOCK": kernel.BLOCK,
    }  # fmt: skip
    names = kernel._scan_kernel.arg_names
    aligned = [
        i for i, n in enumerate(names) if n.endswith("_ptr") or n in ("logits_stride", "vocab_size", "tokens_per_split")
    ]
    source = ASTSource(
        fn=kernel._scan_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in constants},
    )
    options = {"num_warps": 1, "maxnreg": kernel.MAX_REGISTERS}
    code: bytes = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    return code


def basic_blocks(code: bytes) -> list[Counter[str]]:
    """Opcode counts of each basic block, in the order of the program."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        listing = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    blocks: list[Counter[str]] = [Counter()]
    for line in listing.splitlines():
        if re.match(r"\s*\.L_x_\d+:", line):
            blocks.append(Counter())
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(\w+)", line):
            blocks[-1][found[1]] += 1
    return blocks


def main() -> None:
    """Print the blocks and the common path's share per logit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    args = parser.parse_args()
    blocks = [block for block in basic_blocks(compile_scan(args.dtype)) if block.total() > 60]
    for block in blocks:
        print(f"{block.total():5d}  " + ", ".join(f"{name} {count}" for name, count in block.most_common(12)))
    load = next(b for b in blocks if b["LDG"] and b["MUFU"] >= 16 and b["FMNMX"])
    hashing = next(b for b in blocks if b["VIMNMX"] + b["VIMNMX3"] and b["IMAD"] >= 64)
    per_thread = kernel.ROWS * kernel.BLOCK // 32
    common = load + hashing
    integer = sum(count for name, count in common.items() if name in INTEGER_PIPE)
    print(
        f"common path: {common.total()} instructions for {per_thread} logits per thread, "
        f"{common.total() / per_thread:.1f} per logit, {integer / per_thread:.1f} of them on the integer pipe"
    )


if __name__ == "__main__":
    main()
