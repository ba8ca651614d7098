#!/usr/bin/env bash
# Trains to the end on a TPU VM: creates it, starts the training, makes both anew after a
# preemption, and deletes the machines at the end. The one command to leave running, in tmux or on a
# small VM.
#
#   launch/tpu_watch.sh --name NAME --zone ZONE --type v5litepod-16 --spot \
#     -- --config=configs/large.py --workdir=gs://bucket/large
#
# Ends with 0 when training is complete. Where a process was lost or stopped, training is started
# again on all hosts. Training that ends otherwise ends this as well, with its exit code and the
# last lines of its log. Ctrl-C leaves the machines and the training at work; the same command takes
# up the watch again.
#
#   --name, --zone, --project, --type, --runtime, --network, --service_account, --spot:
#                      as for tpu_create.sh
#   --module, --cache  as for tpu_run.sh; pods and new machines compile again without --cache gs://
#   --max_recreations N  give up after so many (default: 50)
#   --max_restarts N   likewise, of training that does not get on (default: 20)
#   --poll SECONDS     between two looks (default: 60)
#   --timeout SECONDS  within which machines are asked for or deleted, or training is installed and
#                      started on all hosts (default: 1800); longer counts as a failure
#   --keep             do not delete the machines at the end
#   --dry-run          print the commands
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=(
  [name]='' [zone]='' [project]='' [type]='' [runtime]='' [network]='' [service_account]=''
  [module]=bertjax.main [cache]='' [max_recreations]=50 [max_restarts]=20 [poll]=60
  [timeout]=1800)
