"""Real Ray workers for tests of the update: two ranks, DeepSpeed, upstream's policy actor, single-step probes of it.

The workers train in float32 unless told otherwise. Learning rate 0 keeps θ where it is while optimizer steps are
taken, so that gradients of several steps are those of one θ.
"""

import copy
import functools
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import ray
import torch

LOW, HIGH = "low", "high"
RANKS, SAMPLES, PROMPT, RESPONSE = 2, 16, 5, 12

# The workers cannot import this module: it travels with what they are sent.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def cluster():
    import openrlhf.utils.deepspeed
    from openrlhf.trainer.ray import ppo_actor

    from arlopti_openrlhf.ops.health import guard

    upstream_actor, upstream_strategy = ppo_actor.Actor, openrlhf.utils.deepspeed.DeepspeedStrategy
    upstream_policy = ppo_actor.PolicyModelActor
    openrlhf.utils.deepspeed.DeepspeedStrategy = guard.GuardedStrategy
    ray.init(num_gpus=2 * RANKS + 2, num_cpus=2 * RANKS + 4, log_to_driver=False)
    try:
        yield
    finally:
        ppo_actor.Actor = upstream_actor  # `probe_class` has put ours there
        openrlhf.utils.deepspeed.DeepspeedStrategy = upstream_strategy
        ppo_actor.PolicyModelActor = upstream_policy
        ray.shutdown()
        Group.workers.clear()


def flags(model: str, *more: str) -> SimpleNamespace:
    """Upstream's nested arguments, from the real parser."""
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    args = hierarchize(
        parse(
            f"--actor.model_name_or_path {model} --actor.num_gpus_per_node {RANKS} --train.batch_size {SAMPLES} "
            f"--train.micro_batch_size 2 --ds.attn_implementation sdpa --algo.kl.use_loss --algo.kl.estimator k3 "
            f"--algo.kl.init_coef 0.1 --actor.eps_clip_low_high 0.2 0.24 --actor.lr_scheduler constant "
            f"--actor.lr_warmup_ratio 0 --actor.adam.lr 0 --rollout.batch_size {SAMPLES} "
            f"--rollout.n_samples_per_prompt 1 --train.max_tokens_per_gpu 40 --rollout.max_tokens_per_gpu 40".split()
            + list(more)
        )
    )
    args.actor.eps_clip_low_high = tuple(args.actor.eps_clip_low_high)
    return args


def experiences(seed: int = 0, empty: tuple[int, ...] = (), kept_log_probs=None, samples_per_prompt: int = 1) -> list:
    """SAMPLES single-sample experiences with responses of 1 to RESPONSE tokens (none for those in `empty`).

    The old log-probs spread over (0, 1) in probability, and differ from the current policy's: ratios, clipping and KL
    are all at work.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(seed)
    batch = []
    for i in range(SAMPLES):
        tokens = int(torch.randint(1, RESPONSE + 1, (1,), generator=generator))
        length = PROMPT + tokens
        action_mask = torch.zeros(1, length - 1, dtype=torch.long)
        if i not in empty:
            action_mask[0, PROMPT - 1 :] = 1

        def random_row(length=length):
            return torch.rand(1, length - 1, generator=generator)

        old = (0.05 + 0.9 * random_row()).log()
        if kept_log_probs is not None:
            old = kept_log_probs[i]
        batch.append(
            Experience(
                sequences=torch.randint(0, 256, (1, length), generator=generator),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                action_mask=action_mask,
                action_log_probs=old * action_mask,
                base_action_log_probs=(old - 0.5 * random_row()) * action_mask,
                rollout_log_probs=(old + 0.5 * random_row() - 0.25) * action_mask,
                advantages=4 * random_row() - 2,
                returns=random_row(),
                total_length=torch.tensor([float(length)]),
                response_length=torch.tensor([float(tokens)]),
                # Upstream's experience maker puts zeros under kl and logprobs_diff where the KL is in the loss.
                info={"uid": torch.tensor([float(i)]), "reward": torch.tensor([1.0])}
                | {"kl": torch.zeros(1), "logprobs_diff": torch.zeros(1)},
            )
        )
        prompt = batch[i - i % samples_per_prompt].sequences[:, :PROMPT]
        batch[-1].sequences[:, :PROMPT] = prompt
    return batch


def probe_class(selective):
    """Upstream's policy actor, plus a look at what its trainer does; sent out with the actor class of its kind."""
    from openrlhf.models import Actor
    from openrlhf.trainer.ray import ppo_actor

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor
    from arlopti_openrlhf.ops.health import guard
    from arlopti_openrlhf.patching import plain_class
    from arlopti_openrlhf.update.policy_actor import PolicyActor

    ppo_actor.Actor = SelectiveActor if selective else Actor

    class Probe(PolicyActor, guard.GuardedPolicyActor, plain_class(ppo_actor.PolicyModelActor)):
        def init_model_from_pretrained(self, strategy, pretrain, max_steps, float32):
            from openrlhf.utils import utils

            torch.set_num_threads(1)
            self.to_dtype = getattr(self, "to_dtype", utils.convert_to_torch_dtype)
            utils.convert_to_torch_dtype = (lambda param_dtype: torch.float32) if float32 else self.to_dtype
            if float32:
                strategy.args.ds.param_dtype = strategy.param_dtype = "fp32"
            super().init_model_from_pretrained(strategy, pretrain, max_steps)

        run, parameters = run_update, full_parameters

        def call(self, function):
            return function(self)

    return ray.remote(Probe)


