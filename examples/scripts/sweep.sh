#!/usr/bin/env bash
# A training script for each seed, method, α and η, one run after the other. A run whose final model exists is skipped, so
# the same command continues where it stopped. Without ALPHAS and ETAS the script's own values count.
#
#   METHOD="none ar lopti both" SEEDS=42 bash examples/scripts/sweep.sh bash examples/scripts/train_kk.sh
#   METHOD=ar ALPHAS="0.1 0.3" SEEDS="1 2 3" bash examples/scripts/sweep.sh bash examples/scripts/train_kk.sh
#   arlopti analyze --runs "α 0.3=outputs/sweep/ar-alpha-0.3-seed-1/tensorboard,..." --out sweep
set -euo pipefail

METHOD=${METHOD:-both}  # none, ar, lopti, both, or several of them
ALPHAS=${ALPHAS:-}
ETAS=${ETAS:-}
SEEDS=${SEEDS:-1 2 3}
FOLDER=${FOLDER:-outputs/sweep}

[ $# -gt 0 ] || set -- bash examples/scripts/train_kk.sh

for seed in $SEEDS; do
  for method in $METHOD; do
    # What a method does not have is not swept.
    case $method in ar | both) alphas=${ALPHAS:-own} ;; *) alphas=own ;; esac
    case $method in lopti | both) etas=${ETAS:-own} ;; *) etas=own ;; esac
    for alpha in $alphas; do
      for eta in $etas; do
        run=$method settings=(METHOD="$method")
        [ "$alpha" = own ] || { run+=-alpha-$alpha; settings+=(ALPHA="$alpha"); }
        [ "$eta" = own ] || { run+=-eta-$eta; settings+=(ETA="$eta"); }
        run+=-seed-$seed
        if [ -e "$FOLDER/$run/$run/config.json" ]; then
          echo "sweep.sh: $run is done" >&2
          continue
        fi
        env "${settings[@]}" OUT="$FOLDER/$run" "$@" --train.seed "$seed"
      done
    done
  done
done
