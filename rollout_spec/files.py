"""JSON files that commands read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_spec.checks import shown

MAX_JSON_BYTES = 1 << 26
"""Larger reports and cost curves are refused unread: real ones have less than a megabyte."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: it does not, or is larger than `MAX_JSON_BYTES`. The message does not name the file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            data = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:  # which does not name the file, as that of `open` does
            raise OSError(error.errno, error.strerror, str(path)) from error
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES:,} bytes")
    if not data.strip():
        raise ValueError("it is empty")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:  # no JSON, no text, or brackets without end
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"it must be a JSON object, got {shown(values)}")
    return values
