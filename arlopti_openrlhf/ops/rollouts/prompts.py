"""Draws the prompts in the order of the seed, and knows which of them have been trained.

Upstream's loader takes its order from the generator of its process, which evaluations move, and its state counts every
prompt that it has yielded, whether a step has had the samples or not.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger
from torch.utils.data import DataLoader

from arlopti_openrlhf.ops.checkpoints.unpickling import packed, unpacked
from arlopti_openrlhf.ops.lifecycle.stopping import RunStopped
from arlopti_openrlhf.ops.rollouts import prompt_text

logger = init_logger(__name__)

_upstream_datasets = ppo_trainer.prepare_datasets
_DATE = re.compile(r"strftime_now\(\s*[\"']([^\"']+)")


def prepare_datasets(strategy, tokenizer) -> tuple["Prompts", Any, int]:
    """Return upstream's loaders and number of steps, with `Prompts` in place of the loader to train on.

    The log gets the first prompt.

    Raises:
        ValueError: there would be no optimizer step. Upstream would save the model as it came.
    """
    args = strategy.args
    prompt_text.with_arguments(tokenizer, args.data.chat_template_args)
    loader, eval_loader, max_steps = _upstream_datasets(strategy, tokenizer)
    if not max_steps:
        raise ValueError(
            f"argument --data.prompt_dataset: {len(loader)} prompts with {args.rollout.n_samples_per_prompt} samples "
            f"each are fewer than one batch of --train.batch_size {args.train.batch_size}, so nothing would be trained"
        )
    of_text = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    logger.info(f"the first prompt as the model gets it: {prompt_text.shown(loader.dataset.prompts[0], of_text)}")
    return Prompts(loader, digest_of(loader.dataset), args), eval_loader, max_steps


def digest_of(dataset) -> str:
    """Return a digest of all prompts and labels in their order, in about 3 s for a million of 1 kB.

    It is of the text that upstream has loaded and rendered, wherever from, without the date that a template may write.
    """
    digest = hashlib.blake2b(digest_size=16)
    formats = _DATE.findall(str(getattr(dataset.tokenizer, "chat_template", None)))
    date = re.compile("|".join(re.escape(datetime.now().strftime(each)) for each in formats) or "(?!)")
    for pair in zip(dataset.prompts, dataset.labels, strict=True):
        digest.update(date.sub("", repr(pair)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class OtherPrompts(RunStopped):
    """The run that is resumed had other prompts, among which the checkpoint's place is another one."""

    exit_code = 2


def seed_of(*key: Any) -> int:
    """Return a seed of 56 bits that follows from `key` alone, on any machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


class Numbered:
    """Iterates over batches of one prompt each, and counts them.

    Args:
        name: what the prompts are for. Together with its number, it names a prompt.
        batches: upstream's (sources, prompts, labels, images), each a list of one.
        drawn: how many came before.
    """

    def __init__(self, name: tuple, batches: Iterable[tuple], drawn: int = 0) -> None:
        self.name, self.drawn = name, drawn
        self._batches = iter(batches)

    def __iter__(self) -> "Numbered":
        return self

    def __next__(self) -> tuple:
        batch = next(self._batches)
        self.drawn += 1
        return batch


def _sample(fields: dict[str, Any]) -> Experience:
    """Return the sample that had these attributes."""
    sample = Experience()
    vars(sample).update(fields)
    return sample


class Prompts:
    """Stands in for upstream's loader of the prompts to train on, with a place that a checkpoint can keep.

    Each episode has an order that follows from the seed and the number of the episode. So the place is that number,
    how many prompts of the episode have been drawn, and the samples of those that no step has had yet.

    Args:
        loader: upstream's loader, one prompt per batch.
        digest: `digest_of` the loader's data set.
        args: upstream's, nested.
    """

    def __init__(self, loader, digest: str, args: SimpleNamespace) -> None:
        self.loader, self.digest = loader, digest
        self.seed, self.samples = args.train.seed, args.rollout.n_samples_per_prompt
        self.may_change = args.ckpt.load_changed
        self.leftover: list[Experience] = []  # samples for a later step
        self._set_place(episode=0, drawn=0)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def is_drawn(self) -> bool:
        """True where the episode has no further prompt."""
        return self.rest.drawn >= len(self)

    def begin_next_episode(self) -> None:
        self._set_place(self.episode + 1, drawn=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place, in which every prompt drawn has been trained but those of the samples left over."""
        return {
            "episode": self.episode,
            "drawn": self.rest.drawn,
            "of": len(self),
            "digest": self.digest,
            "samples": self.samples,
            "leftover": packed([vars(sample) for sample in self.leftover]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that `state_dict` has returned.

        Samples that it holds are left out where a prompt has another number of them now.

        Raises:
            OtherPrompts: it is a place among other prompts, and that was not asked for.
            ValueError: it is the place of upstream's loader. Only a universal checkpoint can come from there.
        """
        if "drawn" not in state:
            raise ValueError("the checkpoint is of OpenRLHF's own command, whose place in the prompts is another kind")
        if (state["of"], state.get("digest", self.digest)) != (len(self), self.digest):  # early ones have no digest
            what = f"the run that is resumed had other prompts or labels ({state['of']} then, {len(self)} now)"
            wrong = "in the rest of this episode, prompts may come again or not at all"
            if not self.may_change:
                raise OtherPrompts(f"{what}; give the same data, or add --ckpt.load_changed: {wrong}")
            logger.warning(f"{what}: {wrong}")
        self._set_place(state["episode"], state["drawn"])
        leftover = state["leftover"]
        if isinstance(leftover, torch.Tensor):  # early ones hold the samples themselves
            leftover = list(map(_sample, unpacked(leftover)))
        if state.get("samples", self.samples) != self.samples:
            logger.warning(
                f"{len(leftover)} samples that are left over in the checkpoint are not trained: a prompt has "
                f"{self.samples} samples now, and had {state['samples']}"
            )
            return
        self.leftover = leftover

    def _set_place(self, episode: int, drawn: int) -> None:
        self.episode = episode
        self.rest = Numbered(("train", episode), self._batches(episode, drawn), drawn)

    def _batches(self, episode: int, drawn: int) -> Iterator[tuple]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", episode))
        order = torch.randperm(len(self), generator=generator).tolist()
        yield from DataLoader(
            self.loader.dataset,
            batch_size=1,
            sampler=order[drawn:],
            collate_fn=self.loader.collate_fn,
            num_workers=self.loader.num_workers,
            generator=generator,  # otherwise a resumed run would draw once more than others from the process's own
        )
