#!/usr/bin/env bash
# Checks and benchmarks that need a GPU. Run from the repository's root with torch and vLLM importable; rows and logs go
# to OUT.
#   bash experiments/gpu.sh OUT check device verify     correctness, the device drafter, the verifier: about 8 minutes
#   bash experiments/gpu.sh OUT engine-1.5b             the engine step, 12 modes: about 15 minutes
#   bash experiments/gpu.sh OUT engine-1.5b:none,device,budget-replay        some of the modes: a minute each
#   bash experiments/gpu.sh OUT engine-7b invariant     the larger shape; first divergence with batch-invariant kernels
set -uo pipefail
out=$(realpath -m "$1")
shift
mkdir -p "$out/plugin"
export PYTHONPATH="$PWD:$out/plugin${PYTHONPATH:+:$PYTHONPATH}" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

# vLLM finds plugins through their package's metadata; where the package is not installed, this provides it.
python3 - "$out/plugin" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    version("rollout-spec")
except PackageNotFoundError:
    folder = Path(sys.argv[1], "rollout_spec-0.1.0.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rollout-spec\nVersion: 0.1.0\n")
    entry = "[vllm.general_plugins]\nrollout_spec = rollout_spec.integrations.vllm_plugin:register\n"
    (folder / "entry_points.txt").write_text(entry)
PYTHON

failed=0
for stage in "$@"; do
    case $stage in
        check) command="experiments/check_gpu.py --out $out/check_gpu.jsonl" ;;
        device) command="experiments/bench_device.py --out $out/bench_device_gpu.jsonl" ;;
        verify) command="experiments/bench_verify.py --out $out/bench_verify_gpu.jsonl" ;;
        engine-*)
            shape=${stage#engine-}
            command="experiments/bench_engine.py --shape ${shape%%:*} --out $out/bench_engine_gpu.jsonl"
            [[ $shape == *:* ]] && command="$command --modes ${shape#*:}"
            command=${command//,/ }
            ;;
        invariant)
            command="experiments/bench_engine.py --shape 1.5b --batch 8 64 --modes none off v2 device --batch-invariant"
            command="$command --out $out/bench_engine_gpu.jsonl"
            ;;
        *)
            echo "unknown stage $stage" >&2
            exit 2
            ;;
    esac
    echo "== $stage"
    # shellcheck disable=SC2086
    python3 $command 2>"$out/$stage.log" || { failed=1; tail -n 5 "$out/$stage.log"; }
done
exit $failed
