"""What a step costs on a GPU where vLLM is missing: a model's forward pass by its tokens.

    python -m experiments.costs.bench_forward --shape 1.5b --batch 64 [--out FILE.jsonl]

A transformer of the given shape with random weights, in CUDA graphs where there are any: `batch` requests with a
context of `--context` tokens each, of which 1 to K + 1 are computed, and our verifier over their logits. An engine's
step takes longer, by its scheduler and its host's work. Medians of `--repeats` runs, in milliseconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from experiments.engines.build import SHAPES
from experiments.rows import append, make_parser, origin
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.layout import lay_out


class Model:
    """A Llama-like transformer with random weights, whose keys and values of the context are there already.

    Args:
        shape: A name in `SHAPES`.
        batch: Requests.
        context: Tokens of each before the step.
    """

    def __init__(self, shape: str, batch: int, context: int, device: torch.device, dtype: torch.dtype) -> None:
        layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, hidden // heads

        def weight(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype) * 0.02

        kv = kv_heads * self._head_dim
        self._layers = [
            (weight(hidden + 2 * kv, hidden), weight(hidden, hidden), weight(2 * intermediate, hidden),
             weight(hidden, intermediate), weight(2, batch, kv_heads, context, self._head_dim))
            for _ in range(layers)
        ]  # fmt: skip
        self._embedding, self._head = weight(vocab, hidden), weight(vocab, hidden)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [batch * width, vocabulary] of integer tokens [batch, width]."""
        batch, width = tokens.shape
        x = self._embedding[tokens]
        hidden = x.shape[-1]
        for qkv, out, gate_up, down, cache in self._layers:
            q, k, v = linear(rms_norm(x, (hidden,)), qkv).split(
                [hidden, self._kv_heads * self._head_dim, self._kv_heads * self._head_dim], -1
            )
            q = q.view(batch, width, self._heads, self._head_dim).transpose(1, 2)
            k, v = (t.view(batch, width, self._kv_heads, self._head_dim).transpose(1, 2) for t in (k, v))
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            # Without the mask among the step's own tokens, which costs nothing in an engine's kernel.
            mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + linear(mixed.transpose(1, 2).reshape(batch, width, hidden), out)
            gate, up = linear(rms_norm(x, (hidden,)), gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, down)
        return linear(rms_norm(x, (hidden,)), self._head).view(batch * width, -1)


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of a step's time; on a GPU of a captured graph."""
    run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
        return float(np.median(times))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(events)]))


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write the curve."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = origin(torch.cuda.get_device_name() if device.type == "cuda" else None)
    model = Model(args.shape, args.batch, args.context, device, getattr(torch, args.dtype))
    rows = SamplingBatch(
        torch.ones(args.batch, device=device),
        torch.arange(args.batch, device=device),
        torch.full((args.batch,), args.context, device=device),
    )
    print(f"{args.shape}, {args.batch} requests, context {args.context}\n  tokens  forward ms  with verifier ms")
    with torch.inference_mode():
        for width in sorted({1, 2, 3, (args.k + 3) // 2, args.k + 1}):
            given = torch.zeros(args.batch, width, dtype=torch.int64, device=device)
            drafts = torch.zeros(args.batch * (width - 1), dtype=torch.int32, device=device)
            counts = torch.arange(1, args.batch + 1, dtype=torch.int32, device=device) * (width - 1)

            def step(given: Tensor = given, drafts: Tensor = drafts, counts: Tensor = counts) -> Any:
                logits = model(given)
                layout, most = lay_out(counts, drafts, rows), given.shape[1] - 1
                return verify_rows(logits, layout, logprobs_mode="processed_logprobs", max_draft_tokens=most)

            forward = median_ms(lambda given=given: model(given), device, args.repeats)  # type: ignore[misc]
            whole = median_ms(step, device, args.repeats)
            tokens = args.batch * width
            print(f"{tokens:8d} {forward:11.3f} {whole:17.3f}", flush=True)
            append(
                args.out,
                {
                    "benchmark": "forward", "shape": args.shape, "batch": args.batch, "context": args.context,
                    "tokens": tokens, "forward_ms": round(forward, 4), "step_ms": round(whole, 4), **about,
                },
            )  # fmt: skip


if __name__ == "__main__":
    main()
