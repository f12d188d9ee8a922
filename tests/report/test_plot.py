"""`rollout-spec doctor REPORT --plot FILE`: what each panel shows of a report, and where it has nothing to show."""

from __future__ import annotations

import json
import sys

import pytest

from rollout_spec import cli
from rollout_spec.report import plot
from rollout_spec.report.explain import headline
from rollout_spec.report.stats import Progress, SpeculationStats
from tests.report.test_doctor import a_report

pytest.importorskip("matplotlib")

PANELS = ("time", "progress", "positions", "sources", "speedup")


def the_progress(*tokens_per_step):
    """One log every five training steps, each of 100 request-steps."""
    progress = Progress()
    for i, tokens in enumerate(tokens_per_step):
        progress.add(5 * i + 5, SpeculationStats(request_steps=100, emitted_tokens=round(100 * tokens)), 1.5)
    return progress.to_dict()


def panels(report):
    found = {axes.get_label(): axes for axes in plot.draw(report).axes}
    assert tuple(found) == PANELS
    return found


def words(axes):
    """What is written in a panel, without its title."""
    return " ".join(" ".join(text.get_text() for text in axes.texts).split())


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def lengths(axes):
    """Of horizontal bars."""
    return [bar.get_width() for bar in axes.patches]


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def is_empty(axes):
    return not axes.patches and not axes.lines and not axes.get_xticks().size and not axes.get_yticks().size


def test_a_report_is_drawn():
    """The numbers are those of `test_doctor.test_the_report_is_explained`."""
    report = a_report(global_step=15, num_processes=4, progress=the_progress(1.25, 2, 1.75))
    figure = plot.draw(report)
    assert figure.get_suptitle() == headline(report)
    assert "Up to step 15, the first of 4 processes: " in figure.get_suptitle()
    found = panels(report)
    assert all(axes.get_title(loc="left") and axes.get_xlabel() for axes in found.values())

    parts = ["target's forward pass", "verification", "drafting", "scheduling and other"]
    assert ticks(found["time"].yaxis) == parts
    assert lengths(found["time"]) == pytest.approx([1.2, 0.1, 0.22, 0.68])
    assert words(found["time"]) == "1.20 s, 55 % 0.10 s, 5 % 0.22 s, 10 % 0.68 s, 31 %"
    assert "not seen" not in found["time"].get_xlabel()

    line, without_drafts = found["progress"].lines
    assert list(line.get_xdata()) == [5, 10, 15]
    assert list(line.get_ydata()) == [1.25, 2, 1.75]
    assert set(without_drafts.get_ydata()) == {1}

    assert found["positions"].get_xticks().tolist() == [1, 2, 3, 4]
    assert heights(found["positions"]) == [100, 0, 0, 0]
    assert ticks(found["sources"].yaxis) == ["own", "problem"]
    assert lengths(found["sources"]) == pytest.approx([30, 35])
    assert words(found["sources"]) == "30 % of 100 35 % of 200"

    gain, loss = found["speedup"].patches
    assert (gain.get_y(), gain.get_height()) == pytest.approx((1, 0.6))
    assert (loss.get_y(), loss.get_height()) == pytest.approx((1, -0.1))
    assert gain.get_facecolor() != loss.get_facecolor()
    assert words(found["speedup"]) == "1.60 0.90"
    assert "below 1 drafts lost time" in found["speedup"].get_ylabel()
    assert ticks(found["speedup"].xaxis) == ["1.0\n83 %", "64.0\n17 %"]


def test_a_size_without_a_cost_has_a_place_and_no_bar():
    report = a_report()
    report["budget"]["undrafted_of_sizes"][-1] = None  # of 64 requests
    axes = panels(report)["speedup"]
    assert heights(axes) == pytest.approx([0.6])
    assert axes.get_xticks().tolist() == [0, 1]
    assert words(axes) == "1.60 not measured"


def test_a_report_without_the_series():
    """An older version's, or an engine's."""
    found = panels(a_report())
    assert is_empty(found.pop("progress"))
    assert "No series over the training" in words(panels(a_report())["progress"])
    assert not any(map(is_empty, found.values()))


@pytest.mark.parametrize("progress", [Progress().to_dict(), {**the_progress(2.0), "request_steps": [0]}])
def test_a_series_of_nothing(progress):
    axes = panels(a_report(progress=progress))["progress"]
    assert is_empty(axes)
    assert "No log of the training has metrics yet" in words(axes)


