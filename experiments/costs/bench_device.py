"""The device drafter's kernels on a GPU: the time of a step's update and look-up, after a correctness gate.

    python -m experiments.costs.bench_device [--batch 1 64 512 8] [--resident 1000000] [--out FILE]

The text is made up: a problem's rollouts are copies of one text with Zipf-distributed tokens, in which one token in ten
was drawn again. Each problem has 16 requests in flight, between a quarter of a rollout and a whole
one; the other resident tokens are earlier rollouts. A step adds three tokens to every request, as a verification would,
with made-up features: of each token three candidates, and states so similar that nearly all candidates are looked at.

The gate: texts that repeat are drafted as they go on; a step captured in a CUDA graph drafts the same
as a launched one and waits for nothing (torch's synchronisation check); most requests have drafts.

Reported, p20/p50/p80 in microseconds: `graph`, a captured step replayed; `launched`, three Triton launches from Python.
With `--device cpu`, where `tests/ptx` emulates the kernels, only the last is measured, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.check_gpu import captured, check_drafts, no_waiting
from experiments.engines.scripted import marks, milliseconds_between
from experiments.rows import append, make_parser, origin, quantiles
from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest
from rollout_spec.drafters.device.kernels import EngineSlots
from rollout_spec.features import Features, pack

GROUP = 16
"""Requests of one problem."""
K, NEW_TOKENS = 8, 3
STEPS = 400
"""Most steps that the texts are long enough for."""
VOCAB = 50_000
MUTATED = 0.1
PROMPT = 64


class Batch:
    """An engine's side of a drafter: requests of `batch / GROUP` problems in flight, and their history."""

    def __init__(self, device: torch.device, batch: int, resident: int, *, length: int) -> None:
        self.rng = rng = np.random.default_rng(0)
        num_problems = -(-batch // GROUP)
        max_len = PROMPT + length + NEW_TOKENS * STEPS
        lengths = rng.integers(length // 4, length, batch)
        earlier = max(0, resident - int(lengths.sum())) // (num_problems * max_len)
        self.drafter = DeviceDrafter(
            max_requests=batch, max_model_len=max_len, device=device, max_draft_tokens=K,
            max_resident_tokens=(earlier * num_problems + 1) * max_len, max_problem_tokens=(earlier + 1) * max_len,
        )  # fmt: skip
        self.texts = self.words(num_problems * max_len).reshape(num_problems, max_len)
        texts = np.stack([self.mutate(self.texts[i // GROUP]) for i in range(batch)])
        self.history = torch.from_numpy(texts.astype(np.int32)).to(device)
        self.total_len = torch.full((batch,), PROMPT, dtype=torch.int32, device=device)
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.num_sampled = torch.ones(batch, dtype=torch.int32, device=device)
        self.seeds = torch.arange(batch, dtype=torch.int64, device=device)
        self.temperature = torch.ones(batch, device=device)
        for slot in range(batch):
            if slot % GROUP == 0:
                self.add_history(slot, earlier)
            self.drafter.start_request(slot, texts[slot, :PROMPT].tolist(), problem_id=slot // GROUP)
        self.total_len += torch.from_numpy(lengths.astype(np.int32)).to(device)
        words = [text[PROMPT : PROMPT + length] for text, length in zip(texts, lengths, strict=True)]
        self.say(torch.from_numpy(lengths.astype(np.int32)).to(device), np.concatenate(words))
        self.drafter.reserve(np.arange(batch), np.full(batch, max_len))
        self.drafter.propose(*self.arguments())
        self.say(torch.full_like(self.num_sampled, NEW_TOKENS), self.words(batch * NEW_TOKENS))
        self.resident = int(lengths.sum()) + earlier * num_problems * (max_len - PROMPT)

    def say(self, num_sampled: torch.Tensor, tokens: np.ndarray) -> None:
        """How many tokens every request says in a step, and their features."""
        self.num_sampled.copy_(num_sampled)
        self.first_rows = (num_sampled.cumsum(0) - num_sampled).int()
        self.features = torch.from_numpy(random_features(self.rng, tokens)).to(num_sampled.device)

    def words(self, count: int) -> np.ndarray:
        """Zipf-distributed tokens."""
        return np.minimum(self.rng.zipf(1.2, count), VOCAB) - 1

    def mutate(self, text: np.ndarray) -> np.ndarray:
        """A copy in which one token in ten after the prompt is drawn again."""
        new = np.where(self.rng.random(text.size) < MUTATED, self.words(text.size), text)
        new[:PROMPT] = text[:PROMPT]
        return new

    def add_history(self, slot: int, count: int) -> None:
        """Run `count` rollouts of the slot's problem to their end, and restore the slot's row."""
        problem, before = slot // GROUP, self.history[slot].clone()
        for _ in range(count):
            self.drafter.start_request(slot, self.texts[problem, :PROMPT].tolist(), problem_id=problem)
            self.history[slot] = torch.from_numpy(self.mutate(self.texts[problem]).astype(np.int32))
            self.total_len[slot] = self.history.shape[1]
            tokens = self.history[slot, PROMPT:].cpu().numpy()
            features = torch.from_numpy(random_features(self.rng, tokens)).to(self.slots.device)
            row = self.slots[slot : slot + 1]
            num_sampled = torch.full_like(row, len(tokens))
            self.drafter.reserve(np.array([slot]), np.array([self.history.shape[1]]))
            self.drafter.propose(row, num_sampled, self.engine(), features, torch.zeros_like(row))
            self.drafter.stop_requests([EndedRequest(slot, self.history.shape[1])])
        self.history[slot], self.total_len[slot] = before, PROMPT

    def engine(self) -> EngineSlots:
        return EngineSlots(self.history, self.total_len, self.seeds, self.temperature)

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `DeviceDrafter.propose`."""
        return self.slots, self.num_sampled, self.engine(), self.features, self.first_rows

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Add three tokens to every request, and draft."""
        self.total_len += NEW_TOKENS
        return self.drafter.propose(*self.arguments())


def random_features(rng: np.random.Generator, tokens: np.ndarray) -> Features:
    """Features of tokens, of which each had a probability of 0.6: signatures that differ in up to eight bits."""
    signatures = np.stack((rng.integers(0, 1 << 8, tokens.size), np.ones(tokens.size)), 1).astype(np.uint64)
    tops = np.stack((tokens, tokens + 1, tokens + 2), 1).astype(np.int32)
    return pack(signatures, tops, np.log(np.tile([0.6, 0.2, 0.1], (tokens.size, 1))))


def check_graph(batch: Batch) -> Callable[[], Any]:
    """Check that a captured step drafts as a launched one and never waits; return what replays it.

    Raises:
        AssertionError: it does not.
    """
    with no_waiting(batch.slots.device):
        batch.step()
    graph, (drafts, _) = captured(batch.step)
    graph.replay()
    replayed = drafts.clone()
    launched, _ = batch.drafter.propose(*batch.arguments())  # nothing is new: the same step again
    assert torch.equal(replayed, launched), "a captured step drafts otherwise"
    return graph.replay


def time_us(step: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds on the device of each call."""
    mark = marks()
    marked = [mark()]
    for _ in range(repeats):
        step()
        marked.append(mark())
    return (1e3 * milliseconds_between(marked)).tolist()


def main() -> None:
    """Check, measure and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 512, 8], help="time may run out")
    parser.add_argument("--resident", nargs="+", type=int, default=[1_000_000, 100_000])
    parser.add_argument("--length", type=int, default=1500, help="tokens of a rollout")
    parser.add_argument("--repeats", type=int, default=60, help="up to 100: the texts end")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_device needs a GPU; the tests emulate the kernels")
    check_drafts(device)  # the gate
    on_gpu = device.type == "cuda"
    about = origin(torch.cuda.get_device_name() if on_gpu else None)
    columns = "graph us   launched us" if on_gpu else "launched us"
    print(f"batch   resident   {columns}   drafted per request")
    for resident in args.resident:
        for size in args.batch:
            batch = Batch(device, size, resident, length=args.length)
            times = {}
            if on_gpu:
                times["graph"] = quantiles(time_us(check_graph(batch), args.repeats))
            times["launched"] = quantiles(time_us(batch.step, args.repeats))
            rates = batch.step()[1]
            drafted = float((rates > 0).float().sum(1).mean())
            assert float((rates[:, 0] > 0).float().mean()) > 0.5, "most requests have nothing to draft"
            figures = {"batch": size, "resident": batch.resident, "k": K, "drafted": drafted, "features": True}
            for name, us in times.items():
                append(args.out, {"benchmark": "device", **figures, "mode": name, "us": us, **about})
            p50 = [f"{us[1]:9.1f}" for us in times.values()]
            print(f"{size:5d} {batch.resident:10d} {'  '.join(p50)}   {drafted:6.2f}", flush=True)


if __name__ == "__main__":
    main()
