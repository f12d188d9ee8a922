#!/usr/bin/env bash
# Makes FOLDER a virtual environment with the oldest releases of everything that pyproject.toml names.
#   tests/oldest_environment.sh .venv-oldest
# TRL needs Python 3.11: with 3.10 there are none of the demo's requirements. What others depend on is new, except torch,
# for whose CPU build the package index decides.
set -euo pipefail
folder=$1
"${PYTHON:-python3}" -m venv "$folder"
tests/install_part.sh "pip and uv" "$folder/bin/python" -m pip install --upgrade pip uv
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} # uv does not read pip's settings
extras=$("$folder/bin/python" -c 'import sys; print("dev,demo" if sys.version_info >= (3, 11) else "dev")')
tests/install_part.sh "the oldest of all that rollout_spec names" "$folder/bin/uv" pip install \
    --python "$folder/bin/python" --resolution lowest-direct -e ".[$extras]" torch==2.13.0
"$folder/bin/python" -m pip check
"$folder/bin/python" -m pip list
touch "$folder/.ready"
echo "installed in $folder"
