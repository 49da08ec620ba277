"""The same update as others compute it: OpenRLHF with its own options, and TRL.

Each peer takes the batch, the engine and the optimizer of `update_bench.Bench`, and computes stock GRPO's gradient by
its own code. `packed_actor` is no peer: it belongs to every table, as the second baseline.
"""

import copy
import importlib.metadata
import importlib.util
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from hardware import type_of_products
from torch.nn.utils.rnn import pad_sequence

from arlopti_openrlhf.patching import replaced_attribute

DYNAMIC = "OpenRLHF, packing and dynamic batches"
CHECKPOINTING = "OpenRLHF, gradient checkpointing"
TRL = "TRL"
PEERS = (DYNAMIC, CHECKPOINTING, TRL)
# What cannot be timed on a CPU, and why.
NEED_A_GPU = {
    "Liger (TRL, verl, OpenRLHF)": "its kernels are Triton's",
    "verl": "its trainer needs flash-attn, and its PrefixGrouper and prefix tree too",
    "Unsloth": "its kernels are Triton's",
}


def missing(peer: str) -> str | None:
    """Return why this peer does not run here, or None where it does."""
    if peer == TRL and importlib.util.find_spec("trl") is None:
        return "not installed; pip install --no-deps trl"
    return None


def name(peer: str) -> str:
    """Return the peer's name with its version."""
    if peer == TRL and missing(peer) is None:
        return f"TRL {importlib.metadata.version('trl')}"
    return peer


@contextmanager
def gradient_checkpointing(model: torch.nn.Module) -> Iterator[None]:
    """Let the layers compute their activations again in the backward pass, as OpenRLHF switches it on."""
    was_on = model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        if not was_on:
            model.gradient_checkpointing_disable()


@contextmanager
def no_accumulation(engine) -> Iterator[None]:
    """Let DeepSpeed's engine expect one micro-batch per step, as OpenRLHF's strategy does for dynamic batches.

    DeepSpeed 0.19.6 then keeps the gradient of the step's last micro-batch alone. What it costs is the same.
    """
    size, micro_steps = engine.train_batch_size(), engine.micro_steps
    engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu())
    try:
        yield
    finally:
        engine.set_train_batch_size(size)
        engine.micro_steps = micro_steps  # by which it knows where the next mini-batch ends


def packed_actor(engine) -> torch.nn.Module:
    """Return OpenRLHF's actor with packed rows, whose sequences attend to themselves alone, as by flash-attn.

    Without flash-attn, transformers' SDPA takes a packed row under a boolean matrix of what each token sees, which no
    user of OpenRLHF with a GPU would pay for.

    Args:
        engine: DeepSpeed's.
    """
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward import packed_attention
    from arlopti_openrlhf.forward.shared_prompt import pack

    class PackedActor(Actor):
        def forward(self, sequences, action_mask=None, attention_mask=None, *args, **kwargs):
            batch = pack(sequences, attention_mask, attention_mask[:, 1:], share=False).to(sequences.device)
            return super().forward(sequences, action_mask, attention_mask, *args, packed_batch=batch, **kwargs)

    packed_attention.install(engine.module.config._attn_implementation)
    actor = PackedActor(engine)
    actor.packing_samples, actor.is_vlm = True, False
    return actor


def unshared_actor(actor) -> torch.nn.Module:
    """Return a selective actor on the same engine that computes the prompt of each response anew.

    Beside it stands what sharing prompts saves, and nothing else.
    """
    from arlopti_openrlhf.forward.selective_actor import SelectiveActor
    from arlopti_openrlhf.forward.shared_prompt import pack

    class UnsharedActor(SelectiveActor):
        def lay_out(self, sequences, action_mask, attention_mask, *options):
            return replace(pack(sequences, attention_mask, action_mask, share=False), by_segments=True)

    unshared = copy.copy(actor)
    unshared.__class__ = UnsharedActor
    return unshared


@contextmanager
def one_pass_log_probs() -> Iterator[None]:
    """Let OpenRLHF's actor take log-probs in one pass over the logits, as it does by flash-attn's cross-entropy.

    Without flash-attn it sums the exponentials of float32 logits by chunks, whose backward pass takes memory and time
    that grow with the square of the chunks.
    """
    from openrlhf.models import actor

    def log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        logits = logits if temperature == 1.0 else logits / temperature
        return -torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(
            labels
        )

    with replaced_attribute(actor, "log_probs_from_logits", log_probs):
        yield


