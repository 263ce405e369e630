//! `drover`: the command line.
//!
//! This crate has the user interface: arguments, tables, progress bars, exit codes. The work of sites and mounts is
//! done in `agent`; images are read, matched and sent by the crates below it.

mod audit;
mod bar;
mod changes;
mod cli;
mod domains;
mod failure;
mod flock;
mod generate;
mod images;
mod migrate;
mod mounts;
mod moves;
mod nodes;
mod out;
mod peers;
mod profile;
mod prompt;
mod replicate;
mod runtime;
mod send;
mod serve;
mod setup;
mod snapshot;
mod space;
mod status;
mod tickets;
mod transfers;
mod vault;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use cli::{ChangesAction, Cli, Command, DomainArg, ImageAt, ProfileAction, TicketArgs};
use drover_agent::error::{Kind, kind_of};
use drover_agent::home::Home;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return failure::of_arguments(&e),
    };
    let serves = matches!(
        cli.command,
        Command::Serve(_) | Command::Teleporter(_) | Command::MountDaemon { .. }
    );
    if let Err(e) = log(cli.verbose, serves) {
        out::note(&format!("drover: {e}"));
        return ExitCode::from(Kind::Usage as u8);
    }
    if serves_kernel(&cli.command) {
        // Before any thread starts: threads inherit it.
        drover_agent::mounts::survive_write_back();
    }
    if matches!(
        cli.command,
        Command::Send(_)
            | Command::Migrate(_)
            | Command::Evacuate(_)
            | Command::Replicate(_)
            | Command::MountDaemon { .. }
            | Command::Export(_)
            | Command::Launch(_)
            | Command::Pair(_)
            | Command::Serve(_)
            | Command::Teleporter(_)
    ) {
        drover_net::warm_up();
    }
    let json = match &cli.command {
        Command::Send(args) => args.json,
        Command::Migrate(args) => args.json,
        Command::Evacuate(args) => args.json,
        Command::Move(args) => args.json,
        Command::Replicate(args) => args.json,
        Command::Snapshot(args) => args.of.json,
        Command::Restore(args) => args.of.json,
        _ => false,
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        // A closed pipe is not an error, as in other tools.
        Err(e) if out::is_reader_gone(&e) => ExitCode::SUCCESS,
        Err(e) => {
            let code = kind_of(e.as_ref()) as u8;
            if json {
                let last = serde_json::json!({"event": "error", "code": code, "message": failure::line(e.as_ref())});
                // The reader may be gone.
                let _ = out::json(&last);
            }
            out::note(&format!("drover: {}", failure::line(e.as_ref())));
            ExitCode::from(code)
        }
    }
}

/// Whether this process itself serves disks that the kernel writes back dirty pages to.
fn serves_kernel(command: &Command) -> bool {
    match command {
        Command::MountDaemon { .. } => true,
        Command::Mount(args) => args.daemon.foreground,
        Command::Attach(args) => args.daemon.foreground,
        Command::Export(args) => !args.background,
        Command::Launch(args) if args.nbd.is_some() => !args.background,
        Command::Launch(args) => args.foreground,
        _ => false,
    }
}

