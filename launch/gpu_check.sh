#!/usr/bin/env bash
# Benches the train step of BERT-base and BERT-large on this machine's GPU, in under 8 minutes.
#
#   launch/gpu_check.sh [--output DIR] [--python PYTHON] [--dry-run]
#
# Prints one line of JSON for each model and, with --output, writes them to DIR/gpu_check.jsonl.
# A model that fails or takes more than its share of the time does not stop the others; the exit
# code is then 1.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=([output]='' [python]=python)
declare -A SWITCH=([dry-run]=no)
parse "$@"
# shellcheck source=launch/env.sh
source "$LAUNCH/env.sh" gpu
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}  # no CPU instead of a GPU that is not there

# Model and the seconds it may take, compiling included: together less than 8 minutes.
readonly BENCHES=('base 180' 'large 270')

cd "$CHECKOUT"
run nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
code=0
for bench in "${BENCHES[@]}"; do
  read -r size seconds <<< "$bench"
  command=(
    timeout "$seconds" "${OPTION[python]}" -m bertjax.tools.bench_step --size "$size"
    --dtype bfloat16 --seconds 20)
  if is_on dry-run; then
    run "${command[@]}"
  elif line=$("${command[@]}"); then
    printf '%s\n' "$line"
    if [[ ${OPTION[output]} ]]; then
      mkdir -p "${OPTION[output]}"
      printf '%s\n' "$line" >> "${OPTION[output]}/gpu_check.jsonl"
    fi
  else
    log "$size failed, with exit code $?"
    code=1
  fi
done
exit "$code"
