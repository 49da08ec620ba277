"""Draws the prompts in the order of the seed, and knows which of them have been trained.

Upstream's loader takes its order from the generator of its process, which evaluations move, and its state counts every
prompt that it has yielded, whether a step has had the samples or not.
"""

import hashlib
import re
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.utils.logging_utils import init_logger
from torch.utils.data import DataLoader

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


class Prompts:
    """Stands in for upstream's loader of the prompts to train on, with a place that a checkpoint can keep.

    Each episode has an order that follows from the seed and the number of the episode. So the place is that number,
    how many prompts of the episode have been drawn, and the numbers of those that were drawn and not trained. A
    resumed run draws these first.

    Args:
        loader: upstream's loader, one prompt per batch.
        digest: `digest_of` the loader's data set.
        args: upstream's, nested.
    """

    def __init__(self, loader, digest: str, args: SimpleNamespace) -> None:
        self.loader, self.digest, self.seed = loader, digest, args.train.seed
        self.may_change = args.ckpt.load_changed
        self.episode = self.drawn = 0
        self.untrained: list[int] = []  # drawn, with samples for a later step
        self._again: list[int] = []  # drawn before the resume, and not since
        self._has_begun = False

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def drawn_in_all(self) -> int:
        """The number of prompts of all episodes that have been drawn, each counted once."""
        return self.episode * len(self) + self.drawn

    def __iter__(self) -> Iterator[tuple[tuple, tuple]]:
        """Return the rest of the episode, or the next episode if that rest has been asked for before.

        It yields prompts' places, as ("train", episode, number), and their batches, as upstream's loader has them.
        """
        if self._has_begun:
            self.episode, self.drawn = self.episode + 1, 0
        self._has_begun = True
        return self._rest()

    def state_dict(self) -> dict[str, Any]:
        """Return the place, in which every prompt drawn has been trained but the `untrained`."""
        untrained = [*self.untrained, *self._again]
        return {
            "episode": self.episode,
            "drawn": self.drawn,
            "untrained": untrained,
            "of": len(self),
            "digest": self.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that `state_dict` has returned. Call it before any prompt is drawn.

        Raises:
            OtherPrompts: it is a place among other prompts, and that was not asked for.
            ValueError: it is the place of upstream's loader. Only a universal checkpoint can come from there.
        """
        if "drawn" not in state:
            raise ValueError("the checkpoint is of OpenRLHF's own command, whose place in the prompts is another kind")
        if (state["of"], state["digest"]) != (len(self), self.digest):
            what = f"the run that is resumed had other prompts or labels ({state['of']} then, {len(self)} now)"
            wrong = "in the rest of this episode, prompts may come again or not at all"
            if not self.may_change:
                raise OtherPrompts(f"{what}; give the same data, or add --ckpt.load_changed: {wrong}")
            logger.warning(f"{what}: {wrong}")
        self.episode, self.drawn = state["episode"], min(state["drawn"], len(self))
        self._again = sorted(number for number in state["untrained"] if number < len(self))

    def _rest(self) -> Iterator[tuple[tuple, tuple]]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", self.episode))
        order = torch.randperm(len(self), generator=generator).tolist()
        numbers = [*self._again, *range(self.drawn, len(self))]
        batches = DataLoader(
            self.loader.dataset,
            batch_size=1,
            sampler=[order[number] for number in numbers],
            collate_fn=self.loader.collate_fn,
            num_workers=self.loader.num_workers,
            generator=generator,  # otherwise a resumed run would draw once more than others from the process's own
        )
        for number, batch in zip(numbers, batches, strict=True):
            if self._again:
                self._again.pop(0)
            else:
                self.drawn += 1
            yield ("train", self.episode, number), batch
