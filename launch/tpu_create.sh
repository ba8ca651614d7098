#!/usr/bin/env bash
# Asks for a TPU VM, one host or a pod slice, as a queued resource; it comes when there is capacity.
#
#   launch/tpu_create.sh --name NAME --zone ZONE --type v5litepod-16 --spot
#
#   --name NAME        of the queued resource and of its node
#   --zone ZONE        e.g. us-west4-a
#   --type TYPE        e.g. v5litepod-8 (one host), v5litepod-256, v4-32, v5p-64, v6e-16
#   --project ID       default: gcloud's
#   --runtime VERSION  software version of the TPU VM; default: the usual one of the type
#   --network NAME     default: gcloud's
#   --service_account EMAIL  that may read and write the bucket of the workdir; default: gcloud's
#   --valid_for TIME   how long to wait for capacity, e.g. 6h; default: without end
#   --spot             cheaper, and taken away at any time: launch/tpu_watch.sh makes it anew
#   --dry-run          print the command
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=(
  [name]='' [zone]='' [type]='' [project]='' [runtime]='' [network]='' [service_account]=''
  [valid_for]='')
declare -A SWITCH=([spot]=no [dry-run]=no)
parse "$@"
require name zone type
find_target

if [[ -z ${OPTION[runtime]} ]]; then
  case ${OPTION[type]} in
    v2-* | v3-* | v4-*) OPTION[runtime]=tpu-ubuntu2204-base ;;
    v5litepod-*) OPTION[runtime]=v2-alpha-tpuv5-lite ;;
    v5p-*) OPTION[runtime]=v2-alpha-tpuv5 ;;
    v6e-*) OPTION[runtime]=v2-alpha-tpuv6e ;;
    *) die 2 "no usual --runtime is known for --type ${OPTION[type]}: give one" ;;
  esac
fi

create=(
  gcloud compute tpus queued-resources create "${OPTION[name]}" "${TARGET[@]}"
  "--node-id=${OPTION[name]}" "--accelerator-type=${OPTION[type]}"
  "--runtime-version=${OPTION[runtime]}" --quiet)
if [[ ${OPTION[network]} ]]; then
  create+=("--network=${OPTION[network]}")
fi
if [[ ${OPTION[service_account]} ]]; then
  create+=("--service-account=${OPTION[service_account]}")
fi
if [[ ${OPTION[valid_for]} ]]; then
  create+=("--valid-until-duration=${OPTION[valid_for]}")
fi
if is_on spot; then
  create+=(--spot)
fi
run "${create[@]}"
