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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.rows import append, origin
from rollout_spec.drafters.model.choice_device import DeviceChoice
from rollout_spec.features.format import LOGPROB_STEP, SIGNATURE_BITS, TOP_TOKENS, signature_matrix, unpack
from rollout_spec.noise import host as noise
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("sample", "rejection", "dense")
MODES = ("processed_logprobs", "raw_logprobs", None)
SCORE_TOLERANCE = 1e-4
"""The device's noise is within 1e-5 of NumPy's; the rest allows for the rounding of logit / T."""


def random_batch(rng: np.random.Generator, vocab: int, trial: int) -> tuple[np.ndarray, np.ndarray, SamplingBatch]:
    """(logits [N, V] float32, inclusive draft counts [B], how each request is sampled)."""
    lengths = rng.integers(0, 6, rng.integers(1, 7))
    size, num_rows = len(lengths), int(lengths.sum()) + len(lengths)
    logits = (rng.standard_normal((num_rows, vocab)) * rng.choice([0.1, 2.0, 5.0])).astype(np.float32)
    if trial % 3 == 0:
        logits = np.round(logits)
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, 0] = 0
    if trial % 7 == 0:
        logits[rng.integers(num_rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        logits[rng.integers(num_rows)] = -np.inf
    truncate = trial % 2 == 1
    rows = SamplingBatch(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.5], size).astype(np.float32),
        seeds=rng.integers(-(2**63), 2**63 - 1, size),
        positions=rng.integers(0, 40_000, size),
        top_k=rng.choice([0, 1, 20, 50], size).astype(np.int32) if truncate else None,
        top_p=rng.choice([0.5, 0.95, 1.0], size).astype(np.float32) if truncate else None,
        min_p=rng.choice([0.0, 0.05], size).astype(np.float32) if truncate else None,
    )
    return logits, np.cumsum(lengths).astype(np.int32), rows


def compare(
    got: Any, expected: Any, logits: np.ndarray, cu: np.ndarray, rows: SamplingBatch, method: str, mode: str | None
) -> tuple[int, float]:
    """(tokens that differ because they were too close to tell, largest error of a log-probability).

    Raises:
        AssertionError: anything else differs.
    """
    tokens, want = got.output_token_ids.cpu().numpy(), expected.output_token_ids
    starts = np.concatenate(([0], cu + np.arange(1, len(cu) + 1)))
    close, error = 0, 0.0
    for request in range(len(cu)):
        same = (tokens[request] == want[request]).all()  # otherwise another row ends the request
        for counts in ("num_invalid_rows", "num_broken_rows", "num_accepted"):
            ours, theirs = getattr(got, counts)[request], getattr(expected, counts)[request]
            assert not same or int(ours) == int(theirs), f"request {request}: {counts} is {ours} for {theirs}"
        for j in range(starts[request + 1] - starts[request]):
            row = starts[request] + j
            if want[request, j] < 0 and tokens[request, j] < 0:
                break
            if tokens[request, j] != want[request, j]:
                assert method == "sample", f"request {request}, token {j}: {tokens[request]} for {want[request]}"
                temperature = max(float(rows.temperature[request]), 1e-9)
                score = logits[row].astype(np.float64) / temperature
                if rows.temperature[request] > 0:
                    position = int(rows.positions[request]) + j
                    score += noise.gumbel(int(rows.seeds[request]), position, np.arange(logits.shape[1]))
                gap = abs(score[tokens[request, j]] - score[want[request, j]])
                assert gap <= SCORE_TOLERANCE * max(1.0, abs(score[want[request, j]])), f"differs by {gap}"
                close += 1
                break
            if mode is not None:
                error = max(error, abs(float(got.logprobs[row]) - float(expected.logprobs[row])))
                assert error < 1e-4, f"request {request}, token {j}: log-probability is off by {error}"
                assert int(got.ranks[row]) == expected.ranks[row], f"request {request}, token {j}: rank"
    return close, error


def verify(logits: Any, drafts: Any, cu: Any, rows: SamplingBatch, **options: Any) -> Any:
    """The kernels, on whatever device."""
    return kernel.verify_rows(logits, kernel.lay_out(cu, drafts, rows), rows, **options)


