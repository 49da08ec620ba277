"""What a LoRA run leans on, whose policy is its own reference."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Text
from arlopti_openrlhf.ops.preflight.seams.run import MAKER

CLI = "openrlhf.cli.train_ppo_ray"
PEFT = "peft.tuners.tuners_utils"

SEAMS: list[Seam] = [
    Text(
        CLI,
        "train",
        "if args.algo.kl.init_coef > 0: ref_model = RayActorGroup( args.ref.num_nodes, args.ref.num_gpus_per_node, "
        "ReferenceModelActor,",
        "ops.rollouts.lora_reference.install",
    ),
    Text(
        CLI,
        "train",
        "if ref_model is not None: refs.extend(ref_model.async_init_model_from_pretrained(strategy, "
        "args.actor.model_name_or_path))",
        "ops.rollouts.lora_reference.install: a run may have none, and its weights are the policy's",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker.make_experience",
        "base_action_log_probs_ref = self._dispatch_forward( self.initial_model_group,",
        "ops.rollouts.lora_reference.ReferenceInPolicy",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker._dispatch_forward",
        'ref = group.async_run_method_batch(method_name="forward", **kwargs)',
        "ops.rollouts.lora_reference.ReferenceInPolicy.async_run_method_batch",
    ),
    Text(
        MAKER,
        "RemoteExperienceMaker._dispatch_forward",
        'ray.get(group.async_run_method(method_name="empty_cache"))',
        "ops.rollouts.lora_reference.ReferenceInPolicy.async_run_method",
    ),
    Text(
        "openrlhf.models.actor",
        "Actor.__init__",
        "lora_config = LoraConfig( task_type=TaskType.CAUSAL_LM, r=lora_rank, lora_alpha=lora_alpha, "
        'target_modules=target_modules, lora_dropout=lora_dropout, bias="none", )',
        "ops.rollouts.lora_reference: nothing of the base model is trained",
    ),
    Text(
        "openrlhf.models.actor",
        "Actor.__init__",
        'if "norm" in name: module = module.to(torch.float32)',
        "ops.preflight.combinations.loads_reference: in 4 bits policy and reference differ",
    ),
    Text(PEFT, "BaseTunerLayer", "return self._disable_adapters", "update.lora.without_adapters"),
    Text(
        "peft.tuners.lora.layer",
        "Linear.forward",
        "if self.disable_adapters: if self.merged: self.unmerge() result = self.base_layer(x, *args, **kwargs)",
        "update.lora.without_adapters",
    ),
]
