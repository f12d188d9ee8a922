"""What pyproject.toml says of the packages that ours needs."""

import ast
import re
import sys

import pytest

from tests.conftest import ROOT

PACKAGES = ("rollout_spec", "drafters", "integrations")

BROUGHT = {
    "accelerate": "trl",
    "llvmlite": "numba",
    "prometheus_client": "vllm",
    "requests": "vllm",
    "torch": "vllm",
    "transformers": "vllm",
    "triton": "torch",
}
"""What we import and do not name in pyproject.toml, as its version is another package's business, which brings it."""


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported_by_us() -> dict[str, str]:
    """By each package that our code imports, one of the files that do."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "rollout_spec"}}


def requirements(project) -> dict[str, list[str]]:
    """All requirements but those on our own extras, by extra; "" for those without one."""
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [r for r in some if not r.startswith("rollout-spec[")] for extra, some in extras.items()}


def test_what_is_imported_is_declared(project):
    names = (re.match(r"[\w.-]+", requirement)[0] for some in requirements(project).values() for requirement in some)
    declared = {name.lower().replace("_", "-") for name in names}
    for name, path in imported_by_us().items():
        bringer = name
        while bringer in BROUGHT:
            bringer = BROUGHT[bringer]
        assert bringer in declared, f"{path} imports {name}"


def test_extras_that_messages_name_exist(project):
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {extra for source in sources for extra in re.findall(r"""install\(["']([\w-]+)""", source)}
    assert named <= project["optional-dependencies"].keys()
