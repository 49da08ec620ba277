#!/usr/bin/env bash
# A training script for each α, η and seed, one run after the other. A run whose final model is there is left out, so the
# same command again goes on where it stopped.
#
#   ALPHAS="0.1 0.3" ETAS="0.3 0.5" SEEDS="1 2 3" bash examples/scripts/sweep.sh bash examples/scripts/train_kk.sh
#   arlopti analyze --runs "α 0.3=outputs/sweep/alpha-0.3-eta-0.5-seed-1/tensorboard,..." --out sweep
set -euo pipefail

ALPHAS=${ALPHAS:-0.1 0.3}
ETAS=${ETAS:-0.5}
SEEDS=${SEEDS:-1 2 3}
FOLDER=${FOLDER:-outputs/sweep}

[ $# -gt 0 ] || set -- bash examples/scripts/train_kk.sh

for seed in $SEEDS; do
  for alpha in $ALPHAS; do
    for eta in $ETAS; do
      run=alpha-$alpha-eta-$eta-seed-$seed
      if [ -e "$FOLDER/$run/$run/config.json" ]; then
        echo "sweep.sh: $run is done" >&2
        continue
      fi
      METHOD=both ALPHA=$alpha ETA=$eta OUT=$FOLDER/$run "$@" --train.seed "$seed"
    done
  done
done
