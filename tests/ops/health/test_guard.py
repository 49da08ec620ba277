"""What the guard remembers of losses, with DeepSpeed's engines of each stage and one process. fp16 too, on a CPU."""

import os
import socket
import subprocess
import sys

import pytest

# A skipped mini-batch with a NaN loss, a good step, a step whose loss is NaN and whose gradient is not, a good step.
STEPS = """
import torch
from arlopti_openrlhf import cpu

cpu.enable()
import deepspeed
from deepspeed.accelerator import get_accelerator
from arlopti_openrlhf.ops.health.guard import GuardedStrategy
from arlopti_openrlhf.update import optimizer_steps

deepspeed.init_distributed("gloo")
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not offer it on a CPU
get_accelerator().supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]

def backward(extra=0.0):
    loss = engine(torch.ones(1, 4, dtype=dtype)).float().sum() + extra
    strategy.losses.append(loss.detach())
    engine.backward(loss)

def step(extra=0.0):
    backward(extra)
    before = engine.skipped_steps
    engine.step()
    return engine.skipped_steps - before

for stage, name, dtype in [(s, "bf16", torch.bfloat16) for s in range(4)] + [(s, "fp16", torch.half) for s in (0, 2)]:
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, name: {"enabled": True}}
    config |= {"zero_allow_untested_optimizer": True}
    config[name] |= {"initial_scale_power": 4} if name == "fp16" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    strategy = object.__new__(GuardedStrategy)
    strategy.losses = []
    strategy._check_steps(engine)
    backward(torch.nan)
    optimizer_steps.skip(engine, torch.optim.lr_scheduler.ConstantLR(optimizer))
    engine.set_gradient_accumulation_boundary(None)
    print("refused", stage, name, step(), step(torch.nan), step(), len(strategy.losses))
"""


@pytest.mark.long
def test_a_skipped_loss_is_forgotten_and_no_other_one_passes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    engines = [f"{stage} bf16" for stage in range(4)] + ["0 fp16", "2 fp16"]
    assert found == [f"refused {engine} 0 1 0 0" for engine in engines], done.stderr[-2000:]
