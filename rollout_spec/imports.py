"""Packages: how to install what is missing, and which versions there are."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata


def install(*extras: str) -> str:
    """The command that installs extras of ours, for messages. It also works with an editable install."""
    return f"pip install 'rollout-spec[{','.join(extras)}]'"


INSTALL_VLLM = f"{install('vllm')}, on a CPU `make install-cpu` in a clone of the repository"
"""The same of vLLM, whose CPU build no extra can bring."""


@functools.cache  # reads files
def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
