#!/usr/bin/env bash
# Creates a GPU VM with NVIDIA's driver.
#
#   launch/gpu_create.sh --name NAME --zone ZONE --machine_type a2-highgpu-1g --spot
#
#   --name NAME        of the VM
#   --zone ZONE        e.g. us-central1-a
#   --machine_type T   e.g. g2-standard-8 (L4), a2-highgpu-1g (A100), a3-highgpu-8g (8 x H100)
#   --project ID       default: gcloud's
#   --image_family F   default: one with driver 580, which CUDA 13 needs
#   --disk SIZE        of the boot disk (default: 200GB)
#   --spot             cheaper, and stopped at any time; `gcloud compute instances start`, then
#                      launch/gpu_run.sh again, go on from the last checkpoint
#   --dry-run          print the command
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=(
  [name]='' [zone]='' [machine_type]='' [project]=''
  [image_family]=common-cu129-ubuntu-2204-nvidia-580 [disk]=200GB)
declare -A SWITCH=([spot]=no [dry-run]=no)
parse "$@"
require name zone machine_type
find_target

create=(
  gcloud compute instances create "${OPTION[name]}" "${TARGET[@]}"
  "--machine-type=${OPTION[machine_type]}" --maintenance-policy=TERMINATE
  "--image-family=${OPTION[image_family]}" --image-project=deeplearning-platform-release
  --metadata=install-nvidia-driver=True "--boot-disk-size=${OPTION[disk]}"
  --scopes=cloud-platform --quiet)
if is_on spot; then
  create+=(--provisioning-model=SPOT --instance-termination-action=STOP)
fi
run "${create[@]}"
