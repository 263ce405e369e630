//! QEMU's guest agent: found in a real QEMU, and asked as a real program, on this host instead of in a guest.

use std::process::{Command, Stdio};
use std::time::Instant;

use drover_hypervisor::testing::{Launch, PATIENCE, program};
use drover_hypervisor::{Agent, GuestAgent};

#[tokio::test]
async fn the_port_of_an_agent_is_found() {
    let Some(()) = program("the_port_of_an_agent_is_found") else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut without = Launch::new().start(directory.path(), "without");
    let machine = without.machine().await;
    assert_eq!(machine.guest_agent().await.unwrap(), Agent::None);
    let socket = directory.path().join("a,b.qga");
    // A comma in a value is written twice.
    let socket = socket.display().to_string().replace(',', ",,");
    let port = format!(
        "-device virtio-serial-pci -chardev socket,id=qga,path={socket},server=on,wait=off \
         -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0"
    );
    let mut with = Launch::new().with(&port).start(directory.path(), "with");
    let machine = with.machine().await;
    // No program in the machine has opened it.
    assert_eq!(machine.guest_agent().await.unwrap(), Agent::Silent);
}

#[tokio::test]
async fn a_real_agent_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("qga");
    // It must not freeze this host: only what ends a freeze is allowed, where nothing is frozen.
    let spawned = Command::new("qemu-ga")
        .args(["--method", "unix-listen", "--path"])
        .arg(&socket)
        .args(["--statedir"])
        .arg(directory.path())
        .args(["-b", "guest-fsfreeze-freeze,guest-fsfreeze-freeze-list"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut process = match spawned {
        Ok(process) => process,
        Err(e) => {
            eprintln!("SKIP a_real_agent_is_asked: no qemu-ga (qemu-guest-agent): {e}");
            return;
        }
    };
    let begun = Instant::now();
    while !socket.exists() && begun.elapsed() < PATIENCE {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let mut agent = GuestAgent::connect(&socket).await.unwrap();
    let refused = agent.freeze().await;
    let thawed = agent.thaw().await;
    process.kill().unwrap();
    process.wait().unwrap();
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("the guest agent says"), "{refused}");
    assert_eq!(thawed.unwrap(), 0);
}
