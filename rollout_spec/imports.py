"""Packages: how to install what is missing, which versions there are, and the command that runs."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path


def install(*extras: str) -> str:
    """The command that installs extras of ours, for messages. It also works with an editable install."""
    return f"pip install 'rollout-spec[{','.join(extras)}]'"


INSTALL_VLLM = f"{install('vllm')}, on a CPU `make install-cpu` in a clone of the repository"
"""The same of vLLM, whose CPU build no extra can bring."""


def command_line() -> list[str]:
    """The command that runs, in which absolute paths are shortened to their last part."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv]


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {package: _version_of(package) for package in packages}
    return {package: version for package, version in found.items() if version is not None}


@functools.cache  # reads files
def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
