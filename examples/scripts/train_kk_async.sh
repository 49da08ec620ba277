#!/usr/bin/env bash
# Asynchronous training on one node with 8 GPUs: four generate while four train. The samples are one step old, and their
# importance weights are cut. PARTIAL=1 also lets a weight sync interrupt samples, which go on with the new weights.
#
#   bash examples/scripts/train_kk_async.sh
#   PARTIAL=1 bash examples/scripts/train_kk_async.sh
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

partial_flags=()
if [ "${PARTIAL:-0}" = 1 ]; then
  partial_flags=(--train.partial_rollout_enable)
fi

exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url kk \
  "${partial_flags[@]}" \
  --train.async_enable \
  --train.async_queue_size 1 \
  --train.colocate_actor_ref \
  --algo.advantage.is_correction_level token \
  --algo.advantage.is_correction_mode clip \
  --algo.advantage.is_correction_threshold 0 2 \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  --vllm.gpu_memory_utilization 0.9 \
  "$@"
