#!/usr/bin/env bash
# Installs the Debian (or Ubuntu) packages that a part of the project needs beyond Python's own:
#   scripts/debian.sh mooncake    the libraries that Mooncake's wheel links to
#   scripts/debian.sh browser     Chromium, for the tests of the web page
#   scripts/debian.sh npm         npm, which fetches a recogniser of speech for the tests of the embedded model
#   scripts/debian.sh voices      flite and espeak-ng, which put spoken questions to it
# Does nothing, quickly, when all is there. Exits with 1, and says what to do, when it cannot install.
set -euo pipefail

missing=()
case "${1:-}" in
  mooncake)
    # By the library's file, so that it also works where the distribution names its packages otherwise.
    for package in libibverbs1 libnuma1; do
      { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true; } | grep -q "${package%1}.so.1" || missing+=("$package")
    done
    ;;
  browser)
    command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
      || missing+=(chromium)
    ;;
  npm)
    command -v npm > /dev/null || missing+=(npm)
    ;;
  voices)
    for package in flite espeak-ng; do
      command -v "$package" > /dev/null || missing+=("$package")
    done
    ;;
  *)
    echo "use: scripts/debian.sh mooncake|browser|npm|voices" >&2
    exit 2
    ;;
esac
[ ${#missing[@]} -gt 0 ] || exit 0

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
