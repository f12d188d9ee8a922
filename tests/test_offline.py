"""Nothing of ours talks to another machine."""

import ipaddress
import json
import sys
import sysconfig
import traceback

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from rollout_spec import cli, engine_kwargs
from rollout_spec.drafters import build_drafter
from tests.conftest import ROOT
from tests.test_doctor import a_report

pytestmark = pytest.mark.exhaustive

OURS = tuple(str(ROOT / name) for name in ("rollout_spec", "drafters", "integrations"))
STANDARD = sysconfig.get_paths()["stdlib"]
CONNECTIONS = ("socket.connect", "socket.sendto", "socket.sendmsg")
QUESTIONS = ("socket.getaddrinfo", "socket.gethostbyname")


@pytest.fixture
def attempts():
    """A list that grows by the file behind each attempt to reach another machine, none of which succeeds."""
    found, is_on = [], True

    def look(event, arguments):
        host = None
        if event in CONNECTIONS and isinstance(arguments[1], tuple):  # others are AF_UNIX, or connected before
            host = arguments[1][0]
        elif event in QUESTIONS:
            host = arguments[0]
        host = host.decode() if isinstance(host, bytes) else host
        if is_on and host and host != "localhost" and not is_this_machines(host):
            files = [frame.filename for frame in traceback.extract_stack()[:-1]]
            found.append(next(f for f in reversed(files) if "site-packages" in f or not f.startswith(STANDARD)))
            raise OSError(f"no network: {event} to {host}")

    sys.addaudithook(look)
    yield found
    is_on = False


def is_this_machines(host):
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def test_drafters_and_commands_stay_on_this_machine(tiny_model, tmp_path, attempts):
    report, traces, history = tmp_path / "report.json", tmp_path / "rollouts.parquet", tmp_path / "history"
    report.write_text(json.dumps(a_report()))
    rows = [
        {"prompt_id": "a", "sample_id": i, "epoch": i // 2, "prompt_tokens": [1, 2], "completion_tokens": [3, 4, 5] * 9}
        for i in range(4)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), traces)
    for name in ("history", "suffix", "ngram"):
        drafter = build_drafter(name, max_draft_tokens=4)
        drafter.start_request("a", np.arange(9, dtype=np.int32), problem_id=1, seed=1)
        drafter.extend("a", np.array([1, 2, 3, 1, 2, 3, 1], np.int32))
        drafter.propose(["a"], [4])
        drafter.stop_request("a")
    for arguments in (
        ["doctor", report],
        ["estimate", traces, "--gpu", "h100", "--model", "7b"],
        ["history", "import", traces, "--into", history, "--tokenizer", tiny_model],
        ["history", "stats", history],
    ):
        assert cli.main(list(map(str, arguments))) == 0, arguments
    assert attempts == []


@pytest.mark.engine
def test_so_does_what_we_add_to_an_engine(tiny_model, tmp_path, attempts):
    """vLLM itself asks for this machine's address by a connection, and goes on without an answer."""
    from tests.integrations.engines import build, generate, mixed_params, stats_of

    llm = build(tiny_model, **engine_kwargs(num_speculative_tokens=4, budget=False, history_dir=str(tmp_path)))
    for _ in range(2):
        generate(llm, mixed_params(6, max_tokens=30, ignore_eos=True))
    assert stats_of(llm)["accepted_tokens"] > 0
    llm.collective_rpc("rollout_spec", args=("report",))
    assert not [path for path in attempts if path.startswith(OURS)]
