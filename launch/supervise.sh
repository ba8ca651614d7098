#!/usr/bin/env bash
# Runs a training command on one machine, and again when it was stopped after a save.
#
#   launch/supervise.sh [--platform P] -- python -m bertjax.main --config=... --workdir=...
#
# Exit code 143 of the command means: stopped by a signal after a save; it is started again. 0 means
# that training is complete. Any other code ends the supervision, with the code and the last lines.
#
#   --platform P       whose settings of launch/env.sh to take: tpu, gpu or cpu (default)
#   --max_restarts N   give up after so many (default: 100)
#   --state DIR        log, exit_code and lock (default: ~/bertjax-run)
#   --check            only say whether another run is at work there (exit code 1)
#   --dry-run          print the command
#
# A SIGTERM to the supervisor goes on to the command, which is then not started again.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=([platform]=cpu [max_restarts]=100 [state]="$HOME/bertjax-run")
declare -A SWITCH=([check]=no [dry-run]=no)
parse "$@"
state=${OPTION[state]}

# finish CODE MESSAGE: leaves the code for launch/tpu_watch.sh to find.
finish() {
  log "$2" 2>> "$state/log"
  log "$2"
  printf '%s\n' "$1" > "$state/exit_code.new"
  mv "$state/exit_code.new" "$state/exit_code"
  exit "$1"
}

# Runs the command to its end and sets `code`; a signal is passed on and its answer awaited.
attempt() {
  code=0
  "${COMMAND[@]}" >> "$state/log" 2>&1 9>&- &
  child=$!
  wait "$child" || code=$?
  while [[ $signalled == yes ]]; do  # that was the signal's code, not yet the command's
    signalled=no code=0
    wait "$child" || code=$?
  done
}

mkdir -p "$state"
exec 9> "$state/lock"
flock --nonblock 9 || die 1 "a run is at work in $state: its log is $state/log"
if is_on check; then
  exit 0
fi
((${#COMMAND[@]})) || die 2 'give the training command after --'
# shellcheck source=launch/env.sh
source "$LAUNCH/env.sh" "${OPTION[platform]}"
if is_on dry-run; then
  quoted "${COMMAND[@]}"
  exit 0
fi

rm -f "$state/exit_code"
stopping=no signalled=no child=''
pass_on() {
  stopping=yes signalled=yes
  kill -TERM "$child" 2> /dev/null || true
}
trap pass_on TERM INT
for ((restarts = 0; ; restarts++)); do
  attempt
  case $code in
    0) finish 0 'Training is complete' ;;
    143) ;;
    *) tail -n 20 "$state/log" >&2
       finish "$code" "Training ended with exit code $code: not restarted; see $state/log" ;;
  esac
  if [[ $stopping == yes ]]; then
    finish 143 'Stopped after a save; the same command goes on from there'
  elif ((restarts >= OPTION[max_restarts])); then
    finish 143 "Stopped after a save for the last time: ${OPTION[max_restarts]} restarts were made"
  fi
  log "Stopped after a save: restart $((restarts + 1))" 2>> "$state/log"
done
