"""Records seeded updates by two Ray workers, to the last bit, so that a refactoring can be held against them.

    python tests/oracle.py record before.json
    python tests/oracle.py record after.json
    python tests/oracle.py compare before.json after.json

`compare` prints every difference, and ends with status 1 if there is one. Both files must come from one machine, since
rounding differs between machines.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

AR, LOPTI = "--algo.ar.alpha 0.3", "--algo.lopti.eta 0.5"
BOTH = f"{AR} {LOPTI}"
HALVES = "--train.batch_size 8"  # two mini-batches
CORRECTION = "--algo.advantage.is_correction"
METHOD, ARGS, NORMALIZE = "--algo.token_method", "--algo.token_method_args", "--algo.token_method_normalize"
LOPTI_METHOD, AR_METHOD = f"{METHOD} lopti {ARGS} lopti.eta=0.5", f"{METHOD} ar {ARGS} ar.alpha=0.3"
OWN_FILE = ROOT / "examples" / "token_method.py"

# The flags of an update beside those of `update_workers.flags`, which has the KL in the loss.
SETTINGS = {
    "off": "",
    "off, statistics off": "--logger.probability_stats off",
    "AR": AR,
    "AR as a method": AR_METHOD,
    "AR as a method, below 0": f"{METHOD} ar {ARGS} ar.alpha=-0.2",
    "Lopti by eta": LOPTI,
    "Lopti by eta, as a method": LOPTI_METHOD,
    "Lopti by quantile": "--algo.lopti.quantile 0.3",
    "Lopti, an empty group": "--algo.lopti.eta 1e-9",
    "AR and Lopti": BOTH,
    "AR and Lopti as methods": f"{METHOD} ar lopti {ARGS} ar.alpha=0.3 lopti.eta=0.5",
    "AR and Lopti as methods, normalized": f"{METHOD} ar lopti {ARGS} ar.alpha=0.3 lopti.eta=0.5 {NORMALIZE}",
    "AR as a flag, Lopti as a method": f"{AR} {LOPTI_METHOD}",
    "AR as a method, Lopti as a flag": f"{LOPTI} {AR_METHOD}",
    "high first": f"{BOTH} --algo.lopti.order high_first",
    "low alone": f"{BOTH} --algo.lopti.groups low",
    "high alone": f"{BOTH} --algo.lopti.groups high",
    "mini-batches": f"{BOTH} {HALVES}",
    "scope minibatch": f"{BOTH} {HALVES} --algo.lopti.scope minibatch",
    "scope minibatch, high first": f"{BOTH} {HALVES} --algo.lopti.scope minibatch --algo.lopti.order high_first",
    "epochs": f"{BOTH} --train.max_epochs 2",
    "epochs of mini-batches": f"{BOTH} {HALVES} --train.max_epochs 2",
    "off, epochs of mini-batches": f"{HALVES} --train.max_epochs 2",
    "no KL": f"{BOTH} --algo.kl.init_coef 0",
    "unbiased KL": f"{BOTH} --algo.kl.estimator k1 --algo.kl.unbiased_gradient",
    "entropy and dual clip": f"{BOTH} --actor.entropy_coef 0.05 --actor.dual_clip 3",
    "off, entropy and dual clip": "--actor.entropy_coef 0.05 --actor.dual_clip 3",
    "seq-mean-token-mean": f"{BOTH} --actor.loss_agg_mode seq-mean-token-mean",
    "GSPO": f"{BOTH} --actor.policy_loss_type gspo",
    "packed": f"{BOTH} --ds.packing_samples --actor.entropy_coef 0.05",
    "packed seq-mean": f"{BOTH} --ds.packing_samples --actor.loss_agg_mode seq-mean-token-mean",
    "off, packed": "--ds.packing_samples",
    "dynamic": f"{BOTH} --ds.packing_samples --train.dynamic_batch_enable",
    "dynamic, epochs of mini-batches": f"{BOTH} --ds.packing_samples --train.dynamic_batch_enable {HALVES} "
    "--train.max_epochs 2 --train.max_tokens_per_gpu 24",
    "token importance sampling": f"{BOTH} {CORRECTION}_level token {CORRECTION}_threshold 0.9 1.1",
    "sequence importance sampling": f"{BOTH} {CORRECTION}_level seq {CORRECTION}_threshold 0.97 1.03",
    "statistics off": f"{BOTH} --logger.probability_stats off",
    "EMA": f"{BOTH} {HALVES} --train.enable_ema --train.ema_beta 0.5",
    "cosine": f"{BOTH} --actor.lr_scheduler cosine_with_min_lr --actor.lr_warmup_ratio 0.3",
    "no clipping of gradients": f"{BOTH} --actor.max_norm 0",
    "a3po, normalized": f"{METHOD} a3po {NORMALIZE}",
    "positive_weight": f"{METHOD} positive_weight",
    "clip_cov": f"{METHOD} clip_cov {ARGS} clip_cov.share=1 clip_cov.low=0.3",
    "own file": f"{METHOD} {OWN_FILE} {ARGS} token_method.weight=0.5",
}
# The selective actor alone gives the entropies that these read.
READING_ENTROPIES = {
    "eighty_twenty": f"{METHOD} eighty_twenty",
    "eighty_twenty, mini-batches": f"{METHOD} eighty_twenty --train.max_epochs 2 {HALVES}",
    "eighty_twenty, packed": f"{METHOD} eighty_twenty --ds.packing_samples",
    "stare": f"{METHOD} stare {ARGS} stare.entropy=9 stare.negative=0.9",
    "stapo": f"{METHOD} stapo {ARGS} stapo.tau=0.2",
    "steer": f"{METHOD} steer",
    "entropy_advantage": f"{METHOD} entropy_advantage",
    "surprisal_band": f"{METHOD} surprisal_band {ARGS} surprisal_band.lo=0.5 surprisal_band.hi=1.5",
    "eighty_twenty, Lopti as a method": f"{METHOD} eighty_twenty lopti {ARGS} lopti.eta=0.2",
    "eighty_twenty, Lopti by quantile": f"{METHOD} eighty_twenty --algo.lopti.quantile 0.3",
    "stare, AR as a method": f"{METHOD} stare ar {ARGS} stare.entropy=9 ar.alpha=0.3",
    "stare, AR as a flag": f"{AR} {METHOD} stare {ARGS} stare.entropy=9",
}


class Kind(NamedTuple):
    """How an update is computed, and its settings."""

    selective: bool
    flags: str
    settings: dict[str, str]
    float32: bool = True


# The reference, on upstream's loop, has only the published order of the passes.
ON_STOCK = {name: setting for name, setting in SETTINGS.items() if "scope minibatch" not in name}
_FEW = ("off", "AR", "AR and Lopti", "Lopti by quantile", "AR and Lopti as methods", "epochs of mini-batches")
FEW = {name: SETTINGS[name] for name in (*_FEW, "dynamic")}
KINDS = {
    "stock, ZeRO-2": Kind(False, "--ds.zero_stage 2", ON_STOCK),
    "stock, ZeRO-3": Kind(False, "--ds.zero_stage 3", FEW),
    "selective, ZeRO-2": Kind(True, "--ds.zero_stage 2", FEW),
    "selective, ZeRO-3": Kind(True, "--ds.zero_stage 3", SETTINGS | READING_ENTROPIES),
    "selective, ZeRO-2, bf16": Kind(True, "--ds.zero_stage 2", FEW, float32=False),
}


def record_updates() -> dict[str, Any]:
    """Return two updates of each setting in each kind, one after the other."""
    from arlopti_openrlhf import cpu

    cpu.enable()  # before openrlhf is imported
    from arlopti_testing.update_workers import Group, cluster, flags

    updates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, cluster():
        make_model(folder)
        batches = make_batches(folder)
        for kind_name, kind in KINDS.items():
            how = f"--actor.update {'selective' if kind.selective else 'stock'} --actor.adam.lr 1e-3 {kind.flags}"
            for name, setting in kind.settings.items():
                args = flags(folder, *how.split(), *setting.split())
                group = Group(args, max_steps=8, float32=kind.float32, selective=kind.selective)
                for batch_name, batch in batches.items():
                    result = group.run(batch, on_policy=batch_name == "on-policy")
                    update = recorded(result) | {"weights": digest(group.parameters())}
                    if args.train.enable_ema:
                        update["averaged weights"] = digest(group.parameters(averaged=True))
                    updates.setdefault(kind_name, {}).setdefault(name, {})[batch_name] = update
            print(f"updates: {kind_name}", flush=True)
    return updates


def make_model(folder: str) -> None:
    """Write a Qwen2 model of 0.1M random parameters with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    sizes = dict(vocab_size=320, hidden_size=64, intermediate_size=128, max_position_embeddings=1024)
    heads = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    ends = dict(bos_token_id=None, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **ends, initializer_range=0.2))
    policy.model.norm.weight.data.fill_(3)  # so that probabilities spread over (0, 1)
    policy.save_pretrained(folder)


