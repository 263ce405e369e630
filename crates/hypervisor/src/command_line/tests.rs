//! Command lines as people and programs write them.

use super::*;
use crate::machine::parse_disks;

fn parse(line: &str) -> CommandLine {
    CommandLine::parse(line.split_whitespace().map(String::from).collect()).unwrap()
}

/// A disk as `query-block` lists it.
fn disk(device: &str, qdev: &str, node: &str, file: &str, read_only: bool) -> Disk {
    let answer = json!([{
        "device": device, "qdev": qdev, "removable": false, "locked": false, "type": "unknown",
        "inserted": {
            "node-name": node, "drv": "qcow2", "ro": read_only, "encrypted": false,
            "image": {"filename": file, "virtual-size": 4096, "format": "qcow2"}
        }
    }]);
    parse_disks(answer).unwrap().remove(0)
}

fn waits(line: &str, disks: &[Disk]) -> String {
    let waiting = parse(line).waiting(disks, "/run/web.qmp").unwrap();
    let end = " -qmp unix:/run/web.qmp,server=on,wait=off -S -incoming defer -sandbox on";
    let text = waiting.shell().replace(" \\\n  ", " ");
    text.strip_suffix(end).unwrap_or(&text).to_owned()
}

#[test]
fn what_belongs_to_one_run_is_left_out() {
    let line = "qemu-system-x86_64 -name web --enable-kvm -m 2G -S -daemonize -pidfile /run/p -incoming defer \
                -qmp unix:/run/q,server=on -chardev socket,id=mon,path=/run/m,server=on -mon chardev=mon,mode=control \
                -chardev stdio,id=hmp -mon hmp -device virtio-net-pci,netdev=n0 -netdev tap,id=n0";
    assert_eq!(
        waits(line, &[]),
        "qemu-system-x86_64 -name web -enable-kvm -m 2G -chardev stdio,id=hmp -mon hmp -device virtio-net-pci,netdev=n0 \
         -netdev tap,id=n0"
    );
    let line = "qemu-kvm -chardev socket,id=mon,path=/run/m -mon mon,mode=control";
    assert_eq!(waits(line, &[]), "qemu-kvm");
    let own = parse("qemu-kvm -sandbox on,spawn=deny").waiting(&[], "/run/q");
    assert!(own.unwrap().shell().ends_with("-sandbox on,spawn=deny"));
}

#[test]
fn block_nodes_of_a_disk_become_one_that_is_empty() {
    let line = "qemu-system-x86_64 -blockdev driver=file,filename=/base.qcow2,node-name=b \
                -blockdev driver=qcow2,file=b,node-name=base,read-only=on \
                -blockdev {\"driver\":\"file\",\"filename\":\"/web.qcow2\",\"node-name\":\"f\"} \
                -blockdev {\"driver\":\"qcow2\",\"file\":\"f\",\"backing\":\"base\",\"node-name\":\"disk\"} \
                -device virtio-blk-pci,drive=disk,id=vd0 \
                -blockdev driver=file,filename=/cd.iso,node-name=cd,read-only=on -device scsi-cd,drive=cd";
    let disks = [
        disk(
            "",
            "/machine/peripheral/vd0/virtio-backend",
            "disk",
            "/web.qcow2",
            false,
        ),
        disk(
            "",
            "/machine/peripheral-anon/device[1]",
            "cd",
            "/cd.iso",
            true,
        ),
    ];
    assert_eq!(
        waits(line, &disks),
        "qemu-system-x86_64 \
         -blockdev '{\"driver\":\"null-co\",\"node-name\":\"empty-1\",\"read-zeroes\":true,\"size\":4096}' \
         -blockdev '{\"driver\":\"raw\",\"file\":\"empty-1\",\"node-name\":\"disk\"}' \
         -device virtio-blk-pci,drive=disk,id=vd0 \
         -blockdev driver=file,filename=/cd.iso,node-name=cd,read-only=on -device scsi-cd,drive=cd"
    );
}

#[test]
fn drives_become_empty_and_keep_their_place() {
    let line = "qemu-system-x86_64 -drive file=/web.qcow2,format=qcow2,if=none,id=d0,cache=none \
                -device virtio-blk-pci,drive=d0 -drive file=/seed.iso,if=virtio,media=cdrom -hda /old.img";
    let disks = [
        disk(
            "d0",
            "/machine/peripheral-anon/device[0]",
            "#block100",
            "/web.qcow2",
            false,
        ),
        disk("virtio0", "", "#block200", "/seed.iso", true),
        disk("ide0-hd0", "", "#block300", "/old.img", false),
    ];
    assert_eq!(
        waits(line, &disks),
        "qemu-system-x86_64 -drive \
         if=none,id=d0,node-name=disk-block100,driver=raw,file.driver=null-co,file.size=4096,file.read-zeroes=on \
         -device virtio-blk-pci,drive=d0 -drive file=/seed.iso,if=virtio,media=cdrom -drive \
         index=0,media=disk,node-name=disk-block300,driver=raw,file.driver=null-co,file.size=4096,file.read-zeroes=on"
    );
}

#[test]
fn what_is_not_understood_is_said() {
    let words = |line: &str| {
        line.split_whitespace()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let refused = |line: &str| CommandLine::parse(words(line)).unwrap_err();
    assert!(refused("sshd -D").contains("not to QEMU"));
    assert!(refused("qemu-kvm disk.img").contains("disk.img"));
    let web = disk("virtio0", "", "#block1", "/web.qcow2", false);
    let unknown = parse("qemu-kvm -drive if=virtio,file=/else").waiting(&[web], "/q");
    assert!(unknown.unwrap_err().contains("#block1"));
    let lost = parse("qemu-kvm -snapshot").waiting(&[], "/q");
    assert!(lost.unwrap_err().contains("-snapshot"));
}

#[test]
fn files_of_the_host_are_listed() {
    let line = "qemu-kvm -kernel /boot/k -chardev socket,id=c,path=/run/c -drive file=/a.iso,if=virtio -qmp unix:/q \
                -netdev tap,id=n -serial unix:/s";
    assert_eq!(parse(line).files(), ["/a.iso", "/boot/k", "/run/c", "/s"]);
}

#[test]
fn a_shell_reads_what_was_written() {
    let line = CommandLine {
        program: "qemu-kvm".into(),
        options: vec![
            ("-append".into(), Some("it's $HOME".into())),
            ("-S".into(), None),
        ],
    };
    assert_eq!(
        line.shell(),
        "qemu-kvm \\\n  -append 'it'\\''s $HOME' \\\n  -S"
    );
}