declare -A SWITCH=([spot]=no [keep]=no [dry-run]=no)
parse "$@"
require name zone type
((${#COMMAND[@]})) || die 2 'give the arguments of the training after --'
find_target

# Seconds that a look may take.
readonly PATIENCE=300
# So often in a row gcloud may fail (a network that is away, a host that starts) before this ends.
readonly MAX_FAILURES=5
# After so many looks in a row at training that runs, the restarts before it are forgotten: their
# limit is for a run that does not get on.
readonly HEALTHY=10

# within SECONDS COMMAND...: ended after so long, since a host that is taken away lets its client
# wait for ever. A terminal's Ctrl-C does not reach what `timeout` runs: it is passed on from here.
within() {
  local child code=0
  timeout --kill-after=10 "$@" < /dev/null &
  child=$!
  trap 'kill "$child" 2> /dev/null || true; exit 130' INT
  wait "$child" || code=$?
  trap - INT
  if ((code == 124 || code == 137)); then  # 137: it had to be killed
    log "No end within $1 s: $(quoted "${@:2:5}") ..."
  fi
  return "$code"
}

# options NAME...: those that were given, as words in the array GIVEN.
options() {
  local name
  GIVEN=()
  for name in "$@"; do
    if [[ ${OPTION[$name]} ]]; then
      GIVEN+=("--$name=${OPTION[$name]}")
    fi
  done
  if is_on dry-run; then
    GIVEN+=(--dry-run)
  fi
}

create() {
  started='' restarts=0  # the next start is the first on its machines
  options name zone project type runtime network service_account
  if is_on spot; then
    GIVEN+=(--spot)
  fi
  within "${OPTION[timeout]}" "$LAUNCH/tpu_create.sh" "${GIVEN[@]}"
}

delete() {
  options name zone project
  within "${OPTION[timeout]}" "$LAUNCH/tpu_delete.sh" "${GIVEN[@]}"
}

start() {
  options name zone project module cache
  within "${OPTION[timeout]}" "$LAUNCH/tpu_run.sh" "${GIVEN[@]}" -- "${COMMAND[@]}"
}

# Prints the answer of a gcloud command that only looks, or ABSENT where there is nothing to see.
look() {
  local answer code=0 errors
  errors=$(mktemp)
  answer=$(within "$PATIENCE" "$@" 2> "$errors") || code=$?
  if ((code)) && grep -q NOT_FOUND "$errors"; then
    answer=ABSENT code=0
  elif ((code)); then
    cat "$errors" >&2
  fi
  rm -f "$errors"
  printf '%s\n' "$answer"
  return "$code"
}

# The node's state; where there is no node (yet), that of the queued resource.
find_state() {
  local state
  state=$(look gcloud compute tpus tpu-vm describe "${OPTION[name]}" "${TARGET[@]}" \
    '--format=value(state)') || return
  if [[ $state == ABSENT ]]; then
    state=$(look gcloud compute tpus queued-resources describe "${OPTION[name]}" "${TARGET[@]}" \
      '--format=value(state.state)') || return
  fi
  printf '%s\n' "$state"
}

on_hosts() {
  within "$PATIENCE" gcloud compute tpus tpu-vm ssh "${OPTION[name]}" "${TARGET[@]}" --quiet \
    "--worker=$1" "--command=$2"
}

# `running` where any host trains, else what says most of the hosts' exit codes, or `none` for a
# host on which training never started, or which is new.
find_training() {
  local answers code others
  answers=$(on_hosts all '
    if bertjax/launch/supervise.sh --check > /dev/null 2>&1 || ! [ -e bertjax ]
    then cat bertjax-run/exit_code 2> /dev/null || echo none
    else echo running; fi') || return
  if grep -qx running <<< "$answers"; then
    echo running
    return
  fi
  # Others wait in vain for a host that is stopped or new, and end with an error (2). 1 is often the
  # echo of an error on another host, 75 that of a lost process: those say more.
  mapfile -t others < <(grep -xE '[0-9]+' <<< "$answers" | grep -vxE '0|1|75|134|137|143')
  for code in 143 none "${others[@]}" 1 137 134 75 0; do
    if grep -qx "$code" <<< "$answers"; then
      echo "$code"
      return
    fi
  done
  return 1
}

# finish CODE MESSAGE: cleans up and ends.
finish() {
  local failures=0 code
  log "$2"
  if is_on keep; then
    log "--keep: the machines are still there, and cost: $(quoted "$LAUNCH/tpu_delete.sh" \
      "--name=${OPTION[name]}" "--zone=${OPTION[zone]}")"
    exit "$1"
  fi
  until code=0; delete || code=$?; ((code == 0)) || [[ $(find_state) == ABSENT ]]; do
    failures=$((failures + 1))
    if ((failures >= MAX_FAILURES)); then
      die "$code" 'the machines could not be deleted: they are still there, and cost'
    fi
    log "The deletion failed with exit code $code: trying again"
    sleep "${OPTION[poll]}"
  done
  exit "$1"
}

recreate() {  # recreate STATE
  if ((recreations >= OPTION[max_recreations])); then
    finish 1 "$1, and ${OPTION[max_recreations]} re-creations were made: giving up"
  fi
  recreations=$((recreations + 1))
  log "$1: re-creation $recreations"
  if [[ $1 != ABSENT ]]; then
    delete || return
  fi
  create
}

# restart TRAINING: on all hosts; the first start on new machines does not count.
restart() {
  local first=''
  if [[ $1 == none && ! $started ]]; then
    first=yes
  elif ((restarts >= OPTION[max_restarts])); then
    give_up "$1" "Training: $1, and ${OPTION[max_restarts]} restarts were made: giving up"
  fi
  start || return
  started=yes ended='' healthy=0
  if [[ ! $first ]]; then
    restarts=$((restarts + 1))
    log "Training was started again: restart $restarts"
  fi
}

# give_up TRAINING MESSAGE: ends with the exit code of the training and what it said last.
give_up() {
  on_hosts all 'tail -n 20 bertjax-run/log' >&2 || true
  finish "${1/none/1}" "$2; the last lines are above"
}

# Looks after machines that are ready; `ended` keeps a bad end in mind until the next look, since
# training fails some time before a preemption shows.
look_after_training() {
  local training
  training=$(find_training) || return
  if [[ $training != "$ended" ]]; then
    log "Training: $training"
  fi
  case $training in
    running)
      ended='' healthy=$((healthy + 1))
      if ((healthy >= HEALTHY)); then
        restarts=0
      fi
      ;;
    none | 143) restart "$training" ;;
    0) finish 0 'Training is complete' ;;
    *)
      if [[ $ended != "$training" ]]; then
        ended=$training
      elif [[ $training =~ ^(75|134|137)$ ]]; then  # a process was lost, but no machine
        restart "$training"
      else
        give_up "$training" "Training ended with exit code $training"
      fi
      ;;
  esac
}

if is_on dry-run; then
  create
  start
  delete
  exit 0
fi

recreations=0 restarts=0 healthy=0 failures=0 started='' ended='' last=''
while true; do
  code=0
  state=$(find_state) || code=$?
  if ((code == 0)); then
    [[ $state == "$last" ]] || log "State: $state"
    case $state in
      READY) look_after_training || code=$? ;;
      ABSENT) if [[ ${last/ABSENT/} ]]; then recreate ABSENT; else create; fi || code=$? ;;
      PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED) recreate "$state" || code=$? ;;
      *) ;;  # on its way: ACCEPTED, PROVISIONING, WAITING_FOR_RESOURCES, CREATING, ...
    esac
    last=$state
  fi
  if ((code == 2)); then
    die 2 'what was asked for cannot be done, as said above; machines that are there cost'
  fi
  failures=$((code ? failures + 1 : 0))
  if ((failures >= MAX_FAILURES)); then
    die "$code" "gcloud failed $failures times in a row, with exit code $code; machines that are" \
      'there were left, and cost'
  elif ((failures)); then
    log "gcloud failed with exit code $code, $failures of at most $MAX_FAILURES times in a row"
  fi
  sleep "${OPTION[poll]}"
done
