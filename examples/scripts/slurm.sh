#!/usr/bin/env bash
# A run on one node under Slurm, which goes on over as many jobs as it takes: ten minutes before the time limit it saves
# a checkpoint and puts itself back into the queue. Within a job it starts again after a crash (--train.restarts).
#
#   sbatch --gpus-per-node=4 --time=24:00:00 examples/scripts/slurm.sh bash examples/scripts/train_kk.sh
#
# The command has to be `arlopti train` or a script that ends in `exec` of it, as train_kk.sh does. Submit it from the
# repository's root, with the environment active. A job that is cancelled is not queued again. scancel --batch
# --signal=TERM saves a checkpoint first. Plain scancel signals Ray's processes too, so that nothing can be saved.
#SBATCH --job-name=arlopti
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -uo pipefail

[ $# -gt 0 ] || set -- bash examples/scripts/train_kk.sh

run=
asked=  # to end, perhaps before there is anything to end
out_of_time=
hand_on() {
  asked=yes
  [ -z "$run" ] || kill -TERM "$run"
}
trap 'out_of_time=yes; hand_on' USR1
trap hand_on TERM

"$@" --ckpt.load_enable --train.restarts 10 &
run=$!
[ -z "$asked" ] || kill -TERM "$run" 2>/dev/null

while kill -0 "$run" 2>/dev/null; do wait "$run"; done
wait "$run"
status=$?
if [ "$out_of_time" ] && [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
