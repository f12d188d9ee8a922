"""Objects named by dotted paths in configurations."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str, what: str) -> Any:
    """Import `package.module.Name`.

    Raises:
        ValueError: the module does not import or has no such name; the message says `what` was wanted.
    """
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {path!r} cannot be imported: {error}") from error
