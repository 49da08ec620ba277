"""What the machine lacks is found: folders, disk, memory, GPUs, a cluster that does not answer."""

import json
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest
from arlopti_testing.preflight_command import arguments

from arlopti_openrlhf.ops.preflight import machine, placement
from arlopti_openrlhf.ops.preflight.model import num_parameters

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
GIB = 1 << 30


@pytest.fixture
def qwen(tmp_path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


def test_a_models_size_from_its_configuration(qwen, tmp_path):
    config = tmp_path / "model" / "config.json"
    assert num_parameters(str(tmp_path / "model")) == 7_615_616_512  # Qwen2.5-7B's own number
    config.write_text('{"model_type": "unknown"}')
    assert num_parameters(str(tmp_path / "model")) is None


def test_a_vision_encoder_counts(tmp_path):
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = QWEN_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4},
        architectures=["Qwen2VLForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(config)
    assert num_parameters(str(tmp_path)) == model.num_parameters()


def test_the_tiny_models_size_is_its_weights(tiny_model):
    from safetensors.torch import load_file

    weights = load_file(f"{tiny_model}/model.safetensors")
    assert num_parameters(tiny_model) == sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize(
    ("free", "max_num", "save_steps", "verdict"),
    [
        # A checkpoint of 14 bytes a parameter takes 99 GiB, the model 14 GiB.
        (1000, 3, 20, []),
        (310, 3, 20, [True]),  # 3 x 99.3 + 14.2
        (380, 3, 20, [False]),  # the fourth, beside them
        (320, 1, 20, []),
        (320, 3, -1, []),  # only what a signal saves
        (100, 3, -1, [True]),
    ],
)
def test_disk_for_the_checkpoints_asked_for(qwen, monkeypatch, free, max_num, save_steps, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, used=0, free=free * GIB))
    args = arguments(f"--actor.model_name_or_path {qwen} --ckpt.max_num {max_num} --ckpt.save_steps {save_steps}")
    found = list(machine.check_disk(args))
    assert [finding.is_fatal for finding in found] == verdict
    assert all(finding.flag == "--ckpt.path" and f"{free}.0 GiB are free" in finding.problem for finding in found)


def test_copies_that_nobody_removes(qwen, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, used=0, free=480 * GIB))
    args = arguments(f"--actor.model_name_or_path {qwen} --ckpt.save_steps 1 --ckpt.save_hf")
    (finding,) = machine.check_disk(args)
    # 480 - 4 x 99.3 - 14.2 = 68.6 GiB, and each copy takes 14.2
    assert finding.flag == "--ckpt.save_hf" and "room for 4" in finding.problem and not finding.is_fatal


@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nobody/writes/here"])
def test_folders_that_cannot_be_written(tmp_path, flag, place):
    (tmp_path / "file").touch()
    folders = f"--ckpt.path {tmp_path} --ckpt.output_dir {tmp_path} {flag} {tmp_path / place}"
    (finding,) = machine.check(arguments(folders))
    assert finding.is_fatal and (finding.flag, finding.value) == (flag, str(tmp_path / place))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_curves_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folders = f"--ckpt.path {tmp_path} --ckpt.output_dir {tmp_path} --logger.tensorboard_dir {tmp_path}/file/x"
    (finding,) = machine.check(arguments(folders))
    assert not finding.is_fatal and finding.flag == "--logger.tensorboard_dir" and "nothing can be" in finding.problem


def test_more_gpus_than_there_are(monkeypatch):
    import torch

    monkeypatch.setenv("ARLOPTI_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    four = "--actor.num_gpus_per_node {0} --ref.num_gpus_per_node {0} --vllm.num_engines {0} --vllm.sync_backend nccl"
    assert not list(placement.check(arguments(four.format(4))))
    (finding,) = placement.check(arguments(four.format(8)))
    assert "asks for 8 GPUs, and this machine has 4" in finding.problem
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # a cluster may have them
    assert not list(placement.check(arguments(four.format(8))))


def test_policy_and_vllm_on_one_gpu_need_no_nccl(monkeypatch):
    """OpenRLHF makes an NCCL group of the two for every other backend than nccl."""
    import torch

    monkeypatch.setenv("ARLOPTI_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    (finding,) = placement.check(arguments("--vllm.sync_backend gloo"))
    assert finding.is_fatal and finding.flag == "--vllm.sync_backend" and "give nccl" in finding.remedy
    assert not list(placement.check(arguments("--vllm.sync_backend nccl")))
    assert not list(placement.check(arguments("--vllm.sync_backend gloo --vllm.sync_with_ray")))


NOBODY = "127.0.0.1:1"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """cluster(`ray start`'s address, RAY_ADDRESS) returns the findings. {} stands for an address that answers."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def run(started: str, named: str) -> list[str]:
            (tmp_path / "ray" / "ray_current_cluster").write_text(started.format(address))
            monkeypatch.setenv("RAY_ADDRESS", named.format(address))
            found = list(placement.check_cluster(SimpleNamespace()))
            assert all(finding.is_fatal for finding in found)
            return [str(finding).replace(address, "HERE") for finding in found]

        yield run


@pytest.mark.parametrize(
    ("started", "named", "problem"),
    [
        ("{}", "", "runs on this machine, at HERE; RAY_ADDRESS=HERE joins it, RAY_ADDRESS=local starts one for this"),
        (NOBODY, "", None),
        ("{}", "local", None),
        ("{}", "auto", None),
        (NOBODY, "{}", None),
        (NOBODY, "ray://{}", None),
        ("{}", f"ray://{NOBODY}", f"RAY_ADDRESS ray://{NOBODY}: no Ray cluster answers there"),
    ],
)
def test_what_the_run_would_join(cluster, started, named, problem):
    found = cluster(started, named)
    assert len(found) == (problem is not None)
    assert all(problem in line and "\n" not in line for line in found)


def test_vllm_without_its_kernels(monkeypatch):
    """As without libnuma.so.1, to which those for a CPU link. vLLM warns, and its engine ends at the first of them."""
    assert list(machine._check_kernels()) == []
    for name in ("_C", "_C_AVX2", "_C_AVX512"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", None)
    [found] = machine._check_kernels()
    assert found.is_fatal and "Failed to import from vllm._C" in found.problem


@pytest.mark.parametrize(
    ("free", "total", "verdict", "said"),
    [
        (24_000, 24_000, [], ""),
        (800, 24_000, [False], "/dev/shm has 800 MiB of 24000 free"),
        (63, 64, [True], "63 MiB of 64 free, and vLLM, Ray and NCCL keep their buffers there; give a container more "),
    ],
)
def test_shared_memory(free, total, verdict, said, monkeypatch):
    """Docker gives a container 64 MiB."""
    size = SimpleNamespace(total=total << 20, free=free << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: size)
    monkeypatch.setenv("ARLOPTI_DEVICE", "cuda")
    assert not any(finding.is_fatal for finding in list(machine._check_shared_memory()))
    monkeypatch.setenv("ARLOPTI_DEVICE", "cpu")
    found = list(machine._check_shared_memory())
    assert [finding.is_fatal for finding in found] == verdict and all(said in str(finding) for finding in found)
    assert all("--shm-size" in finding.remedy for finding in found)
