"""What the update and the forward pass depend on."""

from contract.kinds import fields, signature, text

BUFFER = "openrlhf.trainer.ppo_utils.replay_buffer"
DEEPSPEED_ENGINE = "deepspeed.runtime.engine"
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience"
LOSS = "openrlhf.models.loss"
PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"

# fmt: off
ENTRIES = (
    (signature, PPO_ACTOR, "ActorPPOTrainer.__init__",
     "self strategy actor ema_model actor_optim actor_scheduler ema_beta micro_train_batch_size buffer_limit "
     "buffer_cpu_offload eps_clip tokenizer dataloader_pin_memory vllm_engines **kwargs",
     "update.trainer.TokenUpdateTrainer"),
    (signature, PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", "self",
     "ops.lora.MergedSync.broadcast_to_vllm"),
    (signature, LOSS, "PolicyLoss.forward",
     "self log_probs old_log_probs advantages action_mask rollout_log_probs dp_size batch_num_tokens "
     "global_batch_size", "update.loss.pass_policy_loss"),
    (signature, "openrlhf.utils.loss_utils", "get_loss_batch_info",
     "strategy loss_mask *, replay_buffer step dynamic_batch batch_num_tokens global_batch_size",
     "update.micro_batches.micro_batches"),
    (signature, EXPERIENCE, "balance_experiences", "experiences args", "update.whole_prompts.balance_experiences"),
    (signature, EXPERIENCE, "remove_padding_in_sequences", "items", "update.whole_prompts.balance_experiences"),
    (text, "openrlhf.trainer.ppo_trainer", "BasePPOTrainer.train_step",
     "experiences = balance_experiences(experiences, self.args)", "update.whole_prompts.WholePrompts.train_step"),
    (text, BUFFER, "NaiveReplayBuffer.setup_dynamic_batch",
     "num_steps = min(expected_num_steps, len(sample_lengths) // local_train_batch_size) … "
     "self.dynamic_optimizer_step = optimizer_steps", "reference.ReferenceTrainer"),
    (signature, EXPERIENCE, "split_experience_batch", "experience", "reference.ReferenceTrainer.training_step"),
    (text, PPO_ACTOR, "ActorPPOTrainer.ppo_train",
     "self.replay_buffer.setup_dynamic_batch(self.strategy) … dataloader = DataLoader( self.replay_buffer, … "
     "for epoch in range(self.max_epochs): … status = self.training_step(experience, kl_ctl, step, loss_batch_info)",
     "reference.ReferenceTrainer.ppo_train"),
    (text, PPO_ACTOR, "ActorPPOTrainer.training_step",
     "action_mask = experience.action_mask … self.actor( sequences, action_mask, … self.actor_loss_fn( … "
     "action_mask=experience.action_mask, … kl_loss = aggregate_loss(kl, experience.action_mask, **loss_batch_info) … "
     "self.args.actor.aux_loss_coef … self.strategy.optimizer_step(self.actor_optim, self.actor, "
     "self.actor_scheduler, name=\"actor\") … self.ema_beta",
     "reference.ReferenceTrainer.training_step"),
    (signature, BUFFER, "NaiveReplayBuffer.append", "self experience", "token_update: AR depends on nothing else"),
    (signature, "openrlhf.models.actor", "Actor.forward",
     "self sequences action_mask attention_mask return_output allgather_logits return_logprobs ring_attn_group "
     "packed_seq_lens return_entropy **mm_inputs", "forward.selective_actor.SelectiveActor.forward"),
    (text, "openrlhf.cli.train_ppo_ray", "", "from openrlhf.trainer.ray.ppo_actor import PolicyModelActor",
     "bindings.TABLE"),
    (text, PPO_ACTOR, "", "@ray.remote(num_gpus=1) class PolicyModelActor(BaseModelActor):",
     "bindings.TABLE"),
    (text, PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "ActorPPOTrainer(",
     "bindings.TABLE"),
    (text, PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "scheduler_steps=max_steps",
     "update.trainer.TokenUpdateTrainer"),
    (text, PPO_ACTOR, "PolicyModelActor.fit", "self.trainer.ppo_train(kl_ctl)", "update.trainer.TokenUpdateTrainer"),
    (text, PPO_ACTOR, "ActorPPOTrainer.__init__",
     "self.strategy = … self.args = … self.actor = … self.ema_model = … self.actor_scheduler = … self.actor_loss_fn = "
     "… self.replay_buffer = … self.max_epochs = … self.ema_beta = … self.vllm_engines =",
     "update.trainer.TokenUpdateTrainer"),
    (text, LOSS, "PolicyLoss.forward", "return loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio",
     "update.loss.pass_policy_loss"),
    (text, PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm",
     "for n, p in model.named_parameters() if … param.shape if self.strategy.args.ds.zero_stage != 3 else "
     "param.ds_shape … deepspeed.zero.GatheredParameters([param], enabled=", "ops.lora.merged_parameters"),
    (text, BUFFER, "NaiveReplayBuffer.__init__", "self.items: List[Experience] = []",
     "update.trainer.TokenUpdateTrainer._train"),
    (text, "openrlhf.utils.deepspeed.deepspeed", "", 'mesh_dim_names=("dp", "sp", "tp")', "update.ranks.Ranks"),
    (text, PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "actor = Actor(",
     "bindings.TABLE"),
    (text, "openrlhf.trainer.ray.launcher", "ReferenceModelActor.init_model_from_pretrained", "Actor(",
     "bindings.TABLE"),
    (text, PPO_ACTOR, "PolicyModelActor.forward", "with torch.no_grad(): action_log_probs = self.actor(",
     "update.policy_actor.PolicyActor.forward"),
    (text, "deepspeed.utils.timer", "ThroughputTimer.start",
     "if self.config.synchronized: get_accelerator().synchronize()", "update.policy_actor.PolicyActor"),
    (text, "openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker.make_experience",
     "if (self.initial_model_group is not None) and (not args.algo.kl.use_loss): kl = compute_approx_kl(",
     "update.old_log_probs.needed_before"),
    (text, DEEPSPEED_ENGINE, "DeepSpeedEngine.step",
     "if self.is_gradient_accumulation_boundary(): self.gas_boundary_ctr += 1 … self.micro_steps += 1",
     "update.optimizer_steps.skip"),
    (text, ZERO12, "", "INITIAL_MICRO_STEP_ID = -1", "update.optimizer_steps.skip"),
    (text, ZERO12, "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu", "if self.micro_step_id > 0:",
     "update.optimizer_steps.skip: only `step` resets it"),
    (text, DEEPSPEED_ENGINE, "DeepSpeedEngine.is_gradient_accumulation_boundary",
     "if self._is_gradient_accumulation_boundary is None:", "update.optimizer_steps.skip"),
    (text, "transformers.masking_utils", "_preprocess_mask_arguments",
     "if isinstance(attention_mask, (torch.Tensor, BlockMask)) and len(attention_mask.shape) == 4: return True,",
     "forward.packed_attention.NO_MASK"),
    (text, "transformers.models.qwen2.modeling_qwen2", "Qwen2Attention.forward",
     "ALL_ATTENTION_FUNCTIONS.get_interface( self.config._attn_implementation, eager_attention_forward )",
     "forward.packed_attention.install"),
    (fields, EXPERIENCE, "Experience",
     "sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values returns "
     "advantages kl rewards scores response_length truncated total_length index prompts labels images mm_train_inputs "
     "info", "update.trainer.TokenUpdateTrainer"),
    (text, "peft.tuners.tuners_utils", "BaseTunerLayer", "return self._disable_adapters",
     "ops.lora.without_adapters"),
    (text, "peft.tuners.lora.layer", "Linear.forward",
     "if self.disable_adapters: if self.merged: self.unmerge() result = self.base_layer(x, *args, **kwargs)",
     "ops.lora.without_adapters"),
)
# fmt: on
