#!/bin/bash
# Runs a command in a small machine whose kernel has what this one's lacks (nbd, ublk): QEMU without KVM, Debian
# trixie's kernel.
# usage: lab/guest/run.sh [--with PROGRAM... --module NAME...] [--cpus N] [--nic NIC] [--dir CACHE] [--timeout SECONDS] COMMAND
# The machine's console goes to standard output; the exit code is the command's, 77 when this machine cannot do it,
# 124 when it took too long. The first run fetches 230 MB of packages into the cache.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=lab/cache timeout=300 cpus=1 nic=() programs=() modules=()
while [ $# -gt 1 ]; do
  case $1 in
    --with) programs+=("$2") ;;
    --module) modules+=("$2") ;;
    --cpus) cpus=$2 ;;
    --nic) nic=(-nic "$2") ;;
    --dir) dir=$2 ;;
    --timeout) timeout=$2 ;;
    *) echo "unknown: $1" >&2; exit 2 ;;
  esac
  shift 2
done
[ $# = 1 ] || { sed -n 4p "$0" >&2; exit 2; }
skip() { echo "SKIP lab/guest: $1" >&2; exit 77; }
command -v qemu-system-x86_64 >/dev/null || skip "no qemu-system-x86_64 (qemu-system-x86)"
for program in "${programs[@]}"; do
  [ -x "$program" ] || skip "no $program"
done

tree=$("$here/fetch.sh" "$dir") || exit $?

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
lib=usr/lib/x86_64-linux-gnu loader=usr/lib64/ld-linux-x86-64.so.2
[ -e "$tree/$loader" ] || loader=$lib/ld-linux-x86-64.so.2
mkdir -p "$root"/{dev,proc,sys,run,tmp,root,etc,usr/bin,usr/local/bin,usr/sbin,usr/lib64,"$lib"}
for link in bin sbin lib lib64; do ln -s usr/$link "$root/$link"; done

# Programs and the libraries that they name.
within() { "$tree/$loader" --library-path "$tree/$lib:$tree/usr/lib/x86_64-linux-gnu" "$@"; }
cp -L "$tree/$loader" "$root/usr/lib64/ld-linux-x86-64.so.2"
take() {
  cp -L "$1" "$root/$2"
  within --list "$1" | sed -n 's/.*=> \([^ ]*\) .*/\1/p' | while read -r so; do cp -Ln "$so" "$root/$lib/"; done
}
cp -L "$tree"/usr/bin/busybox "$root/usr/bin/"
take "$tree/usr/bin/ip" usr/bin/ip
take "$tree/usr/sbin/tc" usr/sbin/tc
take "$tree/usr/bin/ping" usr/bin/ping
take "$tree/usr/bin/iperf3" usr/bin/iperf3
# Not busybox's: that one would call its own `ip`.
take "$tree/usr/bin/dash" usr/bin/sh
for program in "${programs[@]}"; do
  take "$program" "usr/bin/$(basename "$program")"
done

# The modules, in the order in which they are loaded.
release=$(basename "$tree"/usr/lib/modules/*)
available=$tree/usr/lib/modules/$release
mkdir -p "$root/usr/lib/modules/$release"
for name in "${modules[@]}"; do
  found=$(find "$available" -name "$name.ko*" | head -1)
  [ -n "$found" ] || continue # built in
  cp "$found" "$root/usr/lib/modules/$release/"
  echo "$name" >>"$root/etc/modules"
done
printf '%s\n' "$1" >"$root/root/command"
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /usr/local/bin
rm -f /usr/local/bin/chrt /usr/local/bin/ping # the first would start its own of the second
export PATH=/usr/sbin:/usr/bin:/usr/local/bin HOME=/root
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
mount -t tmpfs none /run; mount -t tmpfs none /tmp
ip link set lo up
for module in $(cat /etc/modules); do
  insmod /usr/lib/modules/*/$module.ko* || echo "guest: no module $module"
done
cd /root
/usr/bin/sh ./command </dev/null
echo "guest: exit code $?"
sync
poweroff -f
INIT
chmod +x "$root/init"
within "$tree/usr/bin/cpio" --version >/dev/null || skip "cpio of the tree does not run"
(cd "$root" && find . | within "$tree/usr/bin/cpio" -o -H newc --quiet) | gzip -1 >"$work/initrd.gz"

kernel=$(echo "$tree"/boot/vmlinuz-*)
code=0
# With one processor the guest's clock counts its instructions, one a nanosecond, and jumps where it sleeps: how busy
# this machine is does not show in what is measured there. Several run side by side and on the real clock. In a
# scheduling group of its own and before others, to have done with it.
accelerator=(-accel tcg -icount shift=0,sleep=off)
[ "$cpus" = 1 ] || accelerator=(-accel tcg,thread=multi)
setsid -w sh -c 'echo -10 2>/dev/null >/proc/self/autogroup; exec "$@"' sh \
  timeout "$timeout" qemu-system-x86_64 "${accelerator[@]}" -cpu max -smp "$cpus" -m 512 \
  -nodefaults -no-user-config -display none "${nic[@]}" \
  -no-reboot -serial stdio -kernel "$kernel" -initrd "$work/initrd.gz" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off" </dev/null | tr -d '\r' | tee "$work/console" || code=${PIPESTATUS[0]}
[ "$code" = 0 ] || exit "$code"
told=$(sed -n 's/^guest: exit code //p' "$work/console" | tail -1)
exit "${told:-1}"
