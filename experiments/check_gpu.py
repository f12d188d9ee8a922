"""Checks on a GPU that nothing waits for the device and that the verifier's kernels agree with the reference.

    python -m experiments.check_gpu [--trials 60] [--vocab 151936] [--out FILE]

First what takes seconds: what is copied to the host, and rollouts that move between a request's row, the device
drafter's pool and the host, are right while the device is busy; a captured CUDA graph gives the same result when it is
replayed on new logits. Then random batches with ragged drafts, mixed temperatures, ties, removed tokens and
rows without a distribution, in bf16, fp16 and fp32, for all methods, with accepted and rejected drafts. Tokens must be
the reference's; one may differ only where the reference's scores of the two are within the device's logarithm error.
Log-probabilities agree within 1e-4, features as `verify/agreement.py` says. No call waits for the device (torch's
synchronisation check).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from experiments.rows import append, make_parser, origin
from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest
from rollout_spec.drafters.model.choice_device import DeviceChoice
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.integrations.vllm.device_io import HostCopy
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference
from rollout_spec.verify.agreement import Batch, compare, compare_features
from rollout_spec.verify.self_check import inputs_on, on_device, on_host, random_batch, verify, with_drafts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("sample", "rejection", "dense")
MODES = ("processed_logprobs", "raw_logprobs", None)
BUSY_CYCLES = 200_000_000
"""For which the device does nothing else: a tenth of a second, in which the host gets far ahead."""


def made_up(rng: np.random.Generator, vocab: int, trial: int) -> Batch:
    """Requests with up to five drafted tokens, some of broken logits."""
    lengths = rng.integers(0, 6, rng.integers(1, 7))
    batch = random_batch(rng, lengths, vocab, has_ties=trial % 3 == 0)
    if trial % 7 == 0:
        num_rows = len(batch.logits)
        batch.logits[rng.integers(num_rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        batch.logits[rng.integers(num_rows)] = -np.inf
    return batch


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, whatever waits for the device inside raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def keep_busy(device: torch.device) -> None:
    """What is launched from now on runs much later than the host goes on."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def main(argv: list[str] | None = None) -> None:
    """Check, and print one line per kind of check."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    check_host_copy(device)
    print("what is copied to the host arrives, and nothing waits for it before it is read", flush=True)
    check_moving_history(device)
    print("rollouts that move between rows, pool and host while the device is busy are drafted from", flush=True)
    if device.type == "cuda":
        check_graph(args.vocab, device)
        check_model_drafts(args.vocab, device)
        print("a replayed CUDA graph gives what a call gives", flush=True)
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
        if trial % 10 == 9:
            print(f"{trial + 1} batches of {args.trials} agree", flush=True)
    assert 2 * counted["features"] >= counted["tokens"], "features of most tokens must have been compared"
    print(f"{args.trials} batches agree with the reference: {counted}")
    row = {"benchmark": "check_gpu", "vocab": args.vocab, "trials": args.trials, **counted}
    row["seconds"] = round(time.perf_counter() - started, 1)
    append(args.out, {**row, **origin(torch.cuda.get_device_name() if device.type == "cuda" else None)})


def check_host_copy(device: torch.device) -> None:
    """A copy has what was computed before it, although the device is still at it and later overwrites the source."""
    sources = [torch.zeros(n, dtype=torch.int64, device=device) for n in (5, 3)]
    before = [torch.zeros_like(source) for source in sources]
    for source in sources:  # loads the kernels, which may wait
        source += 1
        source.zero_()
    HostCopy(sources).read()  # takes pinned memory, which may wait; the next one gets the same
    with no_waiting(device):
        keep_busy(device)
        for number, source in enumerate(sources, 1):
            source += number
        copy = HostCopy(sources if device.type == "cuda" else [source.clone() for source in sources])
        arrived_at_once = copy.has_arrived()
        for source, zeros in zip(sources, before, strict=True):
            source.copy_(zeros)
    assert arrived_at_once == (device.type != "cuda"), "the copy was waited for"
    assert [values.tolist() for values in copy.read()] == [[1] * 5, [2] * 3]
    assert copy.has_arrived()


def check_moving_history(device: torch.device) -> None:
    """Rollouts go from a request's row to the pool, to the host and back to the pool, and drafts follow them.

    The pool has room for one problem's rollout. Requests of two problems take turns in one slot, so each finds that its
    problem's rollout has gone to the host, and brings it back. A text's tokens are distinct: what to draft is known.
    """
    k, length, prompt = 4, 300, 5
    drafter = DeviceDrafter(
        max_requests=1, max_model_len=length, device=device, max_draft_tokens=k,
        max_resident_tokens=length, max_problem_tokens=length,
    )  # fmt: skip
    texts = [np.arange(length, dtype=np.int32) + 1000 * problem for problem in range(2)]
    uploaded = [torch.from_numpy(text[None]).to(device) for text in texts]
    sizes = {n: torch.full((1,), n, dtype=torch.int32, device=device) for n in (prompt + 1, length - k)}
    slots, ones = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    new = ones * (length - k - prompt - 1)
    seeds, temperature = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    features = torch.zeros(length, FEATURE_WORDS, dtype=torch.int64, device=device)
    history, total_len = torch.zeros_like(uploaded[0]), torch.zeros_like(ones)
    engine = history, total_len, seeds, temperature, features, slots
    drafter.warm_up(torch.int32, history, total_len, seeds, temperature)
    early, late = [], []
    for turn in range(6):
        problem = turn % 2
        drafter.start_request(0, texts[problem][:prompt], problem_id=problem)
        with no_waiting(device):
            keep_busy(device)
            history.copy_(uploaded[problem])
            total_len.copy_(sizes[prompt + 1])
            early.append((texts[problem], drafter.propose(slots, ones, *engine)))
            total_len.copy_(sizes[length - k])
            late.append(drafter.propose(slots, new, *engine)[1])
            drafter.stop_requests([EndedRequest(0, length - k)])
            history.zero_()  # the next request's, while the rollout is still being copied
    for turn, (text, (drafts, rates)) in enumerate(early):
        expected = text[prompt + 1 : prompt + 1 + k].tolist() if turn >= 2 else [int(text[prompt])] * k
        assert drafts.tolist() == [expected], f"turn {turn}: {drafts.tolist()} for {expected}"
        assert bool((rates > 0).all()) == (turn >= 2)
    assert not any(rates.any() for rates in late), "a text's end has no continuation"
    drafter.check_integrity()


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
    with no_waiting(device):
        chosen, *_ = chooser.choose(*arguments)
    assert torch.equal(chosen, 2 * drafts)


if __name__ == "__main__":
    main()