def add_peers(bench, names: Sequence[str]) -> None:
    """Make a bench ready for these of PEERS.

    OpenRLHF's dynamic batches get as many tokens as a micro-batch has on average, and a tenth more.
    """
    from openrlhf.models import Actor
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    engine = bench.stock.model
    for peer in names:
        if peer == TRL:
            bench.trl = TrlUpdate(engine, bench.flags, len(bench.rollout))
            continue
        flags, actor = copy.deepcopy(bench.flags), Actor(engine)
        actor.packing_samples = flags.ds.packing_samples = "packing" in peer
        actor.is_vlm = False
        if peer == DYNAMIC:
            flags.train.dynamic_batch_enable = True
            share = bench.args.micro_batch_size / len(bench.rollout)
            flags.train.max_tokens_per_gpu = int(1.1 * share * bench.tokens) + 1
            bench.around[peer] = lambda: no_accumulation(engine)
        if peer == CHECKPOINTING:
            bench.around[peer] = lambda: gradient_checkpointing(engine.module)
        bench.add_trainer(peer, ActorPPOTrainer, actor, flags)


class TrlUpdate:
    """TRL's `GRPOTrainer._compute_loss` on the bench's engine: token mean, clipping and KL as in OpenRLHF's flags.

    An update that is on-policy computes no old log-probs in TRL, as in ours. TRL runs the LM head in tiles and always
    computes entropies, on a GPU for the tokens of the responses alone, and elsewhere for all tokens and the padding.
    On a CPU without bf16 instructions its head gets float32, as the others do.

    Args:
        engine: DeepSpeed's.
        flags: OpenRLHF's nested arguments.
        samples: in a rollout batch.
    """

    def __init__(self, engine, flags, samples: int) -> None:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        self.engine, self.micro_batch_size = engine, flags.train.micro_batch_size
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        low, high = flags.actor.eps_clip_low_high
        configuration = GRPOConfig(
            output_dir=tempfile.gettempdir(),  # must exist, and stays empty
            use_cpu=not torch.cuda.is_available(),
            bf16=False,  # the weights have their type already
            per_device_train_batch_size=self.micro_batch_size,
            generation_batch_size=samples,
            num_generations=min(8, samples),
            gradient_accumulation_steps=samples // self.micro_batch_size,
            gradient_checkpointing=False,
            epsilon=low,
            epsilon_high=high,
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            engine.module,
            reward_funcs=lambda **_: [0.0],
            args=configuration,
            train_dataset=Dataset.from_dict({"prompt": ["?"] * samples}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        )
        self.trainer.beta = flags.algo.kl.init_coef  # given before, it would load a reference model
        self.trainer.current_gradient_accumulation_steps = samples // self.micro_batch_size
        if type_of_products() is torch.float32:
            del engine.module.forward
            add_fused_lm_head(engine.module, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
        self.forward: Callable = vars(engine.module).pop("forward")  # with TRL's LM head; the others keep their own

    def __call__(self, samples: Sequence) -> None:
        """Take one update of these samples, in a random order as TRL does."""
        order = random.Random(0).sample(samples, len(samples))
        size, tokens = self.micro_batch_size, sum(int(s.action_mask.sum()) for s in samples)
        self.engine.train()
        with replaced_attribute(self.engine.module, "forward", self.forward):
            for i in range(0, len(order), size):
                inputs = trl_inputs(order[i : i + size]) | {"num_items_in_batch": torch.tensor(float(tokens))}
                inputs = {key: value.to(torch.cuda.current_device()) for key, value in inputs.items()}
                loss = self.trainer._compute_loss(self.engine, inputs)
                self.engine.backward(loss, scale_wrt_gas=False)
                self.engine.step()


def trl_inputs(samples: Sequence) -> dict[str, torch.Tensor]:
    """Return one micro-batch in TRL's form: prompts padded on the left, completions on the right."""
    prompts, completions, references = [], [], []
    for sample in samples:
        start = sample.sequences.shape[1] - int(sample.action_mask.sum())
        prompts.append(sample.sequences[0, :start].flip(0))
        completions.append(sample.sequences[0, start:])
        references.append(sample.base_action_log_probs[0][sample.action_mask[0].bool()])
    return dict(
        prompt_ids=pad_sequence(prompts, batch_first=True).flip(1),
        prompt_mask=pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True).flip(1),
        completion_ids=pad_sequence(completions, batch_first=True),
        completion_mask=pad_sequence([torch.ones_like(c) for c in completions], batch_first=True),
        ref_per_token_logps=pad_sequence(references, batch_first=True),
        advantages=torch.stack([sample.advantages[0, -1] for sample in samples]),
    )
