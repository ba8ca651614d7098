#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster, as a JobSet (jobset.yaml); kubectl is set to the cluster.
#
#   launch/gke_jobset.sh --name bert-large --image IMAGE --accelerator tpu-v5-lite-podslice \
#     --topology 4x4 --hosts 4 --chips 4 --spot \
#     -- --config=configs/large.py --workdir=gs://bucket/large
#
# What follows -- goes to `python -m bertjax.main --distributed`. The same command resumes, after
# `launch/gke_jobset.sh --name bert-large --delete`.
#
#   --name NAME        of the JobSet
#   --image IMAGE      with this checkout installed, as launch/Dockerfile makes it
#   --accelerator A    tpu-v4-podslice, tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice
#   --topology T       of a slice, e.g. 4x4, or 4x4x4 for v4 and v5p
#   --hosts N          machines of a slice
#   --chips N          TPU chips of a machine
#   --slices N         slices that train together (default: 1)
#   --max_restarts N   give up after so many (default: 50)
#   --module M         another module to run, e.g. bertjax.finetune.squad
#   --cache DIR        folder on gs:// for compiled programs; without it all pods compile at each
#                      start
#   --namespace N      default: kubectl's
#   --spot             on spot nodes
#   --delete           delete the JobSet of that name and its pods
#   --dry-run          print the command and the filled-in template
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=(
  [name]='' [image]='' [accelerator]='' [topology]='' [hosts]='' [chips]='' [slices]=1
  [max_restarts]=50 [module]=bertjax.main [cache]='' [namespace]='')
declare -A SWITCH=([spot]=no [delete]=no [dry-run]=no)
parse "$@"
require name
namespace=()
if [[ ${OPTION[namespace]} ]]; then
  namespace=("--namespace=${OPTION[namespace]}")
fi
if is_on delete; then
  run kubectl delete jobset "${OPTION[name]}" "${namespace[@]}"
  exit 0
fi
require image accelerator topology hosts chips
((${#COMMAND[@]})) || die 2 'give the arguments of the training after --'

# The arguments as a list in YAML, which JSON strings are.
as_list() {
  local word list=''
  for word in "$@"; do
    word=${word//\\/\\\\}
    list+="\"${word//\"/\\\"}\", "
  done
  printf '[%s]' "${list%, }"
}

fill_in() {
  local text key keys=(name image accelerator topology hosts chips slices max_restarts)
  text=$(< "$LAUNCH/jobset.yaml")
  if is_on spot; then
    text=${text//'#spot'/}
  fi
  if [[ ${OPTION[cache]} ]]; then
    text=${text//'#cache'/}
    keys+=(cache)
  fi
  text=$(grep -vE '^#(spot|cache)' <<< "$text")
  for key in "${keys[@]}"; do
    [[ ${OPTION[$key]} =~ ^[A-Za-z0-9_./:@-]+$ ]] ||
      die 2 "--$key '${OPTION[$key]}' has characters that no such name has"
    text=${text//"@$key@"/"${OPTION[$key]}"}
  done
  printf '%s\n' "${text//'@args@'/"$(as_list "${OPTION[module]}" "${COMMAND[@]}")"}"
}

filled=$(fill_in)
run kubectl apply "${namespace[@]}" --filename=- <<< "$filled"
if is_on dry-run; then
  printf '%s\n' "$filled"
fi
