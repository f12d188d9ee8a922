"""Files that commands write."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose result goes there. Leaves the file as it was.

    Raises:
        OSError: it cannot be written.
    """
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()
