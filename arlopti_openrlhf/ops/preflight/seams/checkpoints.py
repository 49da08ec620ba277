"""What saving, resuming and the trackers lean on.

OpenRLHF saves and loads through its strategy alone. So the smallest override of its rotation and of what it loads is a
subclass of the strategy, with `save_ckpt` and `load_ckpt`.
"""

from arlopti_openrlhf.ops.preflight.seams.kinds import Body, Seam, Signature, Text

ACTOR = "openrlhf.trainer.ray.ppo_actor"
CRITIC = "openrlhf.trainer.ray.ppo_critic"
ENGINE = "deepspeed.runtime.engine"
LOGGERS = "openrlhf.utils.logging_utils"
STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
TRAINER = "openrlhf.trainer.ppo_trainer"

OURS = "ops.checkpoints.saving.CheckpointStrategy"

SEAMS: list[Seam] = [
    Body(STRATEGY, "DeepspeedStrategy.save_ckpt", "87c7d1703228886e", f"{OURS}.save_ckpt"),
    Signature(
        STRATEGY,
        "DeepspeedStrategy.save_ckpt",
        "self model save_dir tag max_num max_mem client_state save_latest metric_value metric_key",
        f"{OURS}.save_ckpt",
    ),
    Signature(
        STRATEGY,
        "DeepspeedStrategy.load_ckpt",
        "self model load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only",
        f"{OURS}.load_ckpt",
    ),
    Signature(
        STRATEGY, "DeepspeedStrategy.save_model", "self model tokenizer output_dir **kwargs", f"{OURS}.save_model"
    ),
    Text(
        STRATEGY,
        "DeepspeedStrategy.save_model",
        "gc.collect() torch_dist_barrier_and_cuda_sync()",
        f"{OURS}.save_model: rank 0 goes to that barrier where it fails",
    ),
    Text(
        ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "lr_scheduler=args.actor.lr_scheduler, lr_warmup_ratio=args.actor.lr_warmup_ratio, "
        "min_lr_ratio=args.actor.min_lr_ratio,",
        f"{OURS}._ds_init_train_model: learning_rate.stay_at_minimum",
    ),
    Text(
        CRITIC,
        "CriticModelActor.init_model_from_pretrained",
        "min_lr_ratio=args.critic.min_lr_ratio, max_norm=args.critic.max_norm, scheduler_steps=max_steps,",
        f"{OURS}._ds_init_train_model: learning_rate.stay_at_minimum",
    ),
    Text(
        STRATEGY,
        "DeepspeedStrategy._ds_init_train_model",
        'if scheduler_name in {"cosine_with_min_lr", "cosine_warmup_with_min_lr"}',
        "learning_rate.stay_at_minimum: which schedules have a minimum",
    ),
    Signature(STRATEGY, "DeepspeedStrategy._ds_init_eval_model", "self model", f"{OURS}._ds_init_eval_model"),
    Signature(
        STRATEGY,
        "DeepspeedStrategy._write_ckpt_metric",
        "self ckpt_dir metric_value metric_key",
        f"{OURS}.save_ckpt",
    ),
    Signature(STRATEGY, "DeepspeedStrategy._read_ckpt_metric", "self ckpt_dir", f"{OURS}.save_ckpt"),
    Text(
        "openrlhf.utils.utils",
        "get_strategy",
        "from openrlhf.utils.deepspeed import DeepspeedStrategy",
        "ops.checkpoints.saving.install",
    ),
    Text(
        ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "_, states = strategy.load_ckpt(self.actor.model, ckpt_path) self.checkpoint_states = states",
        f"{OURS}.load_ckpt",
    ),
    Text(
        ACTOR,
        "PolicyModelActor.init_model_from_pretrained",
        "self.ema_model = strategy.prepare(ema_model)",
        f"{OURS}._ds_init_eval_model: before the checkpoint is loaded",
    ),
    Text(
        ACTOR,
        "PolicyModelActor.save_checkpoint",
        'os.path.join(args.ckpt.path, "_actor"), tag, args.ckpt.max_num, args.ckpt.max_mem, client_states,',
        f"{OURS}.save_ckpt",
    ),
    Text(
        CRITIC,
        "CriticModelActor.save_checkpoint",
        'os.path.join(args.ckpt.path, "_critic"), tag, args.ckpt.max_num, args.ckpt.max_mem,',
        f"{OURS}.save_ckpt",
    ),
    Text(ACTOR, "PolicyModelActor.save_checkpoint", 'f"{tag}_hf"', "ops.checkpoints.files.saved_in"),
    Text(
        CRITIC,
        "CriticModelActor.save_model",
        'args.ckpt.output_dir + "_critic"',
        "cli.run_folders: the critic's model",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.init_checkpoint_states",
        '"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {},',
        "ops.checkpoints.saving.BEGINNING",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.__init__",
        "self.wandb_logger = WandbLogger(self.args) if self.args.logger.wandb.key else None",
        "ops.health.trackers.resumable",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.__init__",
        "self.tensorboard_logger = TensorboardLogger(self.args) if self.args.logger.tensorboard_dir else None",
        "ops.health.trackers.resumable",
    ),
    Text(
        LOGGERS,
        "TensorboardLogger.__init__",
        "self.writer = SummaryWriter(log_dir=log_dir)",
        "ops.health.trackers.ResumableTensorboard.drop_from",
    ),
    Text(LOGGERS, "WandbLogger.__init__", "self.handle = wandb", "ops.health.trackers.ResumableWandb"),
    Text(LOGGERS, "WandbLogger.__init__", "name=args.logger.wandb.run_name,", "ops.health.trackers.identify"),
    Text(
        "openrlhf.cli.train_ppo_ray",
        "",
        'default="ppo_%s" % datetime.now().strftime("%m%dT%H:%M")',
        "ops.health.trackers.identify: knows the default by its form",
    ),
    Text(
        "openrlhf.trainer.ppo_utils.kl_controller",
        "AdaptiveKLController.update",
        "self.value *= mult",
        "ops.checkpoints.resuming.ResumableTrainer.resume",
    ),
    Text(ENGINE, "DeepSpeedEngine._save_checkpoint", "self.checkpoint_engine.save(", f"{OURS}._write"),
    Text(
        ENGINE,
        "DeepSpeedEngine._save_zero_checkpoint",
        "self.checkpoint_engine.save(zero_sd, zero_checkpoint_name)",
        f"{OURS}._write",
    ),
    Text(
        ENGINE,
        "DeepSpeedEngine._save_zero_checkpoint",
        "self._copy_recovery_script(save_path)",
        f"{OURS}._write",
    ),
]
