"""What a training loses when it is killed at random moments, and how warm it is afterwards.

    python -m experiments.history.bench_resume [--kills 20] [--policy demo/policy-v1-seed0] [--out FILE]

Trains the demo's policy with GRPO in TRL, a checkpoint after each step, in three ways: without a break; killed at
random moments (SIGKILL, also while it starts or writes) and resumed, with `history_dir`; and the same without
`history_dir`. After each kill it checks, as gates:

- no file of history is damaged, and the next run refuses none;
- every rollout of the steps before the one that was running is in the history.

Printed and written: tokens per request-step of the first step after a restart, of the last one before it, and of the
same step of the training without a break. Drafts are all verified (`budget=False`): what a budget decides depends on
time. The policy is the one that `rollout-spec demo` trains first.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.rows import append, origin
from rollout_spec.history.shards import Origin, read_shard
from rollout_spec.history.storage import open_storage

NUM_PROBLEMS = 12
PROMPTS_PER_STEP = 2
GROUP_SIZE = 8
MAX_COMPLETION_TOKENS = 384
JOURNAL = "journal.jsonl"
HISTORY = "rollout_spec_history"
LONGEST_LIFE = 8.0
"""Seconds within which a run is killed, from its first generation on."""


def digest(tokens: Any) -> str:
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).hexdigest()


# -- the training, in a process of its own ---------------------------------------------------------------------------


def train(policy: str, folder: Path, num_steps: int, *, keeps_history: bool) -> None:
    """Train until `num_steps`, from the last checkpoint in `folder` if there is one."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    from rollout_spec import RolloutSpecGenerator
    from rollout_spec.demo.task import make_problem, prompt_text, reward

    class Journal(RolloutSpecGenerator):
        """Writes a line for each generation."""

        def generate(self, prompts: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.stats()
            self.write({"step": self._step, "began": True})
            outputs = super().generate(prompts, sampling_params, *args, **kwargs)
            after = self.stats()
            counted = {name: after[name] - before[name] for name in ("emitted_tokens", "request_steps")}
            rollouts = [digest(completion.token_ids) for output in outputs for completion in output.outputs]
            self.write({"step": self._step, "rollouts": rollouts, **counted})
            return outputs

        def write(self, line: dict[str, Any]) -> None:
            with (folder / JOURNAL).open("a") as file:
                file.write(json.dumps(line) + "\n")

    torch.set_num_threads(1)
    rng, prompts = random.Random(0), {}
    while len(prompts) < NUM_PROBLEMS:
        prompts[prompt_text(make_problem(rng))] = None
    engine = {"dtype": "float32", "enforce_eager": True, "use_tqdm_on_load": False}
    callback = Journal(llm_kwargs=engine, budget=False, history_dir=True if keeps_history else None)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
        reward_funcs=lambda prompts, completions, **_: list(map(reward, prompts, completions)),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            seed=0,
            max_steps=num_steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * GROUP_SIZE,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_COMPLETION_TOKENS,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=448,
            logging_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[callback],
    )
    callback.write({"loaded": callback.llm.collective_rpc("rollout_spec", args=("history",))[0]})
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder, get_last_checkpoint))


def last_whole_checkpoint(folder: Path, find: Any) -> str | None:
    """The last checkpoint. One that was being written when the trainer was killed is removed."""
    while (checkpoint := find(str(folder))) is not None:
        if (Path(checkpoint) / "trainer_state.json").exists() and (Path(checkpoint) / "rng_state.pth").exists():
            return str(checkpoint)
        subprocess.run(["rm", "-r", checkpoint], check=True)
    return None


# -- what kills it and looks at what is left -------------------------------------------------------------------------


def start(args: argparse.Namespace, folder: Path, mode: str, log: Any) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "experiments.history.bench_resume",
        "--policy",
        args.policy,
        "--steps",
        str(args.steps),
        "--child",
        mode,
    ]
    return subprocess.Popen([*command, "--folder", str(folder)], stdout=log, stderr=log, start_new_session=True)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """Its lines; the last one may have been cut."""
    lines = []
    for line in (folder / JOURNAL).read_text().splitlines() if (folder / JOURNAL).exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def check_history(folder: Path, journal: list[dict[str, Any]]) -> dict[str, int]:
    """Gates. Returns how much there is, and how many of the running step's rollouts are missing."""
    storage = open_storage(folder / HISTORY)
    kept: set[str] = set()
    for name in storage.sizes():
        for entry in read_shard(storage, name, Origin())[1]:  # raises if it is damaged
            kept.add(digest(entry.rollout.tokens))
    missing = {"finished": 0, "running": 0}
    for generations in by_run(journal):
        for line in generations[:-1]:
            missing["finished"] += len(set(line["rollouts"]) - kept)
        missing["running"] = sum(len(set(line["rollouts"]) - kept) for line in generations[-1:])
    if missing["finished"]:
        raise SystemExit(f"{missing['finished']} rollouts of finished steps are missing: {folder}")
    refused = [line["loaded"]["folder"]["shards_refused"] for line in journal if line.get("loaded")]
    if any(refused):
        raise SystemExit(f"a run refused shards of its own history: {folder}")
    return {"rollouts": len(kept), "missing_of_running_step": missing["running"]}


