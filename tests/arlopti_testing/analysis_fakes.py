"""Make what the tests of the analysis share: responses without vLLM, and TensorBoard logs without a training."""

import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from transformers import AutoTokenizer

from arlopti_openrlhf.lab.analysis import rollouts

RIGHT = " Since Zoey's statement is so, check it.</think><answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
WRONG = " Thus so.</think><answer>(1) Zoey is a knave\n(2) Oliver is a knave</answer>"


def fake_answers(model, rows, texts):
    """Return the same responses to every prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampled = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, *texts)]
        sampled.append(rollouts.Sampled(prompt, ids[0], list(zip(texts, ids[1:], strict=True))))
    return sampled


def fake_sample(texts):
    """Return a stand-in for vLLM, which answers every prompt with the same texts."""

    def sample(path, model, rows, asked, room):
        keys, rows = zip(*rows, strict=True)
        sampled = dict(zip(keys, fake_answers(model, rows, texts), strict=True))
        rollouts.append(path, sampled)
        return sampled

    return sample


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def write_log(folder, scalars) -> str:
    writer = EventFileWriter(str(folder / "run"))
    for name, series in scalars.items():
        for step, value in series.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=step, summary=summary))
    writer.close()
    return str(folder)


def write_logs(make_folder) -> list[str]:
    """Log two seeds of GRPO and one run of Lopti, each in a folder of its own."""
    seeds = [
        {
            "train/rollout/reward_mean": {1: -1.0, 2: value},
            "eval/kk_2ppl/accuracy": {2: 0.2},
            "eval/kk_3ppl/accuracy": {2: 0.1 * value},
            "train/actor_grad_norm": {1: 0.5, 2: 0.5},
            "train/tokens/entropy": {1: 0.9, 2: 3.0},
        }
        for value in (1.0, 2.0)
    ]
    stages = {f"train/lopti/{group}/actor_grad_norm": {1: 0.3} for group in ("low", "high")}
    runs = [*seeds, {"train/rollout/reward_mean": {1: -1.0}} | stages]
    return [write_log(make_folder("run"), scalars) for scalars in runs]
