# What attach_guest.rs runs in a machine whose kernel has nbd and ublk: a far site and a near home, over loopback.
# Prints "ok WHAT" or "FAIL WHAT" for every check.
cd /tmp
mkdir -p /mnt far near images
# A ticket is not printed to a file that others can read.
umask 077
ok() { echo "ok $1"; }
fail() { echo "FAIL $1"; sed 's/^/  | /' said 2>/dev/null; }
# check WHAT COMMAND...: it has to succeed within three minutes: the machine may be slow.
check() { what=$1; shift; if timeout 180 "$@" >said 2>&1; then ok "$what"; else fail "$what"; fi; }
# refused WHAT TEXT COMMAND...: it has to fail soon, and say so.
refused() {
  what=$1 text=$2; shift 2
  if timeout 180 "$@" >said 2>&1; then fail "$what: succeeded"
  elif grep -q "$text" said; then ok "$what"; else fail "$what"; fi
}
far() { DROVER_HOME=/tmp/far timeout 360 drover "$@"; }
near() { DROVER_HOME=/tmp/near timeout 360 drover "$@"; }
forget() { sync; echo 3 >/proc/sys/vm/drop_caches; }
# attaches WHAT ARGUMENTS...: sets dev.
attaches() {
  what=$1; shift
  dev=$(near attach lyon:disk.raw "$@" 2>said)
  if [ -b "$dev" ]; then ok "$what: attached"; else fail "$what: attached"; tail -5 far.log; exit 1; fi
}
# serves: starts the far site at its port; sets site.
serves() {
  DROVER_HOME=/tmp/far drover serve --listen 127.0.0.1:7377 >ticket 2>>far.log &
  site=$!
  for _ in $(seq 900); do [ -s ticket ] && break; sleep 0.1; done
}
daemon() { near mounts --json | sed -n 's/.*"process":\([0-9]*\).*/\1/p' | head -1; }
ends() { check "$1: unmounted" env DROVER_HOME=/tmp/near drover unmount $dev; }
is_gone() {
  case $1 in
    /dev/nbd*) ! [ -e /sys/block/${1#/dev/}/pid ] ;;
    *) ! [ -e $1 ] && ! [ -e /dev/ublkc${1#/dev/ublkb} ] ;;
  esac
}
free() { if is_gone $2; then ok "$1: the device is gone"; else fail "$1: the device is gone"; fi; }

dd if=/dev/urandom of=noise bs=1M count=8 2>/dev/null
dd if=/dev/urandom of=more bs=1M count=3 2>/dev/null
dd if=/dev/zero of=images/disk.raw bs=1M count=48 2>/dev/null
mkfs.ext4 -q -F images/disk.raw
mount -o loop images/disk.raw /mnt && cp noise /mnt/old && umount /mnt
far init --name lyon --images /tmp/images >said 2>&1 || fail "init"
# All of this is in memory, which has less room than a site keeps free.
echo 'reserve = "1M"' >>far/config.toml
far index images/disk.raw >said 2>&1 || fail "index"
serves
near pair - --name lyon <ticket >said 2>&1 || fail "pair"

# A disk's life, from a first look to a check of what came back.
life() {
  way=$1; shift
  begin=$(cut -d. -f1 /proc/uptime)
  attaches "$way" "$@"
  check "$way: mount" mount -t ext4 $dev /mnt
  check "$way: content" cmp noise /mnt/old
  check "$way: write" cp more /mnt/$way
  for n in $(seq 50); do echo "file $n" >/mnt/$way$n; done
  check "$way: sync" sync
  near mounts >said; if grep -q "$dev.*up" said; then ok "$way: listed"; else fail "$way: listed"; fi
  refused "$way: busy" "in use (mounted at /mnt)" env DROVER_HOME=/tmp/near drover unmount $dev
  check "$way: still there" cmp more /mnt/$way
  check "$way: umount" umount /mnt
  first=$dev
  ends "$way"
  free "$way" $first
  attaches "$way read-only" "$@" --read-only
  check "$way read-only: flag" [ "$(cat /sys/block/${dev#/dev/}/ro)" = 1 ]
  check "$way read-only: fsck" e2fsck -fn $dev
  check "$way read-only: mount" mount -t ext4 -o ro,noload $dev /mnt
  check "$way read-only: content" cmp more /mnt/$way
  check "$way read-only: small files" [ "$(cat /mnt/$way[0-9]* | sort -k2n | tail -1)" = "file 50" ]
  check "$way read-only: umount" umount /mnt
  ends "$way read-only"
  echo "figure $way: a life in s $(($(cut -d. -f1 /proc/uptime) - begin))"
}

# The daemon is killed under reads and writes: errors, no hang; what was flushed is there when it is attached again.
killed() {
  way=$1; shift
  attaches "$way killed" "$@" --prefetch none
  first=$dev
  check "$way killed: mount" mount -t ext4 $dev /mnt
  check "$way killed: write" cp more /mnt/flushed-$way
  check "$way killed: flush" sync
  while dd if=/dev/urandom of=/mnt/scratch bs=64k count=8 conv=fsync 2>/dev/null; do :; done & writer=$!
  ( while dd if=$dev of=/dev/null bs=64k iflag=direct 2>/dev/null; do :; done ) & reader=$!
  sleep 1
  kill -9 $(daemon)
  for _ in $(seq 600); do kill -0 $writer 2>/dev/null || kill -0 $reader 2>/dev/null || break; sleep 0.1; done
  if kill -0 $writer 2>/dev/null || kill -0 $reader 2>/dev/null; then fail "$way killed: nobody hangs"; kill -9 $writer $reader; else ok "$way killed: nobody hangs"; fi
  near mounts >said; if grep -q dead said; then ok "$way killed: listed as dead"; else fail "$way killed: listed as dead"; fi
  check "$way killed: umount" umount /mnt
  attaches "$way again" "$@"
  check "$way again: mount" mount -t ext4 $dev /mnt
  check "$way again: what was flushed" cmp more /mnt/flushed-$way
  check "$way again: what was old" cmp noise /mnt/old
  check "$way again: umount" umount /mnt
  check "$way again: fsck" e2fsck -fn $dev
  [ $dev = $first ] || free "$way killed" $first
  ends "$way again"
}

# The daemon is killed and nothing else comes; unmount clears it away, and pushes what was not pushed.
cleared() {
  way=$1; shift
  attaches "$way dead" "$@" --push-interval 1h
  check "$way dead: mount" mount -t ext4 $dev /mnt
  check "$way dead: write" cp more /mnt/dead-$way
  check "$way dead: umount" umount /mnt
  kill -9 $(daemon)
  sleep 0.5
  ends "$way dead"
  free "$way dead" $dev
  near mounts >said 2>&1; if grep -q "no mounts" said; then ok "$way dead: nothing is listed"; else fail "$way dead: nothing is listed"; fi
  attaches "$way after the dead" "$@" --read-only
  check "$way after the dead: mount" mount -t ext4 -o ro,noload $dev /mnt
  check "$way after the dead: content" cmp more /mnt/dead-$way
  check "$way after the dead: umount" umount /mnt
  ends "$way after the dead"
}

# Attached again while the dead one is still mounted: the way out is named, and works.
beside() {
  way=$1; shift
  attaches "$way beside" "$@"
  first=$dev
  check "$way beside: mount" mount -t ext4 $dev /mnt
  check "$way beside: write" cp more /mnt/beside
  sync
  kill -9 $(daemon)
  sleep 1
  refused "$way beside: refused" "umount /mnt" env DROVER_HOME=/tmp/near drover attach lyon:disk.raw "$@"
  check "$way beside: the dead one goes" umount /mnt
  attaches "$way beside again" "$@"
  check "$way beside: mount again" mount -t ext4 $dev /mnt
  check "$way beside: content" cmp more /mnt/beside
  check "$way beside: umount" umount /mnt
  ends "$way beside"
  free "$way beside" $dev
}

# The link is cut (the site is stopped), and the site restarts: reads of what is not here wait, and come.
cuts() {
  way=$1; shift
  attaches "$way cut" "$@" --read-only --prefetch none
  check "$way cut: a first read" dd if=$dev of=/dev/null bs=4k count=1 iflag=direct
  kill -STOP $site
  dd if=$dev of=part bs=1M skip=20 count=8 iflag=direct 2>reader & reader=$!
  sleep 2
  if kill -0 $reader 2>/dev/null; then ok "$way cut: a read waits"; else cp reader said; fail "$way cut: a read waits"; fi
  kill -CONT $site
  if wait $reader; then ok "$way cut: the read comes"; else cp reader said; fail "$way cut: the read comes"; fi
  kill -9 $site; wait $site 2>/dev/null
  dd if=$dev of=rest bs=1M skip=28 count=8 iflag=direct 2>reader & reader=$!
  sleep 2
  if kill -0 $reader 2>/dev/null; then ok "$way restart: a read waits"; else cp reader said; fail "$way restart: a read waits"; fi
  : >ticket; serves
  if wait $reader; then ok "$way restart: the read comes"; else cp reader said; fail "$way restart: the read comes"; fi
  check "$way restart: the same bytes again" sh -c "dd if=$dev bs=1M skip=20 count=16 iflag=direct 2>/dev/null | cmp - both"
  ends "$way cut"
}

# A link that does not come back: an error in time.
gives_up() {
  way=$1; shift
  attaches "$way gives up" "$@" --read-only --prefetch none --give-up-after 3s
  kill -STOP $site
  begin=$(cut -d. -f1 /proc/uptime)
  refused "$way gives up: an error" "rror" dd if=$dev of=/dev/null bs=4k skip=9000 count=1 iflag=direct
  took=$(($(cut -d. -f1 /proc/uptime) - begin))
  if [ $took -ge 2 ] && [ $took -lt 40 ]; then ok "$way gives up: in time"; else fail "$way gives up: in time ($took s)"; fi
  kill -CONT $site
  check "$way gives up: it goes on" sh -c "for n in \$(seq 20); do dd if=$dev of=/dev/null bs=4k skip=9000 count=1 iflag=direct && exit 0; sleep 1; done; exit 1"
  ends "$way gives up"
}

attaches "whatever is there"
case $dev in /dev/ublkb*) ok "ublk before nbd" ;; *) fail "ublk before nbd: $dev" ;; esac
refused "attached twice" "is already in use" env DROVER_HOME=/tmp/near drover attach lyon:disk.raw --as nbd
flusher() { for t in /proc/$(daemon)/task/*; do f=$(cut -d' ' -f9 $t/stat); [ $((f & 0x80000)) != 0 ] || { cat $t/comm; return 1; }; done; }
if flusher >said; then ok "every thread is an I/O flusher"; else fail "every thread is an I/O flusher"; fi
ends "whatever is there"
refused "the wrong driver" "other driver" env DROVER_HOME=/tmp/near drover attach lyon:disk.raw --as nbd --device /dev/ublkb0
life nbd --as nbd
life ublk --as ublk
killed nbd --as nbd
killed ublk --as ublk
# What the disk is now, by way of a whole reading.
attaches "all of it" --read-only
dd if=$dev of=both bs=1M skip=20 count=16 iflag=direct 2>/dev/null
ends "all of it"
cuts nbd --as nbd
cuts ublk --as ublk
gives_up nbd --as nbd
gives_up ublk --as ublk
beside nbd --as nbd
beside ublk --as ublk

# A file by FUSE, and a loop device on it.
mkdir -p /tmp/at
dev=$(near mount lyon:disk.raw /tmp/at/disk --device 2>said)
if [ -b "$dev" ]; then ok "loop: attached"; else fail "loop: attached"; fi
check "loop: mount" mount -t ext4 $dev /mnt
check "loop: content" cmp noise /mnt/old
check "loop: write" cp noise /mnt/loop
refused "loop: busy" "/mnt" env DROVER_HOME=/tmp/near drover unmount $dev
check "loop: umount" umount /mnt
ends "loop"
cleared nbd --as nbd
cleared ublk --as ublk
kill -TERM $site; wait $site
if dmesg | grep -q "BUG\|Oops\|blocked for more\|general protection"; then
  dmesg | tail -40 >said; fail "the kernel is well"
else
  ok "the kernel is well"
fi
echo "done"
