# What nfs.rs runs in a machine whose kernel has NFS: /srv is exported to it itself, and each node of the site "far" has it
# mounted at /images in a namespace of its own. Prints "ok WHAT" or "FAIL WHAT" for every check.
cd /tmp
umask 077
url='postgres://drover@10.0.2.100:5432/DATABASE?sslmode=disable'
ok() { echo "ok $1"; }
fail() { echo "FAIL $1"; sed 's/^/  | /' said 2>/dev/null; }
# check WHAT COMMAND...: it has to succeed within five minutes: the machine may be slow.
check() { what=$1; shift; if timeout 300 "$@" >said 2>&1; then ok "$what"; else fail "$what"; fi; }
at() { home=$1; shift; DROVER_HOME=/tmp/$home timeout 300 drover "$@"; }
# soon COMMAND...: it succeeds some time.
soon() { for _ in $(seq 600); do "$@" >/dev/null 2>&1 && return; sleep 0.5; done; false; }

ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0

# The server: version 4.2 only, and what else its helpers would tell it.
mkdir -p /srv /images /proc/fs/nfsd /var/lib/nfs/v4recovery
mount -t tmpfs none /srv
mount -t nfsd nfsd /proc/fs/nfsd
echo "nfsd 127.0.0.1 2147483647 here" >/proc/net/rpc/auth.unix.ip/channel
# Read and write, for root too, as it is asked for; its number is 0, which makes it the root of what is exported.
echo "here /srv 2147483647 9218 65534 65534 0" >/proc/net/rpc/nfsd.export/channel
printf 'here 1 \\x00000000 2147483647 /srv\n' >/proc/net/rpc/nfsd.fh/channel
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
echo "-3 +4 +4.1 +4.2" >/proc/fs/nfsd/versions
echo "tcp 2049" >/proc/fs/nfsd/portlist
echo 4 >/proc/fs/nfsd/threads
echo Y >/proc/fs/nfsd/v4_end_grace

# serves HOME PORT [MOUNT OPTIONS]: a node in a namespace of its own; sets node.
serves() {
  unshare -m sh -c '
    mount -i $3 /images || exit 1
    DROVER_HOME=/tmp/$1 exec drover serve --listen 127.0.0.1:$2' \
    sh "$1" "$2" "${3:--t nfs4 -o vers=4.2,hard,nosharecache,addr=127.0.0.1,clientaddr=127.0.0.1 127.0.0.1:/}" >$1.ticket 2>>$1.log &
  node=$!
  soon [ -s $1.ticket ] || { fail "$1: it serves"; tail -5 $1.log; }
}
is_nfs() { grep -q '^127.0.0.1:/ /images nfs4 .*vers=4.2' /proc/$1/mounts; }

for home in a b c; do
  at $home init >said 2>&1 || fail "init"
  echo "images = \"/images\"
node = \"$home\"
name = \"far\"
node-term = \"20s\"
reserve = \"1M\"
catalog = \"$url\"" >$home/config.toml
done
cp a/identity.key b/identity.key
cp a/identity.key c/identity.key
serves a 7377
a=$node
check "the database answers" env DROVER_HOME=/tmp/a drover nodes
serves b 7378
b=$node
if is_nfs $a; then ok "a: its mount is NFS"; else fail "a: its mount is NFS"; fi
if is_nfs $b; then ok "b: its mount is NFS"; else fail "b: its mount is NFS"; fi

# One whose directory is another one does not start.
unshare -m sh -c 'mount -i -t tmpfs none /images; DROVER_HOME=/tmp/c exec timeout 300 drover serve --listen 127.0.0.1:7379' >said 2>&1
if grep -q "directory" said && ! grep -q ticket said; then ok "another directory is refused"; else fail "another directory is refused"; fi

at near init >said 2>&1 || fail "init"
dd if=/dev/urandom of=web.img bs=1M count=8 2>/dev/null
dd if=/dev/urandom of=db.img bs=1M count=12 2>/dev/null
# That of the second node names both.
at near pair - --name far <b.ticket >said 2>&1 || fail "pair"
check "an image is sent" env DROVER_HOME=/tmp/near drover send web.img far
check "a: the image is whole" env DROVER_HOME=/tmp/a drover verify web.img
check "b: the image is whole" env DROVER_HOME=/tmp/b drover verify web.img
cmp web.img /proc/$a/root/images/web.img && cmp web.img /proc/$b/root/images/web.img || fail "its bytes"

# The node that receives an image is killed.
at near send db.img far --limit 1M >sent 2>&1 &
send=$!
some() { at $1 transfers --json | grep -q '"done_bytes":[1-9][0-9]\{6,\}'; }
receives() { some a && to=a || { some b && to=b; }; }
soon receives || { fail "it arrives"; cat sent; }
case $to in a) kill -9 $a; other=b ;; b) kill -9 $b; other=a ;; esac
fenced() { at $other nodes --json | tr '{' '\n' | grep "\"name\":\"$to\"" | grep -q '"state":"fenced"'; }
if soon fenced; then ok "b takes over from a"; else fail "b takes over from a"; at $other nodes; fi
if wait $send; then ok "the rest goes to b"; else fail "the rest goes to b"; cat sent; tail -5 $other.log; fi
rm -f $to.ticket
serves $to 7380
check "a: what b has received is whole" env DROVER_HOME=/tmp/$to drover verify db.img
cmp db.img /proc/$node/root/images/db.img || fail "its bytes"
if dmesg | grep -q 'BUG:\|Oops\|general protection'; then fail "the kernel is well"; dmesg | tail -30; else ok "the kernel is well"; fi
echo done
