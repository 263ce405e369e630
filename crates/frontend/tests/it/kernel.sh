# What tests/it/kernel.rs runs in a machine whose kernel has nbd and ublk. Prints "ok WHAT" or "FAIL WHAT" for every
# check, and "figure WHAT VALUE".
cd /tmp
mkdir -p /mnt
dd if=/dev/urandom of=noise bs=1M count=16 2>/dev/null

ok() { echo "ok $1"; }
fail() { echo "FAIL $1"; sed 's/^/  | /' said 2>/dev/null; }
# check WHAT COMMAND...: it has to succeed.
check() { what=$1; shift; if timeout 180 "$@" >said 2>&1; then ok "$what"; else fail "$what"; fi; }
# holds WHAT FUNCTION...: the same for a function of this file.
holds() { what=$1; shift; if "$@" >said 2>&1; then ok "$what"; else fail "$what"; fi; }
# refused WHAT TEXT COMMAND...: it has to fail soon, and say so.
refused() {
  what=$1 text=$2; shift 2
  if timeout 180 "$@" >said 2>&1; then fail "$what: succeeded"
  elif grep -q "$text" said; then ok "$what"; else fail "$what"; fi
}
# starts WHAT ARGUMENTS...: serves in the background; sets dev and pid.
starts() {
  what=$1; shift
  : >log
  attach_memory "$@" >log 2>&1 &
  pid=$!
  for _ in $(seq 200); do
    dev=$(sed -n 's/^attached //p' log)
    [ -z "$dev" ] || break
    [ -e /proc/$pid ] || break
    sleep 0.1
  done
  cp log said
  if [ -b "$dev" ]; then ok "$what attached"; else fail "$what attached"; fi
}
# ends WHAT: the server has ended by itself, in peace.
ends() {
  for _ in $(seq 200); do kill -0 $pid 2>/dev/null || break; sleep 0.1; done
  cp log said
  if ! kill -0 $pid 2>/dev/null && wait $pid && grep -q '^detached' log; then ok "$1"; else fail "$1"; kill -9 $pid 2>/dev/null; fi
}
is_free() { attach_memory status "$1" | grep -q "is free"; }
centis() { sed 's/ .*//; s/[.]//' /proc/uptime; }
forget() { echo 3 >/proc/sys/vm/drop_caches; }
same() { [ "$(dd if="$1" bs=1M count=16 iflag=direct 2>/dev/null | sha256sum)" = "$(sha256sum <noise)" ]; }

# A file system on it, from mkfs to a detach by somebody else.
life() {
  way=$1; shift
  starts "$way" "$@"
  check "$way size" [ "$(cat /sys/block/${dev#/dev/}/size)" = 131072 ]
  check "$way mkfs" mkfs.ext4 -q "$dev"
  check "$way mount" mount -t ext4 "$dev" /mnt
  check "$way write" cp noise /mnt/noise
  for n in $(seq 200); do echo "file $n" >/mnt/small$n; done
  refused "$way in use" "is in use (mounted at /mnt): unmount it first" attach_memory detach "$dev"
  check "$way umount" umount /mnt
  forget
  check "$way fsck" e2fsck -fn "$dev"
  check "$way mount again" mount -t ext4 -o ro "$dev" /mnt
  check "$way content" cmp noise /mnt/noise
  check "$way small files" [ "$(cat /mnt/small* | sort -k2n | tail -1)" = "file 200" ]
  check "$way umount again" umount /mnt
  check "$way detached by another process" attach_memory detach "$dev"
  ends "$way server ends"
  holds "$way free" is_free "$dev"
}
life nbd nbd
life nbd-4 nbd --connections 4
life nbd-ioctl nbd --ioctl
life ublk ublk
life ublk-slow ublk --slow 2 --queues 1

