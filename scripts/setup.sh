#!/usr/bin/env bash
# Sets up .venv with everything the project needs, and nothing twice: repeated runs take a fraction of a second.
# Use: scripts/setup.sh [test|ray|docs]
# PyTorch is its CPU build where there is no NVIDIA GPU. TORCH="torch==2.11.0" takes another (any pip requirement,
# options too), PYTHON=python3.13 another Python.
set -euo pipefail
cd "$(dirname "$0")/.."

want=${1:-run}
python=${PYTHON:-python3}
release=torch==2.13.0
cpu_index=https://download.pytorch.org/whl/cpu
stamps=.venv/stamps

if [ "$(uname -s)" != Linux ]; then
  echo "Stretto runs on Linux; here (on $(uname -s)) use WSL2 or a container: docker build -f deploy/Containerfile" \
    "--build-arg TORCH_INDEX=$cpu_index -t stretto:cpu . && docker run --rm -p 127.0.0.1:8000:8000 stretto:cpu" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
  echo "stretto needs Python 3.11 or newer, and $python is not; PYTHON=python3.12 would take another" >&2
  exit 1
fi

if [ ! -x .venv/bin/pip ]; then
  echo "creating .venv"
  if ! "$python" -m venv .venv; then
    echo "could not create a virtual environment; on Debian: apt-get install python3-venv" >&2
    exit 1
  fi
fi
mkdir -p "$stamps"

pip_install() {
  .venv/bin/pip install --disable-pip-version-check "$@"
}

if [ "$want" = docs ]; then
  # The site's generator alone: it needs neither PyTorch nor the package.
  .venv/bin/python -c 'import material' 2> /dev/null || pip_install "mkdocs-material>=9.8,<10"
  exit
fi

# The driver of this machine, of a container's host, or of Windows below WSL2.
has_nvidia_gpu() {
  [ -e /dev/nvidiactl ] || [ -e /proc/driver/nvidia/version ] || nvidia-smi -L > /dev/null 2>&1 \
    || /usr/lib/wsl/lib/nvidia-smi -L > /dev/null 2>&1
}

# Whether anything answers there, by way of a proxy if there is one. What it answers, pip will see.
answers() {
  .venv/bin/python - "$1" << 'PYTHON'
import ssl, sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=10).close()
except urllib.error.HTTPError:
    pass
except OSError as error:
    sys.exit(not isinstance(getattr(error, "reason", None), ssl.SSLError))
PYTHON
}

# The build without CUDA: by its full version, which no other build has, so that no other can be taken instead.
install_cpu_torch() {
  local index=()
  if answers "$cpu_index/torch/"; then index=(--extra-index-url "$cpu_index"); fi
  echo "installing $release for the CPU (there is no NVIDIA GPU here): about 200 MB"
  if pip_install "${index[@]}" "$release+cpu"; then return; fi
  echo "PyTorch's build for the CPU is not to be had here ($cpu_index): taking the one with CUDA, which runs on the CPU" \
    "too, but is 2.5 GB to download and 6 GB on disk" >&2
  pip_install "$release"
}

if [ -n "${TORCH:-}" ]; then torch=$TORCH; elif has_nvidia_gpu; then torch=$release; else torch=$release+cpu; fi
installed=$(cat "$stamps/torch" 2> /dev/null || true)
if [ "$installed" != "$torch" ]; then
  # First and alone: left to another package's choice, pip would fetch the newest build with all of CUDA.
  if [ "$installed" = "$release+cpu" ]; then .venv/bin/pip uninstall --yes --quiet torch; fi  # pip would keep it
  if [ "$torch" = "$release+cpu" ] && [ -z "${TORCH:-}" ]; then
    install_cpu_torch
  else
    echo "installing $torch (with CUDA it is 2.5 GB to download)"
    # shellcheck disable=SC2086  # TORCH may hold options
    pip_install $torch
  fi
  echo "$torch" > "$stamps/torch"
fi

case "$want" in
  ray) extras=video,talk,ray ;;
  test)
    extras=test
    # Without these the tests that need them are skipped, and say so.
    if scripts/debian.sh mooncake; then extras=test,mooncake; fi
    scripts/debian.sh browser || true
    scripts/debian.sh voices || true
    if scripts/debian.sh npm; then .venv/bin/python scripts/recogniser.py || true; fi
    ;;
  *) extras=video,talk ;;
esac
sum="$extras $(cksum < pyproject.toml)"
if [ "$(cat "$stamps/$want" 2>/dev/null)" != "$sum" ]; then
  echo "installing stretto[$extras]"
  # PyTorch stays as it is: what an extra asks for may fit another version of it better.
  .venv/bin/pip freeze --disable-pip-version-check --exclude-editable | grep -i '^torch==' > "$stamps/constraint" || true
  pip_install --constraint "$stamps/constraint" -e ".[$extras]"
  echo "$sum" > "$stamps/$want"
fi