def make_batches(model: str) -> dict[str, list]:
    """Return samples of the model's own answers; in the second batch, other policies gave the old log-probs.

    In the first the actor is asked for them. The selective update asks it in both, except where it needs them before.
    """
    import torch
    from arlopti_testing.update_workers import PROMPT, experiences
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    batches = {"on-policy": experiences(seed=1, empty=(3,), samples_per_prompt=4), "off-policy": experiences(seed=2)}
    for i in (1, 4, 5, 6, 7):
        batches["on-policy"][i].advantages.zero_()
    for sample in sum(batches.values(), []):
        for t in range(PROMPT, sample.sequences.shape[1]):
            p = policy(sample.sequences[:, :t]).logits[0, -1].softmax(-1)
            sample.sequences[0, t] = torch.multinomial(p, 1, generator=generator)
    return batches


def recorded(result: Any) -> dict[str, Any]:
    """Return an update's results as JSON, with every number to the last bit."""
    status = {name: value.item() if hasattr(value, "item") else value for name, value in result.status.items()}
    return {
        "steps": result.steps,
        "last_rate": float(result.last_rate).hex(),
        "gradients": [digest(gradients) for gradients in result.gradients],
        "metrics": {n: float(value).hex() for n, value in status.items() if not isinstance(value, (list, tuple))},
        "histograms": [float(x).hex() for value in status.values() if isinstance(value, list) for x in value],
    }