# Random requests from several threads against a copy.
torture() {
  way=$1; shift
  starts "$way torture" "$@" --size 16
  check "$way torture" torture_device $dev $seed 300
  cat said
  kill -TERM $pid
  ends "$way torture ends"
}
seed=$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')
torture nbd nbd
torture nbd-4 nbd --connections 4
torture ublk ublk
torture ublk-slow ublk --slow 1 --queues 1

# What is written is where it belongs, and survives the device; a device of a given number; the end by a signal.
for kind in nbd ublk; do
  number=/dev/nbd7; [ $kind = nbd ] || number=/dev/ublkb7
  starts "$kind file" $kind --device $number --file backing --size 16
  check "$kind number" [ "$dev" = $number ]
  refused "$kind number taken" "is already attached" attach_memory $kind --device $number
  check "$kind fill" dd if=noise of=$dev bs=64k conv=fsync
  kill -TERM $pid
  ends "$kind ends by a signal"
  check "$kind backing file" cmp noise backing
  starts "$kind read-only" $kind --read-only --file backing --size 16
  holds "$kind read-only content" same $dev
  refused "$kind read-only write" "not permitted\|Read-only" dd if=noise of=$dev bs=4k count=1 conv=fsync
  check "$kind read-only flag" [ "$(cat /sys/block/${dev#/dev/}/ro)" = 1 ]
  kill -TERM $pid
  ends "$kind read-only ends"
  rm backing
done

# Trim and zeroes reach the device.
starts "ublk trim" ublk --file backing --size 16
check "ublk trim fill" dd if=noise of=$dev bs=1M conv=fsync
check "ublk discard" blkdiscard $dev
check "ublk zeroes" [ "$(dd if=$dev bs=1M iflag=direct 2>/dev/null | tr -d '\0' | wc -c)" = 0 ]
check "ublk backing is empty" [ "$(du -k backing | cut -f1)" -lt 64 ]
kill -TERM $pid
ends "ublk trim ends"
rm -f backing

# One slow request holds nobody up: 16 reads of a second.
for kind in nbd "ublk --queues 1"; do
  name=${kind%% *}
  starts "$name slow" $kind --slow 1000
  begin=$(centis)
  readers=
  for n in $(seq 16); do
    dd if=$dev of=/dev/null bs=4k count=1 skip=$((n * 100)) iflag=direct 2>/dev/null &
    readers="$readers $!"
  done
  wait $readers
  took=$((($(centis) - begin) * 10))
  echo "figure $name 16-reads-of-1-s-ms $took"
  check "$name slow side by side" [ $took -lt 8000 ]
  kill -TERM $pid
  ends "$name slow ends"
done

# The server is killed with requests under way: they fail, nothing hangs, the rest can be removed.
for how in "nbd --timeout 3" ublk; do
  kind=${how%% *}
  starts "$kind killed" $how --slow 50
  dd if=$dev of=/dev/null bs=4k iflag=direct 2>reader &
  reader=$!
  sleep 1
  kill -9 $pid; wait $pid 2>/dev/null
  for _ in $(seq 200); do kill -0 $reader 2>/dev/null || break; sleep 0.1; done
  cp reader said
  if kill -0 $reader 2>/dev/null; then fail "$kind killed: the reader hangs"
  elif wait $reader; then fail "$kind killed: the reader saw no error"
  elif grep -q "rror" reader; then ok "$kind killed: the reader sees an error"; else fail "$kind killed: the reader"; fi
  [ $kind = nbd ] || check "ublk killed: the node goes" sh -c "while [ -e $dev ]; do sleep 0.1; done"
  check "$kind killed: removed" attach_memory detach --force $dev
  holds "$kind killed: free" is_free $dev
