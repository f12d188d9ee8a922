"""What an engine's steps take on a GPU in each mode, put together from parts. **Estimates.**

    python -m experiments.costs.gpus [--gpus h100 h200 a100] [--out FILE]
    python -m experiments.costs.gpus --measured FILE.csv [--out FILE]

Without drafts, and with the drafter on the device, scheduling is asynchronous: a step takes little longer than the
device, or than the host if that takes longer. With the drafter on the host they work one after the other. Seconds
unless said otherwise. `--measured`: beside what was measured on an A100, a file with the columns model, requests,
context, num_speculative_tokens and median_ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from experiments.rows import append, make_parser, origin
from rollout_spec.estimate.costs import (
    CONTEXT,
    HOST_REQUEST,
    HOST_STEP,
    LAUNCH,
    PEAKS,
    SHAPES,
    EngineCost,
    sampling_seconds,
    step_cost,
    step_time_rows,
)

Mode = Literal["none", "device", "host"]
PIECEWISE_LAUNCHES = 3
"""Launches per layer where requests have different numbers of draft tokens, and vLLM has no graph of whole steps: the
graph of what lies between two attentions, the cache's update and attention. Read in vLLM's code."""
HOST_VERIFYING = 1.2e-3
"""What our sampler takes a GPU server's host more than vLLM's, of a step of 64 requests (results/README.md)."""
HOST_DRAFT_CALL, HOST_DRAFT_REQUEST = 160e-6, 10.5e-6
"""The drafter on the host in V2, K = 8, on quiet cores: 170 us for one request, 10 for each of 64, 6.8 of 256 (measured
at 5505d49; bench_host.jsonl has 188, 19 and 11, on busier ones). Without what is indexed while the device computes."""


def cost_of(model: str, mode: Mode, gpu: str, context: int = CONTEXT) -> EngineCost:
    """A model's steps in a mode, features on. With the drafter on the host it and the device work by turns.

    Args:
        model: In SHAPES.
        gpu: In PEAKS.
        context: Tokens in a request's KV cache.
    """
    cost = step_cost(SHAPES[model], gpu, drafts=mode != "none", context=context)
    if mode != "host":
        return cost
    launching = SHAPES[model].layers * LAUNCH * PIECEWISE_LAUNCHES
    return cost._replace(
        seconds=np.maximum(cost.seconds, launching + sampling_seconds(drafts=True)) + HOST_STEP + HOST_VERIFYING,
        request_seconds=cost.request_seconds + HOST_REQUEST,
        draft_call_seconds=HOST_DRAFT_CALL,
        draft_seconds=HOST_DRAFT_REQUEST,
        host_seconds=0.0,
        host_request_seconds=0.0,
        drafting_host_seconds=0.0,
        drafting_host_request_seconds=0.0,
    )


def beside_measured(path: Path) -> Iterator[dict[str, Any]]:
    """Measured times of an A100's steps and estimates, for K up to 7 and contexts of 1,024 and 4,096, milliseconds."""
    for name, requests, context, k, took in step_time_rows(path):
        model = name.rsplit("-")[-1].lower()
        if context not in (1024, 4096) or k > 7:
            continue
        cost = cost_of(model, "none", "a100", context)._replace(host_seconds=0.0, host_request_seconds=0.0)
        estimate = 1e3 * cost.whole_step(requests, requests * k)
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
        for mode in get_args(Mode):
            cost = cost_of(model, mode, gpu)
            row[f"{mode}_ms"] = {}
            for k in [0] if mode == "none" else args.k:
                seconds = cost.whole_step(batch, batch * k, is_drafting=k > 0) + cost.drafting(batch) * (k > 0)
                row[f"{mode}_ms"][str(k)] = round(1e3 * seconds, 2)
        append(args.out, {**row, **about})
        print(*row.values())


if __name__ == "__main__":
    main()
