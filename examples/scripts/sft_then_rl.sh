#!/usr/bin/env bash
# A warm start by supervised fine-tuning with OpenRLHF's train_sft, launched by DeepSpeed, and then Knights and Knaves from
# it, on one node with 4 GPUs of 80 GB. A warm start that is there is not made again.
#
#   bash examples/scripts/sft_then_rl.sh
#   MODEL=Qwen/Qwen2.5-1.5B METHOD=lopti bash examples/scripts/sft_then_rl.sh --train.num_episodes 2
#
# Data: SFT_DATA, JSON lines with `prompt`, final text up to the <think> that responses follow, and `response`; new puzzles.
#   python -m arlopti_openrlhf.cli.prepare_data --generate --people 3 4 5 6 7 --train 900 --test 100 --prompt-format text --out data/kk
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B}
SFT_DATA=${SFT_DATA:-data/kk_sft/train.jsonl}
WARM_START=${WARM_START:-outputs/kk-sft-$(basename "$MODEL")}

if [ ! -e "$WARM_START/config.json" ]; then
  deepspeed --module openrlhf.cli.train_sft \
    --model.model_name_or_path "$MODEL" \
    --data.dataset "$SFT_DATA" \
    --data.input_key prompt \
    --data.output_key response \
    --data.input_template "{}" \
    --data.max_len 4096 \
    --train.batch_size 64 \
    --train.micro_batch_size 4 \
    --train.max_epochs 1 \
    --adam.lr 5e-6 \
    --ds.zero_stage 2 \
    --ds.packing_samples \
    --model.gradient_checkpointing_enable \
    --ckpt.path "$WARM_START/checkpoints" \
    --ckpt.output_dir "$WARM_START"
fi

MODEL=$WARM_START OUT=${OUT:-outputs/$(basename "$WARM_START")-rl-${METHOD:-both}} \
  exec bash "$(dirname "${BASH_SOURCE[0]}")/train_kk.sh" "$@"
