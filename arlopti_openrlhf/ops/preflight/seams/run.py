"""What the controllers, the evaluation, the rewards and the advantages lean on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Signature, Text

AGENT = "openrlhf.utils.agent"
ASYNC = "openrlhf.trainer.ppo_trainer_async"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
SAMPLES = "openrlhf.trainer.ppo_utils.samples_generator"
TRAINER = "openrlhf.trainer.ppo_trainer"

SEAMS: list[Seam] = [
    Text(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "if sampling_params.logprobs is not None and generation_output.logprobs is not None:",
        "ops.rollouts.rollout_log_probs.SpotChecks",
    ),
    Text(
        "vllm.v1.sample.sampler",
        "Sampler.forward",
        'if logprobs_mode == "raw_logprobs": raw_logprobs = self.compute_logprobs(logits)',
        "ops.rollouts.rollout_log_probs.SpotChecks: before the temperature",
    ),
    Text(
        "vllm.sampling_params",
        "SamplingParams",
        "flat_logprobs: bool = False",
        "ops.rollouts.rollout_log_probs.SpotChecks.ask",
    ),
    Signature(
        TRAINER,
        "BasePPOTrainer._compute_rollout_stats",
        "self experiences",
        "ops.health.health.WatchedTrainer._compute_rollout_stats",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.train_step",
        "rollout_stats = self._compute_rollout_stats(experiences)",
        "ops.health.health.WatchedTrainer._compute_rollout_stats",
    ),
    Text(
        TRAINER,
        "PPOTrainer.fit",
        "self.save_logs_and_checkpoints(global_step, status, client_states)",
        "ops.health.health.WatchedTrainer.save_logs_and_checkpoints: once after each step",
    ),
    Text(
        ASYNC,
        "TrainingActor.fit",
        "self.save_logs_and_checkpoints(global_step, status, client_states)",
        "ops.health.health.WatchedTrainer.save_logs_and_checkpoints: once after each step",
    ),
    Signature(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "self prompt label sampling_params max_length hf_tokenizer llm_engine images",
        "ops.rollouts.reward_client.RewardExecutor.execute",
    ),
    Signature(
        TRAINER,
        "compute_eval_metrics",
        "eval_dataloader samples_list n_samples_per_prompt",
        "ops.rollouts.evaluation.compute_eval_metrics",
    ),
    Signature(
        SAMPLES,
        "SamplesGenerator.generate_eval_samples",
        "self **generate_kwargs",
        "ops.rollouts.evaluation.SourceSamplesGenerator",
    ),
    Signature(
        TRAINER,
        "BasePPOTrainer.save_logs_and_checkpoints",
        "self global_step logs_dict client_states",
        "ops.controller.Controller",
    ),
    Signature(TRAINER, "BasePPOTrainer._detect_eval_metric_key", "self eval_metrics", "ops.controller.Controller"),
    Signature(ASYNC, "GenerateSamplesActor._run_eval", "self", "ops.controller.GenerateSamplesActor"),
    Signature(
        TRAINER,
        "BasePPOTrainer.save_best_checkpoint",
        "self eval_metrics global_step client_states",
        "ops.controller.Controller",
    ),
    Signature(
        MAKER,
        "RemoteExperienceMaker.__init__",
        "self actor_model_group critic_model_group reward_model_group initial_model_group kl_controller "
        "strategy tokenizer **kwargs",
        "ops.controller.Controller.__init__",
    ),
    Signature(
        MAKER,
        "RemoteExperienceMaker.split_rollout_samples",
        "self rollout_samples",
        "ops.rollouts.experience_maker.ExperienceMaker.split_rollout_samples",
    ),
    Signature(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "self experiences",
        "ops.rollouts.experience_maker.ExperienceMaker.compute_advantages_and_returns",
    ),
    Signature(
        MAKER,
        "RemoteExperienceMaker.get_cumulative_returns",
        "self rewards action_mask gamma",
        "ops.rollouts.experience_maker.ExperienceMaker._drop_reward",
    ),
    Signature(
        "openrlhf.models.utils",
        "compute_reward",
        "r kl_coef kl action_mask reward_clip_range",
        "ops.rollouts.experience_maker.ExperienceMaker._drop_reward",
    ),
    Signature(
        SAMPLES,
        "SamplesGenerator._process_response_into_experience",
        "self response **generate_kwargs",
        "ops.rollouts.evaluation.SourceSamplesGenerator: marks samples without scores",
    ),
    Text(
        "openrlhf.trainer.ray.vllm_engine",
        "RolloutRayActor.__init__",
        "self.executor = SingleTurnAgentExecutor(remote_rm_url)",
        "ops.rollouts.reward_client.install",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.__init__",
        "self.reward_endpoints = reward_endpoints or []",
        "ops.rollouts.reward_client.RewardExecutor: gives upstream no endpoints",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "if self.reward_endpoints: try:",
        "ops.rollouts.reward_client.RewardExecutor.execute",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        'query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)',
        "ops.rollouts.reward_client.RewardExecutor.execute: does the same",
    ),
    Text(
        SAMPLES,
        "SamplesGenerator._process_response_into_experience",
        "rewards=torch.tensor([reward_val]) if reward_val is not None else None,",
        "ops.rollouts.reward_client.RewardExecutor: one number per sample",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.__init__",
        "self.experience_maker = RemoteExperienceMaker( self.actor_model_group, self.critic_model_group, "
        "self.reward_model_group, self.reference_model_group, self.kl_ctl, self.strategy, tokenizer, )",
        "ops.controller.Controller.__init__: builds ours with the same arguments",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.train_step",
        "experiences = self.experience_maker.make_experience_batch(rollout_samples)",
        "ops.rollouts.experience_maker.ExperienceMaker",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.make_experience_batch",
        "samples_list = self.split_rollout_samples(rollout_samples)",
        "ops.rollouts.experience_maker.ExperienceMaker.split_rollout_samples",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "apply_length_penalties(experiences, args)",
        "ops.rollouts.experience_maker.ExperienceMaker: reads the rewards after it",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "rewards[indices] = raw_rewards",
        "ops.rollouts.experience_maker.equal_groups: does the same",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)",
        "ops.rollouts.experience_maker.ExperienceMaker: guards it",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "reward = compute_reward( reward, self.kl_ctl.value, experience.kl, "
        "action_mask=experience.action_mask, reward_clip_range=args.reward.clip_range, )",
        "ops.rollouts.experience_maker.ExperienceMaker._drop_reward: does the same",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "experience.advantages = experience.returns.clone()",
        "ops.rollouts.experience_maker.ExperienceMaker._drop_reward: sets both",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        'experience.info["return"] = reward.sum(dim=-1) experience.kl = None',
        "ops.rollouts.experience_maker.ExperienceMaker: keeps kl, and sets the return",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.__init__",
        'if self.reward_endpoints and self.reward_endpoints[0].endswith(".py"):',
        "ops.rollouts.reward_client.RewardExecutor: tells files from servers alike",
    ),
    Text(TRAINER, "", "logs = compute_eval_metrics(", "ops.rollouts.evaluation.install"),
    Text(ASYNC, "", "logs = compute_eval_metrics(", "ops.rollouts.evaluation.install"),
    Text(
        TRAINER,
        "PPOTrainer.fit",
        "self.save_best_checkpoint(eval_logs, global_step, client_states) pbar.update(prompts_consumed) "
        "if is_exhausted: break # Close trackers if self.wandb_logger: self.wandb_logger.close()",
        "ops.controller.PPOTrainer.fit: what is evaluated last, and the trackers closed at the end",
    ),
    Text(
        ASYNC,
        "TrainingActor.fit",
        "self.save_best_checkpoint(eval_metrics, eval_step, client_states)",
        "ops.controller.Controller.save_best_checkpoint: learns there which step was evaluated",
    ),
    Text(
        ASYNC,
        "GenerateSamplesActor.fit",
        "if self._should_eval(global_step) and not self._eval_just_done:",
        "ops.controller.GenerateSamplesActor: evaluates at step 0",
    ),
    Text(
        ASYNC,
        "PPOTrainerAsync.__init__",
        "self.trainer_actor = TrainingActor.remote(",
        "ops.controller.install: rebinds both actors",
    ),
    Text(
        SAMPLES,
        "SamplesGenerator.generate_eval_samples",
        "dataloader_iter=self._eval_dataloader_iter,",
        "ops.rollouts.evaluation.SourceSamplesGenerator: sets the iterator",
    ),
]
