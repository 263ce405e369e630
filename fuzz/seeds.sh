#!/bin/bash
# Makes small inputs that targets should start from. Needs qemu-img for images;
# without it the image target starts without seeds and prints a note.
set -euo pipefail
cd "$(dirname "$0")"

# seed TARGET NAME BYTES: an input with these bytes (as printf takes them).
seed() {
    mkdir -p "corpus/seeds/$1"
    printf "$3" >"corpus/seeds/$1/$2"
}

zeros() { printf '\\0%.0s' $(seq "$1"); }
# Three data blocks of batch 0, a strong and a weak head; with its digests and proof, and to be
# given some.
front='\0\3\1\3\1\0\1\1'
seed calls call '\12test.count\254\2'
seed calls refusal '\3\2no\0'
seed batch_decode whole "\\0$front$(zeros 68)"
seed batch_decode front "\\3$front"
seed batch_decode mixed '\50\1\144\3\12\62\50\0\2\1\3'
seed match_event_decode match "\\5\\7$front$(zeros 68)"
seed match_event_decode begin '\0\7'
seed match_event_decode trim '\11\0\5\200\10'
# A flock of two images, and one of them could not be sent.
seed flock_messages order "\\4shop$(zeros 16)\\1\\2\\5a.img\\0\\5b.img\\1$(zeros 32)"
seed flock_messages end "$(zeros 16)\\1\\1\\2no"
# A machine with a disk.
seed machine_spec disk '\12pc-q35-7.2\0\0\6qemu64\1\4avx2\0\1\1\1\1\1\1\1\6pc.ram\200\200\200\40\200\200\200\40\0\0\0\0\1\200\200\200\2\1\16virtio-blk-pci\1\3vd0\0\2\4addr\1\20\6serial\2\1x\1\0'
# For ten blocks: literal, an image's, the sequence cache's; one store.
seed plan_decode plan '\12\0\3\4\0\3\5\7\150\3\16\50\1\5\6\2'
seed plan_decode answer '\12\0\1\1\12\0\0'
seed plan_decode freed '\0\0\5\3\1\2\3'
# A block of part 0 is left, all was said, and it arrives as zeros.
seed program_frames left '\10\4\0\0\1\1\1\11\2\0ok\0\6\0\0\200\40\200\40\2'
# A round of two disks begins and is complete, the next one has one disk, and the replica takes over.
asked="\\3web$(zeros 16)\\1"
seed replica_calls round "\\1\\0\\31\\0$asked\\2\\0\\0\\0\\1\\126\\0\\3web\\1$(zeros 16)\\2$(zeros 64)\\0\\30\\0$asked\\1\\0\\0\\3\\0\\0"
# Seven slots from 5 on are pending from image 2, and three of them no more.
seed pending_journal two "\\1\\0\\0\\0\\7\\0\\0\\0\\5$(zeros 7)\\2$(zeros 7)\\12$(zeros 31)\\2\\0\\0\\0\\3\\0\\0\\0\\6$(zeros 47)"
# A disk of ten blocks; two boots read its second and third.
seed profile two "$(zeros 32)\\200\\300\\2\\2\\2\\2\\2\\2\\1abcdefghijklABCDEFGHIJKL"
seed need_decode need '\2\5\3\11\1'
seed literal_decode text '\0drover drover drover drover'
seed literal_decode lz4 '\1\25\0\0\1\1\0\1\37\0\1\0\377\377\377\377\377\377\377\377\377\377\377\377\377'
seed roles destination '\1\12\0\0\3\0\4\2\4\5\0\0\12\5\0\7'
seed roles source '\0\12\0\0\1\2\1\5\3\0\4\5\1'
seed image_map blocks '\1\100\1\100'
# A run of two zero blocks and one of three others; two blocks in use of one container.
seed vault_objects page '\1\5\0\1\2\4\7\0\24'
seed vault_objects uses '\3\1\1w\1\5\0\24\72\60\0\0\1\0\0\0\0\0\1\0\20\0\0\0\1\0\2\0'
seed vault_objects aborted '\4\1'
seed vault_objects sealed '\5containers/x/1.0'
seed vault_objects peer '\6\20\10\0\5vault\3\21\3abc\20\7\2\5vault'
seed transfer_log batch "\\2\\3\\121\\0\\114$front$(zeros 68)\\1\\3\\0\\0"

