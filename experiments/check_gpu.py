"""Checks the verifier's kernels on a GPU against the reference.

    python -m experiments.check_gpu [--trials 60] [--vocab 151936] [--out FILE]

Random batches with ragged drafts, mixed temperatures, truncation, ties, removed tokens and rows without a distribution,
in bf16, fp16 and fp32, for all methods, with accepted and rejected drafts. Tokens must be the reference's; one may
differ only where the reference's scores of the two are within the device's logarithm error. Log-probabilities agree
within 1e-4. Then: no call waits for the device (torch's synchronisation check), and a captured CUDA graph gives the
same result when it is replayed on new logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.rows import append, origin
from rollout_spec.drafters.model.choice_device import DeviceChoice
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference
from rollout_spec.verify.agreement import Batch, compare, compare_features
from rollout_spec.verify.self_check import inputs_on, on_device, on_host, random_batch, verify, with_drafts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("sample", "rejection", "dense")
MODES = ("processed_logprobs", "raw_logprobs", None)


def made_up(rng: np.random.Generator, vocab: int, trial: int) -> Batch:
    """Requests with up to five drafted tokens, some of broken logits."""
    lengths = rng.integers(0, 6, rng.integers(1, 7))
    batch = random_batch(rng, lengths, vocab, truncates=trial % 2 == 1, has_ties=trial % 3 == 0)
    if trial % 7 == 0:
        num_rows = len(batch.logits)
        batch.logits[rng.integers(num_rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        batch.logits[rng.integers(num_rows)] = -np.inf
    return batch


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, whatever waits for the device inside raises."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    yield
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def main(argv: list[str] | None = None) -> None:
    """Check, and print one line per kind of check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="append a row to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    counted = {"tokens": 0, "too_close": 0, "accepted": 0, "features": 0, "largest_logprob_error": 0.0}
    for trial in range(args.trials):
        dtype, method, mode = DTYPES[trial % 3], METHODS[trial // 3 % 3], MODES[trial // 9 % 3]
        vocab = args.vocab if trial % 4 else int(rng.integers(1, min(args.vocab, 3000)))
        batch = made_up(rng, vocab, trial)
        given = on_device(batch.logits, device, dtype)
        batch = batch._replace(logits=given.float().cpu().numpy())
        num_drafts = len(batch.drafts)
        batch = batch._replace(drafts=rng.integers(-1, vocab, num_drafts).astype(np.int32))
        if trial % 5:
            wish = reference.verify(*batch, after_difference=True).target_token_ids
            batch = with_drafts(batch, wish, np.ones(num_drafts, bool))
        probs = None
        if method == "dense":
            probs = rng.dirichlet(np.ones(vocab), num_drafts).astype(np.float32)
        name: Any = "rejection" if method == "dense" else method
        hidden = torch.from_numpy(rng.standard_normal((len(batch.logits), 64), np.float32)).to(device)
        expected = reference.verify(*batch, method=name, draft_probs=probs, logprobs_mode=mode)
        arguments: dict[str, Any] = {
            "method": name,
            "draft_probs": None if probs is None else torch.from_numpy(probs).to(device),
            "logprobs_mode": mode,
            "hidden": hidden,
            "max_draft_tokens": int(np.diff(batch.cu, prepend=0).max()),
        }
        inputs = (given, *inputs_on(batch, device))
        if device.type == "cuda":
            verify(*inputs, **arguments)  # compiles
        with no_waiting(device):
            result = verify(*inputs, **arguments)
        got = on_host(result)
        close, error = compare(got, expected, batch, method=name, has_probs=probs is not None)
        counted["features"] += compare_features(got, expected, batch, hidden.cpu().numpy())
        counted["too_close"] += close
        counted["tokens"] += int((expected.output_token_ids >= 0).sum())
        counted["accepted"] += int(expected.num_accepted.sum())
        counted["largest_logprob_error"] = max(counted["largest_logprob_error"], error)
    assert 2 * counted["features"] >= counted["tokens"], "features of most tokens must have been compared"
    print(f"{args.trials} batches agree with the reference: {counted}")
    if device.type == "cuda":
        check_graph(args.vocab, device)
        check_model_drafts(args.vocab, device)
        print("no call waited for the device; a replayed CUDA graph gives what a call gives")
    row = {"benchmark": "check_gpu", "vocab": args.vocab, "trials": args.trials, **counted}
    row["seconds"] = round(time.perf_counter() - started, 1)
    append(args.out, {**row, **origin(torch.cuda.get_device_name() if device.type == "cuda" else None)})


def check_graph(vocab: int, device: torch.device) -> None:
    """Capture one call, replay it on other logits, and compare with a plain call."""
    rows = SamplingBatch(
        torch.ones(8, device=device), torch.arange(8, device=device), torch.zeros(8, dtype=torch.int64, device=device),
        top_p=torch.full((8,), 0.9, device=device),
    )  # fmt: skip
    cu = torch.arange(4, 33, 4, dtype=torch.int32, device=device)
    drafts = torch.zeros(32, dtype=torch.int32, device=device)
    logits = torch.randn(40, vocab, device=device, dtype=torch.bfloat16)

    def run() -> Any:
        return verify(logits, drafts, cu, rows, logprobs_mode="processed_logprobs", max_draft_tokens=4)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    again = run()
    assert torch.equal(captured.output_token_ids, again.output_token_ids)
    assert torch.equal(captured.logprobs, again.logprobs)


def check_model_drafts(vocab: int, device: torch.device) -> None:
    """A model's draft is drawn in a graph with the target's noise, and the choice between drafts waits for nothing."""
    size, k = 8, 3
    logits = torch.randn(size, vocab, device=device, dtype=torch.bfloat16)
    temperature, seeds = torch.ones(size, device=device), torch.arange(size, device=device)
    positions = torch.full((size,), 5, device=device)
    kernel.draw(logits, temperature, seeds, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = kernel.draw(logits, temperature, seeds, positions)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    rows = SamplingBatch(temperature, seeds, positions)
    nothing = torch.zeros(size, dtype=torch.int32, device=device)
    target = verify(logits, nothing[:0], nothing, rows, logprobs_mode="processed_logprobs", max_draft_tokens=0)
    assert torch.equal(tokens, target.target_token_ids)
    assert torch.equal(logprobs, target.logprobs)
    chooser = DeviceChoice(size, k, k, device)
    texts = torch.zeros(size, 64, dtype=torch.int32, device=device)
    slots, length = torch.arange(size, dtype=torch.int32, device=device), nothing + 9
    drafts, rates = torch.ones(size, k, dtype=torch.int64, device=device), torch.full((size, k), 0.1, device=device)
    arguments = slots, nothing + 1, texts, length, temperature, (drafts, rates), (2 * drafts, 9 * rates)
    chooser.choose(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    chosen, *_ = chooser.choose(*arguments)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(chosen, 2 * drafts)


if __name__ == "__main__":
    main()
