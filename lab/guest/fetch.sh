#!/bin/bash
# Fetches what guests are made of, once: 230 MB of packages of Debian trixie, its kernel among them.
# usage: lab/guest/fetch.sh [CACHE]
# Says in which directory it is; the exit code is 77 when this machine cannot do it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../cache}
skip() { echo "SKIP lab/guest: $1" >&2; exit 77; }
mkdir -p "$dir/guest"
dir=$(cd "$dir" && pwd) tree=$dir/guest/trixie
# One fetches; the others wait for it.
exec 9>"$dir/guest/lock"
flock -w 300 9 || skip "another run has been fetching packages for 5 minutes"
if ! [ -d "$tree/boot" ]; then
  command -v mmdebstrap >/dev/null || skip "no mmdebstrap to fetch a kernel with"
  timeout 300 "$here/tree.sh" "$tree" "$dir/packages/trixie" >&2 || skip "trixie's packages cannot be fetched"
fi
echo "$tree"
