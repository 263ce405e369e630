//! What a real QEMU is made of, and one that is built of what was said: it takes the state of the first, and is described the
//! same.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use drover_hypervisor::CommandLine;
use drover_hypervisor::machine::{Capability, Channel, Machine, MigrationStatus};
use drover_hypervisor::spec::{Built, Card, Spec, build, disk_node};
use drover_hypervisor::testing::{PATIENCE, program};

use tokio::time::{Instant, sleep};

use crate::util::raw;

/// A QEMU that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connects, when it answers.
async fn ready(socket: &Path) -> Machine {
    let begun = Instant::now();
    loop {
        match Machine::connect(socket).await {
            Ok(machine) => return machine,
            Err(e) => assert!(begun.elapsed() < PATIENCE, "{e}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// The names and sizes of the writable disks.
async fn moving(machine: &Machine) -> Vec<(String, u64)> {
    let disks = machine.disks().await.unwrap().into_iter();
    let mut found: Vec<_> = disks
        .filter_map(|disk| Some((disk.name, disk.medium?)))
        .filter(|(_, medium)| !medium.read_only)
        .collect();
    // Those that were built are in the order of what was said.
    if found.iter().any(|(_, medium)| medium.node == disk_node(0)) {
        found.sort_by(|a, b| a.1.node.cmp(&b.1.node));
    }
    let found = found.into_iter();
    found.map(|(name, medium)| (name, medium.size)).collect()
}

/// Starts a machine, and another one as the first is said to be; what is said of it.
async fn is_built_again(directory: &Path, arguments: &str) -> Spec {
    let (near, far) = (directory.join("near.qmp"), directory.join("far.qmp"));
    let arguments = arguments.split_whitespace().map(str::to_owned);
    let arguments: Vec<String> = arguments.collect();
    let first = Command::new("qemu-system-x86_64")
        .args(&arguments)
        .args([
            "-accel", "tcg", "-display", "none", "-monitor", "none", "-S",
        ])
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", near.display()))
        .stdin(Stdio::null())
        .spawn();
    let _first = Running(first.unwrap());
    let source = ready(&near).await;
    let line = CommandLine::of(&near).unwrap();
    let spec = Spec::read(&source, &line, moving(&source).await)
        .await
        .unwrap();
    let site = Built {
        program: "qemu-system-x86_64".into(),
        name: "web".into(),
        max_memory: 2 << 30,
        max_cpus: 4,
        network: vec![Card::User],
        kernel: None,
        incoming: true,
    };
    let built = build(&spec, &site).unwrap();
    drover_hypervisor::spec::audit(&built).unwrap();
    let listen = |path: &Path| -> OwnedFd { UnixListener::bind(path).unwrap().into() };
    let mut second = Command::new(&built.program);
    for (option, argument) in &built.options {
        second.arg(option).args(argument);
    }
    let second = second
        .stdin(Stdio::from(listen(&far)))
        .stdout(Stdio::from(listen(&directory.join("far.console"))))
        .spawn();
    let _second = Running(second.unwrap());
    let destination = ready(&far).await;
    for machine in [&source, &destination] {
        let events = [Capability::Events];
        machine.set_capabilities(&events, true).await.unwrap();
    }
    let memory = Channel::Unix(directory.join("memory"));
    destination.migrate_incoming(&memory).await.unwrap();
    let mut events = source.events();
    source.migrate(&memory).await.unwrap();
    let wanted = MigrationStatus::Completed;
    source
        .wait_migration(&mut events, &wanted, PATIENCE)
        .await
        .unwrap();
    let mut events = destination.events();
    if destination.migration().await.unwrap().status != wanted {
        destination
            .wait_migration(&mut events, &wanted, PATIENCE)
            .await
            .unwrap();
    }
    let line = CommandLine::of(&far).unwrap();
    let again = Spec::read(&destination, &line, moving(&destination).await);
    assert_eq!(again.await.unwrap(), spec);
    spec
}

#[tokio::test]
async fn a_machine_of_few_words_is_built_again() {
    if program("a_machine_of_few_words_is_built_again").is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = raw(directory.path(), "web.raw", 1 << 20);
    let spec = is_built_again(
        directory.path(),
        &format!(
            "-M pc-i440fx-7.2 -m 64M -drive file={},format=raw,if=virtio -nic user,model=e1000 -serial null",
            image.display()
        ),
    )
    .await;
    let models: Vec<&str> = spec
        .devices
        .iter()
        .map(|device| device.model.as_str())
        .collect();
    for model in [
        "VGA",
        "isa-serial",
        "ide-cd",
        "floppy",
        "e1000",
        "virtio-blk-pci",
    ] {
        assert!(models.contains(&model), "{model} is not among {models:?}");
    }
}

#[tokio::test]
async fn a_machine_of_many_devices_is_built_again() {
    if program("a_machine_of_many_devices_is_built_again").is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let disks = ["a", "b", "c"].map(|name| raw(directory.path(), name, 1 << 20));
    let nodes = disks.iter().zip(["da", "db", "dc"]).map(|(path, node)| {
        format!(
            "-blockdev driver=file,filename={},node-name={node} ",
            path.display()
        )
    });
    let nodes: String = nodes.collect();
    let devices = "-device pcie-root-port,id=rp1,chassis=1,slot=1 -device virtio-net-pci,bus=rp1,netdev=n,id=n0,romfile= \
        -netdev user,id=n -device virtio-scsi-pci,id=scsi0 -device scsi-hd,bus=scsi0.0,drive=da,lun=3,serial=a-1 \
        -device scsi-cd,bus=scsi0.0,lun=4 -device ide-hd,drive=db,bus=ide.2 -device virtio-blk-pci,drive=dc,num-queues=2 \
        -device qemu-xhci,id=usb -device usb-tablet,bus=usb.0 -device usb-kbd,bus=usb.0 -device virtio-balloon-pci \
        -device virtio-rng-pci -device virtio-serial-pci,id=vs -chardev null,id=ga \
        -device virtserialport,bus=vs.0,chardev=ga,name=org.qemu.guest_agent.0 -device virtio-vga -device pvpanic \
        -device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87 -device pcie-pci-bridge,id=br -device i6300esb,bus=br,addr=1";
    let spec = is_built_again(
        directory.path(),
        &format!(
            "-nodefaults -M pc-q35-7.2,memory-backend=ram0,hpet=off -object memory-backend-ram,id=ram0,size=64M \
             -m 64M,slots=2,maxmem=1G -smp 2,maxcpus=4,sockets=2 -cpu qemu64,+avx2,-svm -boot order=nc \
             -uuid 12345678-1234-1234-1234-123456789abc {nodes} {devices}"
        ),
    )
    .await;
    assert_eq!((spec.devices.len(), spec.disks.len()), (19, 3));
    assert_eq!((spec.features.len(), spec.boot_order.as_str()), (2, "nc"));
}