fn run(cli: Cli) -> Result<()> {
    let dir = || Home::locate(cli.home.as_deref());
    let create = || Home::create(dir()?);
    let existing = || Home::existing(dir()?);
    let of = |domain: &DomainArg| -> Result<Home> { Ok(existing()?.domain(&domain.domain)?) };
    let with = |image: &mut ImageAt, domain: &DomainArg| -> Result<Home> {
        images::home_of(existing()?, image, &domain.domain)
    };
    match cli.command {
        Command::Init(args) => setup::init(dir()?, args),
        Command::Serve(args) => wait(serve::serve(create()?, args)),
        Command::Teleporter(args) => wait(serve::teleporter(create()?, args.listen)),
        Command::Ticket(args) if args.list => tickets::list(&existing()?, args.json),
        Command::Ticket(TicketArgs {
            revoke: Some(id),
            json,
            ..
        }) => tickets::revoke(&existing()?, &id, json),
        Command::Ticket(args) => tickets::ticket(&create()?, args),
        Command::Pair(args) => wait(peers::pair(&create()?, args)),
        Command::Send(args) => wait(send::send(&existing()?, args)),
        Command::Migrate(args) => wait(migrate::migrate(&existing()?, args)),
        Command::Evacuate(args) => wait(migrate::evacuate(&existing()?, args)),
        Command::Move(args) => wait(moves::move_disk(&existing()?, args)),
        Command::Replicate(args) => wait(replicate::replicate(&of(&args.of)?, args)),
        Command::Failover(args) => wait(replicate::failover(&of(&args.of)?, args)),
        Command::Mount(args) => wait(mounts::mount(&existing()?, args, cli.verbose)),
        Command::Export(args) => wait(mounts::export(&existing()?, args, cli.verbose)),
        Command::Attach(args) => wait(mounts::attach(&existing()?, args, cli.verbose)),
        Command::Launch(args) => wait(mounts::launch(&existing()?, args, cli.verbose)),
        Command::Unmount(args) => wait(mounts::unmount(&existing()?, args)),
        Command::Mounts(args) => wait(mounts::mounts(&existing()?, args)),
        Command::Guard { identifier } => Ok(drover_agent::mounts::guard(&identifier)?),
        Command::MountDaemon { name } => {
            wait(drover_agent::mounts::run_daemon(&existing()?, &name))
        }
        Command::Profile(mut args) => {
            let home = match (&mut args.image, &mut args.action) {
                (Some(image), _) | (_, Some(ProfileAction::Export { image, .. })) => {
                    with(image, &args.of)?
                }
                // Mounts are those of the site.
                (_, Some(ProfileAction::Record { .. } | ProfileAction::Stop { .. })) => existing()?,
                _ => of(&args.of)?,
            };
            wait(profile::profile(&home, args))
        }
        Command::Vault(args) => vault::vault(cli.home.as_deref(), args),
        Command::Snapshot(args) => snapshot::snapshot(cli.home.as_deref(), args),
        Command::Snapshots(args) => vault::snapshots(cli.home.as_deref(), &args),
        Command::Restore(args) => vault::restore(cli.home.as_deref(), &args),
        Command::Space(args) => space::space(&of(&args.of)?, &args),
        Command::Changes(mut args) => {
            let home = match &mut args.action {
                Some(ChangesAction::Merge(merge)) => with(&mut merge.image, &args.of)?,
                Some(ChangesAction::Drop(drop)) => with(&mut drop.image, &args.of)?,
                _ => of(&args.of)?,
            };
            wait(changes::changes(&home, args))
        }
        Command::Images(args) => wait(images::images(&of(&args.of)?, args)),
        Command::Flock(args) => wait(flock::flock(&of(&args.of)?, &args)),
        Command::Transfers(args) => wait(transfers::transfers(&of(&args.of)?, args)),
        Command::Index(args) => wait(images::index(|dir| Ok(create()?.domain(dir)?), args)),
        Command::Verify(args) => wait(images::verify(&of(&args.of)?, args)),
        Command::Rm(mut args) => {
            let home = with(&mut args.image, &args.of)?;
            wait(images::rm(&home, args))
        }
        Command::Share(mut args) => {
            let home = with(&mut args.image, &args.of)?;
            wait(images::share(&home, args))
        }
        Command::Status(args) => wait(status::status(&existing()?, args)),
        Command::Peers(args) => peers::peers(&existing()?, args),
        Command::Audit(args) => audit::audit(&existing()?, &args),
        Command::Nodes(args) => nodes::nodes(&existing()?, args),
        Command::Domains(args) => wait(domains::domains(&existing()?, args)),
        Command::Digest(args) => images::digest(args),
        Command::Completions(args) => generate::completions(&args),
        Command::Man(args) => generate::man(&args),
    }
}

/// Runs an asynchronous command.
fn wait<T, E>(command: impl Future<Output = Result<T, E>>) -> Result<T>
where
    anyhow::Error: From<E>,
{
    let runtime = runtime::runtime()?;
    let out = runtime.block_on(command);
    // Do not wait for abandoned blocking jobs.
    runtime.shutdown_background();
    Ok(out?)
}

/// Sets up logging to stderr: warnings by default, info in a server, more with `-v`.
fn log(verbose: u8, serves: bool) -> Result<(), String> {
    let level = match verbose + u8::from(serves) {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = match std::env::var("DROVER_LOG") {
        Ok(filter) => EnvFilter::try_new(&filter).map_err(|_| {
            format!("DROVER_LOG={filter}: not a log filter: use a level or MODULE=LEVEL, such as drover_net=debug")
        })?,
        Err(_) => EnvFilter::new(format!("warn,drover={level}")),
    };
    let stderr = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(stderr)
        .with_target(false)
        // Its own error messages would panic when stderr is closed.
        .log_internal_errors(false)
        .init();
    Ok(())
}