# Of Debian 12 with two packages and a block of its disk; a log that forgets a file.
seed known_files likeness "\\0\\1\\6debian\\00212\\0\\0\\4ext4\\2\\2\\5\\7\\1\\3\\11\\1\\2\\1\\2"
seed known_files log "\\1DRVRKNWN\\1\\0\\0\\0\\4\\0\\0\\0$(zeros 4)\\2/a\\0"
# A header without a caller's, and a frame of one record.
seed chunk_log frame "DRVRCLG\\0\\1$(zeros 23)CLfr\\1\\0\\0\\0\\1$(zeros 47)"
# A disk of four chunks in its second generation, two of them written; the map of one of 300 MiB, in its first.
seed generations summary "\\0\\1$(zeros 16)\\0\\0\\100$(zeros 13)\\24\\1\\2abcdefghABCDEFGH\\2\\0\\1\\1\\1\\2$(zeros 4)"
seed generations map "\\1DRVRCLG\\0\\1\\0\\0\\0\\30$(zeros 27)\\0\\0\\300\\22$(zeros 12)CLfr\\1\\0\\0\\0\\1$(zeros 23)\\1$(zeros 19)\\341\\0\\0\\0"
# option NUMBER LENGTH DATA, request COMMAND FLAGS OFFSET LENGTH, as an NBD client sends them.
option() { printf 'IHAVEOPT\\0\\0\\0\\%s\\0\\0\\0\\%s%s' "$1" "$2" "${3-}"; }
request() { printf '\\45\\140\\225\\23\\0\\%s\\0\\%sabcdefgh\\0\\0\\0\\0\\0\\0\\%s\\0\\0\\0\\%s\\0' "$2" "$1" "$3" "$4"; }
context='\0\0\0\1a\0\0\0\1\0\0\0\17base:allocation'
info='\0\0\0\1a\0\3\0\1\0\2\0\3'
seed nbd whole "\\0\\3$(option 10 0)$(option 3 0)$(option 12 34 "$context")$(option 7 15 "$info")$(request 0 4 2 20)\
$(request 7 10 2 20)$(request 6 22 2 20)$(request 3 0 0 0)$(request 4 1 2 20)$(request 2 0 0 0)"
seed nbd tls "\\2\\3$(option 3 0)$(option 5 0)$(option 10 0)$(option 6 15 "$info")$(option 7 6 '\0\0\0\0\0\0')$(request 0 0 0 1)"
seed nbd name "\\0\\0$(option 1 1 b)$(request 1 0 0 20)"
# A server's answers to the three options, then to a read, a write, a flush and a block status; the same replies alone.
answer() { printf '\\0\\3\\350\\211\\4\\125\\145\\251\\0\\0\\0\\%s\\0\\0\\0\\%s\\0\\0\\0\\%s%s' "$1" "$2" "$3" "${4-}"; }
piece() { printf '\\146\\216\\63\\357\\0\\%s\\0\\%s\\0\\0\\0\\0\\0\\0\\0\\%s\\0\\0\\%s\\%s' "$1" "$2" "$3" "$4" "$5"; }
simple() { printf '\\147\\104\\146\\230\\0\\0\\0\\%s\\0\\0\\0\\0\\0\\0\\0\\%s' "$1" "$2"; }
offset='\0\0\0\0\0\0\40\0'
replied="$(piece 1 2 1 0 14)$offset\0\0\20\0$(simple 0 3)$(simple 5 4)$(piece 1 5 5 0 14)\0\0\0\1\0\20\0\0\0\0\0\3"
seed nbd_replies replies "\1$replied"
seed nbd_replies plain "\0$(simple 0 3)$(simple 34 1)"
seed nbd_replies whole "\2NBDMAGICIHAVEOPT\0\3$(answer 10 1 0)$(answer 12 4 23 '\0\0\0\1base:allocation')$(answer 12 1 0)\
$(answer 7 3 14 "\0\0\0\0\0\0\0\20\0\0\4\157")$(answer 7 3 16 '\0\3\0\0\2\0\0\0\20\0\2\0\0\0')$(answer 7 1 0)$replied"
# Checksums need not be right: epoch 1 of a zero digest, zeros for the first block, the seal.
seed overlay_files redo "\\1DRVRREDO\\1$(zeros 55)\\2$(zeros 16)\\20$(zeros 14)\\3$(zeros 7)\\1$(zeros 7)\\140$(zeros 15)"
# 10,000 bytes in chunks of 4096; its first chunk is empty, or there.
directory='DRVRDIR\0\1\0\0\0\0\20\0\0\20\47\0\0\0\0\0\0'
seed directory_device empty "$directory$(zeros 4)"
seed directory_device chunk "$directory$(zeros 4)$(zeros 4096)"
# Objects of 16 KiB, of which there are four and none was written; somebody has the lease. Its checksum need not be right.
seed chunk_store disk "DRVRSTO\\0\\1\\0\\0\\0\\0\\20\\0\\0\\0\\100\\0\\0\\2\\0\\0\\0\\0\\0\\1\\0\\0\\0\\0\\0$(zeros 16)\\1$(zeros 7)\\1$(zeros 7)$(zeros 8)\\7$(zeros 23)\\1\\0\\0\\0x$(zeros 12)"
seed chunk_store reply '*2\r\n$1\r\n0\r\n*1\r\n$3\r\nabc\r\n'
# An opening message; a background read, part of an epoch; what a site answers to an opening and to a read of two chunks, of
# which one is zeros; and the pieces of such an answer.
seed mount_messages open "\\0$(zeros 16)\\1\\1\\7web.img\\1\\200\\200\\4\\0\\2at"
seed mount_messages read '\1\5\0\0\1\0\20\1'
seed mount_messages write '\1\7\0\5\2\1\0\200\40\0some bytes'
seed mount_messages opened "\\0\\200\\200\\4\\200\\40$(zeros 32)\\1\\1\\0\\0\\1\\1\\1\\1"
seed mount_messages chunks "\\2\\11\\0\\0\\1\\0\\2\\1\\2\\0\\0\\1$(zeros 40)"
seed mount_messages pieces "\\3\\4$(zeros 7)\\2\\0\\0\\0\\1"
# Two messages and the beginning of a third; a list of a disk; names of files.
seed qmp_messages stream '\7{"QMP": {"version": {"qemu": {"micro": 1, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}\r\n'\
'{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}\r\n{"id": 1, "error": {"class": "GenericError", "desc": "\\"'
seed qmp_messages disks '\377{"id": 1, "return": [{"device": "", "qdev": "/machine/peripheral/vd0/x", "removable": false, "inserted": '\
'{"node-name": "d", "drv": "raw", "ro": false, "image": {"filename": "nbd://h:1/e", "virtual-size": 512}, '\
'"dirty-bitmaps": [{"name": "b", "count": 1, "granularity": 512}]}}]}'
seed qmp_messages unix '\1nbd+unix:///e%%20x?socket=/run/s'
seed qmp_messages json '\1json:{"driver": "raw", "file": {"driver": "nbd", "export": "e", "server": {"type": "inet", "host": "h", "port": "9"}}}'

