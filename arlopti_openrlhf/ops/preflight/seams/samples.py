"""What the order of the prompts and the generation of samples lean on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Body, Seam, Signature, Text
from arlopti_openrlhf.ops.preflight.seams.run import AGENT, ASYNC, SAMPLES, TRAINER

ENGINE = "openrlhf.trainer.ray.vllm_engine"

SEAMS: list[Seam] = [
    Text(TRAINER, "PPOTrainer.__init__", "= prepare_datasets(strategy, tokenizer)", "ops.rollouts.prompts.install"),
    Text(
        ASYNC,
        "GenerateSamplesActor.__init__",
        "= prepare_datasets(strategy, tokenizer)",
        "ops.rollouts.prompts.install",
    ),
    Text(TRAINER, "PPOTrainer.fit", "self.prompts_dataloader.state_dict()", "ops.rollouts.prompts.Prompts.state_dict"),
    Text(
        ASYNC,
        "GenerateSamplesActor.fit",
        "self.prompts_dataloader.state_dict()",
        "ops.rollouts.prompts.Prompts.state_dict",
    ),
    Text(
        "openrlhf.datasets.prompts_dataset",
        "PromptDataset.__init__",
        "self.prompts.append(prompt) self.labels.append(label)",
        "ops.rollouts.prompts.digest_of",
    ),
    # tests/run/test_samples.py compares ours with these.
    Body(
        SAMPLES,
        "SamplesGenerator.generate_samples",
        "331f36c2a75a56d2",
        "ops.rollouts.samples.SamplesGenerator.generate_samples",
    ),
    Body(
        SAMPLES,
        "SamplesGenerator._generate_vllm",
        "504b87e90b4bd9ee",
        "ops.rollouts.samples.SamplesGenerator._generate_vllm",
    ),
    Body(
        SAMPLES,
        "SamplesGenerator._dispatch_prompts_to_vllm",
        "8aae7435f629c5d6",
        "ops.rollouts.samples.SamplesGenerator._sampling_params",
    ),
    Text(
        SAMPLES,
        "_collect_prompt_batch",
        "return prompts, labels, images, exhausted",
        "ops.rollouts.samples.SamplesGenerator._draw",
    ),
    Text(ENGINE, "create_vllm_engines", "RolloutRayActor.options(", "ops.rollouts.engine.install"),
    Text(
        ENGINE,
        "RolloutRayActor.pause_generation",
        'await self.llm.pause_generation(mode="keep")',
        "ops.rollouts.engine.RolloutRayActor.generate_in_order",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "await llm_engine.generate( prompt_token_ids, deepcopy(effective_params), multi_modal_data=mm_data )",
        "ops.rollouts.engine.RolloutRayActor.generate_in_order: the seed comes with the sampling parameters",
    ),
    Signature(
        ENGINE,
        "RolloutRayActor.generate",
        "self prompt_token_ids sampling_params multi_modal_data",
        "ops.rollouts.engine.RolloutRayActor.generate",
    ),
    Text(
        ENGINE,
        "RolloutRayActor.generate",
        "async for request_output in generator: final_output = request_output return final_output",
        "ops.rollouts.engine.RolloutRayActor.generate: the last result alone is used",
    ),
    Text(
        "vllm.v1.engine.output_processor",
        "RequestState.make_request_output",
        "if not finished and final_only:",
        "ops.rollouts.engine.RolloutRayActor.generate: makes no result before",
    ),
    Text(
        AGENT,
        "SingleTurnAgentExecutor.execute",
        "generation_output = request_output.outputs[0] action_token_ids = generation_output.token_ids",
        "ops.rollouts.reward_client.RewardExecutor.execute: reads no text",
    ),
    Text(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        "q = await self.add_request(",
        "ops.rollouts.engine.RolloutRayActor._admit",
    ),
    Text(
        "vllm.v1.engine.core",
        "EngineCoreProc.pause_scheduler",
        'pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW',
        "ops.rollouts.engine.RolloutRayActor.generate_in_order",
    ),
]
