#!/usr/bin/env bash
# Installs this checkout on all hosts of a TPU VM and starts training there; resumes likewise.
#
#   launch/tpu_run.sh --name NAME --zone ZONE \
#     -- --config=configs/large.py --workdir=gs://bucket/large
#
# What follows -- goes to `python -m bertjax.main --distributed`. It runs detached, under
# launch/supervise.sh; the log is ~/bertjax-run/log on each host. The workdir must be on gs://: all
# hosts write into one, and it outlives the machines. Nothing is changed while a run is at work.
#
#   --name, --zone, --project  as given to tpu_create.sh
#   --module M         another module to run, e.g. bertjax.finetune.squad
#   --cache DIR        folder on gs:// for compiled programs; without it all hosts of a pod but the
#                      first compile at each start, and new machines all do
#   --dry-run          print the commands
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse_run "$@"

on_all_hosts() {
  run gcloud compute tpus tpu-vm ssh "${OPTION[name]}" "${TARGET[@]}" --worker=all --quiet \
    "--command=$1"
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
on_all_hosts "$(check_command)"
pack "$folder/bertjax.tar.gz"
run gcloud compute tpus tpu-vm scp "$folder/bertjax.tar.gz" "${OPTION[name]}:bertjax.tar.gz" \
  "${TARGET[@]}" --worker=all --quiet
on_all_hosts "$(install_command tpu,gcs)"
on_all_hosts "$(start_command tpu "${OPTION[cache]}" "${OPTION[module]}" --distributed \
  --platform=tpu "${COMMAND[@]}")"