# sectors FILE: the sectors that are not zero, each with its number, then the byte that marks this form.
sectors() {
    perl -e 'local $/; open F, "<:raw", $ARGV[0]; $_ = <F>; binmode STDOUT;
        for my $i (0 .. length() / 512 - 1) {
            my $s = substr($_, $i * 512, 512);
            print pack("V", $i) . $s if $s =~ /[^\0]/;
        }
        print "\x02";' "$1"
}

# Small file systems with an operating system and a kernel.
mke2fs=$(PATH=$PATH:/usr/sbin:/sbin command -v mke2fs || true)
guests=corpus/seeds/guest_look
if [ -n "$mke2fs" ] && [ ! -e "$guests/ext2" ]; then
    mkdir -p "$guests"
    dir=$(mktemp -d)
    mkdir -p "$dir/tree/etc" "$dir/tree/boot/grub" "$dir/tree/var/lib/dpkg"
    printf 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n' >"$dir/tree/etc/release"
    ln -s release "$dir/tree/etc/os-release"
    printf 'Package: a\nStatus: install ok installed\nVersion: 1\n\n' >"$dir/tree/var/lib/dpkg/status"
    seq 1 3000 >"$dir/tree/boot/vmlinuz-6.1"
    printf 'menuentry x {\n linux /boot/vmlinuz-6.1 ro\n initrd /boot/vmlinuz-6.1\n}\n' >"$dir/tree/boot/grub/grub.cfg"
    for kind in ext2 ext3 ext4; do
        "$mke2fs" -q -F -t $kind -b 1024 -N 32 -J size=1 -d "$dir/tree" "$dir/$kind" 2M >/dev/null 2>&1 ||
            "$mke2fs" -q -F -t $kind -b 1024 -N 32 -d "$dir/tree" "$dir/$kind" 2M >/dev/null
        sectors "$dir/$kind" >"$guests/$kind"
    done
    rm -rf "$dir"
