"""Draws docs/phase.svg: how long rollout phases took on an H100, with stock vLLM and with ours.

    python -m experiments.draw_phase

From the rows of `bench_phase.jsonl`: seconds of a phase, mean of its turns, and of them those in which less than a
quarter of its requests were left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.check_figures import measured_phases
from experiments.engines.build import ROOT

COLORS = {"none": ("#57606a", "stock vLLM"), "device": ("#1a7f37", "rollout_spec")}
EPOCHS = {"first": "first epoch", "history": "later epoch"}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 300" font-family="sans-serif" font-size="13">
  <rect width="880" height="300" fill="#ffffff"/>"""
BAR, LEFT, WIDTH = 11, 155, 190
"""Pixels: of a bar's height, and of the column's bars."""


def seconds_of(rows: list[dict[str, Any]], **cell: Any) -> tuple[float, float]:
    """Seconds of the phase, and of its last quarter of requests."""
    found = [row for row in rows if all(row[name] == value for name, value in cell.items())]
    total, tail = (np.mean([row[name] for row in found]) for name in ("seconds", "tail_seconds"))
    return float(total), float(tail)


def column(rows: list[dict[str, Any]], shape: str, x: int, top: int) -> list[str]:
    """The phases of a model's shape, from the pixel (x, top) down."""
    cells = [(phase, batch) for phase in EPOCHS for batch in (16, 64, 256)]
    seconds = {(cell, mode): seconds_of(rows, shape=shape, mode=mode, phase=cell[0], batch=cell[1])
               for cell in cells for mode in COLORS}  # fmt: skip
    scale = WIDTH / max(total for total, _ in seconds.values())
    lines = [f'<text x="{x}" y="{top}" font-weight="bold">Qwen2.5-{shape.upper()}\'s shape, seconds</text>']
    for i, cell in enumerate(cells):
        y = top + 18 + i * (2 * BAR + 14)
        name = f"{EPOCHS[cell[0]]}, {cell[1]} at once"
        lines.append(f'<text x="{x + LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{name}</text>')
        for mode, (color, _) in COLORS.items():
            total, tail = seconds[cell, mode]
            times = f", {seconds[cell, 'none'][0] / total:.2f} times" if mode == "device" else ""
            for part, opacity in ((total, 0.5), (total - tail, 1)):
                look = f'fill="{color}" fill-opacity="{opacity}"'
                lines.append(f'<rect x="{x + LEFT}" y="{y}" width="{scale * part:.0f}" height="{BAR}" {look}/>')
            end = x + LEFT + scale * total
            lines.append(f'<text x="{end + 5:.0f}" y="{y + BAR - 1}" font-size="11">{total:.1f}{times}</text>')
            y += BAR
    return lines


def main() -> None:
    """Draw the rows of phases."""
    rows, lines, x = measured_phases(), [], 20
    for color, label in COLORS.values():
        lines.append(f'<rect x="{x}" y="14" width="14" height="14" fill="{color}"/>')
        lines.append(f'<text x="{x + 20}" y="26">{label}</text>')
        x += 130
    lines.append(f'<text x="{x}" y="26">pale: fewer than a quarter of the requests are left</text>')
    lines += column(rows, "7b", 20, 58) + column(rows, "1.5b", 450, 58)
    text = "\n  ".join([HEAD, *lines]) + "\n</svg>\n"
    (ROOT / "docs" / "phase.svg").write_text(text)


if __name__ == "__main__":
    main()
