"""Files that commands write."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Find out whether a file can be written, before the work whose result it is for. Changes nothing.

    Raises:
        OSError: it cannot.
    """
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()
