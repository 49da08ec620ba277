"""What we lean on in OpenRLHF 0.11.2, DeepSpeed, vLLM and transformers, read from their source without importing it.

A failure says what moved upstream and what of ours leans on it: read the new code there, adapt ours, then this table.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from pathlib import Path

import pytest

TRAINER = "update.trainer.TokenUpdateTrainer"
STEP = "update.micro_batch.MicroBatchTrainer"
PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
BUFFER = "openrlhf.trainer.ppo_utils.replay_buffer"
STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
WORKER = "openrlhf.trainer.ray.vllm_worker_wrap"
AGENT = "openrlhf.utils.agent"
REWARDS = "run.reward_client.RewardExecutor"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
ADVANTAGES = "run.experience_maker.ExperienceMaker"

# (module, name in it, the names of its parameters in order, who leans on it)
SIGNATURES = [
    (
        PPO_ACTOR,
        "ActorPPOTrainer.__init__",
        "self strategy actor ema_model actor_optim actor_scheduler ema_beta micro_train_batch_size buffer_limit "
        "buffer_cpu_offload eps_clip tokenizer dataloader_pin_memory vllm_engines **kwargs",
        TRAINER,
    ),
    (PPO_ACTOR, "ActorPPOTrainer.ppo_train", "self kl_ctl", f"{TRAINER}.ppo_train"),
    (
        PPO_ACTOR,
        "ActorPPOTrainer.training_step",
        "self experience kl_ctl step loss_batch_info",
        f"{STEP}.training_step",
    ),
    (PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", "self", f"{TRAINER}.broadcast_to_vllm"),
    (
        "openrlhf.models.loss",
        "PolicyLoss.forward",
        "self log_probs old_log_probs advantages action_mask rollout_log_probs dp_size batch_num_tokens "
        "global_batch_size",
        "update.group_loss.group_policy_loss",
    ),
    (
        "openrlhf.utils.loss_utils",
        "get_loss_batch_info",
        "strategy loss_mask *, replay_buffer step dynamic_batch batch_num_tokens global_batch_size",
        f"{STEP}.training_step",
    ),
    (
        "openrlhf.utils.loss_utils",
        "iter_grad_accum_global_norm",
        "data_iter strategy accumulated_gradient mask_fn",
        f"{TRAINER}._train_pass",
    ),
    (BUFFER, "NaiveReplayBuffer.setup_dynamic_batch", "self strategy", "update.passes.dynamic_mini_batches"),
    (BUFFER, "NaiveReplayBuffer.append", "self experience", "token_update: AR needs no other seam"),
    (
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "self prompt label sampling_params max_length hf_tokenizer llm_engine images",
        f"{REWARDS}.execute",
    ),
    (STRATEGY, "DeepspeedStrategy.moving_average", "self model model_ema beta device", "cpu_patches._patch_strategy"),
    (
        "openrlhf.utils.distributed_util",
        "stateless_init_process_group",
        "master_address master_port rank world_size device",
        "cpu_patches._patch_distributed_util",
    ),
    (
        WORKER,
        "WorkerWrap.init_process_group",
        "self master_address master_port rank_offset world_size group_name backend use_ray",
        "cpu_patches._patch_worker_wrap",
    ),
    (WORKER, "WorkerWrap.update_weight", "self name dtype shape empty_cache", "cpu_patches._update_weight"),
    (
        "openrlhf.models.actor",
        "Actor.__init__",
        "self pretrain_or_model attn_implementation param_dtype load_in_4bit lora_rank lora_alpha lora_dropout "
        "target_modules ds_config device_map packing_samples temperature use_liger_kernel freeze_visual_encoder "
        "experts_implementation **kwargs",
        "cpu_patches._patch_actor",
    ),
    (
        "openrlhf.models.actor",
        "Actor.forward",
        "self sequences action_mask attention_mask return_output allgather_logits return_logprobs ring_attn_group "
        "packed_seq_lens return_entropy **mm_inputs",
        "forward.selective_actor.SelectiveActor.forward",
    ),
    (
        "openrlhf.models.model",
        "get_llm_for_sequence_regression",
        "model_name_or_path model_type *, param_dtype load_in_4bit lora_rank lora_alpha target_modules lora_dropout "
        "normalize_reward attn_implementation ds_config init_value_head value_head_prefix device_map packing_samples "
        "experts_implementation **kwargs",
        "cpu_patches._patch_model",
    ),
    (
        "openrlhf.trainer.ppo_trainer",
        "compute_eval_metrics",
        "eval_dataloader samples_list n_samples_per_prompt",
        "run.evaluation.compute_eval_metrics",
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator.generate_eval_samples",
        "self **generate_kwargs",
        "run.evaluation.SourceSamplesGenerator",
    ),
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer.save_logs_and_checkpoints",
        "self global_step logs_dict client_states",
        "run.controller.Controller",
    ),
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer._detect_eval_metric_key",
        "self eval_metrics",
        "run.controller.Controller",
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "GenerateSamplesActor._run_eval",
        "self",
        "run.controller.GenerateSamplesActor",
    ),
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer.save_best_checkpoint",
        "self eval_metrics global_step client_states",
        "run.controller.Controller",
    ),
    ("openrlhf.utils.config", "hierarchize", "args", "cli.train_ppo_ray: our flags reach workers as strategy.args"),
    (
        "vllm.distributed.utils",
        "stateless_init_torch_distributed_process_group",
        "host port rank world_size backend group_name return_store listen_socket",
        "cpu_patches._GlooGroup",
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.reload_weights",
        "self weights_iterator weights_path is_checkpoint_format",
        "cpu_patches._update_weight",
    ),
    (
        "transformers.modeling_flash_attention_utils",
        "_unpad_input",
        "hidden_states attention_mask unused_mask",
        "cpu_patches._flash_attn_stand_in",
    ),
    (
        "transformers.modeling_flash_attention_utils",
        "_pad_input",
        "hidden_states indices batch seqlen",
        "cpu_patches._flash_attn_stand_in",
    ),
    (
        MAKER,
        "RemoteExperienceMaker.__init__",
        "self actor_model_group critic_model_group reward_model_group initial_model_group kl_controller strategy "
        "tokenizer **kwargs",
        "run.controller.Controller.__init__",
    ),
    (
        MAKER,
        "RemoteExperienceMaker.split_rollout_samples",
        "self rollout_samples",
        f"{ADVANTAGES}.split_rollout_samples",
    ),
    (
        MAKER,
        "RemoteExperienceMaker.compute_advantages_and_returns",
        "self experiences",
        f"{ADVANTAGES}.compute_advantages_and_returns",
    ),
    (
        MAKER,
        "RemoteExperienceMaker.get_cumulative_returns",
        "self rewards action_mask gamma",
        f"{ADVANTAGES}._drop_reward",
    ),
    (
        "openrlhf.models.utils",
        "compute_reward",
        "r kl_coef kl action_mask reward_clip_range",
        f"{ADVANTAGES}._drop_reward",
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._process_response_into_experience",
        "self response **generate_kwargs",
        "run.evaluation.SourceSamplesGenerator: marks samples without scores",
    ),
    ("ray._private.services", "get_ray_address_from_environment", "addr temp_dir", "cpu._starts_cluster"),
    ("torch.utils.file_baton", "FileBaton.try_acquire", "self", "cpu_patches._outlive_killed_builds"),
    ("torch.utils.file_baton", "FileBaton.release", "self", "cpu_patches._outlive_killed_builds"),
]

# (module, name in it or "" for the whole file, text that its source holds, who leans on it); white space is ignored
SOURCES = [
    # The command line: its parser is out of reach under __main__, and patched when it is asked to parse.
    ("openrlhf.cli.train_ppo_ray", "", 'if __name__ == "__main__":', "cli.train_ppo_ray.main"),
    ("openrlhf.cli.train_ppo_ray", "", "parser = argparse.ArgumentParser()", "cli.train_ppo_ray._our_parser"),
    ("openrlhf.cli.train_ppo_ray", "", "args = parser.parse_args()", "cli.train_ppo_ray._our_parser"),
    ("openrlhf.cli.train_ppo_ray", "", "args = hierarchize(args)", "cli.train_ppo_ray"),
    ("openrlhf.cli.train_ppo_ray", "train", "ray.init( runtime_env={", "cpu._hook_ray_workers"),
    (
        "openrlhf.cli.train_ppo_ray",
        "",
        "from openrlhf.trainer.ray.ppo_actor import PolicyModelActor",
        "update.policy_actor.install",
    ),
    # The policy actor builds its trainer by global name, and is pickled with the globals it has on the driver.
    (PPO_ACTOR, "", "@ray.remote(num_gpus=1) class PolicyModelActor(BaseModelActor):", "update.policy_actor.install"),
    (PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "ActorPPOTrainer(", "update.policy_actor.install"),
    (PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained", "scheduler_steps=max_steps", TRAINER),
    (PPO_ACTOR, "PolicyModelActor.fit", "self.trainer.ppo_train(kl_ctl)", TRAINER),
    # What the trainer keeps, under names that the subclass reads and sets.
    *(
        (PPO_ACTOR, "ActorPPOTrainer.__init__", f"self.{name} = ", TRAINER)
        for name in (
            "strategy args actor ema_model actor_scheduler actor_loss_fn replay_buffer max_epochs ema_beta "
            "vllm_engines".split()
        )
    ),
    (
        "openrlhf.models.loss",
        "PolicyLoss.forward",
        "return loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio",
        "update.group_loss.group_policy_loss",
    ),
    # The weight sync.
    (
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "for n, p in model.named_parameters() if",
        "update.lora.merged_parameters",
    ),
    (
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "param.shape if self.strategy.args.ds.zero_stage != 3 else param.ds_shape",
        "update.lora.merged_parameters",
    ),
    (
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "empty_cache=count == num_params",
        "cpu_patches._update_weight: the last parameter is so marked",
    ),
    (
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "self._model_update_group.broadcast(param.data, src=0, stream=torch.cuda.current_stream())",
        "cpu_patches._GlooGroup",
    ),
    (
        WORKER,
        "WorkerWrap.init_process_group",
        "from openrlhf.utils.distributed_util import stateless_init_process_group",
        "cpu_patches._patch_distributed_util: bound when it is called, not when the module is imported",
    ),
    (WORKER, "WorkerWrap.update_weight", "self.model_runner", "cpu_patches._update_weight"),
    (WORKER, "WorkerWrap.update_weight", "dtype == self.model_config.dtype", "cpu_patches._update_weight"),
    # Devices.
    (
        BUFFER,
        "NaiveReplayBuffer.__init__",
        'self.target_device = torch.device(f"cuda:{torch.cuda.current_device()}")',
        "cpu_patches._patch_replay_buffer",
    ),
    (BUFFER, "NaiveReplayBuffer.__init__", "self.items: List[Experience] = []", f"{TRAINER}._train_in_passes"),
    (
        STRATEGY,
        "",
        "from torch.distributed.device_mesh import init_device_mesh",
        "cpu_patches._patch_strategy: a name in the module's globals",
    ),
    (STRATEGY, "", 'self.ds_device_mesh = init_device_mesh( "cuda",', "cpu_patches._patch_strategy"),
    (
        "deepspeed.comm.comm",
        "allgather_fn",
        "return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)",
        "cpu_patches._patch_deepspeed_comm",
    ),
    (
        "deepspeed.comm.comm",
        "all_gather_into_tensor",
        "return cdb.all_gather_into_tensor(output_tensor=output_tensor, input_tensor=tensor, group=group,",
        "cpu_patches._patch_deepspeed_comm",
    ),
    (STRATEGY, "", 'mesh_dim_names=("dp", "sp", "tp")', "update.ranks.Ranks"),
    # Without flash-attn.
    (
        "openrlhf.models.ring_attn_utils",
        "",
        "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input "
        "from flash_attn.utils.distributed import all_gather",
        "cpu_patches._flash_attn_stand_in",
    ),
    # The selective actor takes the place of `Actor` where policy and reference are built. Old log-probs come from the
    # policy actor's `forward`, and are not read before the update.
    (
        PPO_ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "actor = Actor(",
        "update.policy_actor.install_selective_actor",
    ),
    (
        "openrlhf.trainer.ray.launcher",
        "ReferenceModelActor.init_model_from_pretrained",
        "Actor(",
        "update.policy_actor.install_selective_actor",
    ),
    (
        PPO_ACTOR,
        "PolicyModelActor.forward",
        "with torch.no_grad(): action_log_probs = self.actor(",
        "update.policy_actor.PolicyActor.forward",
    ),
    (
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker.make_experience",
        "if (self.initial_model_group is not None) and (not args.algo.kl.use_loss): kl = compute_approx_kl(",
        "update.old_log_probs.can_defer",
    ),
    # An optimizer step that is skipped: without a boundary `step` counts the micro-batch, and does nothing else.
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.step",
        "if self.is_gradient_accumulation_boundary(): self.gas_boundary_ctr += 1",
        "update.optimizer_steps.skip",
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.step", "self.micro_steps += 1", "update.optimizer_steps.skip"),
    ("deepspeed.runtime.zero.stage_1_and_2", "", "INITIAL_MICRO_STEP_ID = -1", "update.optimizer_steps.skip"),
    (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu",
        "if self.micro_step_id > 0:",
        "update.optimizer_steps.skip: only `step` resets it",
    ),
    (
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "deepspeed.zero.GatheredParameters([param], enabled=",
        "update.lora.merged_parameters",
    ),
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.is_gradient_accumulation_boundary",
        "if self._is_gradient_accumulation_boundary is None:",
        "update.optimizer_steps.skip",
    ),
    (
        "transformers.masking_utils",
        "_preprocess_mask_arguments",
        "if isinstance(attention_mask, (torch.Tensor, BlockMask)) and len(attention_mask.shape) == 4: return True,",
        "forward.selective_actor._NO_MASK",
    ),
    (
        "transformers.models.qwen2.modeling_qwen2",
        "Qwen2Attention.forward",
        "ALL_ATTENTION_FUNCTIONS.get_interface( self.config._attn_implementation, eager_attention_forward )",
        "forward.selective_actor._wrap_attention",
    ),
    # Rewards: `execute` generates, and fetches a reward where it has endpoints, whose errors it logs.
    (
        "openrlhf.trainer.ray.vllm_engine",
        "RolloutRayActor.__init__",
        "self.executor = SingleTurnAgentExecutor(remote_rm_url)",
        "run.reward_client.install",
    ),
    (AGENT, "SingleTurnAgentExecutor.__init__", "self.reward_endpoints = reward_endpoints or []", REWARDS),
    (
        AGENT,
        "SingleTurnAgentExecutor.__init__",
        "self._reward_endpoint_cycle = cycle(self.reward_endpoints)",
        f"{REWARDS}._ask_server",
    ),
    (AGENT, "SingleTurnAgentExecutor.execute", "if self.reward_endpoints: try:", f"{REWARDS}.execute"),
    (
        AGENT,
        "SingleTurnAgentExecutor.execute",
        'query = hf_tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)',
        f"{REWARDS}.execute: does the same",
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._process_response_into_experience",
        "rewards=torch.tensor([reward_val]) if reward_val is not None else None,",
        f"{REWARDS}: one number per sample",
    ),
    # Whether this machine has a GPU, asked without initialising CUDA.
    ("torch.cuda", "_nvml_based_avail", 'os.getenv("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"', "cpu.uses_cpu"),
    ("torch.cuda", "is_available", "if _nvml_based_avail():", "cpu.uses_cpu"),
    ("torch.cuda", "is_available", "return device_count() > 0", "cpu.uses_cpu"),
    ("torch.cuda", "device_count", "nvml_count = _device_count_nvml()", "cpu.uses_cpu"),
    ("torch.cuda", "_device_count_nvml", 'if visible_devices[0].startswith("MIG-"): return -1', "cpu._sees_gpu"),
    # Ray: whether `init` starts a cluster or joins one, and what it takes.
    *(
        ("ray._private." + module, name, text, leans)
        for module, name, text, leans in (
            (
                "worker",
                "init",
                "bootstrap_address = services.canonicalize_bootstrap_address(address, _temp_dir)",
                "cpu._starts_cluster",
            ),
            (
                "services",
                "canonicalize_bootstrap_address",
                "addr = get_ray_address_from_environment(addr, temp_dir)",
                "cpu._starts_cluster",
            ),
            (
                "services",
                "canonicalize_bootstrap_address",
                'if addr is None or addr == "local": return None',
                "cpu._starts_cluster",
            ),
            (
                "worker",
                "init",
                "if num_cpus is not None or num_gpus is not None: raise ValueError(",
                "cpu._hook_ray_workers",
            ),
            (
                "runtime_env.constants",
                "",
                'RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"',
                "cpu._job_variables",
            ),
            ("worker", "init", "injected_job_config_json = json.loads(", "cpu._job_variables"),
            (
                "workers.default_worker",
                "",
                "error = load_and_execute_setup_hook(worker_process_setup_hook_key)",
                "cpu._hook_ray_workers",
            ),
        )
    ),
    (
        "ray.runtime_env.runtime_env",
        "_merge_runtime_env",
        "if set(parent_env_vars.keys()).intersection(set(child_env_vars.keys())):",
        "cpu._hook_ray_workers",
    ),
    # The lock of a C++ build, which a killed build leaves behind.
    *(
        ("torch.utils." + module, name, text, f"cpu_patches.{leans}")
        for module, name, text, leans in (
            (
                "file_baton",
                "FileBaton.try_acquire",
                "self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)",
                "_find_builder",
            ),
            ("file_baton", "FileBaton.release", "os.remove(self.lock_file_path)", "_outlive_killed_builds"),
            (
                "cpp_extension",
                "_jit_compile",
                "baton = FileBaton(os.path.join(build_directory, 'lock'))",
                "_find_builder",
            ),
            ("cpp_extension", "_jit_compile", "if baton.try_acquire(): try:", "_outlive_killed_builds"),
            ("cpp_extension", "_jit_compile", "finally: baton.release()", "_outlive_killed_builds"),
            ("cpp_extension", "_run_ninja_build", "cwd=build_directory", "_find_builder"),
        )
    ),
    # Advantages: a group of equal rewards has none.
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer.__init__",
        "self.experience_maker = RemoteExperienceMaker( self.actor_model_group, self.critic_model_group, "
        "self.reward_model_group, self.reference_model_group, self.kl_ctl, self.strategy, tokenizer, )",
        "run.controller.Controller.__init__: builds ours with the same arguments",
    ),
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer.train_step",
        "experiences = self.experience_maker.make_experience_batch(rollout_samples)",
        ADVANTAGES,
    ),
    (
        MAKER,
        "RemoteExperienceMaker.make_experience_batch",
        "samples_list = self.split_rollout_samples(rollout_samples)",
        f"{ADVANTAGES}.split_rollout_samples",
    ),
    *(
        (MAKER, "RemoteExperienceMaker.compute_advantages_and_returns", text, leans)
        for text, leans in (
            ("apply_length_penalties(experiences, args)", f"{ADVANTAGES}: reads the rewards after it"),
            ("rewards[indices] = raw_rewards", "run.experience_maker.equal_groups: does the same"),
            (
                "rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)",
                f"{ADVANTAGES}: guards it",
            ),
            (
                "reward = compute_reward( reward, self.kl_ctl.value, experience.kl, "
                "action_mask=experience.action_mask, reward_clip_range=args.reward.clip_range, )",
                f"{ADVANTAGES}._drop_reward: does the same",
            ),
            ("experience.advantages = experience.returns.clone()", f"{ADVANTAGES}._drop_reward: sets both"),
            (
                'experience.info["return"] = reward.sum(dim=-1) experience.kl = None',
                f"{ADVANTAGES}: keeps kl, and sets the return",
            ),
        )
    ),
    (
        AGENT,
        "SingleTurnAgentExecutor.__init__",
        'if self.reward_endpoints and self.reward_endpoints[0].endswith(".py"):',
        f"{REWARDS}: kk and math become paths",
    ),
    (
        "openrlhf.cli.train_ppo_ray",
        "train",
        "remote_rm_url=args.reward.remote_url,",
        "cli.train_ppo_ray: kk and math reach the engines as they are",
    ),
    (
        "openrlhf.cli.train_ppo_ray",
        "",
        'args.reward.remote_url = args.reward.remote_url.split(",")',
        "cli.train_ppo_ray._check_reward_source",
    ),
    # Evaluation, in the synchronous and the asynchronous trainer.
    ("openrlhf.trainer.ppo_trainer", "", "logs = compute_eval_metrics(", "run.evaluation.install"),
    ("openrlhf.trainer.ppo_trainer_async", "", "logs = compute_eval_metrics(", "run.evaluation.install"),
    (
        "openrlhf.trainer.ppo_trainer",
        "PPOTrainer.fit",
        """self.save_best_checkpoint(eval_logs, global_step, client_states)
        pbar.update(prompts_consumed)
        if is_exhausted: break
        # Close trackers
        if self.wandb_logger: self.wandb_logger.close()""",
        "run.controller.PPOTrainer.fit: what is evaluated last, and the trackers closed at the end",
    ),
    *(
        (module, f"{trainer}.__init__", "= prepare_datasets(strategy, tokenizer)", "run.controller.SeededOrder")
        for module, trainer in (
            ("openrlhf.trainer.ppo_trainer", "PPOTrainer"),
            ("openrlhf.trainer.ppo_trainer_async", "GenerateSamplesActor"),
        )
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "TrainingActor.fit",
        "self.save_best_checkpoint(eval_metrics, eval_step, client_states)",
        "run.controller.Controller.save_best_checkpoint: learns there which step was evaluated",
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "GenerateSamplesActor.fit",
        "if self._should_eval(global_step) and not self._eval_just_done:",
        "run.controller.GenerateSamplesActor: evaluates at step 0",
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "PPOTrainerAsync.__init__",
        "self.trainer_actor = TrainingActor.remote(",
        "run.controller.install: rebinds both actors",
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator.generate_eval_samples",
        "dataloader_iter=self._eval_dataloader_iter,",
        "run.evaluation.SourceSamplesGenerator: sets the iterator",
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._generate_vllm",
        "self._process_response_into_experience(response, **generate_kwargs) for response in ray.get(ref)",
        "run.evaluation.compute_eval_metrics: a problem's samples come together",
    ),
]

# (module, name in it, digest of its body, who restates it). After a change upstream read it, change ours alike, and
# then the digest. tests/update/test_step.py checks that both are equal.
BODIES = [
    (PPO_ACTOR, "ActorPPOTrainer.ppo_train", "318e39fde0e3c042", f"{TRAINER}._train_in_passes"),
    (PPO_ACTOR, "ActorPPOTrainer.training_step", "8f2c662e0539abbf", f"{STEP}.training_step"),
]

EXPERIENCE_FIELDS = (
    "sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values returns "
    "advantages kl rewards scores response_length truncated total_length index prompts labels images mm_train_inputs "
    "info"
)


@lru_cache
def source_of(module: str) -> str:
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None, f"{top} is not installed"
    path = Path(spec.submodule_search_locations[0]).joinpath(*inner)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert path.is_file(), f"{module} is gone upstream"
    return path.read_text(encoding="utf-8")


def find(module: str, name: str) -> ast.AST:
    """The class or function `name` ("Class.method") of a module's source."""
    node = tree_of(module)
    for part in name.split(".") if name else ():
        inner = [child for child in node.body if getattr(child, "name", None) == part]
        assert inner, f"{module}.{name} is gone upstream"
        node = inner[-1]
    return node


