# The whole stack on a CPU: docker build -f docker/cpu.Dockerfile -t arlopti-cpu .
# Then, for the quickstart: docker run --rm --shm-size 4g -v "$PWD/outputs:/arlopti/outputs" arlopti-cpu
# hadolint global ignore=DL3008
FROM python:3.11-slim-bookworm

# The image has Python's headers. DeepSpeed compiles its CPU optimizer with the compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /arlopti
COPY . .
RUN make setup

CMD ["make", "quickstart"]
