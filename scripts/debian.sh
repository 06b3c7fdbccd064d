#!/usr/bin/env bash
# Installs the Debian (or Ubuntu) packages that the project's optional parts need: Mooncake's libraries.
# Does nothing, quickly, when all are there. Exits with 1, and says what to do, when it cannot install them.
set -euo pipefail

packages=(libibverbs1 libnuma1)

missing=()
for package in "${packages[@]}"; do
  # By the library's file, so that it also works where the distribution names its packages otherwise.
  library=${package%1}.so.1
  if ! ldconfig -p 2>/dev/null | grep -q "$library" && ! /sbin/ldconfig -p 2>/dev/null | grep -q "$library"; then
    missing+=("$package")
  fi
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

if ! command -v apt-get > /dev/null; then
  echo "not a Debian system; please install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo > /dev/null || ! sudo -n true 2> /dev/null; then
    echo "needs root to install: ${missing[*]}; please run: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo -n)
fi

echo "installing ${missing[*]}"
install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends -qq "$@" > /dev/null
}
# The package lists may be missing or old: fetch them only if the first try fails.
if ! install "${missing[@]}" 2> /dev/null; then
  "${as_root[@]}" apt-get update -qq
  install "${missing[@]}"
fi