def digest(tensors: list) -> str:
    """Return the SHA-256 of the tensors' types, shapes and bits, with their norm, which says how far two are apart."""
    import torch

    sha = hashlib.sha256()
    for x in tensors:
        sha.update(f"{x.dtype} {tuple(x.shape)}".encode())
        sha.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    norm = torch.cat([x.double().flatten() for x in tensors]).norm().item()
    return f"{sha.hexdigest()}, norm {norm:.12g}"


def flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return {path: value} of everything in nested dictionaries and lists. An empty one is a value."""
    if not isinstance(value, (dict, list)) or not value:
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {p: v for key, inner in pairs for p, v in flat(inner, (*path, str(key))).items()}


def differences(a: Any, b: Any) -> Iterator[str]:
    """Yield a line for each path whose value differs."""
    a, b = flat(a), flat(b)
    for path in [*a, *(path for path in b if path not in a)]:
        if path in a and path in b and a[path] == b[path]:
            continue
        yield f"{' > '.join(path)}: {shown(a.get(path, '(absent)'))} | {shown(b.get(path, '(absent)'))}"


def shown(value: Any) -> str:
    """Return a value for people: numbers in decimals, too."""
    text = str(value)
    return f"{text} ({float.fromhex(text)!r})" if text.removeprefix("-").startswith("0x") else text


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one to record, two to compare")
    args = parser.parse_args()
    if len(args.files) != {"record": 1, "compare": 2}[args.command]:
        parser.error("record takes one file, and compare two")
    if args.command == "record":
        # As in the Makefile: the order of additions must not depend on how many threads there are.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("RAY_worker_niceness", "0")
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        args.files[0].write_text(json.dumps(record_updates(), indent=1) + "\n", encoding="utf-8")
        return
    lines = list(differences(*(json.loads(path.read_text(encoding="utf-8")) for path in args.files)))
    print("\n".join([f"{len(lines)} differences", *(f"  {line}" for line in lines)]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
