#!/usr/bin/env bash
# DAPO (arXiv 2503.14476) with AR and Lopti, on one node with 4 GPUs of 80 GB: clip-higher, dynamic sampling, the soft
# overlong penalty, the mean over tokens, no KL, and truncated importance sampling between vLLM and the policy.
#
#   bash examples/scripts/train_kk_dapo.sh
#   METHOD=lopti bash examples/scripts/train_kk_dapo.sh
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

# Dynamic sampling leaves out prompts whose answers are all right or all wrong. The penalty grows over the last 1,024
# of 4,096 tokens. Importance weights between the two engines are cut at 2.
exec arlopti train \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url kk \
  --algo.advantage.estimator group_norm \
  --algo.kl.init_coef 0 \
  --actor.eps_clip_low_high 0.2 0.28 \
  --algo.dynamic_filtering_enable \
  --algo.dynamic_filtering_range 0.0 1.0 \
  --reward.overlong_buffer_len 1024 \
  --reward.overlong_penalty_factor 1.0 \
  --algo.advantage.is_correction_level token \
  --algo.advantage.is_correction_mode clip \
  --algo.advantage.is_correction_threshold 0 2 \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  "$@"
