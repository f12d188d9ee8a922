"""What the features of a step's tokens cost where the logits are, beside the verification of the same rows.

    python experiments/bench_packing.py --rows 1 9 36 144 [--device cuda] --out FILE

Made-up states and logits, each row a request of its own at temperature 1. Reported: p20/p50/p80 of the milliseconds of
`pack_signatures` and `pack_distributions` together, and of `verify`, in turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from rollout_spec.features.torch import pack_distributions, pack_signatures
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.api import verify
from rows import append, origin, quantiles


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 36, 144])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    about = origin(torch.cuda.get_device_name() if device.type == "cuda" else None)
    print("rows   features ms   verify ms")
    for size in args.rows:
        hidden = torch.randn(size, args.hidden, dtype=dtype, device=device)
        logits = 3 * torch.randn(size, args.vocab, dtype=dtype, device=device)
        request = torch.arange(size, device=device)
        batch = SamplingBatch(torch.ones(size, device=device), request, request)
        none = torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(size, dtype=torch.int32, device=device)
        work = {
            "features": lambda: (pack_signatures(hidden), pack_distributions(logits, batch, request)),  # noqa: B023
            "verify": lambda: verify(logits, *none, batch, logprobs_mode="processed_logprobs"),  # noqa: B023
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for repeat in range(args.repeats + 3):
            for name, call in work.items():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat >= 3:
                    seconds[name].append(1e3 * (time.perf_counter() - started))
        figures = {f"{name}_ms": quantiles(taken) for name, taken in seconds.items()}
        shape = {"rows": size, "vocab": args.vocab, "hidden": args.hidden, "dtype": args.dtype}
        append(args.out, {"benchmark": "packing", **shape, **figures, **about})
        print(f"{size:4d}   {figures['features_ms'][1]:11.2f}   {figures['verify_ms'][1]:9.2f}", flush=True)


if __name__ == "__main__":
    main()
