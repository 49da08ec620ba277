"""What a run's beginning and end lean on: Ray's start on one machine, and the controllers that answer a signal."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Text

ASYNC = "openrlhf.trainer.ppo_trainer_async"
TRAINER = "openrlhf.trainer.ppo_trainer"

SEAMS: list[Seam] = [
    Text("openrlhf.cli.train_ppo_ray", "train", "ray.init( runtime_env={", "ops.lifecycle.cluster.install"),
    Text(
        TRAINER,
        "BasePPOTrainer.save_logs_and_checkpoints",
        "if global_step % self.args.logger.logging_steps == 0:",
        "ops.controller.Controller.save_last_step: no log at an infinite number",
    ),
    Text(
        TRAINER,
        "BasePPOTrainer.save_logs_and_checkpoints",
        "if global_step % self.args.ckpt.save_steps == 0:",
        "ops.controller.Controller.save_last_step: always a checkpoint at 1",
    ),
    Text(
        ASYNC,
        "TrainingActor.fit",
        'payload = self.rollout_queue.get(block=True) if payload == "done": break',
        "ops.controller.PPOTrainerAsync: the trainer ends",
    ),
    Text(
        "ray._private.services",
        "get_node_ip_address",
        "if not ray_constants.ENABLE_RAY_CLUSTER:",
        "ops.lifecycle.cluster: Ray on one machine has the address 127.0.0.1",
    ),
    Text(
        "ray._private.ray_constants",
        "",
        "ENABLE_RAY_CLUSTER = env_bool( ENABLE_RAY_CLUSTERS_ENV_VAR,",
        "ops.lifecycle.cluster: and so have the processes that it starts",
    ),
    Text(
        "ray._private.authentication_test_utils",
        "reset_auth_token_state",
        'AuthenticationTokenLoader.instance().reset_cache() Config.initialize("")',
        "ops.lifecycle.cluster: Ray reads its variables again",
    ),
    Text(
        "ray._private.node",
        "Node._init_temp",
        "self.temp_dir = self._ray_params.temp_dir",
        "ops.lifecycle.cluster: Ray's files lie in the run's folder",
    ),
]
