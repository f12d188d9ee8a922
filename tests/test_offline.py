"""Nothing of ours talks to another machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.conftest import environment_for_a_process
from tests.test_doctor import a_report

ROOT = Path(__file__).parent.parent

GUARDED = """
import json, sys
from tests import network_guard
network_guard.install()
{code}
print("attempts", json.dumps(network_guard.attempts))
"""

WHAT_WE_DO = """
import numpy as np
from rollout_spec.cli import main
from rollout_spec.drafters import build_drafter
for name in ("history", "suffix", "ngram"):
    drafter = build_drafter(name, max_draft_tokens=4)
    drafter.start_request("a", np.arange(9, dtype=np.int32), problem_id=1, seed=1)
    drafter.extend("a", np.array([1, 2, 3, 1, 2, 3, 1], np.int32))
    drafter.propose(["a"], [4])
    drafter.stop_request("a")
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert not code, (arguments, code)
"""

ENGINE = """
from tests import conftest
from tests.integrations.engines import build, generate, mixed_params, stats_of
from rollout_spec import engine_kwargs
if __name__ == "__main__":
    llm = build(sys.argv[1], **engine_kwargs(num_speculative_tokens=4, budget=False, history_dir=sys.argv[2]))
    for _ in range(2):
        generate(llm, mixed_params(6, max_tokens=30, ignore_eos=True))
    assert stats_of(llm)["accepted_tokens"] > 0
    llm.collective_rpc("rollout_spec", args=("report",))
"""


def attempts_of(code: str, *arguments: object) -> list[str]:
    """Who tried to reach another machine while this code ran in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED.format(code=code), *map(str, arguments)],
        env=environment_for_a_process(PYTHONPATH=str(ROOT), VLLM_USE_V2_MODEL_RUNNER="0"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("attempts "))
    return json.loads(line.removeprefix("attempts "))


@pytest.mark.exhaustive
def test_drafters_and_commands_stay_on_this_machine(tiny_model, tmp_path):
    report, traces, history = tmp_path / "report.json", tmp_path / "rollouts.parquet", tmp_path / "history"
    report.write_text(json.dumps(a_report()))
    rows = [
        {"prompt_id": "a", "sample_id": i, "epoch": i // 2, "prompt_tokens": [1, 2], "completion_tokens": [3, 4, 5] * 9}
        for i in range(4)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), traces)
    commands = [
        ["doctor", report],
        ["estimate", traces, "--gpu", "h100", "--model", "7b"],
        ["history", "import", traces, "--into", history, "--tokenizer", tiny_model],
        ["history", "stats", history],
    ]
    assert attempts_of(WHAT_WE_DO, json.dumps([[str(part) for part in command] for command in commands])) == []


@pytest.mark.engine
@pytest.mark.exhaustive
def test_so_does_what_we_add_to_an_engine(tiny_model, tmp_path):
    """vLLM itself asks for this machine's address by a connection, and goes on without an answer."""
    ours = {"rollout_spec", "drafters", "integrations"}
    assert not [path for path in attempts_of(ENGINE, tiny_model, tmp_path) if Path(path).parts[0] in ours]
