#!/usr/bin/env bash
# Knights and Knaves on one GPU or two, of 24 GB each: a model of 0.5B to 1.5B parameters, which vLLM, the policy and the
# reference share (the hybrid engine). Prompts are easier and answers shorter than in the paper. No GPU has run it yet: the
# memory is an estimate.
#
#   bash examples/scripts/train_kk_small.sh
#   GPUS=2 MODEL=Qwen/Qwen2.5-1.5B-Instruct bash examples/scripts/train_kk_small.sh
#
# Data: new puzzles of 2 and 3 people.
#   arlopti data --generate --people 2 3 --train 2000 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

GPUS=${GPUS:-1}

# The optimizer is in the memory of the machine, and costs an update some time.
exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url kk \
  --rollout.batch_size 32 \
  --rollout.max_new_tokens 1024 \
  --data.max_len 2048 \
  --train.batch_size 128 \
  --train.num_episodes 1 \
  --actor.num_gpus_per_node "$GPUS" \
  --ref.num_gpus_per_node "$GPUS" \
  --vllm.num_engines "$GPUS" \
  --vllm.gpu_memory_utilization 0.4 \
  --ds.zero_stage 2 \
  --ds.adam_offload \
  "$@"
