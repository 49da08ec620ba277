"""What the signs of life and their watch lean on."""

from arlopti_openrlhf.preflight.seams.kinds import Seam, Signature, Text

ENGINE = "openrlhf.trainer.ray.vllm_engine"

SEAMS: list[Seam] = [
    Text(ENGINE, "create_vllm_engines", "RolloutRayActor.options(", "run.life.install"),
    Text(
        ENGINE,
        "RolloutRayActor.__init__",
        "self.llm = vllm.AsyncLLMEngine.from_engine_args(engine_args) await self.llm.is_sleeping()",
        "run.life.living_engine: asks the same after the constructor",
    ),
    Signature("vllm.v1.engine.async_llm", "AsyncLLM.is_sleeping", "self", "run.life.living_engine"),
    Text(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.is_sleeping_async",
        'return await self.call_utility_async("is_sleeping")',
        "run.life.living_engine: goes through the engine's process",
    ),
    Text(
        "openrlhf.trainer.ray.launcher",
        "RayActorGroup._initiate_actors",
        "num_gpus=num_gpus_per_actor,",
        "run.life.living: keeps no default of the decorator",
    ),
    Signature(
        "ray._private.state",
        "GlobalState.actor_table",
        "self actor_id job_id actor_state_name",
        "run.watch.Watch.look",
    ),
    Text("ray._private.state", "GlobalState._gen_actor_info", '"Pid": actor_table_data.pid,', "run.watch.Watch.look"),
    Text(
        "ray._private.state",
        "GlobalState._gen_actor_info",
        '"DeathCause": actor_table_data.death_cause,',
        "run.watch.Watch.look",
    ),
]
