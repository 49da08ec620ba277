"""What the machine lacks is found: folders, disk, memory, GPUs, a cluster that does not answer."""

import json
import shutil
import socket
from types import SimpleNamespace

import pytest
from arlopti_testing.preflight_command import arguments

from arlopti_openrlhf.cli.method_checks import describe_update
from arlopti_openrlhf.ops.preflight import machine, memory, placement
from arlopti_openrlhf.ops.preflight.model import model_size

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
    assert model_size(str(tmp_path / "model")).parameters == 7_615_616_512  # Qwen2.5-7B's own number
    config.write_text('{"model_type": "unknown"}')
    assert model_size(str(tmp_path / "model")) is None


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
    size = model_size(str(tmp_path))
    assert (size.parameters, size.config.hidden_size, size.config.vocab_size) == (model.num_parameters(), 64, 152064)


def test_the_tiny_models_size_is_its_weights(tiny_model):
    from safetensors.torch import load_file

    weights = load_file(f"{tiny_model}/model.safetensors")
    assert model_size(tiny_model).parameters == sum(weight.numel() for weight in weights.values())


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


def estimate(flags: str) -> memory.Estimate:
    args = arguments(flags)
    return memory.estimate(args, 80 * GIB, describe_update(args))


def test_memory_of_a_paper_sized_run(qwen):
    """Qwen2.5-7B on eight ranks with ZeRO-3, as train_math.sh runs it with GPUS=8, on GPUs of 80 GiB."""
    flags = (
        "--actor.num_gpus_per_node 8 --ref.num_gpus_per_node 8 --vllm.num_engines 8 --ds.zero_stage 3 "
        "--vllm.gpu_memory_utilization 0.6 --vllm.enable_sleep --ds.enable_sleep --algo.ar.alpha 0.1 "
        "--data.max_len 5120 --actor.gradient_checkpointing_enable --rollout.batch_size 128 --train.batch_size 512 "
        "--rollout.n_samples_per_prompt 8"
    )
    guess = estimate(f"--actor.model_name_or_path {qwen} {flags}")
    billions = 7.6156 / 1.0737  # parameters in units of GiB
    assert guess.weights / GIB == pytest.approx(2 * billions / 8, rel=0.01)
    assert guess.gradients / GIB == pytest.approx(2 * billions / 8, rel=0.01)
    assert guess.optimizer / GIB == pytest.approx(12 * billions / 8, rel=0.01)
    # A prompt's samples x 5120 tokens x (28 layers' inputs of 2 bytes and the last norm's 8, and what one layer keeps,
    # with its gradients).
    inputs, layer = (28 * 2 + 8) * 3584, 8 * 18944 + 20 * 3584 + 4 * 512
    assert guess.activations == 8 * 5120 * (inputs + 2 * layer)
    # Four samples with 10 bytes for each of 152,064 logits. They are gone when the layer begins.
    stock = estimate(f"--actor.model_name_or_path {qwen} {flags} --actor.update stock")
    assert stock.activations == 4 * 5120 * (inputs + 10 * 152_064)
    assert guess.vllm == 48 * GIB
    assert guess.peak == pytest.approx(guess.vllm + guess.others)  # while vLLM is awake, the actor sleeps
    lora = f"--actor.model_name_or_path {qwen} {flags} --train.colocate_actor_ref"
    assert estimate(lora).others / GIB == pytest.approx(2 * billions / 8, rel=0.01)
    assert estimate(lora + " --ds.lora.rank 8").others == 0  # no second model


def test_memory_of_models_that_deepspeed_does_not_offload(qwen):
    """Below ZeRO-3 --ref.offload has no effect, and the moving average lies on the GPU too."""
    flags = f"--actor.model_name_or_path {qwen} --algo.kl.init_coef 0.001"
    billions = 7.6156 / 1.0737
    for extra, copies in (
        ("", 1),
        ("--ref.offload", 1),
        ("--train.enable_ema", 2),
        ("--ref.offload --ds.zero_stage 3", 0),
    ):
        assert estimate(f"{flags} {extra}").others / GIB == pytest.approx(2 * billions * copies, rel=0.01), extra


def test_weights_in_4_bits_take_a_quarter(qwen):
    four, sixteen = (
        estimate(f"--actor.model_name_or_path {qwen} --ds.lora.rank 8 {x}") for x in ("--ds.load_in_4bit", "")
    )
    assert 0.25 < four.weights / sixteen.weights < 0.3


def test_too_much_memory_is_a_warning(qwen, monkeypatch):
    monkeypatch.setattr(memory, "gpu_memory", lambda: 80 * GIB)
    args = arguments(f"--actor.model_name_or_path {qwen}")
    (finding,) = memory.check(args, describe_update(args))
    assert "estimated at 2" in finding.problem and "80.0 GiB" in finding.problem and not finding.is_fatal


@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path"])
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nobody/writes/here"])
def test_folders_that_cannot_be_written(tmp_path, flag, place):
    (tmp_path / "file").touch()
    folders = f"--ckpt.path {tmp_path} --ckpt.output_dir {tmp_path} {flag} {tmp_path / place}"
    (finding,) = machine.check(arguments(folders))
    assert finding.is_fatal and (finding.flag, finding.value) == (flag, str(tmp_path / place))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


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
