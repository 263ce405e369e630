//! The command line of a QEMU, and what it becomes for one that is to receive the same machine elsewhere.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::sockopt::socket_peercred;
use serde_json::{Value, json};

use crate::error::{HypervisorError, is_gone, one_line, plain};
use crate::machine::{Data, Disk, Medium};

/// The program and its options, each with its argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// The program, as it was called.
    pub program: String,
    /// Its options with one dash, in their order.
    pub options: Vec<(String, Option<String>)>,
}

/// Options that do not belong to the machine but to how one QEMU is run.
const OF_THIS_RUN: [&str; 9] = [
    "-S",
    "-daemonize",
    "-incoming",
    "-loadvm",
    "-pidfile",
    "-qmp",
    "-qmp-pretty",
    "-only-migratable",
    "-sandbox",
];

/// Options that name a disk of the machine by its file alone.
const SHORT_DISKS: [(&str, &str); 10] = [
    ("-hda", "index=0,media=disk"),
    ("-hdb", "index=1,media=disk"),
    ("-hdc", "index=2,media=disk"),
    ("-hdd", "index=3,media=disk"),
    ("-cdrom", "index=2,media=cdrom"),
    ("-fda", "if=floppy,index=0"),
    ("-fdb", "if=floppy,index=1"),
    ("-pflash", "if=pflash"),
    ("-mtdblock", "if=mtd"),
    ("-sd", "if=sd"),
];

/// Options of a `-drive` that say how the machine sees it, not where its bytes are.
const OF_THE_DEVICE: [&str; 8] = [
    "if", "id", "index", "bus", "unit", "media", "werror", "rerror",
];

impl CommandLine {
    /// The command line of the process that listens on this QMP socket. It must run on this host, and be one of this user's
    /// if this is not root.
    ///
    /// # Errors
    /// [`HypervisorError::Connect`]; [`HypervisorError::Unsupported`] if the process has ended or cannot be read, as when it made
    /// itself a daemon, or is not a QEMU with options.
    pub fn of(socket: &Path) -> Result<CommandLine, HypervisorError> {
        let name = one_line(&socket.display().to_string());
        let connect = |e: &io::Error| HypervisorError::Connect {
            socket: name.clone(),
            reason: plain(e),
            is_gone: is_gone(e),
        };
        let unsupported = |reason: String| HypervisorError::Unsupported {
            socket: name.clone(),
            reason,
        };
        let stream = UnixStream::connect(socket).map_err(|e| connect(&e))?;
        let process = socket_peercred(&stream).map_err(|e| connect(&e.into()))?;
        let process = process.pid.as_raw_nonzero();
        let told = fs::read(format!("/proc/{process}/cmdline")).map_err(|e| {
            unsupported(format!(
                "was started by process {process}, whose command line cannot be read ({}): start it without -daemonize",
                plain(&e)
            ))
        })?;
        let own = CommandLine::parse(arguments(&told));
        // One that drover has started listens at a socket of the drover that looks after it.
        let threads = fs::read_dir(format!("/proc/{process}/task"));
        let threads = threads.into_iter().flatten().flatten();
        let children = threads.filter_map(|of| fs::read_to_string(of.path().join("children")).ok());
        let children: String = children.collect();
        let mut below = children.split_whitespace().filter_map(|child| {
            let told = fs::read(format!("/proc/{child}/cmdline")).ok()?;
            CommandLine::parse(arguments(&told)).ok()
        });
        own.or_else(|why| below.next().ok_or(why))
            .map_err(unsupported)
    }

    /// Reads a command line.
    ///
    /// # Errors
    /// A text that says what is not understood.
    pub fn parse(arguments: Vec<String>) -> Result<CommandLine, String> {
        let mut arguments = arguments.into_iter().peekable();
        let program = arguments.next().unwrap_or_default();
        if !program.contains("qemu") {
            return Err(format!("belongs to {}, not to QEMU", one_line(&program)));
        }
        let mut options = Vec::new();
        while let Some(option) = arguments.next() {
            if !option.starts_with('-') {
                return Err(format!(
                    "has the argument {}, which is no option: name disks with -drive or -blockdev",
                    one_line(&option)
                ));
            }
            let option = match option.strip_prefix("--") {
                Some(rest) => format!("-{rest}"),
                None => option,
            };
            let is_argument = |next: &String| !next.starts_with('-') || next == "-";
            options.push((option, arguments.next_if(is_argument)));
        }
        Ok(CommandLine { program, options })
    }

