"""Drafters by name: what is made of them, and what their options may be."""

import re
import subprocess
import sys

import pytest

from rollout_spec.drafters import DRAFTERS, build_drafter, find_drafter, runs_on_device
from rollout_spec.drafters.host.drafter import HistoryDrafter
from tests.conftest import ROOT


def test_names_stand_for_options_which_callers_override():
    assert all(isinstance(build_drafter(name), HistoryDrafter) for name in DRAFTERS)
    assert build_drafter("history", shared=False)._settings.use_shared is False
    assert build_drafter("history")._settings.use_shared is True


def test_a_drafter_of_ones_own_that_is_not_on_the_path(tmp_path, monkeypatch):
    """Where its module is missing the remedy is the path; what the module itself lacks is another matter."""
    for name in ("no_such_module.Drafter", "rollout_spec.no_such_module.Drafter"):
        with pytest.raises(ValueError, match=r"PYTHONPATH of every process of the engine$"):
            build_drafter(name)
    (tmp_path / "needs_another.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("needs_another.Drafter", "rollout_spec.drafters.host.drafter.Nothing"):
        with pytest.raises(ValueError) as raised:
            build_drafter(name)
        assert "PYTHONPATH" not in str(raised.value)


def test_the_example_of_ones_own_takes_fewer_steps_than_tokens():
    command = [sys.executable, ROOT / "examples" / "custom_drafter.py"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tokens_per_step = re.fullmatch(r"(\d\.\d\d) tokens per step\n", output)
    assert tokens_per_step
    assert float(tokens_per_step[1]) > 1.5


def test_the_device_drafter_has_a_name_too():
    pytest.importorskip("triton")
    from rollout_spec.drafters.device.drafter import DeviceDrafter

    assert find_drafter("device") is DeviceDrafter
    assert runs_on_device("device")
    assert not any(map(runs_on_device, [*DRAFTERS, "rollout_spec.drafters.device.drafter.DeviceDrafter", "devise"]))
