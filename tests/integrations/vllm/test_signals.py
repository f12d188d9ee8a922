"""Processes that are told to end, or are killed: what had ended is in the folder, and what is there is whole."""

import signal
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

import vllm

from rollout_spec.history.folder import HistoryFolder, Origin
from tests.conftest import environment_for_a_process
from tests.integrations.engines import own_processes
from tests.integrations.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what they start in the background ignore Ctrl-C
from vllm import LLM, SamplingParams
from rollout_spec import engine_kwargs
from rollout_spec.history import exchange
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=64, max_num_seqs=4,
              num_gpu_blocks_override=50, **engine_kwargs(history_dir=sys.argv[2]))
    exchange.SECONDS_TO_WRITE = 0.5  # the problem is never idle for long
    for number in range(4, 4 * int(sys.argv[3]) + 1, 4):
        llm.generate([{"prompt_token_ids": [1, 4, 9]}] * 4, SamplingParams(max_tokens=8, ignore_eos=True),
                     use_tqdm=False)
        print(number, flush=True)
"""


def found_in(folder):
    """How many rollouts are there; none of the files is damaged."""
    reader = HistoryFolder(str(folder), Origin())
    rollouts = reader.load(10**9)
    assert reader.stats.files_refused == 0
    assert all(rollout.tokens.size == 8 for rollout in rollouts)
    return len(rollouts)


def start(model, folder, num_generations, **variables):
    """A script of that many generations of four rollouts, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model), str(folder), str(num_generations)],
        env=environment_for_a_process(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@own_processes
def test_a_script_that_is_killed_or_interrupted(tiny_model, tmp_path):
    """Ctrl-C lets Python end in its own way, which writes the rest. SIGKILL does not."""
    before = 0
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start(tiny_model, tmp_path, 10**8, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        assert process.stdout is not None
        said: list[int] = []
        num_files = len(list(tmp_path.glob("*/*.parquet")))
        for line in filter(str.isdigit, map(str.strip, process.stdout)):
            said.append(int(line))
            if len(said) >= 40 and len(list(tmp_path.glob("*/*.parquet"))) > num_files:
                break
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
        assert process.returncode != 0, errors[-4000:]
        said += [int(line) for line in output.split() if line.isdigit()]
        found = found_in(tmp_path) - before
        assert 0 < found <= said[-1] + 4
        if number == signal.SIGINT:
            assert found >= said[-1]
        before += found


@own_processes
def test_a_script_that_ends_leaves_all_that_it_has_said(tiny_model, tmp_path):
    """Its engine's process is forked, as is vLLM's default, and ends without exit handlers."""
    forked = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    process = start(tiny_model, tmp_path, 1, **forked)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    assert found_in(tmp_path) == 4


@own_processes
@pytest.mark.skipif(vllm.__version_tuple__[:2] < (0, 31), reason="older versions may have no --shutdown-timeout")
def test_a_server_that_is_told_to_end_leaves_all_that_it_has_said(tiny_model, tmp_path):
    """By itself vLLM kills its engine at once, as in the first test."""
    waits = {"shutdown-timeout": 60}
    server = Server(tiny_model, tmp_path / "log", arguments=waits, history_dir=str(tmp_path / "history"))
    for _ in range(3):
        server.complete(n=4, max_tokens=8, ignore_eos=True)
    server.stop()
    assert found_in(tmp_path / "history") == 12
