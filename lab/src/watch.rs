//! The cost of a running process: peak memory and CPU time, sampled from `/proc` until it exits.

use std::fs;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

/// Sampling interval. The kernel keeps the peak, so only growth in the last moments is missed.
const EVERY: Duration = Duration::from_millis(20);
/// Clock ticks per second in `/proc`, on every Linux.
const TICKS: f64 = 100.0;

/// The cost of a process so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Peak resident set size (VmHWM), in bytes.
    pub peak_rss_bytes: u64,
    /// CPU time, user and system, in seconds.
    pub cpu_seconds: f64,
}

/// Samples one process.
pub struct Watch {
    pid: u32,
    cost: Arc<Mutex<Cost>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Samples process `pid` until it exits or this is dropped.
    pub fn start(pid: u32) -> Self {
        let cost = Arc::new(Mutex::new(Cost::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, ended) = (cost.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let Some(now) = look(pid) else { break };
                if let Ok(mut cost) = seen.lock() {
                    *cost = now;
                }
                std::thread::sleep(EVERY);
            }
        });
        Self {
            pid,
            cost,
            stop,
            thread: Some(thread),
        }
    }

    /// The cost as of the last sample.
    pub fn cost(&self) -> Cost {
        self.cost.lock().map(|c| *c).unwrap_or_default()
    }

    /// Resets the peak resident set size to the present one (`proc(5)`, `clear_refs`). Where the kernel does not
    /// support this, the peak remains that since the start.
    pub fn forget_peak(&self) {
        let _ = fs::write(format!("/proc/{}/clear_refs", self.pid), "5");
    }

    fn finish(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.finish();
    }
}

/// CPU time of all descendants that have exited and been waited for.
pub fn cpu_of_children() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&stat, [13, 14]).unwrap_or_default()
}

/// The machine's load average over the last minute.
///
/// # Errors
/// When the kernel does not say.
pub fn load() -> Result<f64> {
    let said = fs::read_to_string("/proc/loadavg")?;
    let first = said.split_whitespace().next();
    Ok(first.context("/proc/loadavg is empty")?.parse()?)
}

/// A description of this machine: CPU, cores, memory and kernel.
pub fn machine() -> String {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let processor = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned());
    let kib =
        field("/proc/meminfo", "MemTotal").and_then(|m| m.split(' ').next()?.parse::<u64>().ok());
    // Rounded: the kernel reserves a varying part at each boot.
    let gib = (kib.unwrap_or(0) + (1 << 19)) >> 20;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{processor}, {cores} cores, {gib} GiB, Linux {}",
        kernel.trim()
    )
}

/// CPU time of the whole machine, in ticks summed over all cores: used, and total. Waiting for I/O does not count as
/// used.
pub fn cores() -> Option<(u64, u64)> {
    cores_of(&fs::read_to_string("/proc/stat").ok()?)
}

fn cores_of(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // user nice system idle iowait irq softirq steal; guest time is included in the first two.
    let of: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .map_while(|field| field.parse().ok())
        .collect();
    let all: u64 = of.iter().sum();
    Some((all - of.get(3)? - of.get(4)?, all))
}

/// The cost of a process, unless it has exited or is a zombie.
fn look(pid: u32) -> Option<Cost> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(Cost {
        peak_rss_bytes: peak_of(&status)?,
        cpu_seconds: cpu_of(&stat)?,
    })
}

/// The peak resident set size (VmHWM) from a `/proc/PID/status`, in bytes.
fn peak_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

fn cpu_of(stat: &str) -> Option<f64> {
    ticks(stat, [11, 12])
}

/// The sum of two fields of `/proc/PID/stat`, in seconds.
fn ticks(stat: &str, fields: [usize; 2]) -> Option<f64> {
    // The name in brackets may contain anything, even brackets: fields are counted after the last one.
    let all: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let of = |field: usize| all.get(field)?.parse::<u64>().ok();
    Some((of(fields[0])? + of(fields[1])?) as f64 / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found() {
        assert_eq!(peak_of("Name:\tx\nVmHWM:\t  2048 kB\n"), Some(2 << 20));
        assert_eq!(peak_of("Name:\tzombie\n"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 12 8 20 0 1 0 100 9 9";
        assert_eq!(cpu_of(stat), Some(2.0));
        assert_eq!(ticks(stat, [13, 14]), Some(0.2));
    }

    #[test]
    fn what_the_cores_did_is_found() {
        let stat = "cpu  10 1 5 70 4 2 3 5 9 9\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(cores_of(stat), Some((26, 100)));
        assert_eq!(cores_of("intr 7\n"), None);
        assert!(cores().is_some_and(|(used, all)| used <= all));
    }

    #[test]
    fn the_load_is_told() {
        assert!(load().is_ok_and(|load| load >= 0.0));
    }

    #[test]
    fn a_process_is_watched_until_it_is_gone() {
        let mut child = std::process::Command::new("sleep")
            .arg("0.3")
            .spawn()
            .unwrap();
        let mut watch = Watch::start(child.id());
        child.wait().unwrap();
        watch.finish();
        assert!(watch.cost().peak_rss_bytes > 100 << 10);
    }
}
