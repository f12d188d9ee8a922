"""Drafters: what the history suggests that the target will sample next. NumPy and numba only."""

from __future__ import annotations

if __name__ != "rollout_spec.drafters":
    raise ImportError("import this package as rollout_spec.drafters: a second identity would have caches of its own")

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout_spec.config import DEVICE_DRAFTER
from rollout_spec.imports import import_object

if TYPE_CHECKING:
    from rollout_spec.drafters.base import Drafter

DRAFTERS: dict[str, dict[str, Any]] = {
    "mixture": {"index": "suffix", "shared": True},
    "suffix": {"index": "suffix"},
    "ngram": {"index": "ngram"},
    "lookahead": {"index": "suffix", "own_only": True, "lookahead": True},
}
"""Options of the history drafter by the name of the combination."""


def find_drafter(name: str) -> tuple[Any, dict[str, Any]]:
    """The class behind a drafter's name, and the options that the name implies.

    Raises:
        ValueError: no such drafter, or the path does not import.
    """
    if name in DRAFTERS:
        from rollout_spec.drafters.mixture import HistoryDrafter

        return HistoryDrafter, dict(DRAFTERS[name])
    if "." in name:
        return import_object(name, "drafter"), {}
    known = sorted([*DRAFTERS, DEVICE_DRAFTER])
    raise ValueError(f"unknown drafter {name!r}: use one of {known} or the dotted path of a class")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that a drafter takes these options, without making one.

    Raises:
        ValueError: no such drafter, the path does not import, or an option is unknown or missing.
    """
    factory, implied = find_drafter(name)
    try:
        inspect.signature(factory).bind(**{**implied, **options})
    except TypeError as error:
        raise ValueError(f"drafter {name!r} does not take these options: {error}") from error


def build_drafter(name: str, **options: Any) -> Drafter:
    """Make a drafter.

    Args:
        name: One of `DRAFTERS`, or the dotted path of a class that implements `rollout_spec.drafters.base.Drafter`.
        **options: Passed to the class; for the built-in ones see `rollout_spec.drafters.mixture.HistoryDrafter`.

    Raises:
        ValueError: no such drafter, the path does not import, or an option is unknown or out of range.
        Exception: what the constructor of a drafter of your own raises.
    """
    check_options(name, options)
    factory, implied = find_drafter(name)
    drafter: Drafter = factory(**{**implied, **options})
    return drafter
