#!/bin/sh
# Fetches what the guest is made of: Debian trixie's kernel and a few programs, extracted and not installed.
# usage: tree.sh TREE DEBS; TREE is made, DEBS keeps the downloads.
set -eu
tree=$1 debs=$2
host=$(. /etc/os-release && echo "$VERSION_CODENAME")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The host's own mirror, turned to trixie.
found=
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list; do
  if [ -e "$file" ] && grep -q "$host" "$file"; then
    case $file in *.sources) found=$work/guest.sources ;; *) found=$work/guest.list ;; esac
    sed "s/\b$host\b/trixie/g" "$file" >"$found"
    break
  fi
done
[ -n "$found" ] || { echo "no apt source of the host names $host" >&2; exit 1; }

archives=/var/cache/apt/archives
mkdir -p "$debs"
mmdebstrap --mode=root --format=directory --variant=extract --quiet --skip=download/empty --skip=cleanup/apt/cache \
  --setup-hook="mkdir -p \"\$1$archives\"" --setup-hook="sync-in '$debs' $archives/" \
  --customize-hook="sync-out $archives '$debs'" \
  --include=linux-image-amd64,dash,busybox-static,iproute2,iputils-ping,iperf3,kmod,cpio,zstd \
  trixie "$work/tree" "$found"
rm -rf "$work/tree$archives"
rm -rf "$tree"
mkdir -p "$(dirname "$tree")"
mv "$work/tree" "$tree"
