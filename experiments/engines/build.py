"""Engines for benchmarks: `build_engine`, the modes that are compared, models with made-up weights, and `Runs`.

none         vLLM as it comes, without speculation
ngram, ngram_gpu, suffix
             vLLM's own drafters, the last where arctic-inference is installed
model        vLLM with a model drafter, its option `speculative_config`
off          ours without speculation: our sampler and its noise, no drafts
all          ours with the drafter on the host, every draft verified
budget       the same under its budget, our default where none is drafted on the device
device       ours with the drafter on the device, our default on a GPU in vLLM's V2 runner
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from experiments.drafting.peers import find_arctic

MODES = ("none", "ngram", "ngram_gpu", "suffix", "model", "off", "all", "budget", "device")
OURS = ("off", "all", "budget", "device")
WORDS_ALONE = {"features": False}
"""`drafter_options` without what the target saw."""
SHAPES = {
    # layers, hidden, intermediate, heads, key-value heads, vocabulary: Qwen2.5-1.5B and -7B
    "1.5b": (28, 1536, 8960, 12, 2, 151_936),
    "7b": (28, 3584, 18944, 28, 4, 152_064),
    "tiny": (2, 64, 128, 2, 1, 50_304),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "2",
}  # fmt: skip
ROOT = Path(__file__).parents[2]


# -- engines ---------------------------------------------------------------------------------------------------------


def build_engine(
    policy: str | Path, mode: str = "budget", k: int = 8, *, options: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    """A `vllm.LLM`, in float32 and without CUDA graphs unless `arguments` say otherwise.

    Args:
        policy: The model's folder.
        mode: One of MODES.
        k: Drafted tokens per request and step.
        options: Fields of `RolloutSpecConfig` on top of the mode's.
        arguments: Of `vllm.LLM`.
    """
    from vllm import LLM

    if mode not in ("none", *OURS):
        repair_vllm_on_cpu()
    if mode == "suffix":
        find_arctic()
    defaults = {"dtype": "float32", "enforce_eager": True}
    return LLM(str(policy), **{**defaults, **mode_arguments(mode, k, **options or {}), **arguments})


def repair_vllm_on_cpu() -> None:
    """Make vLLM's own verification use each request's temperature on a CPU, as it does on a GPU.

    Its CPU build (0.31) leaves what `expand_batch_to_tokens` returns uninitialised.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)

    if not torch.cuda.is_available():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def mode_arguments(mode: str, k: int, **options: Any) -> dict[str, Any]:
    """The keyword arguments of `vllm.LLM` that make a mode."""
    from rollout_spec import engine_kwargs

    if mode == "none":
        return {}
    if mode in ("ngram", "ngram_gpu"):
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        return {"speculative_config": {"method": mode, "num_speculative_tokens": k, **lookup}}
    if mode == "suffix":
        return {"speculative_config": {"method": mode, "num_speculative_tokens": k}}
    if mode == "model":
        return options
    if mode == "off":
        return engine_kwargs(speculation=False)
    drafter = "device" if mode == "device" else "auto" if "speculative_config" in options else "history"
    return engine_kwargs(**{"num_speculative_tokens": k, "drafter": drafter, "budget": mode != "all", **options})


def command(llm: Any, *arguments: Any) -> Any:
    """What the first rank of one of our engines answers, e.g. to "stats"."""
    return llm.collective_rpc("rollout_spec", args=arguments)[0]


def write_model(shape: str, folder: Path) -> None:
    """A Llama configuration of the given shape; vLLM makes the weights up."""
    layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def made_up_arguments(args: argparse.Namespace, cpu_blocks: int) -> dict[str, Any]:
    """Arguments of `build_engine` for a model of `write_model`. `args` are those of `add_arguments`."""
    import torch

    memory: dict[str, Any] = {"num_gpu_blocks_override": cpu_blocks}
    if torch.cuda.is_available():
        memory = {"gpu_memory_utilization": 0.8}
        if args.kv_gib is not None:  # nothing is measured then, so other engines may start and end meanwhile
            memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(args.kv_gib * 2**30)}
    return {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": args.dtype, "enforce_eager": args.eager,
        "logprobs_mode": "processed_logprobs", "seed": 0, **memory,
    }  # fmt: skip


# -- processes -------------------------------------------------------------------------------------------------------


def write_result(path: Path, result: Any) -> None:
    """Write a process's result for `Runs`, which reads it whole even if the process is stopped meanwhile."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(path)


def add_arguments(parser: argparse.ArgumentParser, modes: Sequence[str]) -> None:
    """What benchmarks of made-up models share: the engine, what to run, and what `Runs` passes on."""
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(modes))
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--kv-gib", type=float, help="GiB of the KV cache, if not what is left of 0.8 of the GPU")
    parser.add_argument("--until", type=float, default=inf, help="by this time, as `date +%%s` says it, stop")
    parser.add_argument("--logs", type=Path, help="keep all that the engines print in this folder")
    parser.add_argument("--only", choices=modes, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


class Runs:
    """Runs a script again and again, each time in a new process, for one engine.

    The process writes its result to the file named by `--result` with `write_result`, as often as there is more of it.
    Nothing is started that could not end in time, to judge by what was started before.

    Args:
        module: The script's name, e.g. `experiments.engines.bench_phase`.
        argv: Its arguments, to which each run adds some.
        logs: Folder for all that the processes print; None: it is lost.
        until: Seconds since the epoch.
    """

    def __init__(self, module: str, argv: Sequence[str], logs: Path | None, until: float = inf) -> None:
        self._command = [sys.executable, "-m", module, *argv]
        self._logs = logs
        self._until = until
        self._longest = 0.0
        self.failed: list[str] = []
        self.not_run: list[str] = []

    def run(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
        """What a run wrote last, also before it failed; None if nothing. A line says what went wrong.

        Args:
            name: Of its log.
            arguments: More of the script's.
            environment: More variables.
        """
        began = time.time()
        left = self._until - began
        if left <= self._longest:
            print(f"{name}: not run, only {max(left, 0):.0f} s are left", flush=True)
            self.not_run.append(name)
            return None
        result, ended_well = self._start(name, arguments, environment or {}, left)
        self._longest = max(self._longest, time.time() - began)
        if not ended_well:
            self.failed.append(name)
        return result

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], left: float
    ) -> tuple[Any, bool]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = self._logs or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result, log = Path(temporary, "result.json"), folder / f"{name}.log"
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            variables = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **environment}
            command = [*self._command, *arguments, "--result", str(result)]
            with log.open("w") as file:
                try:
                    code: int | str = subprocess.run(
                        command, env=variables, stdout=file, stderr=subprocess.STDOUT, check=False,
                        timeout=None if left == inf else left,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    code = f"no answer after {left:.0f} s"
            found = json.loads(result.read_text()) if result.exists() else None
            ended_well = not code and found is not None
            if not ended_well:
                last = log.read_text().strip().splitlines()[-1:]
                what = "does not run" if found is None else "stopped early"
                print(f"  {what} ({code}): {last}" + (f"; see {log}" if self._logs else ""), flush=True)
            return found, ended_well

    def finish(self) -> None:
        """Say what was not run. Raises SystemExit if something has failed."""
        if self.not_run:
            print(f"not run for want of time: {', '.join(self.not_run)}")
        if self.failed:
            raise SystemExit(f"failed: {', '.join(self.failed)}")
