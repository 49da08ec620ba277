#!/usr/bin/env bash
# The paper's math run (arXiv 2505.12929, Tables 2 and 3) on one node with 4 GPUs of 80 GB.
#
# Data: the authors' files (git clone https://github.com/zhyang2226/AR-Lopti), which are DSR-Uniform without the test sets'
# problems (or --dataset orz, with EPOCHS=1) and the test sets. Prompts are plain text, because a base model has no chat
# template to follow.
#   arlopti data --from AR-Lopti/data/math/MATH-500.parquet AR-Lopti/data/deepscaler/minerva_dsr.parquet AR-Lopti/data/deepscaler/olympiad_bench_dsr.parquet AR-Lopti/data/deepscaler/amc_dsr.parquet AR-Lopti/data/deepscaler/aime_dsr.parquet --prompt-format text --out data/math/test.jsonl
#   arlopti data --from AR-Lopti/data/deepscaler_c/deepscaler_uniform_train.parquet --exclude data/math/test.jsonl --prompt-format text --out data/math/train.jsonl
#
# Then, from the repository's root (the paper recommends either method alone):
#   METHOD=ar bash examples/scripts/train_math.sh
#   METHOD=lopti bash examples/scripts/train_math.sh --logger.wandb.key WANDB_API_KEY
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-data/math/train.jsonl}
EVAL_DATA=${EVAL_DATA:-data/math/test.jsonl}
METHOD=${METHOD:-ar}  # ar, lopti, both, none
EPOCHS=${EPOCHS:-5}
GPUS=${GPUS:-4}
OUT=${OUT:-outputs/math-$(basename "$MODEL")-$METHOD}
alpha=${ALPHA:-0.1}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

# A rollout batch is 128 questions x 8 answers, two updates of 512 samples each.
exec arlopti train \
  "${grpo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  --reward.remote_url math_boxed \
  --rollout.batch_size 128 \
  --rollout.temperature 1.0 \
  --train.batch_size 512 \
  --train.num_episodes "$EPOCHS" \
  --actor.num_gpus_per_node "$GPUS" \
  --ref.num_gpus_per_node "$GPUS" \
  --vllm.num_engines "$GPUS" \
  --eval.sampling "*:n=1,t=0" --eval.sampling "amc:n=16,t=1" --eval.sampling "aime:n=16,t=1" \
  "$@"
