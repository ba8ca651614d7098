#!/usr/bin/env bash
# All that is to be known of this machine's GPU, from a checkout, in under 8 minutes.
#
#   launch/gpu_check.sh [--install] [--data SHARDS] [--output DIR] [--dry-run]
#
# Is cuDNN's attention XLA's? Then BERT-base and BERT-large at 512 and 128, packed, in bfloat16 on
# real text: step time against the chip's measured matrix rate, attention by XLA (with and without
# dropout) and by cuDNN side by side, the wait for data, and what else costs time.
#
#   --install      first pip install this checkout with the extras cuda and test
#   --python P     the Python to use (default: python)
#   --data SHARDS  of bertjax.data.build; default: made from builtin:docs, in DIR
#   --tokens N     of a batch of BERT-base, half for BERT-large (default: 32768, for 80 GB or more)
#   --output DIR   gets JSON and profiles (default: runs/gpu_check)
#   --seconds N    after which, the installation apart, all is ended (default: 460)
#   --dry-run      print the commands
#
# What fails or takes too long does not stop the rest; the exit code is then 1.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A OPTION=(
  [python]=python [data]='' [tokens]=32768 [output]=runs/gpu_check [seconds]=460)
declare -A SWITCH=([install]=no [dry-run]=no)
parse "$@"
# shellcheck source=launch/env.sh
source "$LAUNCH/env.sh" gpu
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}  # no CPU instead of a GPU that is not there
cd "$CHECKOUT"
code=0

# limited SECONDS COMMAND...: at most so long, and not beyond the time of the whole.
limited() {
  local limit=$1 left=$((OPTION[seconds] - SECONDS)) failed=0
  shift
  if ((left < 5)); then
    log "No time left for: $(quoted "$@")"
    code=1
    return
  fi
  run timeout "$((limit < left ? limit : left))" "$@" || failed=$?
  if ((failed)); then
    log "Exit code $failed (124: it took too long): $(quoted "$@")"
    code=1
  fi
}

# bench NAME CONFIG ROWS LENGTH COMPARE...: one model at one length, packed.
bench() {
  local name=$1 config=$2 rows=$3 length=$4
  shift 4
  limited 150 "${OPTION[python]}" -m bertjax.tools.bench "--config=$config" \
    "--data=${OPTION[data]}" "--batch_size=$rows" "--seq_length=$length" --remat=none \
    --config.max_examples_per_row=8 "${@/#/--compare=}" --steps=24 --matmul \
    "--trace=${OPTION[output]}/$name" "--json=${OPTION[output]}/$name.json"
}

run mkdir -p "${OPTION[output]}"
if is_on install; then
  run "${OPTION[python]}" -m pip install --quiet --editable '.[cuda,test]'
  SECONDS=0
fi
limited 10 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
if [[ ! ${OPTION[data]} ]]; then
  OPTION[data]=${OPTION[output]}/shards
  if [[ ! -e ${OPTION[data]}/manifest.json ]]; then
    limited 60 env JAX_PLATFORMS=cpu "${OPTION[python]}" -m bertjax.data.tokenizer train \
      --input builtin:docs --output "${OPTION[output]}/tokenizer" --overwrite
    limited 60 env JAX_PLATFORMS=cpu "${OPTION[python]}" -m bertjax.data.build \
      --input builtin:docs --tokenizer "${OPTION[output]}/tokenizer" --output "${OPTION[data]}" \
      --num_workers 4
  fi
fi
limited 60 env JAX_DISABLE_MOST_OPTIMIZATIONS=0 "${OPTION[python]}" -m pytest -n 0 -q -W default \
  tests/test_bench.py -k cudnn

rows=$((OPTION[tokens] / 512))
# The paper drops attention weights, which only XLA's attention can: the first of three.
both=('attention=xla,cudnn' 'attention_probs_dropout_prob=0,0')
three=('attention=xla,xla,cudnn' 'attention_probs_dropout_prob=0.1,0,0')
bench base_512 configs/base.py "$rows" 512 "${three[@]}"
bench large_512 configs/large.py "$((rows / 2))" 512 "${three[@]}"
bench base_128 configs/base.py "$((rows * 4))" 128 "${both[@]}"
bench large_128 configs/large.py "$((rows * 2))" 128 "${both[@]}"
exit "$code"