    /// The command line of a QEMU that waits for the machine whose disks these are: each writable disk is empty, and is under
    /// a raw block node with a name, and the monitor is at `socket`. What is read-only, and everything else, stays as it is.
    ///
    /// # Errors
    /// A text that says what has to be written by hand.
    pub fn waiting(&self, disks: &[Disk], socket: &str) -> Result<CommandLine, String> {
        let monitors = self.monitors();
        let removed = self.nodes_below(disks);
        let media = || disks.iter().filter_map(|disk| disk.medium.as_ref());
        let mut left: Vec<&Medium> = media().filter(|medium| !medium.read_only).collect();
        let mut options = Vec::new();
        for (option, argument) in &self.options {
            let text = argument.as_deref().unwrap_or_default();
            let short = SHORT_DISKS.iter().find(|(name, _)| name == option);
            match option.as_str() {
                "-snapshot" => return Err("throws away what it writes (-snapshot)".into()),
                option if OF_THIS_RUN.contains(&option) => {}
                "-mon" if is_control(text) => {}
                "-chardev" if monitors.contains(&value(text, "id")) => {}
                "-blockdev" => {
                    let name = node_name(text);
                    let n = left.len();
                    match take(&mut left, |medium| name.as_ref() == Some(&medium.node)) {
                        Some(medium) => options.extend(empty(n, medium)),
                        None if name.is_some_and(|name| removed.contains(&name)) => {}
                        None => options.push((option.clone(), argument.clone())),
                    }
                }
                "-drive" => {
                    let id = value(text, "id");
                    let mut found = disks.iter().filter_map(|disk| {
                        let medium = disk.medium.as_ref()?;
                        (id.is_some_and(|id| disk.name == id)
                            || is_file(medium, value(text, "file"))
                            || is_file(medium, value(text, "file.filename")))
                        .then_some(medium)
                    });
                    let medium = found.next();
                    options.push(drive(text, medium, &mut left));
                }
                _ => match short {
                    Some((_, placed)) => {
                        let mut found =
                            media().filter(|medium| is_file(medium, argument.as_deref()));
                        let medium = found.next().filter(|medium| !medium.read_only);
                        match medium {
                            Some(medium) => options.push(drive(placed, Some(medium), &mut left)),
                            None => options.push((option.clone(), argument.clone())),
                        }
                    }
                    None => options.push((option.clone(), argument.clone())),
                },
            }
        }
        if let Some(medium) = left.first() {
            return Err(format!(
                "has a disk, {}, that none of its options names: write its command line by hand",
                one_line(&medium.node)
            ));
        }
        let monitor = format!("unix:{socket},server=on,wait=off");
        options.push(("-qmp".into(), Some(monitor)));
        options.push(("-S".into(), None));
        options.push(("-incoming".into(), Some("defer".into())));
        options.push(("-sandbox".into(), Some(self.sandbox())));
        Ok(CommandLine {
            program: self.program.clone(),
            options,
        })
    }

