#!/usr/bin/env bash
# Trains on the GPU machine, in the repository's root, once `gpu_stack.py unpack` has all parts there:
#
#   bash benchmarks/gpu_stack.sh STAGE... [-- FLAGS OF THE TRAININGS short, both AND kk]
#
#   probe   the GPU, compilers, memory, packages
#   short   SmolLM2-135M-Instruct, and 3 steps of AR + Lopti on sums, with the seconds of each phase
#   long    arlopti quickstart --task sums: an evaluation, 20 steps, an evaluation, curves
#   both    8 steps of stock GRPO, and of AR + Lopti
#   kk      2 steps of train_kk_small.sh: sleeping models, the optimizer in the machine's memory
#   check   gpu_check.py: exactness and time of the update
#
# Each stage has a limit, and none stops the next. What the model and the runs leave in /tmp/run stays while the machine
# does. The logs of all calls so far are in $OUT/logs.tgz.
set -uo pipefail

stages=() flags=()
while [ $# -gt 0 ]; do [ "$1" = -- ] && { shift; flags=("$@"); break; }; stages+=("$1"); shift; done
back=${OUT:-/tmp/out} logs=/tmp/run/logs stack=/tmp/stack
unset OUT # the scripts would take it for the run's folder
mkdir -p "$back" "$logs"

# The checkout counts before the stack's copy of the project.
export PYTHONPATH=$PWD:$stack/site PYTHONUNBUFFERED=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=$stack/wheels
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false HF_HOME=/tmp/hf
# What is compiled stays for the next call.
export VLLM_CACHE_ROOT=/tmp/vllm TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
export TORCH_EXTENSIONS_DIR=/tmp/torch_extensions TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=12
export ARLOPTI_VLLM=0.25.1 # another than the tested ones
# What was left out of vLLM, and the model runner that this project's contract reads.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_USE_RUST_FRONTEND=0
export VLLM_USE_V2_MODEL_RUNNER=${VLLM_USE_V2_MODEL_RUNNER:-0}
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 OMP_NUM_THREADS=4
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# The scripts call `python`, which a machine may have as python3 alone.
command -v python >/dev/null || { printf '#!/bin/sh\nexec python3 "$@"\n' >/tmp/run/python && chmod +x /tmp/run/python && export PATH=$PATH:/tmp/run; }
nvcc=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | head -1)
[ -z "$nvcc" ] || { CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$nvcc")")"); export CUDA_HOME PATH=$CUDA_HOME/bin:$PATH; }

run() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS status watch
  shift 2
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits -l 1 >"$logs/$name.gpu" 2>&1 &
  watch=$!
  timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  kill "$watch" 2>/dev/null
  echo "== $name: status $status, $((SECONDS - start)) s of at most $limit"
  tail -n "$([ $status = 0 ] && echo 25 || echo 60)" "$logs/$name.log" | cut -c1-400
  awk -F, '$1 + 0 == $1 { n++; busy += $1; if ($2 > most) most = $2 }
    END { if (n) printf "GPU busy %.0f%% of the time, at most %.1f GiB\n", busy / n, most / 1024 }' "$logs/$name.gpu"
  [ $status = 0 ] || timeout 20 python3 -m ray.scripts.scripts stop --force >/dev/null 2>&1
}

step() { # NAME SECONDS FLAGS OF whole_step.py...
  run "$1" "$2" python3 benchmarks/whole_step.py --task sums --out /tmp/run/sums "${@:3}"
}

for stage in "${stages[@]}"; do
  case $stage in
    probe) run probe 60 bash -c 'nvidia-smi; nproc; free -g; df -h /tmp /dev/shm; which gcc g++ ninja nvcc; nvcc -V
      python3 -m pip list' ;;
    short) step short 280 --rounds 1 --steps 3 --variants "AR + Lopti" --json "$logs/short.json" -- "${flags[@]}" ;;
    long) run long 560 python3 -m arlopti_openrlhf quickstart --task sums --out /tmp/run/quickstart ;;
    both) step both 560 --rounds 1 --steps 8 --json "$logs/both.json" -- "${flags[@]}" ;;
    kk) run kk 400 bash -c 'python3 -m arlopti_openrlhf data --generate --people 2 3 --train 64 --test 8 --prompt-format text \
      --out /tmp/run/kk && MODEL=/tmp/run/sums/model DATA=/tmp/run/kk/train.jsonl EVAL_DATA=/tmp/run/kk/test.jsonl \
      OUT=/tmp/run/kk-run SAVE_HF=0 bash examples/scripts/train_kk_small.sh "$@"' kk --data.max_len 1408 "${flags[@]}" ;;
    check) run check 590 python3 benchmarks/gpu_check.py --minutes 9 --out "$logs/check" ;;
    *) echo "no stage $stage" ;;
  esac
  (cd /tmp/run && find . \( -name '*.log' -o -name '*.gpu' -o -name '*.json' -o -name '*.png' -o -name '*.yaml' \
    -o -name 'events.*' -o -name '*.jsonl' \) -size -8M -not -path '*/model*' -not -path '*/checkpoint*' |
    tar -czf logs.tgz -T - && cp logs.tgz "$back/")
done
ls -l "$back"
