"""Instructions, bytes and sectors of a step's kernels at the sizes of an engine, beside an H200's roofline.

    python -m tests.ptx.count

Counts of PTX, not times: ptxas may make fewer or more instructions of it, and caches spare reads.
"""

from __future__ import annotations

import torch

from tests.ptx import driver, machine

BYTES_PER_SECOND = 4.8e12
INSTRUCTIONS_PER_SECOND = 132 * 4 * 1.98e9
"""Of warps: an H200's multiprocessors issue four in a clock."""


def verify_step() -> None:
    """32 requests with 3 drafts each in Qwen's vocabulary, bf16, with features; all drafts are accepted."""
    from rollout_spec.types import SamplingBatch
    from tests.verify.batches import kernel_verify

    size, k, vocab_size = 32, 3, 151_936
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(size * (k + 1), vocab_size, generator=generator) * 4).bfloat16()
    rows = SamplingBatch(torch.ones(size), torch.arange(size), torch.arange(size))
    hidden = torch.randn(size * (k + 1), 1536, generator=generator)
    cu = torch.arange(k, size * k + 1, k, dtype=torch.int32)
    first = kernel_verify(logits, torch.zeros(size * k, dtype=torch.int32), cu, rows, after_difference=True)
    drafts = first.target_token_ids.reshape(size, k + 1)[:, :k].reshape(-1).int()
    machine.totals.clear()
    kernel_verify(logits, drafts, cu, rows, logprobs_mode="processed_logprobs", hidden=hidden)


def draft_step() -> None:
    """32 requests of two problems, each with 4 earlier rollouts of 2,000 tokens, K = 8."""
    from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest

    size, length = 40, 2000
    drafter = DeviceDrafter(max_requests=size, max_model_len=4096, device=torch.device("cpu"), max_draft_tokens=8)
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50, (size, 4096), generator=generator, dtype=torch.int32)
    lengths = torch.full((size,), length, dtype=torch.int32)
    seeds, temperature = torch.arange(size), torch.ones(size)
    for slot in range(size):
        drafter.start_request(slot, history[slot, :100].tolist(), problem_id=slot % 2)
    slots = torch.arange(size, dtype=torch.int32)
    drafter.extend(slots, history, lengths)
    drafter.stop_requests([EndedRequest(slot, length) for slot in range(32, size)])
    slots = slots[:32]
    ones = torch.ones(32, dtype=torch.int32)
    drafter.propose(slots, ones, history, lengths, seeds, temperature)
    machine.totals.clear()
    drafter.propose(slots, ones, history, lengths + 1, seeds, temperature)


def main() -> None:
    """Print a row per kernel."""
    driver.emulate()
    print("| Kernel | blocks | instructions | KB read | KB written | memory, issue (µs) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for step in (verify_step, draft_step):
        step()
        for name, counts in machine.totals.items():
            read, written = 32 * counts.sectors_read, 32 * counts.sectors_written
            memory = (read + written) / BYTES_PER_SECOND * 1e6
            issue = counts.instructions / INSTRUCTIONS_PER_SECOND * 1e6
            moved = f"{read / 1e3:,.0f} | {written / 1e3:,.0f}"
            print(f"| `{name}` | {counts.blocks:,} | {counts.instructions:,} | {moved} | {memory:.1f}, {issue:.1f} |")


if __name__ == "__main__":
    main()
