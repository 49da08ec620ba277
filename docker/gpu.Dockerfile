# OpenRLHF with the token methods on GPUs: docker build -f docker/gpu.Dockerfile -t arlopti-gpu .
# Then, for a run: docker run --rm --gpus all --shm-size 16g -v "$PWD:/runs" arlopti-gpu bash examples/scripts/train_kk.sh
# It runs as a user with the number 1000. --build-arg UID=$(id -u) takes another, which may write to your folder.
# hadolint global ignore=DL3008,DL3013
# vLLM's image has CUDA with its compiler, PyTorch and vLLM, which are the larger part of the stack. The digest names what
# v0.29.0 was.
FROM vllm/vllm-openai:v0.29.0@sha256:c2914767605584b6d8f45686b82de173ecc99e781897aa3d0a66dacd72c51ae1

# PyTorch's headers name those of cuSPARSE and cuSOLVER, without which neither flash-attn nor DeepSpeed's optimizer compiles.
RUN cuda=$(python3 -c "import torch; print(torch.version.cuda.replace('.', '-'))") \
    && apt-get update \
    && apt-get install -y --no-install-recommends git libnuma1 "libcusparse-dev-$cuda" "libcusolver-dev-$cuda" \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /arlopti
COPY . .
# flash-attn is built with the PyTorch that it finds. --build-arg FLASH_ATTN=0 leaves it out: attention runs on SDPA then.
ARG FLASH_ATTN=1
RUN install="pip install --no-cache-dir --no-deps --no-build-isolation" \
    && $install --require-hashes --requirement requirements/gpu.txt \
    && if [ "$FLASH_ATTN" = 1 ]; then $install --require-hashes --requirement requirements/flash_attn.txt; fi \
    && $install .

ARG UID=1000
RUN useradd --create-home --non-unique --uid "$UID" arlopti
USER "$UID"
WORKDIR /runs
ENTRYPOINT []
CMD ["arlopti", "--help"]
