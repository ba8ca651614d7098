#!/usr/bin/env bash
# Deletes a TPU VM and its queued resource, whatever state they are in. The workdir stays.
#
#   launch/tpu_delete.sh --name NAME --zone ZONE [--project ID] [--dry-run]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=([name]='' [zone]='' [project]='')
declare -A SWITCH=([dry-run]=no)
parse "$@"
require name zone
find_target

# --force: the node goes with its queued resource.
run gcloud compute tpus queued-resources delete "${OPTION[name]}" "${TARGET[@]}" --force --quiet
