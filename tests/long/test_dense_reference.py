"""Random settings of the update against the loss of each optimizer step, by autograd in float64 over all tokens.

The reference is written out here, from the equations alone. It pads nothing, shares nothing and leaves nothing out.
The update runs on two ranks with DeepSpeed, in float32.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.update_workers import OFF, SAMPLES, Group, cluster, experiences, flags, relative_distance
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.long
SETTINGS = 60  # for each of two sizes of micro-batches


@pytest.fixture(scope="module")
def sharp_model(tiny_model, tmp_path_factory) -> str:
    """Give the tiny model probabilities from 1e-5 to 1, so that weights and groups differ from token to token."""
    from transformers import AutoTokenizer

    folder = str(tmp_path_factory.mktemp("sharp"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 3 / model(torch.arange(256)[None]).logits.std()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["8", "2"])
def group(request, sharp_model):
    with cluster():
        stage = {"8": "2", "2": "3"}[request.param]
        more = ["--ds.zero_stage", stage, "--train.micro_batch_size", request.param, "--actor.max_norm", "0"]
        yield Group(flags(sharp_model, *more), selective=True)


def drawn(chance: random.Random) -> SimpleNamespace:
    """Draw a setting."""
    either = chance.choice
    lopti = either(["off", "eta", "quantile"])
    level = either(["off", "off", "token", "seq"])
    is_gspo = chance.random() < 0.15
    return SimpleNamespace(
        alpha=either([0.0, 0.3, chance.uniform(0, 1)]),
        lopti=lopti,
        groups=either(["both", "both", "low", "high"]) if lopti != "off" else "both",
        order=either(["low_first", "high_first"]),
        gspo=is_gspo,
        # GSPO's loss is a mean over sequences, whatever the flag.
        by_sequence=is_gspo or chance.random() < 0.3,
        clip=(chance.uniform(0.1, 0.3), chance.uniform(0.1, 0.4)),
        dual_clip=either([None, 1.5, 10.0]),
        kl=either([None, "k1", "k2", "k3"]),
        entropy=either([None, None, 0.0, 0.05]),
        level=level,
        mode=either(["mask", "clip"]) if level == "token" else "mask",
        band=(chance.uniform(0.8, 0.95), chance.uniform(1.05, 1.2)),
        packing=chance.random() < 0.5,
        on_policy=chance.random() < 0.5,
        per_prompt=either([1, 2, 4, 8]),
        idle=chance.sample(range(SAMPLES), either([0, 5, 12])),
        seed=chance.randrange(10**6),
    )


@pytest.mark.parametrize("seed", range(SETTINGS))
def test_gradients_are_those_of_the_dense_loss(group, sharp_model, seed):
    setting = drawn(random.Random(seed))
    policy = AutoModelForCausalLM.from_pretrained(sharp_model, dtype=torch.float64, attn_implementation="eager")
    batch = experiences(seed=setting.seed, samples_per_prompt=setting.per_prompt)
    generator = torch.Generator().manual_seed(setting.seed)
    old = []
    for i, sample in enumerate(batch):
        mask, (log_probs, _) = sample.action_mask, token_log_probs(policy, sample)

        def noise(size, mask=mask):
            return size * torch.randn(mask.shape, generator=generator)

        sample.action_log_probs = ((log_probs.detach() + (not setting.on_policy) * noise(0.3)) * mask).float()
        sample.base_action_log_probs = ((log_probs.detach() + noise(0.3)) * mask).float()
        sample.rollout_log_probs = (sample.action_log_probs + noise(0.1)) * mask
        if i in setting.idle:
            sample.advantages.zero_()
        old.append((log_probs.detach() if setting.on_policy else sample.action_log_probs.double())[mask.bool()])
    eta, quantile = threshold(torch.cat(old), 0.3)

    overrides = OFF | {
        "algo.ar.alpha": setting.alpha,
        "algo.lopti.eta": eta if setting.lopti == "eta" else None,
        "algo.lopti.quantile": quantile if setting.lopti == "quantile" else None,
        "algo.lopti.groups": setting.groups,
        "algo.lopti.order": setting.order,
        "actor.policy_loss_type": "gspo" if setting.gspo else "ppo",
        "actor.loss_agg_mode": "seq-mean-token-mean" if setting.by_sequence else "token-mean",
        "actor.eps_clip_low_high": setting.clip,
        "actor.dual_clip": setting.dual_clip,
        "actor.entropy_coef": setting.entropy,
        "algo.kl.use_loss": setting.kl is not None,
        "algo.kl.init_coef": 0.1 if setting.kl else 0.0,
        "algo.kl.estimator": setting.kl or "k3",
        "algo.advantage.is_correction_level": setting.level,
        "algo.advantage.is_correction_mode": setting.mode,
        "algo.advantage.is_correction_threshold": list(setting.band),
        "ds.packing_samples": setting.packing,
    }
    result = group.run(batch, overrides, on_policy=setting.on_policy, off_policy=not setting.on_policy)
    stages = {"low": ["low"], "high": ["high"], "both": ["low", "high"]}[setting.groups]
    stages = [None] if setting.lopti == "off" else stages[:: 1 if setting.order == "low_first" else -1]
    assert len(result.gradients) == len(stages)
    for stage, gradients in zip(stages, result.gradients, strict=True):
        expected = dense_gradients(policy, batch, setting, stage, eta)
        assert relative_distance(gradients, expected) < 3e-5, f"{stage}: {setting}"


def token_log_probs(policy: PreTrainedModel, sample) -> tuple[Tensor, Tensor]:
    """Return (1, T - 1) log-probs of a sample's tokens, and the entropies of the distributions that predict them."""
    log_p = policy(sample.sequences).logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, sample.sequences[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def threshold(old: Tensor, share: float) -> tuple[float, float]:
    """Return an η in the widest gap between probabilities near the share, and the quantile that lies in its middle."""
    p = old.exp().sort().values
    first = int(share * len(p)) - 5
    i = first + int(p[first : first + 11].diff().argmax())
    return float(p[i] + p[i + 1]) / 2, (i + 0.5) / (len(p) - 1)


def dense_gradients(policy: PreTrainedModel, batch: list, setting, stage: str | None, eta: float) -> list[Tensor]:
    """Return the gradient of one optimizer step, of every parameter."""
    tokens = sum(int(sample.action_mask.sum()) for sample in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        mask = sample.action_mask.bool()
        log_probs, entropy = (x[mask] for x in token_log_probs(policy, sample))
        advantages, reference, rollout, given = (
            x[mask].double()
            for x in (
                sample.advantages,
                sample.base_action_log_probs,
                sample.rollout_log_probs,
                sample.action_log_probs,
            )
        )
        old = log_probs.detach() if setting.on_policy else given
        low = old.exp() < eta
        group = {None: torch.ones_like(low), "low": low, "high": ~low}[stage]
        advantages = (setting.alpha * old.exp() + 1 - setting.alpha) * advantages
        losses = policy_losses(setting, log_probs, old, rollout, advantages, group)
        # GSPO's ratio, and so the gradient of a group's tokens, is in the losses of all tokens.
        policy_loss = losses.sum() if setting.gspo else losses[group].sum()
        loss = loss + policy_loss / (len(mask[mask]) * len(batch) if setting.by_sequence else tokens)
        if setting.kl:
            difference = log_probs - reference
            values = dict(k1=difference, k2=difference**2 / 2, k3=(-difference).exp() - 1 + difference)
            loss = loss + 0.1 * values[setting.kl].clamp(-10, 10)[group].sum() / tokens
        if setting.entropy:
            loss = loss - setting.entropy * entropy[group].sum() / tokens
    gradients = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(policy.parameters(), gradients, strict=True)]


def policy_losses(
    setting, log_probs: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, group: Tensor
) -> Tensor:
    """Return (A,) losses of a response's tokens: PPO's or GSPO's, dual clip, importance-sampling correction."""
    log_ratio = log_probs - old
    if setting.gspo:
        # The ratio is the sequence's. The tokens of the other group are held constant in it.
        log_ratio = log_probs - (rollout if setting.level != "off" else old)
        log_ratio = torch.where(group, log_ratio, log_ratio.detach()).mean().expand(len(old))
    ratio, (low, high) = log_ratio.exp(), setting.clip
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if setting.dual_clip:
        gain = torch.where(advantages < 0, torch.maximum(gain, setting.dual_clip * advantages), gain)
    if setting.level == "off" or setting.gspo:
        return -gain
    trust = (old - rollout).exp()
    gated = trust if setting.level == "token" else (old - rollout).mean().exp().expand(len(old))
    if setting.mode == "clip":
        return -gated.clamp(*setting.band) * gain
    kept = (gated >= setting.band[0]) & (gated <= setting.band[1])
    return -torch.where(kept, trust, 0.0) * gain


def test_the_settings_differ():
    """Each choice is drawn in several settings."""
    settings = [drawn(random.Random(seed)) for seed in range(SETTINGS)]
    for name in ("lopti", "groups", "order", "gspo", "by_sequence", "dual_clip", "kl", "entropy", "level", "packing"):
        counts = [str(getattr(setting, name)) for setting in settings]
        assert min(map(counts.count, counts)) >= 3, name
    assert not math.isclose(settings[0].clip[0], settings[1].clip[0])