def run_update(
    probe,
    batch,
    overrides,
    stock=False,
    rebuild=True,
    near_policy=False,
    on_policy=False,
    nan_in_fresh_memory=False,
    first_rank_only=False,
    off_policy=False,
    settings=None,
):
    """Trains once on this rank's samples, in a worker; returns all that a test may ask for.

    `on_policy` asks the actor for the old log-probs, as upstream's experience maker does; `near_policy` moves all of
    the batch's log-probs to the current policy's, give or take what sets its own apart. With `first_rank_only` the
    other ranks get no sample. `off_policy` keeps the batch's old log-probs where the first pass would give its own.
    `settings` take the place of those of our flags.
    """
    args = probe.strategy.args
    for name, value in overrides.items():
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, args), last, value)
    probe.actor.packing_samples = args.ds.packing_samples
    if rebuild:
        probe.trainer = new_trainer(probe, stock, off_policy, settings)
    torch.manual_seed(7 + probe._rank)
    size = len(batch) // probe._world_size
    own = batch[probe._rank * size : (probe._rank + 1) * size]
    if first_rank_only:
        own = batch if probe._rank == 0 else []
    for sample in copy.deepcopy(own):
        if near_policy:
            move_to_policy(probe, sample)
        if on_policy:
            sample.action_log_probs = probe.forward(sample.sequences, sample.action_mask, sample.attention_mask)
        probe.append(sample)
    unknown = [bool(item.action_log_probs.isnan().any()) for item in probe.trainer.replay_buffer.items]
    torch.use_deterministic_algorithms(nan_in_fresh_memory, warn_only=True)
    steps = probe.actor.model.global_steps
    with watched(probe) as (seen, gradients, forwards):
        status = probe.fit(args.algo.kl.init_coef)
    return SimpleNamespace(
        status=status,
        unknown=unknown,
        seen=seen,
        gradients=gradients,
        forwards=forwards,
        steps=probe.actor.model.global_steps - steps,
        last_rate=probe.actor_scheduler.get_last_lr()[0],
    )


