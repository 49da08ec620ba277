#!/usr/bin/env bash
# The paper's Knights-and-Knaves run (arXiv 2505.12929, Tables 2 and 3) on one node with 4 GPUs of 80 GB.
#
# Data, from the published parquet files of 3 to 7 people; prompts keep their published text:
#   python -m arlopti_openrlhf.cli.prepare_data --from kk/3ppl_train.parquet kk/4ppl_train.parquet kk/5ppl_train.parquet kk/6ppl_train.parquet kk/7ppl_train.parquet --prompt-format text --out data/kk/train.jsonl
#   python -m arlopti_openrlhf.cli.prepare_data --from kk/3ppl_test.parquet kk/4ppl_test.parquet kk/5ppl_test.parquet kk/6ppl_test.parquet kk/7ppl_test.parquet --prompt-format text --out data/kk/test.jsonl
#
# Then, from the repository's root:
#   bash examples/scripts/train_kk.sh
#   ALGO=reinforce++ METHOD=ar bash examples/scripts/train_kk.sh
#   MODEL=Qwen/Qwen2.5-7B-Instruct-1M bash examples/scripts/train_kk.sh --logger.wandb.key "$WANDB_API_KEY"
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-data/kk/train.jsonl}
EVAL_DATA=${EVAL_DATA:-data/kk/test.jsonl}
ALGO=${ALGO:-grpo}      # grpo, reinforce++
METHOD=${METHOD:-both}  # both, ar, lopti, none
OUT=${OUT:-outputs/kk-$(basename "$MODEL")-$ALGO-$METHOD}

case $ALGO in
  grpo)
    alpha=${ALPHA:-0.3}
    algo_flags=(--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3) ;;
  reinforce++)
    alpha=${ALPHA:-0.1}
    algo_flags=(--algo.advantage.estimator reinforce --algo.kl.estimator k1) ;;
  *) echo "ALGO=$ALGO: grpo or reinforce++" >&2; exit 2 ;;
esac

case $METHOD in
  both)  method_flags=(--algo.ar.alpha "$alpha" --algo.lopti.eta "${ETA:-0.5}") ;;
  ar)    method_flags=(--algo.ar.alpha "$alpha") ;;
  lopti) method_flags=(--algo.lopti.eta "${ETA:-0.5}") ;;
  none)  method_flags=() ;;
  *) echo "METHOD=$METHOD: both, ar, lopti or none" >&2; exit 2 ;;
esac

# A rollout batch is 64 questions x 8 answers, two updates of 256 samples each. Table 2 leaves the rest to verl's
# defaults, hence AdamW's betas and weight decay and the constant learning rate.
python -m arlopti_openrlhf.cli.train_ppo_ray \
  "${algo_flags[@]}" \
  "${method_flags[@]}" \
  --algo.kl.init_coef 0.001 \
  --actor.model_name_or_path "$MODEL" \
  --actor.eps_clip_low_high 0.2 0.24 \
  --actor.dual_clip 10 \
  --actor.loss_agg_mode token-mean \
  --actor.adam.lr 1e-6 \
  --actor.adam.betas 0.9 0.999 \
  --actor.adam.weight_decay 0.01 \
  --actor.lr_scheduler constant \
  --actor.max_norm 1.0 \
  --actor.gradient_checkpointing_enable \
  --data.prompt_dataset "$DATA" \
  --data.input_key prompt \
  --data.label_key label \
  --data.max_len 5120 \
  --reward.remote_url rewards/kk_reward.py \
  --rollout.batch_size 64 \
  --rollout.n_samples_per_prompt 8 \
  --rollout.max_new_tokens 4096 \
  --rollout.temperature 0.7 \
  --rollout.micro_batch_size 8 \
  --train.batch_size 256 \
  --train.micro_batch_size 4 \
  --train.max_epochs 1 \
  --train.num_episodes 5 \
  --train.colocate_all \
  --actor.num_gpus_per_node 4 \
  --ref.num_gpus_per_node 4 \
  --vllm.num_engines 4 \
  --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.6 \
  --vllm.enable_sleep \
  --ds.enable_sleep \
  --ds.zero_stage 3 \
  --ds.packing_samples \
  --eval.dataset "$EVAL_DATA" \
  --eval.steps 20 \
  --eval.temperature 0.7 \
  --eval.n_samples_per_prompt 4 \
  --ckpt.save_steps 20 \
  --ckpt.save_hf \
  --ckpt.path "$OUT/checkpoints" \
  --ckpt.output_dir "$OUT/model" \
  --logger.tensorboard_dir "$OUT/tensorboard" \
  "$@"
