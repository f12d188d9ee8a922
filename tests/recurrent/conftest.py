"""Models with recurrent layers, computed by vLLM's GPU kernels: the CPU build's own crash on drafts of unequal length.

vLLM samples such models wrongly before 0.32 where it speculates, so these tests need a newer one, and they need
processes of their own: `make test-recurrent` runs them in V1 and in V2.
"""

import os

import pytest

from tests.recurrent.kernels import use_gpu_kernels
from tests.recurrent.models import MODELS

if os.environ.get("RECURRENT_MODELS") == "1":
    use_gpu_kernels()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", params=MODELS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / request.param
    MODELS[request.param](path)
    return path