def compare_features(
    got: Any, expected: Any, logits: np.ndarray, cu: np.ndarray, rows: SamplingBatch, hidden: np.ndarray
) -> None:
    """Compare features of emitted tokens with plain arithmetic.

    Raises:
        AssertionError: a kept token is not among the most probable ones, a probability is off by more than its code's
            resolution, or more signs of projections differ than rounding explains.
    """
    signatures, ids, codes = unpack(got.features.cpu().numpy())
    ends = cu + np.arange(1, len(cu) + 1)
    signs = np.packbits(hidden @ signature_matrix(hidden.shape[1]) > 0, axis=1, bitorder="little").view(np.uint64)
    wrong_bits = num_checked = 0
    for request, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for row in range(start, min(start + expected.num_accepted[request] + 1, end)):
            if expected.target_token_ids[row] < 0:
                continue
            place = reference._place(request, row - start, row, end - start - 1, np.zeros(len(logits), np.int32), rows)
            x = reference.process_row(logits[row], place).astype(np.float64)
            top = np.sort(x)[::-1][:TOP_TOKENS]
            kept = top[np.isfinite(top)]
            np.testing.assert_array_equal(x[ids[row, : kept.size]], kept)
            logprobs = kept - top[0] - np.log(np.exp(x - top[0]).sum())
            found = LOGPROB_STEP * (1.0 - codes[row, : kept.size])
            np.testing.assert_allclose(found, np.maximum(logprobs, -15.9), atol=0.6 * LOGPROB_STEP)
            wrong_bits += sum(int(word).bit_count() for word in signatures[row] ^ signs[row])
            num_checked += 1
    assert wrong_bits <= 0.01 * SIGNATURE_BITS * num_checked, f"{wrong_bits} bits of {num_checked} signatures differ"


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
    counted = {"tokens": 0, "too_close": 0, "accepted": 0, "batches_with_features": 0, "largest_logprob_error": 0.0}
    for trial in range(args.trials):
        dtype, method, mode = DTYPES[trial % 3], METHODS[trial // 3 % 3], MODES[trial // 9 % 3]
        vocab = args.vocab if trial % 4 else int(rng.integers(1, min(args.vocab, 3000)))
        logits, cu, rows = random_batch(rng, vocab, trial)
        given = torch.from_numpy(logits).to(device, dtype)
        logits = given.float().cpu().numpy()
        num_drafts = int(cu[-1])
        drafts = rng.integers(-1, vocab, num_drafts).astype(np.int32)
        if trial % 5:
            wish = reference.verify(logits, drafts, cu, rows, after_difference=True).target_token_ids
            drafts = np.delete(wish, cu + np.arange(len(cu))).astype(np.int32)
        probs = None
        if method == "dense":
            probs = rng.dirichlet(np.ones(vocab), num_drafts).astype(np.float32)
        name = "rejection" if method == "dense" else method
        hidden = torch.from_numpy(rng.standard_normal((len(logits), 64), np.float32)).to(device)
        expected = reference.verify(logits, drafts, cu, rows, method=name, draft_probs=probs, logprobs_mode=mode)
        fields = (getattr(rows, field) for field in SamplingBatch.__slots__)
        on_device = SamplingBatch(*(None if v is None else torch.from_numpy(v).to(device) for v in fields))
        arguments: dict[str, Any] = {
            "method": name,
            "draft_probs": None if probs is None else torch.from_numpy(probs).to(device),
            "logprobs_mode": mode,
            "hidden": hidden,
            "max_draft_tokens": int(np.diff(cu, prepend=0).max()),
        }
        inputs = (given, torch.from_numpy(drafts).to(device), torch.from_numpy(cu).to(device), on_device)
        if device.type == "cuda":
            verify(*inputs, **arguments)  # compiles
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        got = verify(*inputs, **arguments)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        close, error = compare(got, expected, logits, cu, rows, method, mode)
        if close == 0:
            compare_features(got, expected, logits, cu, rows, hidden.cpu().numpy())
            counted["batches_with_features"] += 1
        counted["too_close"] += close
        counted["tokens"] += int((expected.output_token_ids >= 0).sum())
        counted["accepted"] += int(expected.num_accepted.sum())
        counted["largest_logprob_error"] = max(counted["largest_logprob_error"], error)
    assert 2 * counted["batches_with_features"] >= args.trials, "features of most batches must have been compared"
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
