"""What the docs name exists: files and headings that are linked, files, modules, targets of make."""

import re

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "experiments/results/README.md", ROOT / "tests/ptx/README.md"]
PAGES += [page for folder in (".", "docs", "examples") for page in sorted((ROOT / folder).glob("*.md"))]
FOLDERS = "rollout_spec|drafters|integrations|experiments|examples|tests|docs"
FILES = {path.name for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings; comments of code are none."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    """What `uv run` runs is a framework's."""
    text, missing = page.read_text(), []
    for link in re.findall(r"""(?:\]\(|\b(?:src|href|srcset)=["'])(?!http)([^)"']+)""", text):
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            missing.append(link)
    paths = re.findall(rf"(?<![\w/.-])(?<!uv run )(?:{FOLDERS})/[\w./-]*\w", text)
    modules = re.findall(r"\bpython3? -m\s+((?:examples|experiments)[\w.]+\w)", text)
    for module in (ROOT / module.replace(".", "/") for module in modules):
        paths.append(str(module / "__main__.py" if module.is_dir() else module) + ".py" * (not module.is_dir()))
    missing += [path for path in paths if not (ROOT / path).exists()]
    missing += [name for name in re.findall(r"`(\w+\.py)`", text) if name not in FILES]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing += [name for name in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE) if name not in targets]
    assert missing == []
