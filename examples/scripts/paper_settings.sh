# What the training scripts share. They set MODEL first, and whatever else is to differ from the values below, and get
#   method_flags  AR and Lopti, by METHOD, alpha and ETA (arXiv 2505.12929, Table 3)
#   grpo_flags    GRPO with the KL in the loss
#   paper_flags   the paper's other settings (Table 2)
#   hybrid_flags  one set of GPUs that all models share, in turn
#   run_flags     the model, the data and the run's folders
#   kk_flags      Knights and Knaves: 64 questions x 8 answers, two updates of 256 samples each
DATA=${DATA:-data/kk/train.jsonl}
EVAL_DATA=${EVAL_DATA:-data/kk/test.jsonl}
METHOD=${METHOD:-both}  # both, ar, lopti, none
alpha=${alpha:-${ALPHA:-0.3}}
script=$(basename "${BASH_SOURCE[1]}" .sh)  # train_kk_lora
script=${script#train_}
OUT=${OUT:-outputs/${script//_/-}-$(basename "$MODEL")-$METHOD}

case $METHOD in
  both)  method_flags=(--algo.ar.alpha "$alpha" --algo.lopti.eta "${ETA:-0.5}") ;;
  ar)    method_flags=(--algo.ar.alpha "$alpha") ;;
  lopti) method_flags=(--algo.lopti.eta "${ETA:-0.5}") ;;
  none)  method_flags=() ;;
  *) echo "METHOD=$METHOD: both, ar, lopti or none" >&2; exit 2 ;;
esac

grpo_flags=(--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3)

# Table 2 leaves the rest to verl's defaults, among them AdamW's betas and weight decay and the constant learning rate.
paper_flags=(
  --algo.kl.init_coef 0.001
  --actor.eps_clip_low_high 0.2 0.24
  --actor.dual_clip 10
  --actor.loss_agg_mode token-mean
  --actor.adam.lr 1e-6
  --actor.adam.betas 0.9 0.999
  --actor.adam.weight_decay 0.01
  --actor.lr_scheduler constant
  --actor.max_norm 1.0
  --actor.gradient_checkpointing_enable
  --data.input_key prompt
  --data.label_key label
  --data.max_len 5120
  --rollout.n_samples_per_prompt 8
  --rollout.max_new_tokens 4096
  --rollout.micro_batch_size 8
  --train.micro_batch_size 4
  --train.max_epochs 1
  --vllm.tensor_parallel_size 1
  --ds.zero_stage 3
  --ds.packing_samples
  --eval.steps 20
  --ckpt.save_steps 20
  # A run that was ended goes on from its newest whole checkpoint. Another OUT starts a new run.
  --ckpt.load_enable
)
# A model with each checkpoint, which stays. SAVE_HF=0 keeps the last one alone.
[ "${SAVE_HF:-1}" = 0 ] || paper_flags+=(--ckpt.save_hf)
# Liger's kernels: norms, rotary embeddings and SwiGLU in one launch each. LIGER=0 goes without, as a CPU has to.
[ "${LIGER:-1}" = 0 ] || paper_flags+=(--ds.use_liger_kernel)

hybrid_flags=(
  --train.colocate_all
  --vllm.gpu_memory_utilization 0.6
)
# Idle models release their memory. SLEEP=0 turns that off, as for a CPU, where vLLM cannot sleep.
[ "${SLEEP:-1}" = 0 ] || hybrid_flags+=(--vllm.enable_sleep --ds.enable_sleep)

run_flags=(
  --actor.model_name_or_path "$MODEL"
  --data.prompt_dataset "$DATA"
  --eval.dataset "$EVAL_DATA"
  --ckpt.path "$OUT/checkpoints"
  --ckpt.output_dir "$OUT/$(basename "$OUT")"
  --logger.tensorboard_dir "$OUT/tensorboard"
  --logger.wandb.run_name "$(basename "$OUT")"
)

kk_flags=(
  --rollout.batch_size 64
  --rollout.temperature 1.0
  --train.batch_size 256
  --train.num_episodes 5
  --eval.sampling "*:n=4,t=1"
)
