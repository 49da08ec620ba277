"""Shows a person how far a run is: one line, with the output of Ray, vLLM, DeepSpeed and OpenRLHF in a file.

The lines for the user are those of this package, warnings of OpenRLHF's and this package's loggers, and Ray's that it
cannot place or keep alive what the run needs.
"""

import re
import sys

from tqdm import tqdm

from arlopti_openrlhf.ops.lifecycle.progress import Progress
from arlopti_openrlhf.terminal import PREFIX, one_line, say

LOG = "train.log"  # in --ckpt.path
WORKER = re.compile(r"^(?:\x1b\[\d*m)?\((?:\S+ )?pid=(\d+)(?:, ip=\S+)?\)(?:\x1b\[\d*m)? ")  # a line that Ray hands on
_FROM_RAY = re.compile(r"^\((?:raylet|autoscaler)\b.*\b(?:warning|error)\b", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[\d*m")
# What a run waits for at first, and how long the whole start takes a small model on two cores.
_RAY = "waiting for OpenRLHF's imports and for Ray"
_MODELS = "waiting for the models in vLLM and DeepSpeed"
_USUALLY = "usually one to two minutes, and more for large models"
_LOGGED = re.compile(r"^(WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \w+\.py:\d+\] ")  # as OpenRLHF's loggers write


def is_wanted(mode: str) -> bool:
    """Return whether a run shows its progress, by `--logger.console` and by where its output leads."""
    return mode == "progress" or (mode == "auto" and sys.stdout.isatty() and sys.stderr.isatty())


class Console:
    """Shows the progress of a run on standard output until `close`.

    Args:
        log: where its output goes.
    """

    def __init__(self, log: str) -> None:
        self._bar: tqdm | None = None
        self._shown = Progress()
        say(f"starting. The output of Ray, vLLM and DeepSpeed: {log}")

    def show(self, found: Progress, has_ray: bool) -> None:
        """Show how far the run is."""
        before, self._shown = self._shown, found
        if found.prompts is None:
            self._show_waiting(_MODELS if has_ray else _RAY)
            return
        if not sys.stdout.isatty():
            if found.step and found.step != before.step:
                share = f"{found.step.prompts} of {found.prompts.total} prompts"
                self.print(f"step {found.step.number}, {share}: {_figures(found)}")
            return
        if self._bar is None or self._bar.total is None:
            self.close()
            self._bar = tqdm(
                total=found.prompts.total,
                initial=found.prompts.at_start,
                desc="step 0",
                file=sys.stdout,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar:10}| {elapsed}<{remaining}{postfix}",
            )
        elif before.last is None and found.last and not found.step:
            self._bar.reset(found.prompts.total)  # an evaluation says nothing of how long steps take
        if found.step:
            self._bar.set_description_str(f"step {found.step.number}", refresh=False)
            self._bar.set_postfix_str(_figures(found), refresh=False)
            self._bar.update(found.step.prompts - self._bar.n)
        self._bar.refresh()

    def _show_waiting(self, what: str) -> None:
        """Show what the run waits for before it has prompts, and for how long it has waited."""
        if self._bar is None and sys.stdout.isatty():
            self._bar = tqdm(file=sys.stdout, bar_format=f"{{desc}}: {{elapsed}} ({_USUALLY})", leave=False)
        if self._bar is not None and self._bar.total is None:
            self._bar.set_description_str(what)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def print(self, text: str) -> None:
        """Print a line above the one of progress."""
        tqdm.write(one_line(text), file=sys.stdout)


def for_the_user(line: str) -> str | None:
    """Return what a line of the output says to the user, without the name of its process, or None."""
    text = _COLOURS.sub("", line).rstrip()
    if _FROM_RAY.match(text):
        return PREFIX + text
    text = WORKER.sub("", text)
    if text.startswith(PREFIX):
        return text
    logged = _LOGGED.match(text)
    return f"{PREFIX}{logged[1].lower()}: {text[logged.end() :]}" if logged else None


def _figures(found: Progress) -> str:
    accuracy = found.last.metrics.get("accuracy") if found.last else None
    shown = [] if accuracy is None else [f"held out {accuracy:.3g}"]
    return ", ".join([*shown, found.step.figures] if found.step else shown)
