#!/usr/bin/env bash
# The paper's Knights-and-Knaves run (arXiv 2505.12929, Tables 2 and 3) on one node with 4 GPUs of 80 GB.
#
# Data: the authors' files of 3 to 7 people (git clone https://github.com/zhyang2226/AR-Lopti). Prompts keep their text:
#   arlopti data --from AR-Lopti/data/kk/instruct/merge_34567ppl/train.parquet --prompt-format text --out data/kk/train.jsonl
#   arlopti data --from AR-Lopti/data/kk/instruct/[3-7]ppl/test_new.parquet --prompt-format text --out data/kk/test.jsonl
# or new puzzles, 900 and 100 for each number of people as in the authors' files:
#   arlopti data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
#
# Then, from the repository's root:
#   bash examples/scripts/train_kk.sh
#   ALGO=reinforce++ METHOD=ar bash examples/scripts/train_kk.sh
#   MODEL=Qwen/Qwen2.5-7B-Instruct-1M bash examples/scripts/train_kk.sh --logger.wandb.key WANDB_API_KEY
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-data/kk/train.jsonl}
EVAL_DATA=${EVAL_DATA:-data/kk/test.jsonl}
ALGO=${ALGO:-grpo}      # grpo, reinforce++
METHOD=${METHOD:-both}  # both, ar, lopti, none
OUT=${OUT:-outputs/kk-$(basename "$MODEL")-$ALGO-$METHOD}

case $ALGO in
  grpo)        alpha=${ALPHA:-0.3} ;;
  reinforce++) alpha=${ALPHA:-0.1} ;;
  *) echo "ALGO=$ALGO: grpo or reinforce++" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

# The paper's text puts the k1 KL into the reward of REINFORCE++, and so does this script. The authors' own scripts keep
# the KL loss there. To train as they did, append --algo.kl.use_loss --algo.kl.estimator k3.
algo_flags=("${grpo_flags[@]}")
if [ "$ALGO" = reinforce++ ]; then
  algo_flags=(--algo.advantage.estimator reinforce --algo.kl.estimator k1)
fi

# A rollout batch is 64 questions x 8 answers, two updates of 256 samples each.
exec python -m "${MODULE:-arlopti_openrlhf.cli.train_ppo_ray}" \
  "${algo_flags[@]}" \
  "${method_flags[@]}" \
  "${paper_flags[@]}" \
  "${hybrid_flags[@]}" \
  "${run_flags[@]}" \
  --reward.remote_url kk \
  --rollout.batch_size 64 \
  --rollout.temperature 0.7 \
  --train.batch_size 256 \
  --train.num_episodes 5 \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  --eval.n_samples_per_prompt 1 \
  --eval.temperature 0 \
  "$@"