def new_trainer(probe, stock, off_policy=False, own_settings=None):
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor
    from arlopti_openrlhf.ops.health import update_health
    from arlopti_openrlhf.reference import ReferenceTrainer
    from arlopti_openrlhf.update.trainer import TokenUpdateTrainer

    is_selective = isinstance(probe.actor, SelectiveActor)

    class Stock(ActorPPOTrainer):
        defers_old_log_probs = False  # which our policy actor asks

    class Ours(update_health.ActorPPOTrainer, TokenUpdateTrainer if is_selective else ReferenceTrainer):
        settings = own_settings
        if not is_selective:
            defers_old_log_probs = False

    class OffPolicy(Ours):
        first_pass_gives_old_log_probs = False

    return (Stock if stock else OffPolicy if off_policy and is_selective else Ours)(
        probe.strategy,
        probe.actor,
        ema_model=probe.ema_model,
        actor_optim=probe.actor_optim,
        actor_scheduler=probe.actor_scheduler,
        micro_train_batch_size=probe.strategy.args.train.micro_batch_size,
        tokenizer=probe.tokenizer,
        ema_beta=probe.strategy.args.train.ema_beta,
    )


def move_to_policy(probe, sample):
    noise = sample.rollout_log_probs - sample.action_log_probs
    reference = sample.base_action_log_probs - sample.action_log_probs
    sample.action_log_probs = probe.forward(sample.sequences, sample.action_mask, sample.attention_mask) + noise
    sample.rollout_log_probs = sample.action_log_probs + noise.flip(1) * sample.action_mask
    sample.base_action_log_probs = sample.action_log_probs + reference


@contextmanager
def watched(probe):
    """Yield lists of (group, uids, response tokens, updated tokens) for each micro-batch, of the gradients of each
    optimizer step, and of (whether with gradient, tokens that went through the model) for each forward pass."""
    from deepspeed.utils import safe_get_full_grad

    from arlopti_openrlhf.patching import replaced_attribute
    from arlopti_openrlhf.update import trainer as update_trainer

    seen, gradients, forwards = [], [], []

    def watched_embedding(module, args, output):
        forwards.append((torch.is_grad_enabled(), args[0].numel()))

    embedding = probe.actor.model.module.get_input_embeddings()
    hook = embedding.register_forward_hook(watched_embedding)
    strategy, trainer = probe.strategy, probe.trainer
    optimizer_step, training_step = strategy.optimizer_step, trainer.training_step

    def watched_optimizer_step(optimizer, model, scheduler, **kwargs):
        if strategy.args.train.dynamic_batch_enable or model.model.is_gradient_accumulation_boundary():
            gradients.append([safe_get_full_grad(p).clone() for p in model.model.module.parameters()])
        optimizer_step(optimizer, model, scheduler, **kwargs)

    def note(batch, index, response, updated):
        group = None if index is None else trainer.token_weights.labels[index].rpartition("/")[2] or None
        seen.append((group, [int(uid) for uid in batch.info["uid"]], int(response), int(updated)))

    def watched_training_step(batch, *rest):  # upstream's loop calls it, and so the reference's
        response = batch.action_mask.sum()
        status = training_step(batch, *rest)
        note(batch, getattr(trainer, "index", None), response, batch.action_mask.sum())
        return status

    with ExitStack() as replaced:
        replaced.callback(hook.remove)
        replaced.enter_context(replaced_attribute(strategy, "optimizer_step", watched_optimizer_step))
        replaced.enter_context(replaced_attribute(trainer, "training_step", watched_training_step))
        if hasattr(trainer, "planner"):  # the selective update
            of_pass, status = trainer._pass, update_trainer.micro_batch_status

            def watched_pass(mini_batch, index, *rest):
                def watched_status(batch, logged, num_tokens, *counts):
                    note(batch, index, batch.action_mask.sum(), num_tokens)
                    return status(batch, logged, num_tokens, *counts)

                with replaced_attribute(update_trainer, "micro_batch_status", watched_status):
                    return of_pass(mini_batch, index, *rest)

            replaced.enter_context(replaced_attribute(trainer, "_pass", watched_pass))
        yield seen, gradients, forwards


def full_parameters(probe, averaged=False):
    import deepspeed

    parameters = list((probe.ema_model if averaged else probe.actor).model.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=probe.strategy.args.ds.zero_stage == 3):
        return [p.detach().clone() for p in parameters]


