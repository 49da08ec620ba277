#!/usr/bin/env bash
# A training script as a job of a Ray cluster, of one node or several. Ray copies this folder to the nodes. The packages
# have to be there on every node, in the environment that `ray start` was called from:
#
#   export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...   # a secret, the same on every node: else all who reach one run code
#   ray start --head --dashboard-host 0.0.0.0       # on the first node
#   ray start --address FIRST_NODE:6379             # on every other node
#   ADDRESS=http://FIRST_NODE:8265 bash examples/scripts/ray_job.sh bash examples/scripts/train_kk.sh
#
# Two nodes of 4 GPUs each train twice as many ranks and engines:
#   ... train_kk.sh --actor.num_nodes 2 --ref.num_nodes 2 --vllm.num_engines 8
#
# MODEL, DATA and OUT have to be paths that every node sees, or names of the Hugging Face hub. Variables that the script
# reads are set in the command: ray_job.sh env METHOD=ar bash examples/scripts/train_kk.sh
set -euo pipefail

ADDRESS=${ADDRESS:-http://127.0.0.1:8265}

[ $# -gt 0 ] || set -- bash examples/scripts/train_kk.sh

exec ray job submit --address "$ADDRESS" --working-dir . \
  --runtime-env-json '{"excludes": ["outputs", "data", ".venv", ".git"]}' -- "$@"
