//! A libvirt daemon of a test, of an ordinary user, with directories of its own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Guest, PATIENCE, Qemu, skip};

const DAEMON: &str = "/usr/sbin/libvirtd";

/// What the machines are started with. libvirt gives a machine whole MiB, and of those QEMU loses what the machine writes when it
/// migrates without KVM: see [`Machine::check_migratable`](crate::machine::Machine::check_migratable). So these have 8 KiB more.
const EMULATOR: &str = r#"#!/bin/sh
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1; shift; left=$((left - 1))
  case $argument in
    -m) shift; left=$((left - 1)); set -- "$@" -m 99336K ;;
    *'"id":"pc.ram"'*) set -- "$@" "$(printf %s "$argument" | sed 's/"size":[0-9]*/"size":101720064/')" ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec /usr/bin/qemu-system-x86_64 "$@"
"#;

const EMULATOR_NAME: &str = "qemu-system-x86_64";

/// A daemon. It and its machines are killed when this is dropped.
#[derive(Debug)]
pub struct Libvirt {
    daemon: Child,
    directory: PathBuf,
}

impl Libvirt {
    /// Starts one with its files in `directory`, whose path must be short; or says SKIP for `test`, and returns `None`.
    ///
    /// # Panics
    /// When the daemon does not start.
    #[must_use]
    pub fn start(test: &str, directory: &Path) -> Option<Libvirt> {
        let needs = "(libvirt-daemon, libvirt-daemon-driver-qemu, libvirt-clients)";
        if !Path::new(DAEMON).exists() || Command::new("virsh").arg("--version").output().is_err() {
            return skip(test, &format!("no libvirtd or no virsh {needs}"));
        }
        let config = directory.join("c/libvirt");
        fs::create_dir_all(&config).expect("a directory to write to");
        // Without virtlogd.
        fs::write(config.join("qemu.conf"), "stdio_handler = \"file\"\n").expect("a file");
        let emulator = directory.join(EMULATOR_NAME);
        fs::write(&emulator, EMULATOR).expect("a file");
        fs::set_permissions(&emulator, Permissions::from_mode(0o755)).expect("a file");
        Self::launch(test, directory)
    }

    /// Kills the daemon; its machines run on.
    ///
    /// # Panics
    /// When it has made no socket.
    pub fn stop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        fs::remove_file(self.socket()).expect("its socket");
    }

    /// Starts it again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_again(&mut self) {
        let mut again = Self::launch("", &self.directory).expect("a daemon");
        // The machines are this one's: the killed one is dropped without them.
        std::mem::swap(&mut self.daemon, &mut again.daemon);
        again.directory = PathBuf::new();
    }

    fn launch(test: &str, directory: &Path) -> Option<Libvirt> {
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(directory.join("log"))
            .expect("a file");
        // For root it would be the daemon of the system.
        let is_root = rustix::process::geteuid().is_root();
        let mut command = match is_root {
            true => Command::new("unshare"),
            false => Command::new(DAEMON),
        };
        if is_root {
            command.args(["-U", "--map-user=1000", "--map-group=1000", DAEMON]);
        }
        for (variable, name) in [
            ("HOME", "h"),
            ("XDG_RUNTIME_DIR", "r"),
            ("XDG_CONFIG_HOME", "c"),
            ("XDG_CACHE_HOME", "k"),
            ("XDG_DATA_HOME", "d"),
        ] {
            let path = directory.join(name);
            fs::create_dir_all(&path).expect("a directory to write to");
            command.env(variable, path);
        }
        let daemon = command
            .arg("--pid-file")
            .arg(directory.join("pid"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn();
        let mut libvirt = match daemon {
            Ok(daemon) => Libvirt {
                daemon,
                directory: directory.to_owned(),
            },
            Err(e) => return skip(test, &format!("libvirtd is not started: {e}")),
        };
        let begun = Instant::now();
        while !libvirt.socket().exists() {
            let ended = libvirt.daemon.try_wait().expect("a child");
            let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
            if is_root && ended.is_some() && log.starts_with("unshare") {
                return skip(test, &format!("no user namespaces for libvirtd: {log}"));
            }
            assert!(ended.is_none() && begun.elapsed() < PATIENCE, "{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(libvirt)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("r/libvirt/libvirt-sock")
    }

    /// The daemon's URI.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu:///session?socket={}", self.socket().display())
    }

    /// Runs `virsh`; what it says, or how it fails.
    ///
    /// # Errors
    /// What it says then.
    ///
    /// # Panics
    /// When it is not installed.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, String> {
        let uri = self.uri().replace("qemu:", "qemu+unix:");
        let mut command = Command::new("virsh");
        let ran = command.args(["-q", "-c", &uri]).args(arguments).output();
        let ran = ran.expect("virsh");
        match ran.status.success() {
            true => Ok(String::from_utf8_lossy(&ran.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&ran.stderr).into_owned()),
        }
    }

    /// Defines the machine `web`, which boots the guest, with these disks.
    ///
    /// # Panics
    /// When libvirt does not take it.
    pub fn define(&self, guest: &Guest, disks: &str) {
        self.define_with(guest, disks, "pace=10 dirty=4");
    }

    /// The same, where the guest has these parameters.
    ///
    /// # Panics
    /// When libvirt does not take it.
    pub fn define_with(&self, guest: &Guest, disks: &str, parameters: &str) {
        let emulator = self.directory.join(EMULATOR_NAME);
        self.define_on(&emulator, guest, disks, parameters);
    }

    /// The same with a memory as libvirt makes it, of which some QEMUs lose something.
    ///
    /// # Panics
    /// When libvirt does not take it.
    pub fn define_whole(&self, guest: &Guest, disks: &str) {
        let emulator = Path::new("/usr/bin/qemu-system-x86_64");
        self.define_on(emulator, guest, disks, "pace=10 dirty=4");
    }

    fn define_on(&self, emulator: &Path, guest: &Guest, disks: &str, parameters: &str) {
        let emulator = emulator.display();
        let (kernel, initrd) = (guest.kernel.display(), guest.initrd.display());
        let directory = self.directory.display();
        let xml = format!(
            "<domain type='qemu'><name>web</name><uuid>5e8b2a4c-0f4e-4d7a-9d55-3d1f0a1c7e60</uuid><memory unit='MiB'>97</memory><vcpu>1</vcpu>
            <os><type arch='x86_64' machine='pc-i440fx-7.2'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
            <cmdline>console=ttyS0 quiet panic=-1 mitigations=off {parameters}</cmdline></os>
            <cpu mode='custom' match='exact'><model>qemu64</model></cpu><devices>
            <emulator>{emulator}</emulator>{disks}
            <serial type='unix'><source mode='bind' path='{directory}/web.console'/><log file='{directory}/web.log' append='on'/>
            </serial><memballoon model='none'/></devices></domain>"
        );
        let path = self.directory.join("web.xml");
        fs::write(&path, xml).expect("a file");
        let path = path.display().to_string();
        self.virsh(&["define", &path]).expect("a machine");
    }

    /// The console of the machine `web`.
    #[must_use]
    pub fn console(&self) -> Qemu {
        Qemu::of_another(&self.directory, "web")
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        // Its directory may be gone; its machines are not children of the test.
        let named = format!("{}/", self.directory.display());
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = process.file_name();
            let id = name.to_str().and_then(|id| id.parse().ok());
            let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command);
            if let Some(id) = id.and_then(rustix::process::Pid::from_raw)
                && !self.directory.as_os_str().is_empty()
                && command.contains("qemu-system")
                && command.contains(&named)
            {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
        }
    }
}
