"""`rollout-spec doctor REPORT --plot FILE`: what `explain.py` says of a run, as one figure of four panels.

The numbers are those of `measures.py`; a panel whose numbers a report lacks says why. matplotlib is imported late: it
is an optional dependency, and only `figure` itself is used, so that no state of pyplot is touched.
"""

from __future__ import annotations

import io
import math
import textwrap
from typing import Any

from rollout_spec.imports import install
from rollout_spec.report.explain import headline, why_no_sizes
from rollout_spec.report.measures import (
    SizeGroup,
    acceptance_by_position,
    acceptance_by_source,
    size_groups,
    time_parts,
)
from rollout_spec.report.stats import Progress

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#6B6B6B"
"""Two of Okabe and Ito's colours, which the colour-blind tell apart, and a grey for what is not measured."""
MAX_NAMED_POSITIONS = 16
"""With more positions than this in a draft, bars are too narrow for their percentages."""
MAX_MARKED_POINTS = 100
"""Points of a longer series are too close to each other to be marked."""


def render(report: dict[str, Any], file_format: str) -> bytes:
    """Draw a report.

    Args:
        report: As `reading.read_report` returns it.
        file_format: The file name's extension, without the dot.

    Returns:
        The file's content.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: matplotlib does not know the format, or cannot draw it on this machine.
    """
    figure = draw(report)
    known = figure.canvas.get_supported_filetypes()
    if file_format.lower() not in known:
        raise ValueError(f"--plot: the file's extension must be one of {', '.join(sorted(known))}, got {file_format!r}")
    content = io.BytesIO()
    try:
        figure.savefig(content, format=file_format.lower(), dpi=120)
    except RuntimeError as error:  # .pgf without LaTeX
        raise ValueError(f"--plot: matplotlib cannot write .{file_format}: {error}") from error
    return content.getvalue()


def draw(report: dict[str, Any]) -> Any:
    """Draw a report as a `matplotlib.figure.Figure`, whose axes have the panels' names as labels.

    Args:
        report: As `reading.read_report` returns it.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib ({error}): {install('demo')}") from error

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(13, 9), layout=layout)
    lines = [textwrap.fill(line, 150) for line in headline(report).split("\n")]
    figure.suptitle("\n".join(lines), fontsize=10.5, linespacing=1.4)
    grid = figure.add_gridspec(2, 2)
    _draw_time(figure.add_subplot(grid[0, 0], label="time"), report["stats"])
    _draw_progress(figure.add_subplot(grid[0, 1], label="progress"), report)
    acceptance = grid[1, 0].subgridspec(1, 2, width_ratios=(3, 2))
    _draw_positions(figure.add_subplot(acceptance[0], label="positions"), report["stats"])
    _draw_sources(figure.add_subplot(acceptance[1], label="sources"), report)
    _draw_speedup(figure.add_subplot(grid[1, 1], label="speedup"), report)
    return figure


def _begin(axes: Any, title: str, grid: str) -> None:
    """Give a panel its title, and faint lines across one axis to read values by."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)


