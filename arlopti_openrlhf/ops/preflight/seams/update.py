"""What the update, the forward pass and the weight sync lean on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Body, Fields, Seam, Signature, Text

BUFFER = "openrlhf.trainer.ppo_utils.replay_buffer"
ENGINE = "deepspeed.runtime.engine"
PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
ZERO3 = "deepspeed.runtime.zero.stage3"

SEAMS: list[Seam] = [
    Signature(
        PPO_ACTOR,
        "ActorPPOTrainer.__init__",
        "self strategy actor ema_model actor_optim actor_scheduler ema_beta micro_train_batch_size "
        "buffer_limit buffer_cpu_offload eps_clip tokenizer dataloader_pin_memory vllm_engines **kwargs",
        "update.trainer.TokenUpdateTrainer",
    ),
    Signature(PPO_ACTOR, "ActorPPOTrainer.ppo_train", "self kl_ctl", "update.trainer.TokenUpdateTrainer.ppo_train"),
    Signature(
        PPO_ACTOR,
        "ActorPPOTrainer.training_step",
        "self experience kl_ctl step loss_batch_info",
        "update.trainer.TokenUpdateTrainer.training_step",
    ),
    Signature(
        PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", "self", "update.trainer.TokenUpdateTrainer.broadcast_to_vllm"
    ),
    Signature(
        "openrlhf.models.loss",
        "PolicyLoss.forward",
        "self log_probs old_log_probs advantages action_mask rollout_log_probs dp_size batch_num_tokens "
        "global_batch_size",
        "update.group_loss.group_policy_loss",
    ),
    Signature(
        "openrlhf.utils.loss_utils",
        "get_loss_batch_info",
        "strategy loss_mask *, replay_buffer step dynamic_batch batch_num_tokens global_batch_size",
        "update.trainer.TokenUpdateTrainer.training_step",
    ),
    Signature(
        "openrlhf.trainer.ppo_utils.experience",
        "balance_experiences",
        "experiences args",
        "update.partition.balance_experiences",
    ),
    Signature(
        "openrlhf.trainer.ppo_utils.experience",
        "remove_padding_in_sequences",
        "items",
        "update.partition.balance_experiences",
    ),
    Text(
        "openrlhf.trainer.ppo_trainer",
        "",
        "experiences = balance_experiences(experiences, self.args)",
        "update.policy_actor.install_selective_actor",
    ),
    Signature(
        BUFFER, "NaiveReplayBuffer.setup_dynamic_batch", "self strategy", "update.mini_batches.dynamic_mini_batches"
    ),
    Signature(BUFFER, "NaiveReplayBuffer.append", "self experience", "token_update: AR needs no other seam"),
    Signature(
        "openrlhf.models.actor",
        "Actor.forward",
        "self sequences action_mask attention_mask return_output allgather_logits return_logprobs "
        "ring_attn_group packed_seq_lens return_entropy **mm_inputs",
        "forward.selective_actor.SelectiveActor.forward",
    ),
    Text(
        "openrlhf.cli.train_ppo_ray",
        "",
        "from openrlhf.trainer.ray.ppo_actor import PolicyModelActor",
        "update.policy_actor.install",
    ),
    Text(
        PPO_ACTOR, "", "@ray.remote(num_gpus=1) class PolicyModelActor(BaseModelActor):", "update.policy_actor.install"
    ),
    Text(PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "ActorPPOTrainer(", "update.policy_actor.install"),
    Signature(
        PPO_ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "self strategy pretrain max_steps vllm_engines",
        "cpu.refusals.install",
    ),
    Text(
        PPO_ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "scheduler_steps=max_steps",
        "update.trainer.TokenUpdateTrainer",
    ),
    Text(PPO_ACTOR, "PolicyModelActor.fit", "self.trainer.ppo_train(kl_ctl)", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.strategy =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.args =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.actor =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.ema_model =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.actor_scheduler =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.actor_loss_fn =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.replay_buffer =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.max_epochs =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.ema_beta =", "update.trainer.TokenUpdateTrainer"),
    Text(PPO_ACTOR, "ActorPPOTrainer.__init__", "self.vllm_engines =", "update.trainer.TokenUpdateTrainer"),
    Text(
        "openrlhf.models.loss",
        "PolicyLoss.forward",
        "return loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio",
        "update.group_loss.group_policy_loss",
    ),
    Text(
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "for n, p in model.named_parameters() if",
        "update.lora.merged_parameters",
    ),
    Text(
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "param.shape if self.strategy.args.ds.zero_stage != 3 else param.ds_shape",
        "update.lora.merged_parameters",
    ),
    Text(
        BUFFER,
        "NaiveReplayBuffer.__init__",
        "self.items: List[Experience] = []",
        "update.trainer.TokenUpdateTrainer._train",
    ),
    Text("openrlhf.utils.deepspeed.deepspeed", "", 'mesh_dim_names=("dp", "sp", "tp")', "update.ranks.Ranks"),
    Text(
        PPO_ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "actor = Actor(",
        "update.policy_actor.install_selective_actor",
    ),
    Text(
        "openrlhf.trainer.ray.launcher",
        "ReferenceModelActor.init_model_from_pretrained",
        "Actor(",
        "update.policy_actor.install_selective_actor",
    ),
    Text(
        PPO_ACTOR,
        "PolicyModelActor.forward",
        "with torch.no_grad(): action_log_probs = self.actor(",
        "update.policy_actor.PolicyActor.forward",
    ),
    Text(
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker.make_experience",
        "if (self.initial_model_group is not None) and (not args.algo.kl.use_loss): kl = compute_approx_kl(",
        "update.old_log_probs.can_defer",
    ),
    Text(
        ENGINE,
        "DeepSpeedEngine.step",
        "if self.is_gradient_accumulation_boundary(): self.gas_boundary_ctr += 1",
        "update.optimizer_steps.skip",
    ),
    Text(ENGINE, "DeepSpeedEngine.step", "self.micro_steps += 1", "update.optimizer_steps.skip"),
    Text("deepspeed.runtime.zero.stage_1_and_2", "", "INITIAL_MICRO_STEP_ID = -1", "update.optimizer_steps.skip"),
    Text(
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu",
        "if self.micro_step_id > 0:",
        "update.optimizer_steps.skip: only `step` resets it",
    ),
    Text(
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "deepspeed.zero.GatheredParameters([param], enabled=",
        "update.lora.merged_parameters",
    ),
    Text(
        ENGINE,
        "DeepSpeedEngine.is_gradient_accumulation_boundary",
        "if self._is_gradient_accumulation_boundary is None:",
        "update.optimizer_steps.skip",
    ),
    Text(
        "transformers.masking_utils",
        "_preprocess_mask_arguments",
        "if isinstance(attention_mask, (torch.Tensor, BlockMask)) and len(attention_mask.shape) == 4: return True,",
        "forward.selective_actor._NO_MASK",
    ),
    Text(
        "transformers.models.qwen2.modeling_qwen2",
        "Qwen2Attention.forward",
        "ALL_ATTENTION_FUNCTIONS.get_interface( self.config._attn_implementation, eager_attention_forward )",
        "forward.selective_actor._wrap_attention",
    ),
    Signature(
        STRATEGY,
        "DeepspeedStrategy._ds_init_train_model",
        "self model cfg",
        "ops.health.guard.GuardedStrategy._ds_init_train_model",
    ),
    Signature(
        STRATEGY,
        "DeepspeedStrategy.backward",
        "self loss model _optimizer **kwargs",
        "ops.health.guard.GuardedStrategy.backward",
    ),
    Signature(
        STRATEGY, "DeepspeedStrategy.get_grad_norm", "self model", "ops.health.guard.GuardedStrategy.get_grad_norm"
    ),
    Text(
        STRATEGY,
        "DeepspeedStrategy.moving_average",
        'self.time_steps["ema"] += 1',
        "ops.health.guard.GuardedStrategy.moving_average",
    ),
    Text(
        "openrlhf.utils.utils",
        "get_strategy",
        "from openrlhf.utils.deepspeed import DeepspeedStrategy",
        "ops.health.guard.install: bound when it is called",
    ),
    Text(
        ENGINE,
        "DeepSpeedEngine._take_model_step",
        "if overflow: self.skipped_steps += 1 else:",
        "ops.health.guard.GuardedStrategy: a refused step moves no schedule",
    ),
    Text(
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.step",
        "if self.check_grad_overflow: self.check_overflow(",
        "ops.health.guard.GuardedStrategy._check_steps",
    ),
    Text(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3.step",
        "if self._overflow_check_and_loss_scale_update():",
        "ops.health.guard.GuardedStrategy._check_steps",
    ),
    Text(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3._overflow_check_and_loss_scale_update",
        "if self.dtype == torch.float16: self.check_overflow()",
        "ops.health.guard.GuardedStrategy._check_steps",
    ),
    Text(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct",
        "err = torch.tensor(-1.0,",
        "ops.health.guard.GuardedStrategy._check_steps",
    ),
    Text(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload",
        "mask_nan_or_inf_with_val_inplace(total_norm",
        "ops.health.guard.GuardedStrategy._check_steps",
    ),
    Signature("deepspeed.runtime.utils", "has_inf_or_nan", "x", "ops.health.guard.first_non_finite"),
    Body(
        PPO_ACTOR,
        "ActorPPOTrainer.ppo_train",
        "318e39fde0e3c042",
        "update.trainer.TokenUpdateTrainer._train",
    ),
    Body(
        PPO_ACTOR,
        "ActorPPOTrainer.training_step",
        "8f2c662e0539abbf",
        "update.step.micro_batch_loss",
    ),
    Fields(
        "openrlhf.trainer.ppo_utils.experience",
        "Experience",
        "sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values returns "
        "advantages kl rewards scores response_length truncated total_length index prompts labels images "
        "mm_train_inputs info",
        "update.trainer.TokenUpdateTrainer",
    ),
]
