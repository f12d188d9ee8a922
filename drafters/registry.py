"""The drafters by name. To add one, write its module and its entry in `REGISTRY`.

Classes are imported only when they are used: those on the host need numba, those on the device torch and triton.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_spec import checks

if TYPE_CHECKING:
    from rollout_spec.drafters.base import Drafter

HISTORY_DRAFTER = "rollout_spec.drafters.host.drafter.HistoryDrafter"
"""Also a drafter's name, as any dotted path: then all arguments of the constructor are options."""


class Entry(NamedTuple):
    """What is known about a drafter before it is imported."""

    path: str = HISTORY_DRAFTER
    """Dotted path of its class."""
    implied: Mapping[str, Any] = {}
    """Arguments of the class that the name sets."""
    options: tuple[str, ...] = ("features", "max_history_tokens")
    """What a user can set."""
    on_device: bool = False
    """Whether it drafts on the device, where the engine makes it. Otherwise it implements
    `rollout_spec.drafters.base.Drafter`, on the host."""


REGISTRY: dict[str, Entry] = {
    "history": Entry(implied={"index": "suffix", "shared": True}),
    "suffix": Entry(implied={"index": "suffix"}),
    "ngram": Entry(implied={"index": "ngram"}),
    "lookahead": Entry(implied={"index": "suffix", "own_only": True, "lookahead": True}, options=("features",)),
    "device": Entry(
        "rollout_spec.drafters.device.drafter.DeviceDrafter",
        options=("features", "max_resident_tokens"),
        on_device=True,
    ),
}
DRAFTERS = tuple(name for name, entry in REGISTRY.items() if not entry.on_device)
"""The built-in drafters on the host."""


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
            f"unknown drafter {checks.shown(name)}: use one of {sorted(REGISTRY)} or the dotted path of a class"
            f"{checks.did_you_mean(name, REGISTRY)}"
        )


def find_drafter(name: str) -> Any:
    """The class behind a drafter's name.

    Raises:
        ValueError: no such drafter, or the path does not import: with the remedy where there is no such module.
    """
    check_name(name)
    path = REGISTRY[name].path if name in REGISTRY else name
    module_name, _, class_name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")
        hint = "; its folder must be on the PYTHONPATH of every process of the engine" if is_missing else ""
        raise ValueError(f"drafter {path!r} cannot be imported: {error}{hint}") from error


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check a drafter's options before an engine is built with it; of a user's own drafter only the options' names.

    Raises:
        ValueError: no such drafter, the path does not import, or an option is unknown, missing or out of range.
        TypeError: an option has the wrong type.
    """
    if name not in REGISTRY:
        _check_names(name, find_drafter(name), options)
        return
    names = REGISTRY[name].options
    for option, value in options.items():
        if option not in names:
            hint = checks.did_you_mean(option, names)
            raise ValueError(f"drafter {name!r} does not take {option!r}: drafter_options are {', '.join(names)}{hint}")
        if option == "features":
            checks.switch(option, value)
        else:
            checks.integer(option, value, 1)


def has_options(name: str, options: Iterable[str]) -> bool:
    """Whether a user can set all of these of a drafter in `REGISTRY`."""
    return set(options) <= set(REGISTRY[name].options)


def has_history(name: str) -> bool:
    """Whether a drafter drafts from ended rollouts; a user's own is taken to."""
    return name not in REGISTRY or not REGISTRY[name].implied.get("own_only")


def build_drafter(name: str, /, **arguments: Any) -> Drafter:
    """Make a drafter that runs on the host.

    Args:
        name: One of `DRAFTERS`, or the dotted path of a class that implements `rollout_spec.drafters.base.Drafter`.
        **arguments: Passed to the class; for the built-in ones see `rollout_spec.drafters.host.drafter.HistoryDrafter`.

    Raises:
        ValueError: no such drafter on the host, the path does not import, or an argument is unknown or out of range.
        Exception: what the constructor of a drafter of your own raises.
    """
    if runs_on_device(name):
        raise ValueError(f"drafter {name!r} runs on the device, where the engine makes it: use one of {list(DRAFTERS)}")
    factory, implied = find_drafter(name), REGISTRY[name].implied if name in REGISTRY else {}
    arguments = {**implied, **arguments}
    _check_names(name, factory, arguments)
    drafter: Drafter = factory(**arguments)
    return drafter


def _check_names(name: str, factory: Any, arguments: Mapping[str, Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [option for option in arguments if option not in signature.parameters]
        hint = checks.did_you_mean(unknown[0], signature.parameters) if unknown else ""
        raise ValueError(f"drafter {name!r} does not take these drafter_options: {error}{hint}") from error
