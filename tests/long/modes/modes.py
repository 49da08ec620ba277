"""The ways in which OpenRLHF can train, as data: which flags each takes, and what its run must show."""

from typing import NamedTuple

GRPO = "--algo.advantage.estimator group_norm --algo.kl.init_coef 0"  # no KL: no reference model to start
WITH_KL = "--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001"
METHODS = "--algo.ar.alpha 0.3 --algo.lopti.eta 0.5"
TOGETHER = "--train.colocate_all"
_CORRECTION = "--algo.advantage.is_correction"


class Mode(NamedTuple):
    """Describes one way to train.

    Attributes:
        topic: what it is a variant of.
        name: what the table calls it.
        flags: in place of, or beside, the common ones. {inputs} is the folder of models, data and reward.
        estimator: the flags of the advantages and the KL.
        methods: the token methods' flags.
        placement: where the models are.
        ranks: training processes.
        engines: of vLLM.
        logs: metrics that every step must log. They say that the mode was on.
        says: what the run must print.
        saves: what it must leave in its folder.
        starts: how often the run is started. The second start has more prompts, and goes on from the first.
        serves: whether a reward server runs beside it.
        is_short: whether `make long` takes it.
    """

    topic: str
    name: str
    flags: str = ""
    estimator: str = GRPO
    methods: str = METHODS
    placement: str = TOGETHER
    ranks: int = 1
    engines: int = 1
    logs: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    saves: tuple[str, ...] = ("final/model.safetensors",)
    starts: int = 1
    serves: bool = False
    is_short: bool = False


_AR, _STAGES = "ar/mean_weight", ("lopti/low/policy_loss", "lopti/high/policy_loss")

MODES = [
    # --- where and when ---
    Mode("placement", "hybrid engine: all models share the GPUs", logs=(_AR, *_STAGES)),
    Mode(
        "placement",
        "each model on GPUs of its own",
        estimator=WITH_KL,
        placement="--ref.num_gpus_per_node 1",
        logs=_STAGES,
    ),
    Mode(
        "schedule",
        "asynchronous, partial rollouts",
        "--train.async_enable --train.partial_rollout_enable",
        logs=_STAGES,
        is_short=True,
    ),
    Mode(
        "schedule",
        "dynamic filtering",
        "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.01 0.99 --data.max_samples 48",
    ),
    Mode("schedule", "two epochs of two mini-batches", "--train.max_epochs 2", logs=_STAGES),
    # --- batches ---
    Mode(
        "batches",
        "dynamic batches",
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 256",
        ranks=2,
        engines=2,
        logs=_STAGES,
    ),
    Mode("batches", "gradient checkpointing", "--actor.gradient_checkpointing_enable", logs=_STAGES),
    Mode("batches", "OpenRLHF's update", "--actor.update stock", logs=_STAGES),
    # --- DeepSpeed ---
    Mode("DeepSpeed", "ZeRO-2, two ranks, packing", "--ds.packing_samples", ranks=2, engines=2, logs=_STAGES),
    Mode(
        "DeepSpeed",
        "ZeRO-3, two ranks, packing",
        "--ds.zero_stage 3 --ds.packing_samples",
        ranks=2,
        engines=2,
        logs=_STAGES,
    ),
    Mode("DeepSpeed", "optimizer on the CPU", "--ds.adam_offload", logs=_STAGES),
    Mode("DeepSpeed", "Muon", "--actor.optim muon --actor.muon.lr 1e-3", logs=_STAGES),
    Mode("DeepSpeed", "EMA", "--train.enable_ema", logs=_STAGES),
    Mode(
        "DeepSpeed",
        "LoRA",
        "--ds.lora.rank 4",
        estimator=WITH_KL,
        logs=_STAGES,
        says=("no second model",),
        saves=("final/adapter_model.safetensors",),
    ),
    # --- advantages ---
    Mode(
        "advantages",
        "GAE with a critic, KL in the reward",
        "--critic.num_gpus_per_node 1",
        estimator="--algo.advantage.estimator gae --algo.kl.estimator k1 --algo.kl.init_coef 0.01",
        logs=("critic_loss", *_STAGES),
        is_short=True,
    ),
    Mode(
        "advantages",
        "REINFORCE++-baseline",
        estimator="--algo.advantage.estimator reinforce_baseline --algo.kl.use_loss --algo.kl.estimator k2",
        logs=_STAGES,
    ),
    Mode(
        "advantages",
        "FlashREINFORCE, one sample per prompt",
        "--rollout.n_samples_per_prompt 1 --rollout.batch_size 32 --data.max_samples 64",
        estimator="--algo.advantage.estimator flash_reinforce --algo.kl.init_coef 0",
        logs=_STAGES,
    ),
    # --- the loss ---
    Mode("loss", "dual clip, clip-higher", "--actor.dual_clip 3 --actor.eps_clip_low_high 0.2 0.28", logs=_STAGES),
    Mode("loss", "token mean", "--actor.loss_agg_mode token-mean", logs=_STAGES),
    Mode("loss", "GSPO", "--actor.policy_loss_type gspo", logs=_STAGES),
    Mode(
        "loss",
        "importance sampling: TIS",
        f"{_CORRECTION}_level token {_CORRECTION}_mode clip {_CORRECTION}_threshold 0 5",
        logs=("vllm_kl", *_STAGES),
    ),
    Mode("loss", "entropy in the loss", "--actor.entropy_coef 0.01", logs=("entropy_loss",)),
    # --- token methods ---
    Mode("token methods", "Lopti in each mini-batch", methods=f"{METHODS} --algo.lopti.scope minibatch", logs=_STAGES),
    Mode(
        "token methods",
        "a file, and 80/20",
        "--ds.packing_samples",
        methods="--algo.token_method examples/token_method.py eighty_twenty",
        ranks=2,
        engines=2,
        logs=("token_method/token_method/mean_weight", "token_method/eighty_twenty/zero_share"),
    ),
    # --- rewards ---
    Mode("rewards", "reward server", "--reward.remote_url {url}", serves=True, logs=_STAGES),
    Mode(
        "rewards",
        "reward model",
        "--reward.remote_url= --reward.model_name_or_path {inputs}/reward_model --reward.num_gpus_per_node 1",
        logs=_STAGES,
    ),
    Mode("rewards", "agent of two turns", "--train.agent_func_path {inputs}/agent.py", logs=_STAGES),
    # --- models ---
    Mode(
        "models",
        "images in the prompt",
        "--actor.model_name_or_path {inputs}/vision_model --data.prompt_dataset {inputs}/images.jsonl "
        "--data.max_images_per_prompt 1",
        logs=(_AR, *_STAGES),
    ),
    # --- around it ---
    Mode(
        "run",
        "stopped and resumed, with an evaluation",
        "--ckpt.save_steps 1 --ckpt.load_enable --eval.dataset {inputs}/train.jsonl --eval.steps 2",
        starts=2,
        logs=_STAGES,
    ),
    Mode("run", "wandb, offline", "--logger.wandb.key offline", logs=_STAGES, saves=("wandb/offline-run-*",)),
]
