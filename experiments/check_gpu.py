"""Checks on a GPU that nothing waits for the device and that the verifier's kernels agree with the reference.

    python -m experiments.check_gpu [--trials 60] [--vocab 151936] [--out FILE]

First what takes seconds: what is copied to the host, and rollouts that move between a request's row, the device
drafter's pool and the host, are right while the device is busy; texts that repeat are drafted; a model's drafts are
drawn in a CUDA graph. Then random batches with ragged drafts, mixed temperatures, ties, removed tokens and rows without
a distribution, in bf16, fp16 and fp32, for both methods, with accepted and rejected drafts, compared as at an engine's
start (`verify/self_check.py`); features are those that a CPU packs. No call waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from experiments.rows import append, make_parser, origin
from rollout_spec.drafters.device.choice import DeviceChoice
from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest
from rollout_spec.drafters.device.kernels import EngineSlots
from rollout_spec.features import FEATURE_WORDS, SIGNATURE_BITS, TOP_TOKENS, pack, unpack
from rollout_spec.transfers import HostCopy
from rollout_spec.types import GREEDY_TEMPERATURE
from rollout_spec.verify import kernel
from rollout_spec.verify.api import draw, verify_rows
from rollout_spec.verify.reference import Layout, lay_out, pack_signatures
from rollout_spec.verify.self_check import Batch, fault_of, random_batch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("sample", "rejection")
MODES = ("processed_logprobs", "raw_logprobs", None)
BUSY_CYCLES = 200_000_000
"""For which the device does nothing else: a tenth of a second, in which the host gets far ahead."""


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


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, and what it returns there. What waits for the device cannot be captured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


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
    check_drafts(device)
    print("texts that repeat are drafted", flush=True)
    if device.type == "cuda":
        check_model_drafts(args.vocab, device)
        print("a replayed CUDA graph draws a model's drafts", flush=True)
    generator = torch.Generator(device).manual_seed(0)
    num_features = 0
    for trial in range(args.trials):
        dtype, method, mode = DTYPES[trial % 3], METHODS[trial // 3 % 2], MODES[trial // 6 % 3]
        vocab = args.vocab if trial % 4 else int(rng.integers(1, min(args.vocab, 3000)))
        lengths = rng.integers(0, 6, rng.integers(3, 9)).tolist()
        batch = random_batch(generator, lengths, vocab, dtype, float(rng.choice([0.1, 0.9, 5.0])))
        options: dict[str, Any] = {"method": method, "logprobs_mode": mode, "max_draft_tokens": max(lengths)}
        fault = fault_of(batch, for_v2=True, **options)
        assert fault is None, f"trial {trial}, {vocab} {dtype} logits, {method}, {mode}: {fault}"
        num_features += check_features(batch, options)
        if trial % 10 == 9:
            print(f"{trial + 1} batches of {args.trials} agree", flush=True)
    print(f"{args.trials} batches agree with the reference, {num_features} rows' features with a CPU's")
    seconds, sizes = round(time.perf_counter() - started, 1), {"vocab": args.vocab, "trials": args.trials}
    row = {"benchmark": "check_gpu", **sizes, "features": num_features, "seconds": seconds}
    append(args.out, {**row, **origin(torch.cuda.get_device_name() if device.type == "cuda" else None)})


def check_features(batch: Batch, options: dict[str, Any]) -> int:
    """Compare the features of emitted tokens with those that a CPU makes of all logits. Returns their number."""
    logits, drafts, cu, rows = batch
    hidden = torch.randn(logits.shape[0], 64, device=logits.device)
    layout = lay_out(cu, drafts, rows)
    with no_waiting(logits.device):  # kernels were compiled by the check of tokens, all but that of features
        result = kernel.verify_rows(logits, layout, **options)
    features = kernel.verify_rows(logits, layout, hidden=hidden, **options).features
    is_emitted = result.target_token_ids >= 0
    raw, temperature = logits[is_emitted].double(), layout.temperature[is_emitted].double()
    raw = pad(raw, (0, max(TOP_TOKENS - raw.shape[1], 0)), value=float("-inf"))
    scaled = raw / torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)[:, None]
    best = raw.sort(descending=True, stable=True).indices[:, :TOP_TOKENS]  # of equally probable tokens the least
    logprobs = scaled.log_softmax(-1).gather(1, best).cpu().numpy()
    signatures = pack_signatures(hidden[is_emitted].cpu()).numpy().view(np.uint64)
    theirs = unpack(pack(signatures, best.int().cpu().numpy(), np.maximum(logprobs, -99.0)))
    ours = unpack(features[is_emitted].cpu().numpy())
    is_token = np.isfinite(logprobs)
    num_bits = sum(int(word).bit_count() for word in (ours[0] ^ theirs[0]).ravel())
    assert num_bits <= 0.01 * SIGNATURE_BITS * len(ours[0]) + 8, f"{num_bits} bits of {len(ours[0])} signatures differ"
    assert (ours[1] == theirs[1])[is_token].all(), "the most probable tokens differ"
    assert (np.abs(ours[2].astype(int) - theirs[2]) <= 1)[is_token].all(), "log-probabilities of features differ"
    assert not ours[2][~is_token].any(), "tokens that cannot be sampled are among the most probable"
    return len(ours[0])


def check_drafts(device: torch.device) -> None:
    """Texts that repeat are drafted as they go on, for each number of requests that has kernels of its own.

    Requests of one problem are at different places of one text, with and without temperature.
    """
    k, period, size = 8, 61, 95
    text = np.resize(np.random.default_rng(0).choice(9999, period, replace=False).astype(np.int32), 4 * period)
    drafter = DeviceDrafter(
        max_requests=size, max_model_len=text.size, device=device, max_draft_tokens=k, features=False
    )
    lengths = 2 * period + np.arange(size, dtype=np.int32) % period
    for slot in range(size):
        drafter.start_request(slot, text[:5], problem_id=0)
    slots, total_len = torch.arange(size, dtype=torch.int32, device=device), torch.from_numpy(lengths).to(device)
    temperature = torch.tensor([0.0, 0.8], device=device).repeat(size)[:size]
    history = torch.from_numpy(np.tile(text, (size, 1))).to(device)
    engine = EngineSlots(history, total_len, torch.arange(size, device=device), temperature)
    drafter.reserve(np.arange(size), lengths)
    drafter.propose(slots, total_len - 5, engine)
    expected = np.stack([text[n : n + k] for n in lengths])
    for batch in (7, 63, 95):
        served = slots[:batch].clone(), torch.ones_like(slots[:batch])
        drafts, rates = drafter.propose(*served, engine)
        again, same_rates = drafter.propose(*served, engine)
        assert torch.equal(drafts, again), f"{batch} requests: two equal calls draft differently"
        assert torch.equal(rates, same_rates), f"{batch} requests: two equal calls draft differently"
        assert (drafts.cpu().numpy() == expected[:batch]).all(), f"{batch} requests: wrong drafts"
        assert ((rates > 0) & (rates <= 1)).all()


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
    """Texts move as they grow, rollouts go to the host and come back to the pool, and drafts follow them.

    The pool has room for one problem's rollout. Requests of two problems take turns in one slot, so each finds that its
    problem's rollout has gone to the host, and brings it back. A text's tokens are distinct: what to draft is known.
    """
    k, length, prompt = 4, 3000, 5
    drafter = DeviceDrafter(
        max_requests=2, max_model_len=length, device=device, max_draft_tokens=k,
        max_resident_tokens=length, max_problem_tokens=length,
    )  # fmt: skip
    texts = [np.arange(length, dtype=np.int32) + length * problem for problem in range(2)]
    uploaded = [torch.from_numpy(text[None]).to(device) for text in texts]
    sizes = {n: torch.full((1,), n, dtype=torch.int32, device=device) for n in (prompt + 1, length - k)}
    slots, ones = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    new = ones * (length - k - prompt - 1)
    seeds, temperature = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, device=device)
    features = torch.zeros(length, FEATURE_WORDS, dtype=torch.int64, device=device)
    history = torch.zeros(2, length, dtype=torch.int32, device=device)
    total_len = torch.zeros(2, dtype=torch.int32, device=device)
    engine = EngineSlots(history, total_len, seeds, temperature), features, slots
    drafter.warm_up(torch.int32, engine[0])
    early, late = [], []
    for turn in range(6):
        problem = turn % 2
        drafter.start_request(0, texts[problem][:prompt], problem_id=problem)
        with no_waiting(device):
            keep_busy(device)
            history[:1].copy_(uploaded[problem])
            total_len[:1].copy_(sizes[prompt + 1])
            drafter.reserve(np.zeros(1, int), np.full(1, prompt + 1))
            early.append((texts[problem], drafter.propose(slots, ones, *engine)))
            total_len[:1].copy_(sizes[length - k])
            drafter.reserve(np.zeros(1, int), np.full(1, length - k))
            late.append(drafter.propose(slots, new, *engine)[1])
            drafter.stop_requests([EndedRequest(0, length - k)])
            history.zero_()  # the next request's, while the rollout is still being copied
    for turn, (text, (drafts, rates)) in enumerate(early):
        expected = text[prompt + 1 : prompt + 1 + k].tolist() if turn >= 2 else [int(text[prompt])] * k
        assert drafts.tolist() == [expected], f"turn {turn}: {drafts.tolist()} for {expected}"
        assert bool((rates > 0).all()) == (turn >= 2)
    assert not any(rates.any() for rates in late), "a text's end has no continuation"
    drafter.check_integrity()


def check_model_drafts(vocab: int, device: torch.device) -> None:
    """A model's draft is drawn in a graph with the target's noise, and the choice between drafts waits for nothing."""
    size, k = 8, 3
    logits = torch.randn(size, vocab, device=device, dtype=torch.bfloat16)
    temperature, seeds = torch.ones(size, device=device), torch.arange(size, device=device)
    positions = torch.full((size,), 5, device=device)
    graph, drawn = captured(lambda: draw(logits, temperature, seeds, positions))
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    layout = Layout.without_drafts(temperature, seeds, positions)
    target = verify_rows(logits, layout, logprobs_mode="processed_logprobs", max_draft_tokens=0)
    assert torch.equal(drawn[0], target.target_token_ids)
    assert torch.equal(drawn[1], target.logprobs.exp())
    chooser = DeviceChoice(size, k, k, device)
    texts = torch.zeros(size, 64, dtype=torch.int32, device=device)
    ones = torch.ones(size, dtype=torch.int32, device=device)
    slots = torch.arange(size, dtype=torch.int32, device=device)
    drafts, rates = torch.ones(size, k, dtype=torch.int64, device=device), torch.full((size, k), 0.1, device=device)
    engine = EngineSlots(texts, 9 * ones, seeds, temperature)
    arguments = slots, ones, engine, (drafts, rates), (2 * drafts, 9 * rates)
    chooser.choose(*arguments)
    with no_waiting(device):
        chosen, *_ = chooser.choose(*arguments)
    assert torch.equal(chosen, 2 * drafts)


if __name__ == "__main__":
    main()
