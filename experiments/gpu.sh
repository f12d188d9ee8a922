#!/usr/bin/env bash
# Checks and benchmarks that need a GPU, in stages of ten minutes at most. Run from the repository's root with torch and
# vLLM importable:
#   bash experiments/gpu.sh OUT check device verify              correctness, device drafter, verifier: about 8 minutes
#   ROLLOUTS=FILE.parquet bash experiments/gpu.sh OUT phase-1.5b     whole rollout phases in every mode: up to 10 minutes
#   bash experiments/gpu.sh OUT phase-1.5b:none,budget,device        in some of them
#   bash experiments/gpu.sh OUT invariant                        rollouts with and without drafts in bf16
#   bash experiments/gpu.sh OUT model-1.5b                       an EAGLE head in vLLM's way, and beside history
#   bash experiments/gpu.sh OUT forward-1.5b                     without vLLM: the cost of a step, for replay --engine-cost
# A failing stage does not stop the others. OUT gets results.jsonl, summary.txt and logs.tar.gz, which holds all that each
# stage and each engine printed.
set -uo pipefail
out=$(realpath -m "$1")
shift
logs=$out/logs
mkdir -p "$logs/plugin"
python=${PYTHON:-python3}
rollouts=${ROLLOUTS:-experiments/results/real_policy/samples-step0040-t1.parquet}
export PYTHONPATH="$PWD:$logs/plugin${PYTHONPATH:+:$PYTHONPATH}" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# Otherwise vLLM 0.26's V2 sampler imports flashinfer, also where it is not installed.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}

for stage in "$@"; do
    case ${stage%%:*} in
        check | device | verify | invariant | phase-?* | model-?* | forward-?*) ;;
        *)
            echo "unknown stage $stage" >&2
            exit 2
            ;;
    esac
done

# Also when something else ends this script: what there is by then.
finish() {
    echo "== summary"
    cat "$out/summary.txt"
    tar -czf "$out/logs.tar.gz" -C "$out" logs && rm -r "$logs"
}
trap finish EXIT
trap 'exit 1' TERM INT

# vLLM finds plugins through their package's metadata; where the package is not installed, this provides it.
"$python" - "$logs/plugin" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    version("rollout-spec")
except PackageNotFoundError:
    folder = Path(sys.argv[1], "rollout_spec-0.1.0.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rollout-spec\nVersion: 0.1.0\n")
    entry = "[vllm.general_plugins]\nrollout_spec = rollout_spec.integrations.vllm.plugin:register\n"
    (folder / "entry_points.txt").write_text(entry)
PYTHON

failed=0
for stage in "$@"; do
    kind=${stage%%:*}
    shape=${kind#*-}
    name=${stage//[:,]/_}
    modes=()
    [[ $stage == *:* ]] && IFS=, read -ra modes <<<"${stage#*:}" && modes=(--modes "${modes[@]}")
    case $kind in
        check) command=(-m experiments.check_gpu) ;;
        device) command=(-m experiments.costs.bench_device) ;;
        verify) command=(-m experiments.costs.bench_verify) ;;
        phase-*) command=(-m experiments.engines.bench_phase --shape "$shape" --rollouts "$rollouts" --logs "$logs/$name" "${modes[@]}") ;;
        model-*)
            modes=(none eagle-stock eagle-history)
            command=(-m experiments.engines.bench_phase --shape "$shape" --rollouts "$rollouts" --batch 8 64
                --modes "${modes[@]}" --logs "$logs/$name")
            ;;
        invariant)
            command=(-m experiments.engines.bench_phase --rollouts "$rollouts" --batch 8 64 --free --batch-invariant
                --modes off all device --logs "$logs/$name")
            ;;
        forward-*) command=(-m experiments.costs.bench_forward --shape "$shape" --cost "$out/cost-$shape.json") ;;
    esac
    echo "== $stage"
    started=$SECONDS
    timeout 595 "$python" "${command[@]}" --out "$out/results.jsonl" 2>"$logs/$name.stderr" | tee "$logs/$name.stdout"
    code=${PIPESTATUS[0]}
    [[ $code == 0 ]] || { failed=1; tail -n 3 "$logs/$name.stderr"; }
    last=$(tail -n 1 "$logs/$name.stdout" | cut -c 1-100)
    printf '%-16s %4s %5d s  %s\n' "$stage" "$([[ $code == 0 ]] && echo ok || echo "$code")" $((SECONDS - started)) "$last" \
        >>"$out/summary.txt"
done
exit $failed
