"""What kernels take of a GPU may only fall, and only by a commit: see `resources.py`."""

import json

import pytest

pytest.importorskip("triton")
pytest.importorskip("vllm.v1.worker.gpu.spec_decode.adaptive_verification", reason="it has one of the kernels")

import triton

from tests.ptx import resources

RECORDED = json.loads(resources.RECORDED.read_text())
REWRITE = "`python -m tests.ptx.resources` writes what is found now, to be committed"


@pytest.fixture(scope="module")
def found():
    return resources.find_variants()


@pytest.mark.skipif(triton.__version__ != RECORDED["triton"], reason="recorded with another release of Triton")
def test_engines_compile_the_recorded_variants_when_they_start(found):
    variants, at_start = found
    names = {f"sm_{capability} {name}" for capability in resources.SHARED_BYTES for name in variants}
    assert names == set(RECORDED["kernels"]), REWRITE
    assert at_start == RECORDED["variants_at_start"], REWRITE


@pytest.mark.exhaustive
def test_no_kernel_takes_more_than_before(found):
    measured, worse, better = resources.measure_all(found[0]), [], []
    if triton.__version__ != RECORDED["triton"]:
        pytest.skip("ptxas takes all kernels; what they need was recorded with another release of Triton")
    for name, row in measured.items():
        for what, value in row.items():
            before = RECORDED["kernels"][name][what]
            if value != before:
                is_worse = (value > before) != (what == "warps")
                (worse if is_worse else better).append(f"{name}: {what} {before} -> {value}")
    assert not worse, "\n".join(["worse than before", *worse])
    assert not better, "\n".join([f"better than before: {REWRITE}", *better])
