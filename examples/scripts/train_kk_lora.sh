#!/usr/bin/env bash
# LoRA on one node with 4 GPUs of 80 GB. vLLM gets the merged weights, and the policy without its adapter is the
# reference, so that no second model is loaded. The final folder holds the adapter.
#
#   bash examples/scripts/train_kk_lora.sh
#   bash examples/scripts/train_kk_lora.sh --ds.lora.rank 64 --ds.lora.alpha 128
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

# An adapter takes a higher learning rate than all weights do. Its checkpoints are small, whole models are not saved.
exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url kk \
  --ds.lora.rank 32 \
  --ds.lora.alpha 64 \
  --actor.adam.lr 1e-5 \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  "$@"