done
# With a file system on it.
for how in "nbd --timeout 3" ublk; do
  kind=${how%% *}
  starts "$kind mounted" $how
  mkfs.ext4 -q $dev && mount -t ext4 $dev /mnt
  cp noise /mnt/noise; sync
  kill -TERM $pid; sleep 0.5
  cp log said
  if kill -0 $pid && grep -q "is in use" log; then ok "$kind mounted: a signal does not detach"; else fail "$kind mounted: signal"; fi
  kill -9 $pid; wait $pid 2>/dev/null
  refused "$kind mounted: killed" "rror" sh -c "echo 3 >/proc/sys/vm/drop_caches; cat /mnt/noise | sha256sum; dd if=/dev/zero of=/mnt/more bs=1M count=4 conv=fsync"
  check "$kind mounted: umount" umount /mnt
  check "$kind mounted: removed" attach_memory detach --force $dev
  holds "$kind mounted: free" is_free $dev
done

# Attached and detached by ioctls alone, with a reader at it.
starts "ioctls alone" nbd --ioctl --slow 20
dd if=$dev of=/dev/null bs=4k iflag=direct 2>reader & reader=$!
sleep 0.5
kill -TERM $pid
ends "ioctls alone: ends"
wait $reader && fail "ioctls alone: the reader saw no error" || ok "ioctls alone: the reader sees an error"
holds "ioctls alone: free" is_free $dev

# A server that is restarted while requests wait for it.
starts "nbd restart" nbd --dead 60 --file backing --size 16
check "nbd restart fill" dd if=noise of=$dev bs=1M conv=fsync
kill -9 $pid; wait $pid 2>/dev/null
forget
check "nbd restart: found again" [ "$(attach_memory list)" = "$dev drover example" ]
same $dev & reader=$!
sleep 1
if kill -0 $reader 2>/dev/null; then ok "nbd restart: the reader waits"; else fail "nbd restart: the reader does not wait"; fi
starts "nbd restart again" nbd --reconnect $dev --file backing --size 16
if wait $reader; then ok "nbd restart: the reader goes on"; else fail "nbd restart: the reader"; fi
check "nbd restart: content" cmp noise $dev
kill -TERM $pid
ends "nbd restart ends"
rm -f backing

# The same for ublk: the driver waits for its server, and says so; the rest is removed when that goes on.
starts "ublk stopped" ublk
kill -STOP $pid
refused "ublk stopped: no end in time" "in time" attach_memory detach --force $dev
kill -CONT $pid
ends "ublk stopped: the server ends"
holds "ublk stopped: free" is_free $dev

# A server that stops answering does not keep a device attached.
starts "nbd stopped" nbd
kill -STOP $pid
dd if=$dev of=/dev/null bs=4k count=1 iflag=direct 2>reader & reader=$!
sleep 0.5
check "nbd stopped: removed" attach_memory detach --force $dev
wait $reader && fail "nbd stopped: the reader saw no error" || ok "nbd stopped: the reader sees an error"
kill -CONT $pid
ends "nbd stopped: the server ends"

refused "nothing there: nbd" "nothing is attached at /dev/nbd9" attach_memory detach /dev/nbd9
refused "nothing there: ublk" "nothing is attached at /dev/ublkb9" attach_memory detach /dev/ublkb9

# Ratios only: the processor is emulated.
rate() { sed -n 's/.* \([0-9.]*\) s, .*/\1/p' said; }
for kind in "nbd" "nbd --connections 2" "ublk"; do
  starts "figures of $kind" $kind
  dd if=/dev/zero of=$dev bs=1M count=64 oflag=direct 2>/dev/null
  dd if=$dev of=/dev/null bs=1M count=64 iflag=direct 2>said; echo "figure $kind: 64-reads-of-1-MiB-s $(rate)"
  dd if=/dev/zero of=$dev bs=1M count=64 oflag=direct 2>said; echo "figure $kind: 64-writes-of-1-MiB-s $(rate)"
  dd if=$dev of=/dev/null bs=4k count=2000 iflag=direct 2>said; echo "figure $kind: 2000-reads-of-4-KiB-s $(rate)"
  kill -TERM $pid
  ends "figures of $kind end"
done

readiness 20

if dmesg | grep -q "BUG\|Oops\|blocked for more\|general protection"; then
  dmesg | tail -40 >said; fail "the kernel is well"
else
  ok "the kernel is well"
fi
echo "done"