def test_a_series_of_one_point():
    """It would not be seen without a marker, which many points go without."""
    line, _ = panels(a_report(progress=the_progress(1.5)))["progress"].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([5], [1.5])
    assert line.get_marker() == "."
    line, _ = panels(a_report(progress=the_progress(*[1.5] * 101)))["progress"].lines
    assert line.get_marker() == "None"


def test_without_a_budget_no_speedup_is_made_up():
    axes = panels(a_report(budget=None))["speedup"]
    assert is_empty(axes)
    assert "without a budget none is taken" in words(axes)
    report = a_report()
    report["budget"]["undrafted_of_sizes"] = [None] * 7
    axes = panels(report)["speedup"]
    assert is_empty(axes)
    assert "none was measured" in words(axes)


@pytest.mark.parametrize(("k", "reason"), [(0, "built without speculation"), (8, "lives on the device")])
def test_without_drafts(k, reason):
    """Of an engine whose steps were not seen to end, only the device's time is known."""
    off = SpeculationStats(forward_seconds=3.0, verify_seconds=1.0)
    off.record([0], [0])
    found = panels(a_report(stats=off.to_dict(), budget=None, sources={}, num_speculative_tokens=k))
    assert lengths(found["time"]) == [3, 1]
    assert "Drafting, scheduling and other were not seen" in found["time"].get_xlabel()
    for panel, message in (
        ("positions", "No draft was verified"), ("sources", "where drafts came from"), ("speedup", reason),
    ):  # fmt: skip
        assert is_empty(found[panel])
        assert message in words(found[panel])


def test_before_anything_was_generated():
    report = a_report(stats=SpeculationStats().to_dict(), sources={})
    report["budget"]["undrafted_of_sizes"] = []
    assert all(map(is_empty, panels(report).values()))
    assert plot.draw(report).get_suptitle() == "Nothing has been generated yet."


def test_long_drafts_have_no_percentages():
    stats = {**a_report()["stats"], "drafted_per_position": [100] * 64, "accepted_per_position": list(range(64, 0, -1))}
    axes = panels(a_report(stats=stats))["positions"]
    assert heights(axes) == pytest.approx(list(range(64, 0, -1)))
    assert not axes.texts


@pytest.fixture
def report_path(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report(progress=the_progress(1.25, 2, 1.75))))
    return path


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_extension_chooses_the_format(report_path, capsys, name, start):
    plot = report_path.with_name(name)
    assert cli.main(["doctor", str(report_path), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(start)
    assert "Where the time of a step goes" in capsys.readouterr().out


def test_pyplot_is_left_alone(report_path, monkeypatch):
    """It would choose a backend, for a screen that may not be there."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert cli.main(["doctor", str(report_path), "--plot", str(report_path.with_name("a.png"))]) == 0


def refused(capsys, *arguments):
    """The one line that is said of a plot that cannot be made."""
    assert cli.main(["doctor", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == "", "nothing is explained before"
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize("name", ["plot", "plot.xyz"])
def test_an_unknown_extension_is_refused(report_path, capsys, name):
    plot = report_path.with_name(name)
    error = refused(capsys, report_path, "--plot", plot)
    assert "--plot: the file's extension must be one of " in error
    assert "png" in error
    assert not plot.exists()


def test_a_format_that_this_machine_cannot_draw_is_refused(report_path, capsys, monkeypatch):
    def without_latex(*args, **kwargs):
        raise RuntimeError("'xelatex' not found")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", without_latex)
    error = refused(capsys, report_path, "--plot", report_path.with_name("plot.pgf"))
    assert "matplotlib cannot write .pgf: 'xelatex' not found" in error


def test_a_plot_that_cannot_be_written_is_refused(report_path, capsys):
    assert "none/a.png" in refused(capsys, report_path, "--plot", report_path.parent / "none" / "a.png")


def test_a_plot_needs_a_report(capsys):
    assert "--plot needs a report" in refused(capsys, "--plot", "a.png")


def test_without_matplotlib_the_extra_is_named(report_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = report_path.with_name("a.png")
    error = refused(capsys, report_path, "--plot", plot)
    assert "--plot needs matplotlib" in error
    assert "pip install 'rollout-spec[demo]'" in error
    assert not plot.exists()
    assert cli.main(["doctor", str(report_path)]) == 0, "text needs none"
