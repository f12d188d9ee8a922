"""The figures in README and docs, made from rows of `experiments/results`.

    python -m experiments.figures            # says what differs; part of `make check`
    python -m experiments.figures --write    # writes the tables and their notes of age

A table is found by its first line. Whole lines are compared, so a figure that no row gives is an error, as is a table
of measurements that is not listed in tables.py. Where the code that a row measures has changed since the row's commit,
the page says so right after the table, which only a clone with all commits can tell. Of the sentences only those of
`sentences` are compared; the others repeat figures of the tables, or name the rows that they are of.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Iterable

from experiments.figures.sentences import sentences
from experiments.figures.tables import NOTE, PAGES, ROOT, Table, has_all_commits, note_of_age, old_commits, tables


def replaced(text: str, table: Table) -> str:
    """A page's text with the table, and the note of its age, as they should be. Raises ValueError: no such table."""
    lines = text.splitlines()
    if table.header not in lines:
        raise ValueError(f"{table.page} has no table {table.header}")
    first = lines.index(table.header) + 2
    end = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    rest, note = lines[end:], []
    if has_all_commits():
        if rest[1:2] and rest[1].startswith(NOTE):
            rest = rest[2:]
        old = old_commits(table.rows)
        note = ["", note_of_age(old)] if old else []
    return "\n".join([*lines[:first], *table.lines(), *note, *rest]) + "\n"


def unknown_tables(page: str, known: Iterable[str]) -> list[str]:
    """First lines of a page's tables that have figures with a point, and are not listed."""
    found = []
    lines = (ROOT / page).read_text().splitlines()
    for i, line in enumerate(lines):
        if (i and lines[i - 1].startswith("|")) or not line.startswith("|"):
            continue
        body = itertools.takewhile(lambda one: one.startswith("|"), lines[i + 2 :])
        if line not in known and any(re.search(r"\d\.\d", re.sub("`[^`]*`", "", one)) for one in body):
            found.append(line)
    return found


def main() -> int:
    """Compare or write; returns 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    made, wrong = tables(), []
    for table in made:
        path = ROOT / table.page
        text = path.read_text()
        new = replaced(text, table)
        if args.write:
            path.write_text(new)
        elif text != new:
            difference = difflib.unified_diff(text.splitlines(), new.splitlines(), table.page, "rows", lineterm="", n=0)
            wrong.append("\n".join(difference))
    for page in PAGES:
        listed = {table.header for table in made if table.page == page}
        wrong += [
            f"{page}: no rows are listed in experiments/figures/tables.py for {line}"
            for line in unknown_tables(page, listed)
        ]
    for said in sentences():
        old = old_commits(said.rows) if has_all_commits() else []
        text = f"{said.text} {note_of_age(old)}" if old else said.text
        if text not in " ".join((ROOT / said.page).read_text().split()):
            wrong.append(f"{said.page} does not say: {text}")
    wrong += [f"{table.page}: no rows for {table.header}" for table in made if not table.rows]
    for complaint in wrong:
        print(complaint)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
