"""What running without a GPU or flash-attn depends on, and what the graders and the reward server depend on."""

from contract.kinds import signature, text

BATON = "torch.utils.file_baton"
COMM = "deepspeed.comm.comm"
CPP_EXTENSION = "torch.utils.cpp_extension"
CUDA = "torch.cuda"
FLASH = "transformers.modeling_flash_attention_utils"
GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
LATEX2SYMPY = "latex2sympy2_extended.latex2sympy2"
MATH_VERIFY = "math_verify.parser"
PPO_ACTOR = "openrlhf.trainer.ray.ppo_actor"
RAY_SERVICES = "ray._private.services"
RAY_WORKER = "ray._private.worker"
STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
WORKER = "openrlhf.trainer.ray.vllm_worker_wrap"

# fmt: off
ENTRIES = (
    # Without a GPU, or without flash-attn
    (signature, PPO_ACTOR, "PolicyModelActor.init_model_from_pretrained",
     "self strategy pretrain max_steps vllm_engines", "bindings.TABLE"),
    (signature, STRATEGY, "DeepspeedStrategy.moving_average", "self model model_ema beta device",
     "cpu.patches._patch_strategy"),
    (signature, "openrlhf.utils.distributed_util", "stateless_init_process_group",
     "master_address master_port rank world_size device", "cpu.patches._patch_distributed_util"),
    (signature, WORKER, "WorkerWrap.init_process_group",
     "self master_address master_port rank_offset world_size group_name backend use_ray",
     "cpu.patches._patch_worker_wrap"),
    (text, GPU_RUNNER, "GPUModelRunner._bookkeeping_sync",
     "gen = self.input_batch.generators.get(int(i)) if gen is not None: gen.set_offset(gen.get_offset() - 4)",
     "cpu.vllm._patch_cpu_model_runner"),
    (text, "vllm.v1.worker.cpu_model_runner", "", "class CPUModelRunner(GPUModelRunner):",
     "cpu.vllm._patch_cpu_model_runner"),
    (signature, WORKER, "WorkerWrap.update_weight", "self name dtype shape empty_cache", "cpu.patches._update_weight"),
    (signature, "openrlhf.models.actor", "Actor.__init__",
     "self pretrain_or_model attn_implementation param_dtype load_in_4bit lora_rank lora_alpha lora_dropout "
     "target_modules ds_config device_map packing_samples temperature use_liger_kernel freeze_visual_encoder "
     "experts_implementation **kwargs", "cpu.patches._patch_actor"),
    (signature, "openrlhf.models.model", "get_llm_for_sequence_regression",
     "model_name_or_path model_type *, param_dtype load_in_4bit lora_rank lora_alpha target_modules lora_dropout "
     "normalize_reward attn_implementation ds_config init_value_head value_head_prefix device_map packing_samples "
     "experts_implementation **kwargs", "cpu.patches._patch_model"),
    (signature, "vllm.distributed.utils", "stateless_init_torch_distributed_process_group",
     "host port rank world_size backend …", "cpu.patches._GlooGroup"),
    (signature, GPU_RUNNER, "GPUModelRunner.reload_weights", "self weights_iterator weights_path is_checkpoint_format",
     "cpu.patches._update_weight"),
    (signature, FLASH, "_unpad_input", "hidden_states attention_mask unused_mask", "cpu.patches._flash_attn_stand_in"),
    (signature, FLASH, "_pad_input", "hidden_states indices batch seqlen", "cpu.patches._flash_attn_stand_in"),
    (signature, "ray._private.utils", "read_ray_address", "temp_dir", "cpu._hook_ray_workers"),
    (signature, BATON, "FileBaton.__init__", "self lock_file_path wait_seconds warn_after_seconds",
     "cpu.patches._name_locks_of_builds"),
    (text, PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", "empty_cache=count == num_params",
     "cpu.patches._update_weight: the last parameter is so marked"),
    (text, PPO_ACTOR, "ActorPPOTrainer.broadcast_to_vllm",
     "self._model_update_group.broadcast(param.data, src=0, stream=torch.cuda.current_stream())",
     "cpu.patches._GlooGroup"),
    (text, WORKER, "WorkerWrap.init_process_group",
     "from openrlhf.utils.distributed_util import stateless_init_process_group",
     "cpu.patches._patch_distributed_util: bound when it is called, not when the module is imported"),
    (text, WORKER, "WorkerWrap.update_weight", "self.model_runner … dtype == self.model_config.dtype",
     "cpu.patches._update_weight"),
    (text, "openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.__init__",
     'self.target_device = torch.device(f"cuda:{torch.cuda.current_device()}")', "cpu.patches._patch_replay_buffer"),
    (text, STRATEGY, "", "from torch.distributed.device_mesh import init_device_mesh",
     "cpu.patches._patch_strategy: a name in the module's globals"),
    (text, STRATEGY, "", 'self.ds_device_mesh = init_device_mesh( "cuda",', "cpu.patches._patch_strategy"),
    (text, "deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.step",
     "self.ds_opt_adam.adam_update(self.opt_id, state['step'], group['lr'], beta1, beta2, group['eps'],",
     "cpu.adam._patch_cpu_adam"),
    (text, "deepspeed.ops.adam.fused_adam", "FusedAdam.step",
     "group['lr'], beta1, beta2, group['eps'], state['step'], self.adam_w_mode, bias_correction,",
     "cpu.adam._patch_fused_adam"),
    (text, COMM, "allgather_fn",
     "return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)",
     "cpu.patches._patch_deepspeed_comm"),
    (text, COMM, "all_gather_into_tensor",
     "return cdb.all_gather_into_tensor(output_tensor=output_tensor, input_tensor=tensor, group=group,",
     "cpu.patches._patch_deepspeed_comm"),
    (text, "openrlhf.models.ring_attn_utils", "",
     "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input from "
     "flash_attn.utils.distributed import all_gather", "cpu.patches._flash_attn_stand_in"),
    (text, CUDA, "_nvml_based_avail", 'os.getenv("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"', "hardware.uses_cpu"),
    (text, CUDA, "is_available", "if _nvml_based_avail(): … return device_count() > 0", "hardware.uses_cpu"),
    (text, CUDA, "device_count", "nvml_count = _device_count_nvml()", "hardware.uses_cpu"),
    (text, CUDA, "_device_count_nvml", 'if visible_devices[0].startswith("MIG-"): return -1', "hardware._sees_gpu"),
    (text, RAY_WORKER, "init", "bootstrap_address = services.canonicalize_bootstrap_address(address, _temp_dir)",
     "ray_address.starts_cluster"),
    (text, RAY_SERVICES, "canonicalize_bootstrap_address",
     'addr = get_ray_address_from_environment(addr, temp_dir) … if addr is None or addr == "local": return None',
     "ray_address.starts_cluster"),
    (text, RAY_SERVICES, "get_ray_address_from_environment",
     'if env_addr is not None and env_addr != "": addr = env_addr if addr is not None and addr != "auto": return addr',
     "ray_address.starts_cluster"),
    (text, RAY_SERVICES, "find_bootstrap_address", "return ray._private.utils.read_ray_address(temp_dir)",
     "cpu._hook_ray_workers"),
    (text, RAY_WORKER, "init", "if num_cpus is not None or num_gpus is not None: raise ValueError(",
     "cpu._hook_ray_workers"),
    (text, "ray._private.runtime_env.constants", "", 'RAY_JOB_CONFIG_JSON_ENV_VAR = "RAY_JOB_CONFIG_JSON_ENV_VAR"',
     "cpu._job_variables"),
    (text, RAY_WORKER, "init", "injected_job_config_json = json.loads(", "cpu._job_variables"),
    (text, "ray._private.workers.default_worker", "",
     "error = load_and_execute_setup_hook(worker_process_setup_hook_key)", "cpu._hook_ray_workers"),
    (text, "ray.runtime_env.runtime_env", "_merge_runtime_env",
     "if set(parent_env_vars.keys()).intersection(set(child_env_vars.keys())):", "cpu._hook_ray_workers"),
    (text, CPP_EXTENSION, "_jit_compile", "baton = FileBaton(os.path.join(build_directory, 'lock'))",
     "cpu.patches._name_locks_of_builds"),
    (text, "vllm.logger", "", '"stream": envs.VLLM_LOGGING_STREAM,', "lab.scoring.waiting.quiet"),
    (text, "vllm.plugins", "", 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"', "cpu.enable_in_vllm"),
    # The graders and the reward server
    (signature, MATH_VERIFY, "parse",
     "pred extraction_config fallback_mode extraction_mode parsing_timeout raise_on_error",
     "grading.math_compare._parse"),
    (text, MATH_VERIFY, "extract_expr", "parse_expr_cached(", "grading.math_compare: we replace it"),
    (text, MATH_VERIFY, "parse_latex_cached", "return latex2sympy(", "grading.math_compare: we replace it"),
    (text, MATH_VERIFY, "parse_latex_cached", "last_eq_latex = get_last_eq(latex)",
     "grading.math_compare: we replace it"),
    (text, LATEX2SYMPY, "_Latex2Sympy.convert_atom_expr", "self.config.lowercase_symbols",
     "grading.math_compare: letter case is kept"),
    (text, LATEX2SYMPY, "convert_to_pct", "sympy.UnevaluatedExpr(sympy.Rational(1, 100))",
     "grading.math_equal: what a percentage is"),
    (text, "latex2sympy2_extended.sets", "FiniteSet.__new__", "obj._unsorted_args = ", "grading.math_equal._read"),
    (text, "latex2sympy2_extended.logic", "And.__new__", "obj._unsorted_args = ", "grading.math_equal._read"),
    (text, MATH_VERIFY, "extract_latex", "normalize_latex(",
     "grading.math_compare: where `units=False` is obeyed"),
    (text, MATH_VERIFY, "extract_target_from_pred", 'if extraction_mode == "first_match": break',
     "grading.math_compare._parse: a formula that does not parse is no place to look for a number"),
    (text, "latex2sympy2_extended.math_normalization", "normalize_latex",
     '_text = unit_superscript_regex.sub("", text)', "grading.math_units.split_unit: does it instead"),
    (text, "uvicorn.server", "Server.capture_signals", "for sig in HANDLED_SIGNALS", "grading.server.serve"),
)
# fmt: on
