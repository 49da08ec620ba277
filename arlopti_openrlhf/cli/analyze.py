"""Draw the paper's figures for your own policies, data and training runs.

    arlopti analyze --model CHECKPOINT --data kk_train.jsonl --out analysis
    arlopti analyze --runs GRPO=run1,run2 "AR + Lopti=run3,run4" --out analysis

--model gives fig1-fig3 (one update: gradients and changes by probability) and fig5 (words). --runs gives fig6-fig8
(training curves), and a table of the runs: accuracy before, best and last, steps, time, and the flags that differ.
Each figure is a picture (fig1.png) and its data (fig1.json). Several models, or a folder that holds several
checkpoints, all get the same prompts. Each then has a folder of its own, and fig5 shows them together.

Responses are kept: the same command samples those that are missing, and draws the figures anew. On a CPU, the
defaults for a model of more than 20M parameters are smaller. The command prints them.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli import config_file, reward_source
from arlopti_openrlhf.cli.arguments import add_data_flags, integer, number, template_of
from arlopti_openrlhf.cli.bad_input import Parser, check_models, check_out, command_parser
from arlopti_openrlhf.lab.analysis import curves
from arlopti_openrlhf.lab.analysis.runs import compare, table
from arlopti_openrlhf.lab.scoring.inputs import ADAPTER, expand_models, rows_of
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError

FIGURES = ("fig1", "fig2", "fig3")


def main() -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    if not args.model and not args.runs:
        parser.error("give --model, or --runs, or both")
    if bool(args.model) != bool(args.data):
        parser.error("--model and --data go together")
    # Everything that can be wrong is looked at before the first model is loaded, and most of it in a second.
    check_out(parser, args.out)
    try:
        labels = [label for label, _ in args.runs]
        if len(set(labels)) < len(labels):
            raise ValueError(f"--runs: a label is given twice; list its seeds as LABEL=DIR,DIR: {', '.join(labels)}")
        runs = {label: [curves.read_run(folder) for folder in folders] for label, folders in args.runs}
        configs = [_config(folder) for _, folders in args.runs for folder in folders]
        named = expand_models(args.model)
        check_models(parser, "--model", [model for model in named.values() if not Path(model, ADAPTER).exists()])
        rows = rows_of(args) if named else []
        reward_source.check(parser, args.reward, rows)

        from arlopti_openrlhf import cpu  # imports PyTorch

        cpu.enable()
        # These import openrlhf, which cannot be imported before enable() where CUDA or flash-attn is missing.
        from arlopti_openrlhf.lab.analysis import models, plots, rollouts
        from arlopti_openrlhf.lab.scoring.adapters import merged

        named = {name: merged(model, args.out / f"{name}.merged") for name, model in named.items()}
        drawn = rollouts.draw(rows, args.prompts, args.seed)
        models.set_defaults(args, list(named.values()))
        args.template = template_of(args)
        settings = models.FigureSettings(**{name: getattr(args, name) for name in models.FigureSettings._fields})
        for model in named.values():
            models.check_layers(model, args.layers or ())
    except (OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    # Models come one after the other. Each leaves its figures before the next one is loaded.
    start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    summaries: dict[str, dict] = {}
    figures: dict[str, Any] = {}  # of all models and of the training runs
    words: dict[str, dict] = {}

    reward = reward_source.load(parser, args)
    for name, model in named.items():
        folder = args.out / name if len(named) > 1 else args.out
        try:
            summaries[name], words[name] = models.analyze_model(name, model, drawn, settings, folder, reward)
        except RewardError as error:
            parser.exit(1, f"{parser.prog}: {terminal.one_line(error)}\n")
    if words:
        figures["fig5"] = words
    if runs:
        figures |= curves.curves(runs)
    for name, values in figures.items():
        plots.write(name, values, args.out)
    if runs:
        alone = {label for label, f in args.runs if len(f) == 1} - named.keys()  # a model may have a run's label
        names = [label if label in alone else f"{label}, {folder}" for label, f in args.runs for folder in f]
        known = {name: config for name, config in zip(names, configs, strict=True) if config is not None}
        compared = compare(dict(zip(names, (one for seeds in runs.values() for one in seeds), strict=True)), known)
        print("\n".join(table(compared)))
        summaries |= compared
    plots.write_json(summaries, args.out / "summary.json")
    for name in named:
        print("\n".join([name, *models.describe(summaries[name])]))
    seconds = time.time() - start
    print(f"{args.out}: {seconds / 60:.1f} minutes" if seconds >= 60 else f"{args.out}: {seconds:.0f} seconds")


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("analyze", __doc__)
    add = parser.add_argument_group("policies").add_argument
    add("--model", nargs="+", default=[], help="Hugging Face directories or names, or a directory of checkpoints")
    add("--data", nargs="+", default=[], help="files that `arlopti data` wrote")
    add_data_flags(parser)
    reward_source.add_flag(parser)
    add("--prompts", type=integer(1), default=64, help="prompts to draw from the data (default: 64)")
    add("--samples", type=integer(2), help="responses per prompt (default: 8, or 4 on a CPU)")
    positive = number("(0, inf)")
    add("--temperature", type=positive, default=1.0, help="temperature of sampling and update (default: 1)")
    add("--max-new-tokens", type=integer(1), help="longest response in tokens (default: 1024, or 256 on a CPU)")
    most = (
        "most tokens of prompts and responses. Prompts beyond are left out (default: any number, or on a CPU 1.3e12 "
        "divided by the parameters)"
    )
    add("--tokens", type=integer(1), help=most)
    add("--seed", type=int, default=0, help="seed of the draw and of sampling (default: 0)")
    add = parser.add_argument_group("the update").add_argument
    which = "what to show in addition to fig5 (default: all)"
    add("--figures", choices=FIGURES, nargs="+", default=list(FIGURES), help=which)
    of_alpha = "values of AR's α (default: 0.1 0.3 0.5, or 0.3 on a CPU)"
    add("--alpha", type=number("(0, 1]"), nargs="+", help=of_alpha)
    of_eta = "values of Lopti's η (default: 0.3 0.5 0.7, or 0.5 on a CPU)"
    add("--eta", type=number("(0, 1)"), nargs="+", help=of_eta)
    add(
        "--optimizer",
        choices=("adamw", "sgd"),
        default="adamw",
        help="adamw (default): AdamW's step in a running training, with second moments from the batch's mini-batches, "
        "because its very first step would only see signs; sgd: a step along the gradient, where Lopti's two small "
        "steps add up to GRPO's",
    )
    add(
        "--learning-rate",
        type=positive,
        help="learning rate of every update (default: the one at which GRPO's update changes the tokens' log π by a "
        "root mean square of 0.02)",
    )
    layers = "decoder layers that Fig. 2 shows, from 1 (default: first, middle, last)"
    add("--layers", type=int, nargs="+", help=layers)
    add("--layer-tokens", type=integer(10), help="tokens that Fig. 2 shows (default: 300, or 100 on a CPU)")
    size = "most tokens of one forward and backward pass, which sets its memory (default: 4096, or 1024 on a CPU)"
    add("--micro-batch-tokens", type=integer(1), help=size)
    runs = "folders of training runs, with their TensorBoard logs; those of one label are seeds of one setting"
    add = parser.add_argument
    add("--runs", nargs="+", default=[], type=_labelled, metavar="[LABEL=]DIR[,DIR]", help=runs)
    add("--out", type=Path, required=True, help="folder to write")
    return parser


def _labelled(text: str) -> tuple[str, list[str]]:
    label, separator, folders = text.partition("=")
    if not separator:
        folders = text
    if not label or not all(folders.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DIR, LABEL=DIR or LABEL=DIR,DIR")
    return label, folders.split(",")


def _config(folder: str) -> dict[str, str] | None:
    """Return the flags of a run that make it another run, from the one config.yaml in its folder or beside its log."""
    for place in (Path(folder), Path(folder).parent):
        found = [path for depth in ("", "*/", "*/*/") for path in place.glob(depth + config_file.KEPT)]
        if found:
            break
    if len(found) != 1:
        return None
    kept = config_file.read(found[0].read_text("utf-8"))
    return {name: str(value) for name, value in kept.items() if not name.startswith(("ckpt.", "logger."))}