def _say(axes: Any, message: str) -> None:
    """Say why a panel is empty."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    width = 26 if axes.get_label() in ("positions", "sources") else 56
    axes.text(0.5, 0.5, textwrap.fill(message, width), ha="center", va="center", color=GREY, transform=axes.transAxes)


def _draw_time(axes: Any, stats: dict[str, Any]) -> None:
    parts = time_parts(stats)
    total = sum(parts.values())
    is_whole = "drafting" in parts
    _begin(axes, "Where the time of a step goes", "x")
    if not total:
        _say(axes, "No step was timed.")
        return
    bars = axes.barh(list(parts), list(parts.values()), color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{seconds:,.2f} s, {_percent(seconds / total)}" for seconds in parts.values()], padding=4)
    axes.invert_yaxis()  # the first part on top
    axes.margins(x=0.25)  # room for the labels
    unseen = "" if is_whole else "\nDrafting, scheduling and other were not seen."
    axes.set_xlabel(f"seconds, all steps together{unseen}")


def _draw_progress(axes: Any, report: dict[str, Any]) -> None:
    _begin(axes, "Tokens per request and step, over the training", "y")
    if "progress" not in report:
        _say(
            axes,
            "No series over the training in this report: an older version wrote it, or no trainer's callback did.",
        )
        return
    points = [point for point in Progress.from_dict(report["progress"]).points if point.request_steps]
    if not points:
        _say(axes, "No log of the training has metrics yet.")
        return
    steps = [point.global_step for point in points]
    tokens = [point.emitted_tokens / point.request_steps for point in points]
    axes.plot(steps, tokens, color=BLUE, marker="." if len(points) <= MAX_MARKED_POINTS else None)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(
        "without drafts", (1, 1), xycoords=axes.get_yaxis_transform(), xytext=(0, -4), textcoords="offset points",
        ha="right", va="top", color=GREY,
    )  # fmt: skip
    # A step gives a token at least: below 1 is only room for the words.
    most = max(*tokens, 1.25) - 1
    axes.set_ylim(max(1 - 0.15 * most, 0), 1 + 1.1 * most)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="training step", ylabel="tokens per request and engine step")


def _draw_positions(axes: Any, stats: dict[str, Any]) -> None:
    _begin(axes, "Drafts accepted, by position", "y")
    rows = acceptance_by_position(stats)
    if not rows:
        _say(axes, "No draft was verified.")
        return
    positions, _, shares = zip(*rows, strict=True)
    bars = axes.bar(positions, [100 * share for share in shares], color=BLUE)
    if len(rows) <= MAX_NAMED_POSITIONS:
        axes.bar_label(bars, [f"{100 * share:.0f}" for share in shares], fontsize=9, padding=2)
        axes.set_xticks(positions)
    axes.set_ylim(0, 105)
    axes.set(xlabel="token's position in its draft", ylabel="accepted, % of verified tokens")


def _draw_sources(axes: Any, report: dict[str, Any]) -> None:
    _begin(axes, "… and by source", "x")
    rows = acceptance_by_source(report["sources"])
    if not rows:
        _say(axes, "The drafter does not say where drafts came from, or the target reached none.")
        return
    names, counts, shares = zip(*rows, strict=True)
    bars = axes.barh(names, [100 * share for share in shares], color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{100 * share:.0f} % of {n:,}" for share, n in zip(shares, counts, strict=True)], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("right, % of the drafted tokens\nthat the target reached")


def _draw_speedup(axes: Any, report: dict[str, Any]) -> None:
    _begin(axes, "Speedup over steps without drafts, by number of requests", "y")
    groups = size_groups(report)[::-1]  # the fewest requests to the left
    if not groups:
        _say(axes, why_no_sizes(report) or "This engine was built without speculation.")
        return
    if all(math.isnan(group.undrafted) for group in groups):
        reason = "without a budget none is taken" if report["budget"] is None else "none was measured"
        _say(axes, f"Not known, for want of steps without drafts to compare with: {reason}.")
        return
    total = sum(group.seconds for group in groups)
    for place, group in enumerate(groups):
        _draw_group(axes, place, group)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))
    labels = [f"{group.requests:.1f}\n{_percent(group.seconds / total)}" for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set(
        xlabel="requests in a step, on average; below: share of these steps' time",
        ylabel="times as fast; below 1 drafts lost time",
    )


def _draw_group(axes: Any, place: int, group: SizeGroup) -> None:
    """A bar from 1, where nothing is gained or lost: up for a gain, down for a loss."""
    if math.isnan(group.speedup):
        axes.text(place, 1, "not\nmeasured", ha="center", va="bottom", color=GREY, fontsize=9)
        return
    gain = group.speedup - 1
    bars = axes.bar(place, gain, bottom=1, width=0.7, color=BLUE if gain >= 0 else ORANGE)
    axes.bar_label(bars, [f"{group.speedup:.2f}"], padding=2)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
