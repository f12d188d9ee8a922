"""The `rollout-spec` command: what it needs, and what it refuses in one line that names the value."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_spec import __version__, cli
from tests.test_doctor import a_report

FILES = {
    "empty": b"",
    "brackets": b"[" * 200_000,
    "old": b'{"format": 0}',
    "damaged": b'{"format": 6}',
    "whole": json.dumps(a_report()).encode(),
}
COMMANDS = [
    ("doctor {empty}", "{empty} is no JSON: "),
    ("doctor {brackets}", "{brackets} is no JSON: "),
    ("doctor {old}", "{old} has a report of format 0, and 6 is read here"),
    ("doctor {damaged}", "{damaged} is damaged: KeyError('stats')"),
    ("doctor {folder}/missing", "No such file or directory: '{folder}/missing'"),
    ("doctor {folder}", "No such file or directory: '{folder}/rollout_spec.json'"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Paths by what is wrong with them."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return {"folder": folder, **{name: folder / name for name in FILES}}


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_command_that_is_refused(command, message, places, capsys):
    assert cli.main([word.format_map(places) for word in command.split()]) == 2
    printed, said = capsys.readouterr()
    assert (printed, said.count("\n")) == ("", 1)
    assert said.startswith("rollout-spec: ")
    assert message.format_map(places) in said


WITHOUT_NUMBA = """
for name in ("numba", "torch", "vllm"):  # the other two take long to import
    sys.modules[name] = None
"""


def run(*arguments, before="", **options):
    code = f"import sys\n{before}\nfrom rollout_spec.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_help_and_doctor_need_no_numba(places):
    def printed_by(*arguments):
        done = run(*arguments, before=WITHOUT_NUMBA, stdout=subprocess.PIPE)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    for arguments, status, line in (
        (["estimate", "--help"], 0, "usage: rollout-spec estimate"),
        (["--version"], 0, __version__),
        (["doctor", places["whole"]], 0, "What to do"),
        (["doctor"], 1, "problem  numba cannot be used"),
    ):
        code, printed = printed_by(*arguments)
        assert (code, line in printed) == (status, True), printed


def test_nobody_reads_what_is_printed(places):
    reader, writer = os.pipe()
    os.close(reader)
    done = run("doctor", places["whole"], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_full_disk(places):
    with open("/dev/full", "w") as full:
        done = run("doctor", places["whole"], stdout=full)
    assert (done.returncode, done.stderr) == (2, "rollout-spec: [Errno 28] No space left on device\n")


def test_ctrl_c(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "rollout-spec: interrupted\n"