fi

images=corpus/seeds/image_open
mkdir -p "$images"
if ! command -v qemu-img >/dev/null || ! command -v qemu-io >/dev/null; then
    echo "seeds.sh: no qemu-img: image targets start without seeds"
    exit 0
fi

# image NAME FORMAT OPTIONS: a small image with a little data, as it is and as sectors.
image() {
    local out=$images/$1
    if [ -e "$out-sectors" ]; then return; fi
    qemu-img create -q -f "$2" ${3:+-o "$3"} "$out.tmp" 256k >/dev/null
    qemu-io -f "$2" -c "write -P 7 0 5000" -c "write -P 8 128k 2k" -c "write -z 64k 64k" "$out.tmp" >/dev/null
    if [ "${4-}" = snapshot ]; then
        qemu-img snapshot -c a "$out.tmp"
        qemu-io -f "$2" -c "write -P 9 0 1k" "$out.tmp" >/dev/null
    fi
    sectors "$out.tmp" >"$out-sectors"
    printf '\0' >>"$out.tmp"
    # What is longer than the fuzzer's limit would be cut.
    if [ "$(stat -c %s "$out.tmp")" -lt 300000 ]; then mv "$out.tmp" "$out"; else rm "$out.tmp"; fi
}

image qcow2-v2 qcow2 compat=0.10,cluster_size=512
image qcow2-v3 qcow2 cluster_size=512
image qcow2-4k qcow2 cluster_size=4096
image qcow2-snapshot qcow2 cluster_size=512 snapshot
image qcow2-sub qcow2 cluster_size=16k,extended_l2=on
image vmdk vmdk subformat=monolithicSparse
image vdi vdi ""
image vhd vpc subformat=dynamic,force_size=on
image vhd-fixed vpc subformat=fixed

if [ ! -e "$images/qcow2-zlib" ]; then
    dir=$(mktemp -d)
    seq 1 40000 >"$dir/text"
    truncate -s 256k "$dir/text"
    for type in zlib zstd; do
        qemu-img convert -c -f raw -O qcow2 -o "cluster_size=4096,compression_type=$type" "$dir/text" "$dir/out"
        printf '\0' >>"$dir/out"
        cp "$dir/out" "$images/qcow2-$type"
    done
    qemu-img convert -f raw -O vmdk -o subformat=streamOptimized "$dir/text" "$dir/out.vmdk"
    cp "$dir/out.vmdk" "$images/vmdk-stream"
    printf '\0' >>"$images/vmdk-stream"
    qemu-img create -q -f vmdk -o subformat=monolithicFlat "$dir/flat.vmdk" 1M
    cp "$dir/flat.vmdk" "$images/vmdk-text"
    printf '\0' >>"$images/vmdk-text"
    for subformat in dynamic fixed; do
        qemu-img create -q -f vhdx -o block_size=1M,log_size=1M,subformat=$subformat "$dir/x.vhdx" 2M
        qemu-io -f vhdx -c "write -P 7 5k 3k" "$dir/x.vhdx" >/dev/null
        sectors "$dir/x.vhdx" >"$images/vhdx-$subformat"
    done
    rm -rf "$dir"
fi
