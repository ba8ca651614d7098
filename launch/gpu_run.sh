#!/usr/bin/env bash
# Installs this checkout on a GPU VM and starts training on all its GPUs; resumes likewise.
#
#   launch/gpu_run.sh --name NAME --zone ZONE \
#     -- --config=configs/base.py --workdir=gs://bucket/base
#
# What follows -- goes to `python -m bertjax.main`. It runs detached, under launch/supervise.sh; the
# log is ~/bertjax-run/log there. Nothing is changed while a run is at work.
#
#   --name, --zone, --project  as given to gpu_create.sh
#   --module M         another module to run, e.g. bertjax.finetune.squad
#   --cache DIR        folder for compiled programs (default: on the VM's disk)
#   --dry-run          print the commands
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

parse_run "$@"

on_host() {
  run gcloud compute ssh "${OPTION[name]}" "${TARGET[@]}" --quiet "--command=$1"
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
on_host "$(check_command)"
pack "$folder/bertjax.tar.gz"
run gcloud compute scp "$folder/bertjax.tar.gz" "${OPTION[name]}:bertjax.tar.gz" "${TARGET[@]}" \
  --quiet
on_host "$(install_command cuda,gcs)"
on_host "$(start_command gpu "${OPTION[cache]}" "${OPTION[module]}" --platform=gpu \
  "${COMMAND[@]}")"
