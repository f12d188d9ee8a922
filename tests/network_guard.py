"""Lets a process reach its own machine only, and notes who tries to reach another."""

from __future__ import annotations

import ipaddress
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STANDARD = Path(sysconfig.get_paths()["stdlib"])

attempts: list[str] = []
"""The file behind each attempt, the standard library left out: relative to the repository if it is one of ours."""


def install() -> None:
    """From now on connections, packets and questions for names raise OSError unless they stay on this machine."""
    sys.addaudithook(_look)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # others are AF_UNIX, or connected before
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if isinstance(host, bytes):
        host = host.decode()
    if not host or _is_here(host):
        return
    attempts.append(_who_tries())
    raise OSError(f"no network: {event} to {host}")


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _who_tries() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        is_installed = "site-packages" in path.parts
        if is_installed or not path.is_relative_to(STANDARD):
            return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and not is_installed else str(path)
    return "?"
