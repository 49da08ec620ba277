# The whole stack on a CPU: docker build -f docker/cpu.Dockerfile -t arlopti-cpu .
# Then, for the quickstart: docker run --rm --shm-size 4g -v "$PWD/outputs:/arlopti/outputs" arlopti-cpu
# It runs as a user with the number 1000. --build-arg UID=$(id -u) takes another, which may write to your folder.
# hadolint global ignore=DL3008
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# The image has Python's headers. DeepSpeed compiles its CPU optimizer with the compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

ARG UID=1000
RUN useradd --create-home --uid "$UID" arlopti \
    && install --directory --owner arlopti /arlopti
USER "$UID"
WORKDIR /arlopti
COPY --chown=arlopti . .
RUN make setup

CMD ["make", "quickstart"]
