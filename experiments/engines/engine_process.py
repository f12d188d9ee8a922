"""Engines for benchmarks: models of real shapes with made-up weights, and a process for each engine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


SEARCH_PATH = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
}
"""So that new processes find `experiments`, wherever they run."""


class TimeBudget:
    """Starts nothing that could not end in time, to judge by what was started before.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.perf_counter() + seconds
        self._longest = 0.0

    @contextmanager
    def run(self, name: str) -> Iterator[float | None]:
        """Time what runs inside. Gives the seconds that are left; None, and a line that says so: too few."""
        began = time.perf_counter()
        left = self._ends - began
        if left <= self._longest:
            print(f"{name}: not run, only {max(left, 0):.0f} s are left", flush=True)
            yield None
            return
        yield left
        self._longest = max(self._longest, time.perf_counter() - began)


def add_arguments(parser: argparse.ArgumentParser, modes: Sequence[str]) -> None:
    """What benchmarks of engines share: the engine, what to run, and what `run_again` passes on."""
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(modes))
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--seconds", type=float, default=570, help="start no mode that could not end by then")
    parser.add_argument("--logs", type=Path, help="keep all that the engines print in this folder")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    parser.add_argument("--only", choices=modes, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def log_file(folder: Path | None, name: str) -> Path | None:
    """FOLDER/NAME.log; None where nothing is to be kept."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


HEAD = "eagle"
"""Folder, in that of a model, of an EAGLE head for it."""


def write_model(shape: str, folder: Path) -> None:
    """Llama configurations of the given shape and of an EAGLE head for it; vLLM makes the weights up."""
    layers, hidden, intermediate, heads, kv_heads, vocab = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / HEAD).mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / HEAD / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def run_again(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path | None,
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> Any:
    """Run a script in a new process, which writes its result as JSON to the file named by `--result`.

    Args:
        module: The script's name, e.g. `experiments.engines.bench_phase`.
        arguments: The script's.
        log: Gets all that the process prints.
        timeout: Seconds after which it is killed.

    Returns:
        The result; None if the process fails, of which the last line and the log's name are printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, printed = Path(folder, "result.json"), log or Path(folder, "log")
        with printed.open("w") as file:
            command = [sys.executable, "-m", module, *arguments, "--result", str(result)]
            try:
                code: int | str = subprocess.run(
                    command, env={**os.environ, **SEARCH_PATH, **ENVIRONMENT, **environment}, stdout=file,
                    stderr=subprocess.STDOUT, timeout=timeout, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = f"no answer after {timeout:.0f} s"
        if code or not result.exists():
            last = printed.read_text().strip().splitlines()[-1:]
            print(f"  does not run ({code}): {last}" + (f"; see {log}" if log else ""), flush=True)
            return None
        return json.loads(result.read_text())
