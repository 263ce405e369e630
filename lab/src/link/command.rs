//! `lab link`: a link for a person or a script.

use std::io::BufRead;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::Args;

use super::check::check;
use super::{EXIT_UNAVAILABLE, EngineKind, Link, Options, Schedule, Side, Unavailable};

/// What the link is like.
#[derive(Args, Clone)]
pub struct LinkArgs {
    /// Round-trip time in milliseconds.
    #[arg(long, default_value_t = 40.0)]
    pub rtt_ms: f64,
    /// Rate in Mbit/s, IP headers included; 0 for no limit.
    #[arg(long, default_value_t = 100.0)]
    pub rate_mbit: f64,
    /// Rate from NAME-b to NAME-a, where it is another: a DSL line has a slow way up.
    #[arg(long)]
    pub rate_back_mbit: Option<f64>,
    /// Packets lost on the line, in percent.
    #[arg(long, default_value_t = 0.0)]
    pub loss_percent: f64,
    /// Greatest deviation of the one-way delay, in milliseconds.
    #[arg(long, default_value_t = 0.0)]
    pub jitter_ms: f64,
    /// Let jitter change the order of packets.
    #[arg(long)]
    pub reorder: bool,
    /// Bytes that may wait before the bottleneck [default: one round trip's worth, at least 64 KiB].
    #[arg(long, value_name = "BYTES")]
    pub queue: Option<u64>,
    /// Seed of loss and jitter.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// TCP's congestion control at both ends, whatever the host's is; cubic is what most machines use.
    #[arg(long, default_value = "cubic", value_name = "NAME")]
    pub congestion: String,
    /// What moves the packets: the kernel's netem, the lab itself, or the first that can be had of the two.
    #[arg(long, value_enum, default_value = "auto")]
    pub engine: EngineKind,
    /// Name of the link: its namespaces are NAME-a (10.77.0.1) and NAME-b (10.77.0.2).
    #[arg(long, default_value = "drover")]
    pub name: String,
}

/// What runs over it.
#[derive(Args, Clone)]
pub struct RunArgs {
    /// Check the link against what it claims, print the table and take it down; the exit code is 1 if a claim is
    /// broken. Needs `ping` and `iperf3`, and about 15 seconds.
    #[arg(long, conflicts_with_all = ["far", "near", "cut_at", "heal_at"])]
    pub check: bool,
    /// Check links of 20, 100 and 1000 Mbit/s at 5, 40 and 150 ms, with and without 0.1 % loss; the other options
    /// are those given.
    #[arg(long, requires = "check")]
    pub matrix: bool,
    /// Print the findings as JSON.
    #[arg(long, requires = "check")]
    pub json: bool,
    /// A shell command to run at the far end (NAME-b) as long as the near one runs.
    #[arg(long, value_name = "COMMAND")]
    pub far: Option<String>,
    /// Cut the link so many seconds after the near command has started; may be repeated.
    #[arg(long, value_name = "SECONDS")]
    pub cut_at: Vec<f64>,
    /// Heal the link so many seconds after the near command has started; may be repeated.
    #[arg(long, value_name = "SECONDS")]
    pub heal_at: Vec<f64>,
    /// A command to run at the near end (NAME-a); without one, the link is up until standard input ends and takes
    /// `cut`, `heal` and `stats` there, one a line.
    #[arg(last = true, value_name = "COMMAND")]
    pub near: Vec<String>,
}

impl From<&LinkArgs> for Options {
    fn from(args: &LinkArgs) -> Self {
        Self {
            name: args.name.clone(),
            rtt_ms: args.rtt_ms.max(0.0),
            rate_mbit: args.rate_mbit.max(0.0),
            rate_back_mbit: args.rate_back_mbit.map(|back| back.max(0.0)),
            loss_percent: args.loss_percent.clamp(0.0, 100.0),
            jitter_ms: args.jitter_ms.max(0.0),
            reorder: args.reorder,
            queue_bytes: args.queue,
            seed: args.seed,
            congestion: args.congestion.clone(),
            engine: args.engine,
        }
    }
}

/// Brings a link up, runs what is asked over it, and takes it down.
///
/// # Errors
/// When the link cannot be made or a command not be started. Where there can be no link the exit code is
/// [`EXIT_UNAVAILABLE`].
pub fn run(link: &LinkArgs, run: &RunArgs) -> Result<ExitCode> {
    match run_over(link, run) {
        Err(error) if error.is::<Unavailable>() => {
            eprintln!("lab: {error:#}");
            Ok(ExitCode::from(EXIT_UNAVAILABLE))
        }
        other => other,
    }
}

fn run_over(link: &LinkArgs, run: &RunArgs) -> Result<ExitCode> {
    let options = Options::from(link);
    if run.check {
        return run_check(options, run);
    }
    let schedule = Schedule::new(&run.cut_at, &run.heal_at)?;
    let mut link = Link::up(&options)?;
    eprintln!(
        "{0}-a (10.77.0.1) - {0}-b (10.77.0.2), {2}: {1}",
        options.name,
        options.describe(),
        link.engine()
    );
    let far = run
        .far
        .as_ref()
        .map(|shell| link.command(Side::B, "sh").args(["-c", shell]).spawn())
        .transpose()
        .context("cannot start the far command")?;
    link.schedule(&schedule)?;
    let code = if let Some((program, args)) = run.near.split_first() {
        let mut command: Command = link.command(Side::A, program);
        let status = command
            .args(args)
            .status()
            .context("cannot start the command")?;
        ExitCode::from(status.code().map_or(1, |code| code as u8))
    } else {
        obey(&link)?;
        ExitCode::SUCCESS
    };
    if let Some(mut far) = far {
        let _ = far.kill();
        let _ = far.wait();
    }
    print_traffic(&link)?;
    Ok(code)
}

fn run_check(options: Options, run: &RunArgs) -> Result<ExitCode> {
    let links = if run.matrix {
        options.matrix()
    } else {
        vec![options]
    };
    let mut all = Vec::new();
    for options in &links {
        let checked = check(options)?;
        if !run.json {
            println!("{}, {}", checked.link, checked.engine);
            println!("{}", checked.table());
        }
        all.push(checked);
    }
    if run.json {
        println!("{}", serde_json::to_string_pretty(&all)?);
    }
    let broken = all.iter().filter(|checked| !checked.holds()).count();
    if broken > 0 {
        eprintln!("lab: {broken} of {} links broke a claim", all.len());
    }
    Ok(ExitCode::from(u8::from(broken > 0)))
}

fn obey(link: &Link) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        match line?.trim() {
            "cut" => link.cut()?,
            "heal" => link.heal()?,
            "stats" => print_traffic(link)?,
            "quit" => break,
            "" => {}
            other => eprintln!("{other:?}: not one of cut, heal, stats, quit"),
        }
    }
    Ok(())
}

fn print_traffic(link: &Link) -> Result<()> {
    let traffic = link.traffic()?;
    for (way, c) in [("a to b", traffic.a_to_b), ("b to a", traffic.b_to_a)] {
        eprintln!(
            "{way}: in {} packets {} bytes, out {} packets {} bytes, lost {}, overflowed {}, cut {}",
            c.packets_in, c.bytes_in, c.packets_out, c.bytes_out, c.lost, c.overflowed, c.cut
        );
    }
    Ok(())
}