    /// The files and host devices that the options of a command line name.
    #[must_use]
    pub fn files(&self) -> Vec<&str> {
        let arguments = self.options.iter().filter_map(|(option, argument)| {
            let text = argument.as_deref()?;
            (option != "-qmp" && option != "-name").then_some(text)
        });
        let parts = arguments.flat_map(|text| text.split([',', '=', '"']));
        let mut files: Vec<&str> = parts
            .map(|part| part.strip_prefix("unix:").unwrap_or(part))
            .filter(|part| part.starts_with('/'))
            .collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// The same for a shell, an option to a line.
    #[must_use]
    pub fn shell(&self) -> String {
        let mut text = quoted(&self.program);
        for (option, argument) in &self.options {
            text.push_str(" \\\n  ");
            text.push_str(&quoted(option));
            if let Some(argument) = argument {
                text.push(' ');
                text.push_str(&quoted(argument));
            }
        }
        text
    }

    /// The character devices of QMP monitors.
    fn monitors(&self) -> HashSet<Option<&str>> {
        let monitors = self.options.iter().filter(|(option, _)| option == "-mon");
        let monitors = monitors.filter_map(|(_, argument)| argument.as_deref());
        let monitors = monitors.filter(|text| is_control(text));
        let first = |text: &str| !text.split(',').next().unwrap_or_default().contains('=');
        monitors
            .map(|text| match value(text, "chardev") {
                None if first(text) => text.split(',').next(),
                named => named,
            })
            .filter(Option::is_some)
            .collect()
    }

    /// The block nodes that writable disks stand on.
    fn nodes_below(&self, disks: &[Disk]) -> HashSet<String> {
        let media = disks.iter().filter_map(|disk| disk.medium.as_ref());
        let writable = media.filter(|medium| !medium.read_only);
        let mut below: HashSet<String> = writable.map(|medium| medium.node.clone()).collect();
        let nodes = self
            .options
            .iter()
            .filter(|(option, _)| option == "-blockdev");
        let nodes: Vec<&str> = nodes.filter_map(|(_, text)| text.as_deref()).collect();
        loop {
            let before = below.len();
            for text in &nodes {
                if node_name(text).is_some_and(|name| below.contains(&name)) {
                    below.extend(children(text));
                }
            }
            if below.len() == before {
                return below;
            }
        }
    }

    fn sandbox(&self) -> String {
        let own = self.options.iter().find(|(option, _)| option == "-sandbox");
        let own = own.and_then(|(_, argument)| argument.clone());
        own.unwrap_or_else(|| "on".into())
    }
}

/// The arguments of a process as the system shows them.
fn arguments(told: &[u8]) -> Vec<String> {
    let arguments = told.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let mut arguments: Vec<String> = arguments.map(String::from).collect();
    arguments.pop();
    arguments
}

/// The `id` of a `-device`, which may be JSON.
pub(crate) fn device_id(text: &str) -> Option<String> {
    let mut named = fields(text).into_iter();
    let named = named.find(|(name, _)| name == "id");
    named.map(|(_, value)| value)
}

/// A raw block node in the place of another one, that reads as zeros.
fn empty(n: usize, medium: &Medium) -> [(String, Option<String>); 2] {
    let (node, size) = (&medium.node, medium.size);
    let below = format!("empty-{n}");
    let null = json!({"driver": "null-co", "node-name": below, "size": size, "read-zeroes": true});
    let raw = json!({"driver": "raw", "node-name": node, "file": below});
    [null, raw].map(|node| ("-blockdev".to_owned(), Some(node.to_string())))
}

/// A `-drive`: that of a writable disk is empty.
fn drive(text: &str, medium: Option<&Medium>, left: &mut Vec<&Medium>) -> (String, Option<String>) {
    let as_it_is = ("-drive".to_owned(), Some(text.to_owned()));
    let Some(medium) = medium else {
        return as_it_is;
    };
    let Some(medium) = take(left, |one| one.node == medium.node) else {
        return as_it_is;
    };
    let kept = text.split(',').filter(|part| {
        let key = part.split('=').next().unwrap_or_default();
        OF_THE_DEVICE.contains(&key)
    });
    let node = match medium.node.strip_prefix('#') {
        Some(generated) => format!("disk-{generated}"),
        None => medium.node.clone(),
    };
    let mut parts: Vec<String> = kept.map(str::to_owned).collect();
    parts.push(format!("node-name={node},driver=raw"));
    parts.push(format!("file.driver=null-co,file.size={}", medium.size));
    parts.push("file.read-zeroes=on".into());
    ("-drive".into(), Some(parts.join(",")))
}

fn take<'a>(left: &mut Vec<&'a Medium>, which: impl Fn(&Medium) -> bool) -> Option<&'a Medium> {
    let at = left.iter().position(|medium| which(medium))?;
    Some(left.remove(at))
}

fn is_file(medium: &Medium, name: Option<&str>) -> bool {
    match (&medium.data, name) {
        (Data::File(path), Some(name)) => path == Path::new(name),
        _ => false,
    }
}

fn is_control(monitor: &str) -> bool {
    value(monitor, "mode") == Some("control")
}

/// The value of `key` in `key=value,...`; commas within values are doubled, which ends no name that we look for.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let values = text.split(',').filter_map(|part| part.split_once('='));
    values
        .filter(|(known, _)| *known == key)
        .map(|(_, value)| value)
        .next_back()
}

/// The options of a `-blockdev`, which may be JSON: names and values at its top.
fn fields(text: &str) -> Vec<(String, String)> {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(fields)) => fields
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_str()?.to_owned())))
            .collect(),
        _ => text
            .split(',')
            .filter_map(|part| part.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    }
}

fn node_name(text: &str) -> Option<String> {
    let mut named = fields(text).into_iter();
    let named = named.find(|(name, _)| name == "node-name");
    named.map(|(_, value)| value)
}

/// The nodes that a `-blockdev` names as those below it.
fn children(text: &str) -> Vec<String> {
    let below = ["file", "backing", "data-file"];
    let named = fields(text).into_iter();
    let named = named.filter(|(name, _)| below.contains(&name.as_str()));
    named.map(|(_, value)| value).collect()
}

/// A word of a shell.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%^".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests;
