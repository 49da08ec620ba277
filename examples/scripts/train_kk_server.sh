#!/usr/bin/env bash
# Rewards from a server, which several runs may share, on one node with 4 GPUs of 80 GB. Start the server first, on any
# machine that the nodes reach:
#
#   (umask 077 && openssl rand -hex 32 >reward_token)    # and copy it to the nodes
#   arlopti serve --grader kk --host 0.0.0.0 --port 5000 --token-file reward_token
#   export ARLOPTI_REWARD_TOKEN=$(cat reward_token)
#   REWARD_URL=http://rewards:5000/get_reward bash examples/scripts/train_kk_server.sh
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

REWARD_URL=${REWARD_URL:-http://127.0.0.1:5000/get_reward}

exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --reward.remote_url "$REWARD_URL" \
  --rollout.temperature 0.7 \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  --eval.sampling "*:n=4,t=0.7" \
  "$@"
