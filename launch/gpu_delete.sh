#!/usr/bin/env bash
# Deletes a GPU VM and its disk. A workdir on gs:// stays.
#
#   launch/gpu_delete.sh --name NAME --zone ZONE [--project ID] [--dry-run]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=([name]='' [zone]='' [project]='')
declare -A SWITCH=([dry-run]=no)
parse "$@"
require name zone
find_target

run gcloud compute instances delete "${OPTION[name]}" "${TARGET[@]}" --quiet
