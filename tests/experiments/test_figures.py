"""Tables in the docs are those of the rows: a changed figure, an old row and a table without rows are found."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.figures import __main__ as pages
from experiments.figures import tables

HEADER = "| requests | speedup |"
PAGE = f"# Page\n\n{HEADER}\n|---|---|\n| 1 | 2.50 |\n\nMore.\n"


def a_table(**changes):
    rows = [{"benchmark": "engines", "git": "abc", "requests": 1, "speedup": 2.5}]
    table = tables.Table(
        "page.md",
        HEADER,
        rows,
        lambda rows: [[str(row["requests"]), f"{row['speedup']:.2f}"] for row in rows],
    )
    return dataclasses.replace(table, **changes)


@pytest.fixture
def changed(monkeypatch):
    """Commits after which code has changed."""
    commits: set[str] = set()
    monkeypatch.setattr(tables, "has_changed", lambda commit, paths: commit in commits)
    monkeypatch.setattr(pages, "has_all_commits", lambda: True)
    return commits


def test_a_page_with_the_figures_of_the_rows_stays(changed):
    assert pages.replaced(PAGE, a_table()) == PAGE


def test_a_figure_that_no_row_gives_is_replaced(changed):
    assert pages.replaced(PAGE.replace("2.50", "2.60"), a_table()) == PAGE
    assert pages.replaced(PAGE.replace("| 1 | 2.50 |\n", ""), a_table()) == PAGE
    assert pages.replaced(PAGE.replace("| 1 | 2.50 |\n", "| 1 | 2.50 |\n| 8 | 9.00 |\n"), a_table()) == PAGE


def test_old_rows_are_said_to_be_old_and_new_ones_are_not(changed):
    changed.add("abc")
    old = PAGE.replace("\n\nMore", "\n\nMeasured with earlier code (abc).\n\nMore")
    assert pages.replaced(PAGE, a_table()) == old == pages.replaced(old, a_table())
    changed.clear()
    assert pages.replaced(old, a_table()) == PAGE


def test_without_all_commits_notes_of_age_stay_as_they_are(changed, monkeypatch):
    monkeypatch.setattr(pages, "has_all_commits", lambda: False)
    changed.add("abc")
    old = PAGE.replace("\n\nMore", "\n\nMeasured with earlier code (xyz).\n\nMore")
    assert pages.replaced(PAGE, a_table()) == PAGE
    assert pages.replaced(old, a_table()) == old


def test_the_commit_of_a_row_that_was_measured_with_uncommitted_changes_counts(changed):
    changed.add("abc")
    assert tables.old_commits([{"benchmark": "demo", "git": "abc-dirty"}]) == ["abc"]


def test_a_replay_of_drafts_is_as_old_as_the_code_of_replays(monkeypatch):
    monkeypatch.setattr(tables, "has_changed", lambda commit, paths: "rollout_spec/jit" in paths)
    rows = [{"benchmark": name, "git": name[:5]} for name in ("demo", "draft/quality", "engines", "demo")]
    assert tables.old_commits(rows) == ["demo", "engin"]


def test_code_has_changed_since_a_commit_that_is_not_known():
    assert tables.has_changed("0" * 40, ["rollout_spec"])
    assert not tables.has_changed("HEAD", ["a/path/that/never/was"])


def test_a_table_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match=r"page\.md has no table"):
        pages.replaced("# Page\n", a_table())


def test_a_table_of_figures_that_is_not_listed_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE + "\n| Option | Default |\n|---|---|\n| `0.5` | 3 |\n")
    assert pages.unknown_tables("page.md", []) == [HEADER]
    assert pages.unknown_tables("page.md", [HEADER]) == []


def test_the_newest_row_counts():
    rows = [{"batch": 1, "x": 1}, {"batch": 1, "x": 2}, {"batch": 8, "x": 3}]
    assert tables.one(rows, batch=1)["x"] == 2


def test_a_readers_page_needs_a_table_for_each_of_the_listed():
    made = tables.tables()
    assert {table.page for table in made} == set(tables.PAGES)
    assert all(table.rows for table in made)
