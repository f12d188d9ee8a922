"""Each script of experiments/ can be imported, and says what its options are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if "parse_args(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out
