"""The `rollout-spec` command: what it needs, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_spec import __version__
from rollout_spec.cli import main
from tests.test_doctor import a_report

ROOT = Path(__file__).parent.parent
WITHOUT_NUMBA = """
import sys
for name in ("numba", "torch", "vllm"):  # the other two take long to import
    sys.modules[name] = None
from rollout_spec.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_every_argument_has_a_help_text(monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, _: parsers.append(self) or sys.exit())
    with pytest.raises(SystemExit):
        main([])
    for parser in parsers:  # which grows
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            else:
                assert action.help, (parser.prog, action)


def run_without_numba(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_help_and_doctor_need_no_numba(tmp_path):
    done = run_without_numba("estimate", "--help")
    assert (done.returncode, "usage: rollout-spec estimate" in done.stdout) == (0, True), done.stderr
    assert __version__ in run_without_numba("--version").stdout
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report()))
    done = run_without_numba("doctor", path)
    assert done.returncode == 0, done.stderr
    assert "A step takes" in done.stdout
    done = run_without_numba("doctor")
    assert done.returncode == 1
    assert "problem  numba cannot be used" in done.stdout
    assert "compiled drafters are kept in" in done.stdout
    assert "Traceback" not in done.stderr
