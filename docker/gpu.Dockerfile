# OpenRLHF with the token methods on GPUs: docker build -f docker/gpu.Dockerfile -t arlopti-gpu .
# Then, for a run: docker run --rm --gpus all --shm-size 16g -v "$PWD:/runs" arlopti-gpu bash examples/scripts/train_kk.sh
# hadolint global ignore=DL3008,DL3013
# vLLM's image has CUDA with its compiler, PyTorch and vLLM, which are the larger part of the stack.
FROM vllm/vllm-openai:v0.29.0

RUN apt-get update \
    && apt-get install -y --no-install-recommends git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /arlopti
COPY . .
# flash-attn is built with the PyTorch that it finds. --build-arg FLASH_ATTN=0 leaves it out: attention runs on SDPA then.
ARG FLASH_ATTN=1
RUN pip install --no-cache-dir uv==0.13.8 \
    && if [ "$FLASH_ATTN" = 1 ]; then \
        pip install --no-cache-dir setuptools wheel ninja packaging psutil \
        && pip install --no-cache-dir --no-build-isolation ".[gpu,analyze]"; \
    else \
        uv pip install --system --no-cache --override requirements/without_flash_attn.txt ".[gpu,analyze]"; \
    fi

WORKDIR /runs
ENTRYPOINT []
CMD ["arlopti", "--help"]
