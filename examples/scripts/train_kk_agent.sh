#!/usr/bin/env bash
# An agent that gets one correction (examples/kk_agent.py), asynchronously, on one node with 8 GPUs. The tokens of both
# turns are trained, and weighted by the methods.
#
#   bash examples/scripts/train_kk_agent.sh
#   bash examples/scripts/train_kk_agent.sh --train.agent_func_path my_agent.py
#
# Data: new puzzles of 3 to 7 people.
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${run_flags[@]}" \
  "${kk_flags[@]}" \
  --train.agent_func_path "$(dirname "${BASH_SOURCE[0]}")/../kk_agent.py" \
  --train.async_enable \
  --train.colocate_actor_ref \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  --vllm.gpu_memory_utilization 0.9 \
  "$@"