class Group:
    """Probes with a model of their own flags; `run` gives rank 0's view and checks that the ranks agree.

    All groups live in the same worker processes (apart for each kind of actor and number of ranks), one at a time:
    whoever runs after another starts from the beginning.

    Args:
        selective: whether the selective update trains, and not the reference.
        off_policy: whether updates keep the old log-probs of their batches by default (`run_update`).
        ranks: how many workers.
    """

    workers: dict = {}
    current: dict = {}

    def __init__(self, args, max_steps=100, float32=True, selective=False, off_policy=False, ranks=RANKS):
        self.args, self.max_steps, self.float32 = args, max_steps, float32
        self.kind, self.off_policy = (selective, ranks), off_policy
        self.start()

    def start(self):
        from openrlhf.trainer.ray.launcher import RayActorGroup
        from openrlhf.utils import get_strategy

        if self.kind not in self.workers:
            selective, ranks = self.kind
            self.workers[self.kind] = RayActorGroup(1, ranks, probe_class(selective))
        self.current[self.kind] = self
        model, strategy = self.args.actor.model_name_or_path, get_strategy(self.args)
        initialize = self.workers[self.kind].async_init_model_from_pretrained
        ray.get(initialize(strategy, model, self.max_steps, float32=self.float32))

    def run_ranks(self, batch, overrides=None, **kwargs):
        if self.current[self.kind] is not self:
            self.start()
        workers, kwargs = self.workers[self.kind], {"off_policy": self.off_policy} | kwargs
        return ray.get(workers.async_run_method("run", batch, overrides or {}, **kwargs), timeout=240)

    def run(self, batch, overrides=None, **kwargs):
        results = self.run_ranks(batch, overrides, **kwargs)
        assert len({result.steps for result in results}) == 1, "ranks took different numbers of optimizer steps"
        return results[0]

    def parameters(self, averaged=False):
        assert self.current[self.kind] is self
        return ray.get(self.workers[self.kind].async_run_method("parameters", averaged))[0]


def relative_distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    a, b = torch.cat([x.double().flatten() for x in a]), torch.cat([x.double().flatten() for x in b])
    return ((a - b).norm() / b.norm()).item()


OFF = {
    "algo.ar.alpha": 0.3,
    "algo.lopti.eta": None,
    "algo.lopti.quantile": None,
    "algo.lopti.scope": "batch",
    "algo.lopti.groups": "both",
    "algo.lopti.order": "low_first",
    "algo.token_method": [],
    "algo.token_method_args": [],
    "algo.token_method_normalize": False,
    "ds.packing_samples": False,
    "actor.loss_agg_mode": "token-mean",
    "actor.policy_loss_type": "ppo",
    "actor.dual_clip": None,
    "actor.entropy_coef": None,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "train.max_epochs": 1,
    "logger.probability_stats": "bins",
}


LOSSES = {
    "token-mean": {},
    "entropy and dual clip": {"actor.entropy_coef": 0.05, "actor.dual_clip": 3.0},
    "packed": {"ds.packing_samples": True, "actor.entropy_coef": 0.05},
    "seq-mean-token-mean": {"actor.loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean, packed": {"actor.loss_agg_mode": "seq-mean-token-mean", "ds.packing_samples": True},
    "gspo": {"actor.policy_loss_type": "gspo", "actor.entropy_coef": 0.05},
    "token importance sampling": {
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_threshold": [0.9, 1.1],
    },
    "sequence importance sampling": {
        "algo.advantage.is_correction_level": "seq",
        "algo.advantage.is_correction_threshold": [0.97, 1.03],
    },
    "quantile": {"algo.lopti.quantile": 0.3, "algo.lopti.eta": None},
}


def assert_no_nan(status: dict) -> None:
    values = {name: value for name, value in status.items() if isinstance(value, int | float)}
    histograms = [status[name] for name in status.keys() - values.keys()]
    assert all(isinstance(histogram, list) for histogram in histograms)
    values |= dict(enumerate(sum(histograms, [])))
    assert all(value == value for value in values.values()), values