@lru_cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module))


def parameters(function: ast.FunctionDef) -> str:
    a = function.args
    names = [arg.arg for arg in a.posonlyargs + a.args]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*,"] if a.kwonlyargs else []
    return " ".join([*names, *(arg.arg for arg in a.kwonlyargs), *([f"**{a.kwarg.arg}"] if a.kwarg else [])])


def squeeze(text: str) -> str:
    return "".join(text.split())


def case_id(case: tuple) -> str:
    module, name, text, _ = case
    return f"{module}.{name}:{squeeze(text)[:40]}"


def test_versions():
    assert importlib.metadata.version("openrlhf") == "0.11.2", "this table was read from openrlhf 0.11.2"


@pytest.mark.parametrize(("module", "name", "expected", "leans"), SIGNATURES, ids=map(case_id, SIGNATURES))
def test_signature(module, name, expected, leans):
    found = parameters(find(module, name))
    assert found == expected, f"{module}.{name} takes ({found}), not ({expected}); what leans on it: {leans}"


@pytest.mark.parametrize(("module", "name", "text", "leans"), SOURCES, ids=map(case_id, SOURCES))
def test_source(module, name, text, leans):
    source = ast.get_source_segment(source_of(module), find(module, name)) if name else source_of(module)
    assert squeeze(text) in squeeze(source), f"{module} {name} no longer holds `{text}`; what leans on it: {leans}"


