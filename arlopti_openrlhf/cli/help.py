"""Puts the help of the training command in order: our flags first, with defaults and an example."""

import argparse

DESCRIPTION = "OpenRLHF's train_ppo_ray with token methods. All of its flags are here, and work as they do there."
EXAMPLE = """example: Knights and Knaves with GRPO, AR and Lopti on one GPU

  arlopti data --generate --people 2 3 --train 2000 --test 100 --out data/kk
  arlopti train --actor.model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --data.prompt_dataset data/kk/train.jsonl \\
    --data.input_key prompt --data.label_key label --data.apply_chat_template --reward.remote_url kk \\
    --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --rollout.batch_size 32 \\
    --train.batch_size 128 --train.colocate_all --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 \\
    --vllm.num_engines 1 --algo.ar.alpha 0.3 --algo.lopti.eta 0.5

examples/scripts has a script for each way to train. --dry-run checks the flags, the data and the reward, and trains
nothing."""


def arrange(parser: argparse.ArgumentParser) -> None:
    """Put the groups of flags that exist before the others, and add the defaults to their help."""
    loose = parser._optionals._group_actions  # all that were added to no group, after --help
    parser.add_argument_group("OpenRLHF's own")._group_actions.extend(loose[1:])
    del loose[1:]
    for action in parser._actions:
        if action.nargs == 0:
            continue
        has_default = action.default not in (None, False, argparse.SUPPRESS, [])
        if has_default and "default" not in (action.help or "").lower():
            action.help = f"{action.help or ''} (default: %(default)s)".strip()
        if action.metavar is None and action.choices is None:
            action.metavar = "INT" if action.type is int else "FLOAT" if action.type is float else "TEXT"
    parser.usage = "%(prog)s [FLAGS]"
    parser.description, parser.epilog = DESCRIPTION, EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
