"""What the heartbeats and their watch lean on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Signature, Text

ENGINE = "openrlhf.trainer.ray.vllm_engine"

SEAMS: list[Seam] = [
    Text(ENGINE, "create_vllm_engines", "RolloutRayActor.options(", "ops.lifecycle.heartbeat.install"),
    Text(
        ENGINE,
        "RolloutRayActor.__init__",
        "self.llm = vllm.AsyncLLMEngine.from_engine_args(engine_args) await self.llm.is_sleeping()",
        "ops.lifecycle.heartbeat.engine: asks the same after the constructor",
    ),
    Signature("vllm.v1.engine.async_llm", "AsyncLLM.is_sleeping", "self", "ops.lifecycle.heartbeat.engine"),
    Text(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.is_sleeping_async",
        'return await self.call_utility_async("is_sleeping")',
        "ops.lifecycle.heartbeat.engine: goes through the engine's process",
    ),
    Text(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.__init__",
        "self.output_processor = OutputProcessor(",
        "ops.lifecycle.heartbeat.tokens_under_way",
    ),
    Text(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.__init__",
        "self.request_states: dict[str, RequestState] = {}",
        "ops.lifecycle.heartbeat.tokens_under_way",
    ),
    Text(
        "vllm.v1.engine.output_processor",
        "RequestState.__init__",
        "self.detokenizer = detokenizer",
        "ops.lifecycle.heartbeat.tokens_under_way",
    ),
    Signature(
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer.num_output_tokens",
        "self",
        "ops.lifecycle.heartbeat.tokens_under_way",
    ),
    Text(
        "vllm.v1.executor.ray_executor",
        "RayDistributedExecutor._init_workers_ray",
        ")(RayWorkerWrapper).remote(rpc_rank=rank)",
        "ops.lifecycle.heartbeat.engine: Ray calls these processes after the class",
    ),
    Text(
        "openrlhf.trainer.ray.launcher",
        "RayActorGroup._initiate_actors",
        "num_gpus=num_gpus_per_actor,",
        "ops.lifecycle.heartbeat.rank: keeps no default of the decorator",
    ),
    Signature(
        "ray._private.state",
        "GlobalState.actor_table",
        "self actor_id job_id actor_state_name",
        "ops.lifecycle.watch.Watch.look",
    ),
    Text(
        "ray._private.state",
        "GlobalState._gen_actor_info",
        '"Pid": actor_table_data.pid,',
        "ops.lifecycle.watch.Watch.look",
    ),
    Text(
        "ray._private.state",
        "GlobalState._gen_actor_info",
        '"DeathCause": actor_table_data.death_cause,',
        "ops.lifecycle.watch.Watch.look",
    ),
]
