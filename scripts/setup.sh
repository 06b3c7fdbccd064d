#!/usr/bin/env bash
# Sets up .venv with everything the project needs, and nothing twice: repeated runs take a fraction of a second.
# Use: scripts/setup.sh [test|ray]        TORCH="torch==2.11.0" scripts/setup.sh   (any pip requirement, options too)
set -euo pipefail
cd "$(dirname "$0")/.."

want=${1:-run}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
stamps=.venv/stamps

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "stretto needs Python 3.11 or newer" >&2; exit 1; }

if [ ! -x .venv/bin/pip ]; then
  echo "creating .venv"
  if ! "$python" -m venv .venv; then
    echo "could not create a virtual environment; on Debian: apt-get install python3-venv" >&2
    exit 1
  fi
fi
mkdir -p "$stamps"

if [ "$(cat "$stamps/torch" 2>/dev/null)" != "$torch" ]; then
  # First and alone: left to another package's choice, pip would fetch the newest build with all of CUDA.
  echo "installing $torch"
  # shellcheck disable=SC2086  # TORCH may hold options
  .venv/bin/pip install --quiet --disable-pip-version-check $torch
  echo "$torch" > "$stamps/torch"
fi

extras=video
if [ "$want" = test ]; then
  extras=test
  # Without these the tests that need them are skipped, and say so.
  if scripts/debian.sh mooncake; then extras=test,mooncake; fi
  scripts/debian.sh browser || true
  scripts/debian.sh voices || true
  if scripts/debian.sh npm; then .venv/bin/python scripts/recogniser.py || true; fi
fi
if [ "$want" = ray ]; then extras=video,ray; fi
sum="$extras $(cksum < pyproject.toml)"
if [ "$(cat "$stamps/$want" 2>/dev/null)" != "$sum" ]; then
  echo "installing stretto[$extras]"
  .venv/bin/pip install --quiet --disable-pip-version-check -e ".[$extras]"
  echo "$sum" > "$stamps/$want"
fi