def digest(function: ast.FunctionDef) -> str:
    """Return a digest of a function's statements, which its comments, its docstring and its layout do not change."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return hashlib.sha256("\n".join(map(ast.unparse, statements)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("module", "name", "expected", "restated"), BODIES, ids=map(case_id, BODIES))
def test_body(module, name, expected, restated):
    found = digest(find(module, name))
    assert found == expected, f"{module}.{name} has another body ({found}); it is restated in {restated}"


def leaning_names() -> list[str]:
    """Return the names of ours that lean on something, without what is said after a colon."""
    cases = [case[-1] for case in (*SIGNATURES, *SOURCES, *BODIES)]
    return sorted({name.strip() for case in cases for name in case.partition(":")[0].split(",")})


@pytest.mark.parametrize("name", leaning_names())
def test_what_leans_on_upstream_exists(name):
    """Each name is a module of ours, or a class, function or constant in one."""
    parts = name.split(".")
    root = Path(__file__).parents[2] / "arlopti_openrlhf"
    modules = [n for n in range(1, len(parts) + 1) if root.joinpath(*parts[:n]).with_suffix(".py").is_file()]
    assert modules, f"{name} names no module"
    body = ast.parse(root.joinpath(*parts[: modules[0]]).with_suffix(".py").read_text("utf-8")).body
    for part in parts[modules[0] :]:
        found = [n for n in body if getattr(n, "name", None) == part or part in map(ast.unparse, targets_of(n))]
        assert found, f"{name}: there is no {part}"
        body = getattr(found[0], "body", [])


def targets_of(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else []


def test_experience_fields():
    fields = [
        node.target.id
        for node in find("openrlhf.trainer.ppo_utils.experience", "Experience").body
        if isinstance(node, ast.AnnAssign)
    ]
    assert fields == EXPERIENCE_FIELDS.split(), f"Experience's fields moved; what leans on them: {TRAINER}"


def test_vllm_loads_our_plugin_in_its_engine_process():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "arlopti_openrlhf.cpu:enable" in {point.value for point in points}, "reinstall the project: make setup"
    assert 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"' in source_of("vllm.plugins"), "vLLM's plugin group moved"
