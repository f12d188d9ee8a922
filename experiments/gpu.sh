#!/usr/bin/env bash
# Checks and benchmarks that need a GPU; docs/gpu.md says how to read what they print. Run from the repository's root
# with torch and vLLM importable:
#   bash experiments/gpu.sh OUT first        is it right, does every engine start, what does a step cost
#   bash experiments/gpu.sh OUT second       whole rollout phases beside vLLM without drafts and with its own drafter
# The same OUT again goes on: stages that were ok, and modes and batch sizes of a phase that have their rows, are left out.
# Each is a list of stages, which can be named instead, with modes and batch sizes (those of bench_phase.py):
#   check device verify                      correctness; the device drafter; the verifier
#   doctor                                   what `rollout-spec doctor --device` says
#   trl                                      GRPO, with rollouts compared; POLICY may have its policy
#   start-1.5b                               engines with 64 requests, and each line that waits for the device
#   drained-1.5b                             batches that drain to nothing, where drafts are cut on the device
#   calls-1.5b:none,device-n1,device-n2:64   what each kind of call takes the host, per pass of the first 200 tokens
#   phase-1.5b:none,device:16,256            whole rollout phases, also phase-7b; device-n1 and -n2 have so many forward
#                                            passes per step, and device as many as pay; peers: ngram-gpu-k8 suffix
#                                            suffix-k8
#   varied-1.5b                              the same on a recording that repeats itself less
#   identical-1.5b                           bf16 rollouts that drafts leave as they are, with and without
#                                            VLLM_BATCH_INVARIANT=1
# Environment variables:
#   LIMIT      seconds for all stages, 420 unless set: they leave room in a machine's ten minutes to unpack vLLM. Each
#              stage has its share of what is left, so none takes another's time. What is not reached is not run.
#   ROLLOUTS   recorded rollouts to repeat instead of those in experiments/engines
#   SHAPE      of the model in `first` and `second`, 1.5b unless set; `tiny` makes every stage small, for a CPU
#   TRITON_CACHE_DIR  kernels that were compiled elsewhere, which saves minutes of `first`. A CPU with the same release
#              of Triton fills it by the command below with KERNELS_FILL_CACHE=1 TRITON_CACHE_DIR=kernels.
# On a CPU, with emulated kernels:
#   PYTHONPATH=tests/gpu_stand_in SHAPE=tiny VLLM_USE_V2_MODEL_RUNNER=1 LIMIT=3000 \
#       ROLLOUTS=experiments/results/real_policy/samples-step0040-t1.parquet bash experiments/gpu.sh OUT first
# A failing stage does not stop the others. OUT gets results.jsonl, summary.txt and logs.tar.gz, which holds all that each
# stage and each engine printed.
set -uo pipefail
(($# >= 2)) || { echo "usage: bash experiments/gpu.sh OUT first|second|STAGE..." >&2; exit 2; }
out=$(realpath -m "$1")
shift
logs=$out/logs
mkdir -p "$logs/plugin"
[[ ! -f $out/logs.tar.gz ]] || tar -xzf "$out/logs.tar.gz" -C "$out" # of earlier runs
python=${PYTHON:-python3}
shape=${SHAPE:-1.5b}
limit=${LIMIT:-420}
export PYTHONPATH="$PWD:$logs/plugin${PYTHONPATH:+:$PYTHONPATH}" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1 # what a stage has printed when its time is over is not lost
# Otherwise vLLM's V2 sampler may import flashinfer, also where it is not installed.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}

stages=()
for stage in "$@"; do
    case $stage in
        first)
            stages+=(check "start-$shape:device-n2,device,none:64" "drained-$shape:device:64")
            stages+=("calls-$shape:none,device-n1,device-n2:64")
            ;;
        second)
            stages+=("phase-$shape:none,ngram-gpu,device,device-n1:64")
            [[ $shape != tiny ]] || continue
            # 80 GB have room for three engines of 7B; the fourth comes later, beside the rows of the others.
            memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
            if ((${memory:-0} > 100000)); then
                stages+=(phase-7b:none,ngram-gpu,device,device-n1:64)
            else
                stages+=(phase-7b:none,ngram-gpu,device:64 phase-7b:device-n1:64)
            fi
            ;;
        *) stages+=("$stage") ;;
    esac
done

# Seconds on an H100, as far as they can be guessed: a stage's share of the limit.
share_of() {
    local commas=${1//[^,]/}
    case ${1%%[-:]*} in
        check) echo 90 ;;
        doctor) echo 60 ;;
        trl) echo 100 ;;
        device) echo 50 ;;
        verify) echo 80 ;;
        drained) echo 70 ;;
        calls) echo 100 ;;
        start) echo 180 ;;
        identical) echo 240 ;;
        phase | varied) [[ $1 == *-7b* ]] && echo 240 || echo $((100 + 20 * ${#commas})) ;;
    esac
}

# The arguments that make a stage of this kind small.
small() {
    [[ $shape == tiny ]] || return
    local dtype=float32
    [[ ${KERNELS_FILL_CACHE:-} != 1 ]] || dtype=bfloat16 # as a GPU's kernels have it
    case ${1%%-*} in
        check) echo --device cpu --trials 9 --vocab 48 ;;
        trl) echo --steps 2 --tokens 24 ;;
        device) echo --device cpu --batch 2 --resident 3000 --length 24 --repeats 1 ;;
        verify) echo --cells 2 --repeats 1 ;;
        drained) echo --dtype "$dtype" --eager --batch 2 --hang-seconds 900 ;;
        start | phase | calls | varied | identical) echo --dtype "$dtype" --eager --batch 2 ;;
    esac
}

commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
touch "$out/results.jsonl"

# Whether a stage was ok, of this commit.
is_done() {
    grep -qF "\"stage\": \"$1\", \"git\": \"$commit\", \"verdict\": \"ok\"" "$out/results.jsonl"
}

left=0
for stage in "${stages[@]}"; do
    case $stage in
        check | doctor | trl | device | verify | start-?* | drained-?* | calls-?* | phase-?* | varied-?* | identical-?*) ;;
        *)
            echo "unknown stage $stage" >&2
            exit 2
            ;;
    esac
    is_done "$stage" || left=$((left + $(share_of "$stage")))
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

from rollout_spec import __version__

try:
    version("rollout-spec")
except PackageNotFoundError:
    folder = Path(sys.argv[1], f"rollout_spec-{__version__}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rollout-spec\nVersion: {__version__}\n")
    entry = "[vllm.general_plugins]\nrollout_spec = rollout_spec.integrations.vllm.plugin:register\n"
    (folder / "entry_points.txt").write_text(entry)
PYTHON

failed=0
say() {
    printf '%-28s %4s %5d s  %s\n' "$@" >>"$out/summary.txt"
    printf '{"benchmark": "gpu.sh", "stage": "%s", "git": "%s", "verdict": "%s", "seconds": %d}\n' \
        "$1" "$commit" "$2" "$3" >>"$out/results.jsonl"
}
for stage in "${stages[@]}"; do
    IFS=: read -r kind modes batches <<<"$stage"
    name=${stage//[:,]/_}
    if is_done "$stage"; then
        echo "== $stage was ok"
        continue
    fi
    share=$(share_of "$stage")
    seconds=$(((limit - SECONDS) * share / left))
    left=$((left - share))
    if ((seconds < 5)); then
        say "$stage" - 0 "not run: the time is over"
        failed=1
        continue
    fi
    watch=()
    case $kind in
        check) command=(-m experiments.check_gpu) ;;
        doctor) command=(-m rollout_spec.cli doctor --device) ;;
        trl) command=(-m experiments.engines.bench_trl ${POLICY:+--policy "$POLICY"}) ;;
        device) command=(-m experiments.costs.bench_device) ;;
        verify) command=(-m experiments.costs.bench_verify) ;;
        start-* | drained-* | calls-* | phase-* | varied-* | identical-*)
            recording=${ROLLOUTS:-}
            # 7 % of its tokens continue the last four as they went on before in the same rollout, and 30 % of the other's.
            [[ $kind != varied-* ]] || recording=experiments/results/real_policy/samples-step0040-t1.parquet
            command=(-m experiments.engines.bench_phase --shape "${kind#*-}" ${recording:+--rollouts "$recording"})
            command+=(--logs "$logs/$name" --until $(($(date +%s) + seconds - 5)))
            batches=${batches:-64}
            [[ $batches == *256* ]] || command+=(--kv-gib 4) # room for 64 rollouts of 2,049 tokens, also of 7B
            ;;&
        start-*)
            # Python says once of each line of a step that waits for the device.
            watch=(env VLLM_GPU_SYNC_CHECK=warn)
            command+=(--task start) modes=${modes:-device,none}
            [[ $shape == tiny ]] || command+=(--max-seqs 256) # as many graphs as by default
            ;;
        drained-*) command+=(--task drained) modes=${modes:-device} ;;
        calls-*) command+=(--task calls) ;;
        identical-*) command+=(--task identical) modes=${modes:-off,device,off-bi,device-bi} ;;
        varied-*) modes=${modes:-none,ngram-gpu,device,device-n1} ;;
        phase-*) command+=(--step-times "$out/step_times_$name.csv") ;;
    esac
    [[ -z $modes ]] || command+=(--modes ${modes//,/ })
    [[ -z $batches ]] || command+=(--batch ${batches//,/ })
    command+=($(small "$kind"))
    [[ $kind == doctor ]] || command+=(--out "$out/results.jsonl")
    echo "== $stage, at most $seconds s"
    started=$SECONDS
    "${watch[@]}" timeout -k 5 "$seconds" "$python" "${command[@]}" 2>"$logs/$name.stderr" | tee "$logs/$name.stdout"
    code=${PIPESTATUS[0]}
    [[ $code == 0 ]] || { failed=1; tail -n 3 "$logs/$name.stderr"; }
    if ((${#watch[@]})); then
        waits='called a synchronizing CUDA operation|Implicit GPU<->CPU sync'
        grep -rHoE "[^ ]+:[0-9]+: UserWarning: ($waits)" "$logs/$name" 2>/dev/null | sort -u
    fi
    tells=$logs/$name.stdout
    case $code in
        0) verdict=ok ;;
        124 | 137) verdict=time ;;
        *) verdict=$code tells=$logs/$name.stderr ;;
    esac
    say "$stage" "$verdict" $((SECONDS - started)) "$(tail -n 1 "$tells" | cut -c 1-240)"
done
exit $failed