def run_and_kill(args: argparse.Namespace, folder: Path, mode: str, num_kills: int, rng: random.Random) -> list[Any]:
    """Kill and resume until the training has been killed so often. Returns what was found after each kill."""
    found = []
    with (folder / "log").open("ab") as log:
        while len(found) < num_kills:
            num_lines = len(read_journal(folder))
            process = start(args, folder, mode, log)
            deadline = time.monotonic() + 300
            # Every fourth run is killed before its first generation, the others some time after it began.
            waits_for = num_lines + (0 if len(found) % 4 == 3 else 2)
            while len(read_journal(folder)) < waits_for and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(rng.random() * LONGEST_LIFE)
            if process.poll() is not None:
                if process.returncode:
                    raise SystemExit(f"the training failed: {folder / 'log'}")
                break  # it has reached its last step
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found.append(check_history(folder, read_journal(folder)) if mode == "history" else {})
            print(f"{mode}: killed {len(found)} times, {found[-1]}", flush=True)
    return found


def tokens_per_step(line: dict[str, Any]) -> float:
    return float(line["emitted_tokens"] / line["request_steps"])


def by_run(journal: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The whole generations of each run; the last one's step was running when it was killed."""
    runs: list[list[dict[str, Any]]] = []
    for line in journal:
        if "loaded" in line:
            runs.append([])
        elif "rollouts" in line:
            runs[-1].append(line)
    return runs


def around_restarts(journal: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(the last whole generation before each restart, the first one after it)."""
    runs = [generations for generations in by_run(journal) if generations]
    return [(before[-1], after[0]) for before, after in itertools.pairwise(runs)]


def main() -> None:
    """Run all three trainings, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="demo/policy-v1-seed0")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000, help="the training would end here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=["unbroken", "history", "nothing"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args.policy, args.folder, args.steps, keeps_history=args.child == "history")
        return
    temporary = tempfile.mkdtemp()  # stays if a gate fails
    folders = {mode: Path(temporary) / mode for mode in ("history", "nothing", "unbroken")}
    for folder in folders.values():
        folder.mkdir()
    rng = random.Random(args.seed)
    found = run_and_kill(args, folders["history"], "history", args.kills, rng)
    run_and_kill(args, folders["nothing"], "nothing", min(args.kills, 5), rng)
    journals = {mode: read_journal(folder) for mode, folder in folders.items()}
    restarts = {mode: around_restarts(journal) for mode, journal in journals.items()}
    args.steps = 1 + max(after["step"] for pairs in restarts.values() for _, after in pairs)
    with (folders["unbroken"] / "log").open("ab") as log:
        start(args, folders["unbroken"], "unbroken", log).wait()
    unbroken = {line["step"]: line for line in read_journal(folders["unbroken"]) if "rollouts" in line}
    for mode in ("history", "nothing"):
        pairs = [pair for pair in restarts[mode] if pair[1]["step"] in unbroken]
        steps = np.array([
            [tokens_per_step(line) for line in (before, after, unbroken[after["step"]])] for before, after in pairs
        ])  # fmt: skip
        ratios = {name: steps[:, 1] / steps[:, column] for name, column in (("before", 0), ("unbroken", 2))}
        row = {
            "benchmark": "resume",
            "history_dir": mode == "history",
            "kills": len(found) if mode == "history" else None,
            "after_each_kill": found if mode == "history" else None,
            "restarts": len(pairs),
            "tokens_per_step": dict(zip(("before", "after", "unbroken"), steps.mean(0).round(3).tolist(), strict=True)),
            # Steps have other prompts, so the ratio of two steps says little, and its mean has this standard error.
            **{
                f"after_over_{name}": [round(float(r.mean()), 3), round(float(r.std() / len(r) ** 0.5), 3)]
                for name, r in ratios.items()
            },
            "by_restart": steps.round(3).tolist(),
            **origin(packages=["trl", "pyarrow"]),
        }
        append(args.out, row)
        print(
            f"{mode}: { ({name: value for name, value in row.items() if name.startswith(('tokens', 'after_over'))}) }"
        )
    shutil.rmtree(temporary)


if __name__ == "__main__":
    from rollout_spec.demo.run import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main()
