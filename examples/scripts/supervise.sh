#!/usr/bin/env bash
# Runs a training until it is done. After an end that another start may mend (a crash, a machine out of memory, a part
# that does not respond) it starts again from the newest whole checkpoint, a bounded number of times, with longer and
# longer pauses.
#
#   bash examples/scripts/supervise.sh bash examples/scripts/train_kk.sh
#   RESTARTS=3 bash examples/scripts/supervise.sh arlopti train ...
#
# It starts no run again that
#   2         was refused: the same flags would be refused again
#   3         has diverged: it would train on the same prompts from the same checkpoint, so somebody has to look first
#   5         has checkpoints, and none of them is whole: somebody has to look first
#   6         has trained no step, because dynamic filtering left out every prompt: it would do so again
#   129, 130, 143  was asked to end. SIGHUP, SIGINT and SIGTERM are handed on to the command alone, and the run saves a
#             checkpoint. A script in between has to `exec` the training, as train_kk.sh does. nohup keeps SIGHUP away.
set -uo pipefail
set -m  # a process group for the command, so that a Ctrl-C reaches it once, from here

RESTARTS=${RESTARTS:-10}    # at most
PAUSE=${PAUSE:-15}          # seconds before the first restart; each pause is twice the one before
LONGEST_PAUSE=${LONGEST_PAUSE:-600}

[ $# -gt 0 ] || { echo "usage: supervise.sh COMMAND ..." >&2; exit 2; }

child=
starts=  # the command, whose process is not known yet
asked=   # the signal that came meanwhile
hand_on() {  # NAME NUMBER
  if [ -n "$child" ]; then kill -"$1" "$child" 2>/dev/null
  elif [ -n "$starts" ]; then asked=$1
  else exit $((128 + $2)); fi
}
trap 'hand_on TERM 15' TERM
trap 'hand_on INT 2' INT
trap 'hand_on HUP 1' HUP  # has no effect under nohup

restart=0
while true; do
  starts=yes asked=
  "$@" --ckpt.load_enable &
  child=$!
  starts=
  [ -z "$asked" ] || kill -"$asked" "$child" 2>/dev/null
  # A signal ends `wait` before the command ends.
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  wait "$child"
  status=$?
  child=
  case $status in
    0) exit 0 ;;
    2|3|5|6|129|130|143) echo "supervise.sh: status $status: not started again" >&2; exit "$status" ;;
  esac
  if [ "$restart" -ge "$RESTARTS" ]; then
    echo "supervise.sh: status $status after $restart restarts (RESTARTS): given up" >&2
    exit "$status"
  fi
  restart=$((restart + 1))
  echo "supervise.sh: status $status: restart $restart of $RESTARTS in $PAUSE s" >&2
  sleep "$PAUSE" &
  wait $!
  PAUSE=$((PAUSE * 2 < LONGEST_PAUSE ? PAUSE * 2 : LONGEST_PAUSE))
done
