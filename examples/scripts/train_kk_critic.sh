#!/usr/bin/env bash
# PPO with a critic (GAE) and the KL in the reward, on one node with 8 GPUs of 80 GB, which all four models share.
#
#   bash examples/scripts/train_kk_critic.sh
#   METHOD=ar ALPHA=0.1 bash examples/scripts/train_kk_critic.sh
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

# The critic starts as the policy with a new head, and learns alone for the first ten steps.
exec arlopti train \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url kk \
  --algo.advantage.estimator gae \
  --algo.advantage.gamma 1 \
  --algo.advantage.lambd 1 \
  --algo.kl.estimator k1 \
  --critic.adam.lr 1e-5 \
  --critic.freezing_steps 10 \
  --actor.num_gpus_per_node 8 \
  --ref.num_gpus_per_node 8 \
  --critic.num_gpus_per_node 8 \
  --vllm.num_engines 8 \
  "$@"
