"""Our verifier against vLLM's V1 rejection sampler, on this machine's device, after a correctness gate.

    python experiments/bench_verify.py [--out experiments/results/bench_verify.jsonl] [--repeats 30]

Both get the same logits and point-mass drafts, return tokens and the emitted tokens' log-probabilities, and alternate
within one process. One JSONL row per cell: p20/p50/p80 of each in microseconds, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

import rollout_spec
from rollout_spec.integrations import vllm_plugin
from rollout_spec.integrations.vllm_cpu import repair_speculation
from rollout_spec.types import SamplingRows
from rollout_spec.verify import reference
from rollout_spec.verify.api import verify

CELLS = [
    {"batch": batch, "k": k, "vocab": vocab, "temperature": temperature}
    for vocab in (128, 32_000)
    for batch, k in ((1, 8), (16, 0), (16, 4), (16, 8))
    for temperature in (0.0, 1.0)
]


class Case:
    """One cell's inputs for both verifiers."""

    def __init__(self, batch: int, k: int, vocab: int, temperature: float, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        self.logits = torch.tensor(rng.standard_normal((batch * (k + 1), vocab)) * 4, dtype=torch.float32).to(device)
        probable = self.logits.argmax(-1).view(batch, k + 1)[:, :k].flatten()
        self.drafts = probable.int()
        self.metadata = SpecDecodeMetadata.make_dummy(probable.view(batch, k).tolist(), device)
        rows = torch.arange(batch * (k + 1), dtype=torch.int32, device=device).view(batch, k + 1)
        self.metadata.target_logits_indices = rows[:, :k].flatten()
        self.metadata.bonus_logits_indices = rows[:, k]
        self.cu = self.metadata.cu_num_draft_tokens
        self.rows = SamplingRows(
            temperature=torch.full((batch,), temperature, device=device),
            seeds=torch.arange(batch, device=device) if temperature > 0 else None,
            positions=torch.full((batch,), 100, device=device),
        )
        empty = torch.empty(0, device=device)
        self.sampling = SamplingMetadata(
            temperature=self.rows.temperature if temperature > 0 else None,
            all_greedy=temperature == 0,
            all_random=temperature > 0,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=empty,
            presence_penalties=empty,
            repetition_penalties=empty,
            output_token_ids=[[] for _ in range(batch)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        self.k = k

    def ours(self) -> Any:
        return verify(
            self.logits, self.drafts, self.cu, self.rows, logprobs_mode="processed_logprobs", max_draft_tokens=self.k
        )

    def gate(self) -> None:
        """Our tokens are the reference's."""
        arrays = (getattr(self.rows, name) for name in SamplingRows.__slots__)
        rows = SamplingRows(*(None if a is None else a.cpu().numpy() for a in arrays))
        expected = reference.verify(self.logits.cpu().numpy(), self.drafts.cpu().numpy(), self.cu.cpu().numpy(), rows)
        np.testing.assert_array_equal(self.ours().output_token_ids.cpu().numpy(), expected.output_token_ids)


def timed(run: Any, device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/bench_verify.jsonl"))
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    vllm_plugin.register()
    if device.type == "cpu":  # what an engine's worker does when it starts
        current_platform.register_triton_kernel_overrides()
    repaired = device.type == "cpu" and repair_speculation()
    sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    provenance = {
        "argv": sys.argv,
        "git": sha.strip(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU, 1 thread",
        "rollout_spec": rollout_spec.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "vllm_repaired": repaired,
    }
    theirs = RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    plain = Sampler(logprobs_mode="processed_logprobs")
    print(" batch  K   vocab    T   ours p50 us   vLLM p50 us   vLLM / ours")
    with args.out.open("w") as out, torch.inference_mode():
        for cell in CELLS:
            case = Case(device=device, **cell)
            case.gate()

            def run_theirs(case: Case = case) -> Any:
                if case.k == 0:
                    return plain(case.logits.clone(), case.sampling)
                return theirs(case.metadata, None, case.logits, case.sampling)

            times: dict[str, list[float]] = {"ours": [], "vllm": []}
            for repeat in range(args.repeats + 3):
                for name, run in (("ours", case.ours), ("vllm", run_theirs)):
                    microseconds = timed(run, device)
                    if repeat >= 3:
                        times[name].append(microseconds)
            ours, vllms = (np.percentile(times[name], [20, 50, 80]).round(1).tolist() for name in ("ours", "vllm"))
            row = {
                **cell,
                "unit": "us",
                "ours": ours,
                "vllm": vllms,
                "ratio": round(vllms[1] / ours[1], 2),
                **provenance,
            }
            out.write(json.dumps(row) + "\n")
            print(
                f"{cell['batch']:6d} {cell['k']:2d} {cell['vocab']:7d} {cell['temperature']:4.1f} "
                f"{ours[1]:13.0f} {vllms[1]:13.0f} {row['ratio']:13.2f}"
            )


if __name__ == "__main__":
    main()
