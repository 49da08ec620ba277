"""What OpenRLHF without a GPU, or without flash-attn, leans on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Signature, Text

PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
WORKER = "openrlhf.trainer.ray.vllm_worker_wrap"
BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"

SEAMS: list[Seam] = [
    Signature(
        STRATEGY, "DeepspeedStrategy.moving_average", "self model model_ema beta device", "cpu.patches._patch_strategy"
    ),
    Signature(
        "openrlhf.utils.distributed_util",
        "stateless_init_process_group",
        "master_address master_port rank world_size device",
        "cpu.patches._patch_distributed_util",
    ),
    Signature(
        WORKER,
        "WorkerWrap.init_process_group",
        "self master_address master_port rank_offset world_size group_name backend use_ray",
        "cpu.patches._patch_worker_wrap",
    ),
    Signature(
        BROADCAST,
        "SpinCondition.__init__",
        "self is_reader context notify_address busy_loop_s",
        "cpu.vllm._patch_shm_broadcast",
    ),
    Text(
        BROADCAST,
        "SpinCondition.wait",
        "if current_time <= self.last_read + self.busy_loop_s: sched_yield() else: events = dict(self.poller.poll(",
        "cpu.vllm._patch_shm_broadcast",
    ),
    Signature(BROADCAST, "SpinCondition.wait", "self timeout_ms", "cpu.vllm._patch_shm_broadcast"),
    Text(BROADCAST, "SpinCondition.notify", "self.local_notify_socket.send(", "cpu.vllm._patch_shm_broadcast"),
    Text(BROADCAST, "MessageQueue.acquire_read", "_spin_condition.record_read()", "cpu.vllm._patch_shm_broadcast"),
    Text(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._bookkeeping_sync",
        "gen = self.input_batch.generators.get(int(i)) if gen is not None: gen.set_offset(gen.get_offset() - 4)",
        "cpu.vllm._patch_cpu_model_runner",
    ),
    Text(
        "vllm.v1.worker.cpu_model_runner",
        "",
        "class CPUModelRunner(GPUModelRunner):",
        "cpu.vllm._patch_cpu_model_runner",
    ),
    Signature(WORKER, "WorkerWrap.update_weight", "self name dtype shape empty_cache", "cpu.patches._update_weight"),
    Signature(
        "openrlhf.models.actor",
        "Actor.__init__",
        "self pretrain_or_model attn_implementation param_dtype load_in_4bit lora_rank lora_alpha "
        "lora_dropout target_modules ds_config device_map packing_samples temperature use_liger_kernel "
        "freeze_visual_encoder experts_implementation **kwargs",
        "cpu.patches._patch_actor",
    ),
    Signature(
        "openrlhf.models.model",
        "get_llm_for_sequence_regression",
        "model_name_or_path model_type *, param_dtype load_in_4bit lora_rank lora_alpha target_modules "
        "lora_dropout normalize_reward attn_implementation ds_config init_value_head value_head_prefix "
        "device_map packing_samples experts_implementation **kwargs",
        "cpu.patches._patch_model",
    ),
    Signature(
        "vllm.distributed.utils",
        "stateless_init_torch_distributed_process_group",
        "host port rank world_size backend group_name return_store listen_socket",
        "cpu.patches._GlooGroup",
    ),
    Signature(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.reload_weights",
        "self weights_iterator weights_path is_checkpoint_format",
        "cpu.patches._update_weight",
    ),
    Signature(
        "transformers.modeling_flash_attention_utils",
        "_unpad_input",
        "hidden_states attention_mask unused_mask",
        "cpu.patches._flash_attn_stand_in",
    ),
    Signature(
        "transformers.modeling_flash_attention_utils",
        "_pad_input",
        "hidden_states indices batch seqlen",
        "cpu.patches._flash_attn_stand_in",
    ),
    Signature("ray._private.services", "get_ray_address_from_environment", "addr temp_dir", "cpu._starts_cluster"),
    Signature("torch.utils.file_baton", "FileBaton.try_acquire", "self", "cpu.patches._outlive_killed_builds"),
    Signature("torch.utils.file_baton", "FileBaton.release", "self", "cpu.patches._outlive_killed_builds"),
    Text("openrlhf.cli.train_ppo_ray", "train", "ray.init( runtime_env={", "cpu._hook_ray_workers"),
    Text(
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "empty_cache=count == num_params",
        "cpu.patches._update_weight: the last parameter is so marked",
    ),
    Text(
        PPO_ACTOR,
        "ActorPPOTrainer.broadcast_to_vllm",
        "self._model_update_group.broadcast(param.data, src=0, stream=torch.cuda.current_stream())",
        "cpu.patches._GlooGroup",
    ),
    Text(
        WORKER,
        "WorkerWrap.init_process_group",
        "from openrlhf.utils.distributed_util import stateless_init_process_group",
        "cpu.patches._patch_distributed_util: bound when it is called, not when the module is imported",
    ),
    Text(WORKER, "WorkerWrap.update_weight", "self.model_runner", "cpu.patches._update_weight"),
    Text(WORKER, "WorkerWrap.update_weight", "dtype == self.model_config.dtype", "cpu.patches._update_weight"),
    Text(
        "openrlhf.trainer.ppo_utils.replay_buffer",
        "NaiveReplayBuffer.__init__",
        'self.target_device = torch.device(f"cuda:{torch.cuda.current_device()}")',
        "cpu.patches._patch_replay_buffer",
    ),
    Text(
        STRATEGY,
        "",
        "from torch.distributed.device_mesh import init_device_mesh",
        "cpu.patches._patch_strategy: a name in the module's globals",
    ),
    Text(STRATEGY, "", 'self.ds_device_mesh = init_device_mesh( "cuda",', "cpu.patches._patch_strategy"),
    Text(
        "deepspeed.ops.adam.cpu_adam",
        "DeepSpeedCPUAdam.step",
        "self.ds_opt_adam.adam_update(self.opt_id, state['step'], group['lr'], beta1, beta2, group['eps'],",
        "cpu.adam._patch_cpu_adam",
    ),
    Text(
        "deepspeed.ops.adam.fused_adam",
        "FusedAdam.step",
        "group['lr'], beta1, beta2, group['eps'], state['step'], self.adam_w_mode, bias_correction,",
        "cpu.adam._patch_fused_adam",
    ),
    Text(
        "deepspeed.comm.comm",
        "allgather_fn",
        "return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)",
        "cpu.patches._patch_deepspeed_comm",
    ),
    Text(
        "deepspeed.comm.comm",
        "all_gather_into_tensor",
        "return cdb.all_gather_into_tensor(output_tensor=output_tensor, input_tensor=tensor, group=group,",
        "cpu.patches._patch_deepspeed_comm",
    ),
    Text(
        "openrlhf.models.ring_attn_utils",
        "",
        "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input from "
        "flash_attn.utils.distributed import all_gather",
        "cpu.patches._flash_attn_stand_in",
    ),
    Text("torch.cuda", "_nvml_based_avail", 'os.getenv("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"', "cpu.uses_cpu"),
    Text("torch.cuda", "is_available", "if _nvml_based_avail():", "cpu.uses_cpu"),
    Text("torch.cuda", "is_available", "return device_count() > 0", "cpu.uses_cpu"),
    Text("torch.cuda", "device_count", "nvml_count = _device_count_nvml()", "cpu.uses_cpu"),
    Text("torch.cuda", "_device_count_nvml", 'if visible_devices[0].startswith("MIG-"): return -1', "cpu._sees_gpu"),
    Text(
        "ray._private.worker",
        "init",
        "bootstrap_address = services.canonicalize_bootstrap_address(address, _temp_dir)",
        "cpu._starts_cluster",
    ),
    Text(
        "ray._private.services",
        "canonicalize_bootstrap_address",
        "addr = get_ray_address_from_environment(addr, temp_dir)",
        "cpu._starts_cluster",
    ),
    Text(
        "ray._private.services",
        "canonicalize_bootstrap_address",
        'if addr is None or addr == "local": return None',
        "cpu._starts_cluster",
    ),
    Text(
        "ray._private.worker",
        "init",
        "if num_cpus is not None or num_gpus is not None: raise ValueError(",
        "cpu._hook_ray_workers",
    ),
    Text(
        "ray._private.runtime_env.constants",
        "",
        'RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"',
        "cpu._job_variables",
    ),
    Text("ray._private.worker", "init", "injected_job_config_json = json.loads(", "cpu._job_variables"),
    Text(
        "ray._private.workers.default_worker",
        "",
        "error = load_and_execute_setup_hook(worker_process_setup_hook_key)",
        "cpu._hook_ray_workers",
    ),
    Text(
        "ray.runtime_env.runtime_env",
        "_merge_runtime_env",
        "if set(parent_env_vars.keys()).intersection(set(child_env_vars.keys())):",
        "cpu._hook_ray_workers",
    ),
    Text(
        "torch.utils.file_baton",
        "FileBaton.try_acquire",
        "self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)",
        "cpu.patches._find_builder",
    ),
    Text(
        "torch.utils.file_baton",
        "FileBaton.release",
        "os.remove(self.lock_file_path)",
        "cpu.patches._outlive_killed_builds",
    ),
    Text(
        "torch.utils.cpp_extension",
        "_jit_compile",
        "baton = FileBaton(os.path.join(build_directory, 'lock'))",
        "cpu.patches._find_builder",
    ),
    Text(
        "torch.utils.cpp_extension",
        "_jit_compile",
        "if baton.try_acquire(): try:",
        "cpu.patches._outlive_killed_builds",
    ),
    Text(
        "torch.utils.cpp_extension", "_jit_compile", "finally: baton.release()", "cpu.patches._outlive_killed_builds"
    ),
    Text("torch.utils.cpp_extension", "_run_ninja_build", "cwd=build_directory", "cpu.patches._find_builder"),
    Text("vllm.plugins", "", 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"', "cpu.enable_in_vllm"),
]
