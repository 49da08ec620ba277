"""Run OpenRLHF's train_sft in this process, with or without a GPU.

python -m arlopti_openrlhf.lab.train_sft FLAGS

The flags are OpenRLHF's. Its own command needs a GPU, flash-attn and DeepSpeed's launcher, which is for several GPUs.
"""

import os
import runpy

from arlopti_openrlhf import cpu


def main() -> None:
    """Run the command as the only rank."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= alone
    cpu.declare_placement(gpus=1, ranks=1)
    cpu.enable()
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
