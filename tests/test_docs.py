"""What the docs name exists: links and their headings, files, modules, targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / name for name in ("experiments/results/README.md", "tests/ptx/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
FOLDERS = ("rollout_spec", "drafters", "integrations", "experiments", "examples", "tests", "docs")
NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # comments of code are none
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that do not exist."""
    broken = []
    text = page.read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"""\b(?:src|href|srcset)=["']([^"']+)""", text)
    for target in targets:
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


def missing_files(text: str) -> list[str]:
    """The files, folders and modules that a text names and that do not exist.

    A name without a folder may be in any; what `uv run` runs is a framework's.
    """
    paths = re.findall(rf"(?<![\w/.-])(?<!uv run )(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
    for module in re.findall(r"\bpython3? -m\s+((?:examples|experiments)[\w.]+\w)", text):
        path = module.replace(".", "/")
        paths.append(f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py")
    missing = [path for path in paths if not (ROOT / path).exists()]
    bare = re.findall(r"`(\w+\.py)`", text)
    return missing + [name for name in bare if name not in NAMES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert broken_links(page) == []
    assert missing_files(text) == []
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
    assert [target for target in commands if target not in targets] == []
