"""The drafters by name. To add one, write its module and its entry in `REGISTRY`.

Classes are imported only when they are used: those on the host need numba, those on the device torch and triton.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_spec.checks import did_you_mean, shown

if TYPE_CHECKING:
    from rollout_spec.drafters.base import Drafter


class Entry(NamedTuple):
    """What is known about a drafter before it is imported."""

    path: str
    """Dotted path of its class."""
    checker: str
    """Dotted path of a callable that takes the options a user can set and raises ValueError if one is out of range: the
    class itself, where making one takes little memory."""
    implied: Mapping[str, Any] = {}
    """Options that the name sets."""
    on_device: bool = False
    """Whether it drafts on the device, where the engine makes it. Otherwise it implements
    `rollout_spec.drafters.base.Drafter`, on the host."""


REQUIRED_METHODS = ("start_request", "extend", "propose", "stop_request", "begin_policy_version")
"""What a drafter of a user's own must have."""
MAX_RESIDENT_TOKENS = 4_000_000
"""Ended rollouts' tokens that the device drafter keeps on the device, unless it is told otherwise."""
_HISTORY = "rollout_spec.drafters.host.history.HistoryDrafter"
_DEVICE = "rollout_spec.drafters.device.drafter"

REGISTRY: dict[str, Entry] = {
    "history": Entry(_HISTORY, _HISTORY, {"index": "suffix", "shared": True}),
    "suffix": Entry(_HISTORY, _HISTORY, {"index": "suffix"}),
    "ngram": Entry(_HISTORY, _HISTORY, {"index": "ngram"}),
    "lookahead": Entry(_HISTORY, _HISTORY, {"index": "suffix", "own_only": True, "lookahead": True}),
    "device": Entry(f"{_DEVICE}.DeviceDrafter", f"{_DEVICE}.check_options", on_device=True),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    name: dict(entry.implied) for name, entry in REGISTRY.items() if not entry.on_device
}
"""The built-in drafters on the host and the options that their names stand for."""
OLD_NAMES = {"mixture": "history"}
"""Names that drafters had in earlier releases, and what they are called now."""
OLD_SWITCHES = {"signatures", "distributions"}
"""Options of earlier releases that `features` has taken the place of."""


def current_name(name: str) -> str:
    """A drafter's name as it is now. The first time that a process uses an old one, it is warned."""
    if name in OLD_NAMES:
        _warn_of_old_name(name)
    return OLD_NAMES.get(name, name)


@functools.cache
def _warn_of_old_name(name: str) -> None:
    message = f"drafter {name!r} is called {OLD_NAMES[name]!r} now: the old name will go in a later release"
    warnings.warn(message, FutureWarning, stacklevel=4)


def runs_on_device(name: str) -> bool:
    """Whether this drafter runs on the device. A user's own runs on the host."""
    return name in REGISTRY and REGISTRY[name].on_device


def check_name(name: str) -> None:
    """Check that a name can be a drafter's, without importing it.

    Raises:
        ValueError: it is neither in `REGISTRY` nor the dotted path of a class.
    """
    *modules, last = name.split(".")
    if name not in REGISTRY and not (modules and all(map(str.isidentifier, (*modules, last)))):
        raise ValueError(
            f"unknown drafter {shown(name)}: use one of {sorted(REGISTRY)} or the dotted path of a class"
            f"{did_you_mean(name, REGISTRY)}"
        )


def find_drafter(name: str) -> tuple[Any, dict[str, Any]]:
    """The class behind a drafter's name, and the options that the name implies.

    Raises:
        ValueError: no such drafter, or the path does not import.
    """
    name = current_name(name)
    entry = REGISTRY.get(name)
    if entry is not None:
        return _imported(entry.path), dict(entry.implied)
    check_name(name)
    factory = _imported(name)
    if not callable(factory):
        raise ValueError(f"drafter {name!r} must be a class, got {shown(factory)}")
    return factory, {}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check a drafter's options before an engine is built with it; of a user's own drafter only the options' names.

    Raises:
        ValueError: no such drafter, the path does not import, or an option is unknown, missing or out of range.
    """
    name = current_name(name)
    factory, implied = find_drafter(name)
    entry = REGISTRY.get(name)
    checker = _imported(entry.checker) if entry is not None else factory
    _check_names(name, checker, {**implied, **options})
    if entry is not None:
        checker(**{**implied, **options})


def has_options(name: str, options: Iterable[str]) -> bool:
    """Whether a drafter in `REGISTRY` has options of all these names."""
    return set(options) <= set(inspect.signature(_imported(REGISTRY[name].checker)).parameters)


def check_keeps_history(name: str) -> None:
    """Check that a drafter's history can be kept in a folder.

    Raises:
        ValueError: it has no history, or lacks the methods of `HistoryKeeper` (`integrations/vllm/engine_history.py`).
    """
    name = current_name(name)
    if name in REGISTRY:
        missing = ["history"] if REGISTRY[name].implied.get("own_only") else []
    else:
        methods = ("max_history_tokens", "record_rollouts", "take_recorded", "add_rollouts", "knows")
        missing = [method for method in methods if not hasattr(find_drafter(name)[0], method)]
    if missing:
        raise ValueError(f"history_dir is set, but drafter {name!r} has no {', '.join(missing)}")


def build_drafter(name: str, /, **options: Any) -> Drafter:
    """Make a drafter that runs on the host.

    Args:
        name: One of `DRAFTERS`, or the dotted path of a class that implements `rollout_spec.drafters.base.Drafter`.
        **options: Passed to the class; for the built-in ones see `rollout_spec.drafters.host.history.HistoryDrafter`.

    Raises:
        ValueError: no such drafter on the host, the path does not import, an option is unknown or out of range, or a
            drafter of your own lacks methods.
        Exception: what the constructor of a drafter of your own raises.
    """
    name = current_name(name)
    if runs_on_device(name):
        raise ValueError(f"drafter {name!r} runs on the device, where the engine makes it: use one of {list(DRAFTERS)}")
    factory, implied = find_drafter(name)
    _check_names(name, factory, {**implied, **options})
    drafter: Drafter = factory(**{**implied, **options})
    _check_methods(name, drafter)
    return drafter


def _check_methods(name: str, drafter: Any) -> None:
    missing = [method for method in REQUIRED_METHODS if not callable(getattr(drafter, method, None))]
    if missing and not hasattr(drafter, "propose_rows"):  # a `BatchDrafter` is called in other ways
        raise ValueError(
            f"drafter {name!r} lacks {', '.join(missing)}: it needs the methods of rollout_spec.drafters.base.Drafter"
        )


def _check_names(name: str, function: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class in C that does not say
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        unknown = [option for option in options if option not in signature.parameters]
        hint = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        if set(unknown) & OLD_SWITCHES and "features" in signature.parameters:
            hint = "; signatures and distributions are one option now: features"
        raise ValueError(f"drafter {name!r} does not take these drafter_options: {error}{hint}") from error


def _imported(path: str) -> Any:
    """What a dotted path names. Raises ValueError with the reason, and where there is no such module the remedy."""
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")
        hint = "; its folder must be on the PYTHONPATH of every process of the engine" if is_missing else ""
        raise ValueError(f"drafter {path!r} cannot be imported: {error}{hint}") from error
