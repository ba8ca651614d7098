# shellcheck shell=bash
# shellcheck disable=SC2034,SC2004  # OPTION, SWITCH and COMMAND belong to the sourcing script
# What the launch scripts share: options, messages, dry runs. Sourced, never run.
#
# A script declares its options, then calls `parse "$@"`:
#   declare -A OPTION=([name]='' [zone]='')    takes a value: --name X or --name=X
#   declare -A SWITCH=([spot]=no [dry-run]=no) is off or on: --spot
# What follows a lone -- goes to the array COMMAND.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo 'The launch scripts need bash 4.4 or newer (macOS: install a newer bash).' >&2
  exit 2
fi

LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CHECKOUT=$(dirname "$LAUNCH")
COMMAND=()

log() {
  printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2
}

# die CODE MESSAGE: 2 is wrong usage, any other code is what stopped the work.
die() {
  local code=$1
  shift
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit "$code"
}

# The comment at the head of a script is its help.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

parse() {
  local word name
  while (($#)); do
    word=$1
    shift
    case $word in
      --) COMMAND=("$@"); return ;;
      --help | -h) usage; exit 0 ;;
      --*=*) name=${word#--} name=${name%%=*}; set -- "${word#*=}" "$@" ;;
      --*) name=${word#--} ;;
      *) die 2 "unexpected argument '$word'; --help says what there is" ;;
    esac
    if [[ -v OPTION[$name] ]]; then
      (($#)) || die 2 "--$name needs a value"
      OPTION[$name]=$1
      shift
    elif [[ -v SWITCH[$name] && $word != *=* ]]; then
      SWITCH[$name]=yes
    else
      die 2 "unknown option '$word'; --help says what there is"
    fi
  done
}

# require NAME...: these options must have been given.
require() {
  local name
  for name in "$@"; do
    [[ ${OPTION[$name]} ]] || die 2 "--$name is needed; --help says what it is"
  done
}

is_on() {
  [[ ${SWITCH[$1]} == yes ]]
}

# A command in words that a shell would read back as the same arguments.
quoted() {
  local word line=''
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
      word="'${word//\'/\'\\\'\'}'"
    fi
    line+="$word "
  done
  printf '%s\n' "${line% }"
}

# run COMMAND...: runs it, or prints it in a dry run. Its exit code is passed on.
run() {
  if is_on dry-run; then
    quoted "$@"
  else
    "$@"
  fi
}

# Fills the array TARGET: where the machine is. An option that is off adds nothing, not even ''.
find_target() {
  TARGET=("--zone=${OPTION[zone]}")
  if [[ ${OPTION[project]} ]]; then
    TARGET+=("--project=${OPTION[project]}")
  fi
}

# Reads the options that both gpu_run.sh and tpu_run.sh have.
parse_run() {
  declare -gA OPTION=([name]='' [zone]='' [project]='' [module]=bertjax.main [cache]='')
  declare -gA SWITCH=([dry-run]=no)
  parse "$@"
  require name zone
  ((${#COMMAND[@]})) || die 2 'give the arguments of the training after --'
  find_target
}

# --- What happens on the machines ----------------------------------------------------------------

# pack FILE: the committed state of this checkout, as it is sent to the machines.
pack() {
  if [[ $(git -C "$CHECKOUT" status --porcelain) ]]; then
    log 'Note: changes that are not committed are not sent'
  fi
  run git -C "$CHECKOUT" archive --format=tar.gz --prefix=bertjax/ "--output=$1" HEAD
}

# Fails where a run is at work: its code must not be replaced.
check_command() {
  printf '%s\n' '! [ -e bertjax/launch/supervise.sh ] || bertjax/launch/supervise.sh --check'
}

# install_command EXTRAS: unpacks and installs. uv brings a Python, since images come with old ones.
# Files of the commit before go, by its list: the folder may hold a workdir, which stays.
install_command() {
  cat <<END
set -eu
tar tzf bertjax.tar.gz | grep -v '/\$' > bertjax-files.new
if [ -e bertjax-files ]; then xargs -d '\n' rm -f -- < bertjax-files; fi
tar xzf bertjax.tar.gz
mv bertjax-files.new bertjax-files
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
~/.local/bin/uv venv --quiet --allow-existing --python 3.12 bertjax-venv
~/.local/bin/uv pip install --quiet --python bertjax-venv --editable 'bertjax[$1]'
END
}

# start_command PLATFORM CACHE ARGUMENTS...: starts the training under the supervisor, detached.
start_command() {
  local platform=$1 cache=$2
  shift 2
  printf '%s\n' 'set -eu' 'cd bertjax' '. ../bertjax-venv/bin/activate' 'launch/supervise.sh --check'
  if [[ $cache ]]; then
    printf 'export JAX_COMPILATION_CACHE_DIR=%s\n' "$(quoted "$cache")"
  fi
  printf 'nohup launch/supervise.sh --platform %s -- python -m %s > /dev/null 2>&1 < /dev/null &\n' \
    "$platform" "$(quoted "$@")"
}
