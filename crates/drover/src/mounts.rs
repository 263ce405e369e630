//! `mount`, `export`, `attach`, `unmount`, `mounts`: images of other sites as local disks.

mod leases;
mod table;
mod unmount;

use std::path::Path;

use anyhow::{Context, Result};
use drover_agent::error::{Error, one_line};
use drover_agent::home::Home;
use drover_agent::metrics::of_mounts;
use drover_agent::mounts::{
    self, ANSWER_LIMIT, Front, How, Listen, LocalDisk, Process, Target, all,
};
use serde_json::json;

use crate::bar::Bar;
use crate::cli::{
    AttachArgs, DaemonArgs, ExportArgs, LaunchArgs, Leased, MountArgs, MountsAction, MountsArgs,
    OptionArgs,
};
use crate::failure::usage;
use crate::out;

pub use unmount::unmount;

/// `drover mount`.
///
/// # Errors
/// When the image cannot be mounted.
pub async fn mount(home: &Home, args: MountArgs, verbose: u8) -> Result<()> {
    let path = std::path::absolute(&args.path)
        .with_context(|| format!("cannot resolve {}", args.path.display()))?;
    let front = Front::File {
        path,
        device: args.device,
        partitions: args.partitions,
    };
    begin(
        home,
        vec![args.image],
        front,
        args.options,
        &args.daemon,
        verbose,
    )
    .await
}

/// `drover export`.
///
/// # Errors
/// When the images cannot be served.
pub async fn export(home: &Home, args: ExportArgs, verbose: u8) -> Result<()> {
    let tls = args.tls_certificates.as_deref();
    check_address(&args.nbd, tls, args.allow_local_users)?;
    for (i, image) in args.images.iter().enumerate() {
        if args.images[..i]
            .iter()
            .any(|other| other.image == image.image)
        {
            return Err(usage(format!(
                "{} is named twice: an export needs a name of its own",
                image.image
            )));
        }
    }
    let front = nbd(args.nbd, tls)?;
    let daemon = DaemonArgs {
        foreground: !args.background,
        json: args.json,
    };
    begin(home, args.images, front, args.options, &daemon, verbose).await
}

fn nbd(listen: Listen, tls: Option<&Path>) -> Result<Front> {
    let absolute = |dir: &Path| {
        std::path::absolute(dir).with_context(|| format!("cannot resolve {}", dir.display()))
    };
    let tls = tls.map(absolute).transpose()?;
    Ok(Front::Nbd { listen, tls })
}

/// `drover launch`.
///
/// # Errors
/// When the image is not there and not on its way, or cannot be served.
pub async fn launch(home: &Home, args: LaunchArgs, verbose: u8) -> Result<()> {
    let tls = args.tls_certificates.as_deref();
    let front = match (&args.nbd, &args.path) {
        (Some(listen), _) => {
            check_address(listen, tls, args.allow_local_users)?;
            nbd(listen.clone(), tls)?
        }
        (None, path) => {
            let path = path.as_deref().unwrap_or(Path::new("."));
            Front::File {
                path: std::path::absolute(path)
                    .with_context(|| format!("cannot resolve {}", path.display()))?,
                device: args.device,
                partitions: args.partitions,
            }
        }
    };
    let daemon = DaemonArgs {
        foreground: args.foreground || (args.nbd.is_some() && !args.background),
        json: args.json,
    };
    let options = args.options();
    let image: Target = args.image.as_str().parse().map_err(usage)?;
    let images = resolved(home, &options, vec![image]).await?;
    let mut how = options.of(&images)?;
    how.launch = images[0].is_own();
    if let Some(limit) = args.wait.filter(|_| how.launch) {
        mounts::wait_for(home, &images[0], limit).await?;
    }
    begin_as(home, images, front, how, &daemon, verbose).await
}

/// Refuses an address at which clients need not prove who they are, but for a Unix socket and what the user allowed.
fn check_address(nbd: &Listen, dir: Option<&Path>, allow_local_users: bool) -> Result<()> {
    let Listen::Tcp(_) = nbd else {
        return match allow_local_users {
            true => Err(usage(
                "--allow-local-users is for an ADDRESS:PORT: a Unix socket is for its owner",
            )),
            false => Ok(()),
        };
    };
    let ca = dir.map(|dir| dir.join("ca-cert.pem"));
    match ca {
        Some(ca) if ca.exists() => Ok(()),
        _ if nbd.is_local() && allow_local_users => Ok(()),
        _ if nbd.is_local() => Err(usage(format!(
            "--nbd {nbd}: every user of this host could use the disk: listen on unix:PATH, or allow it with --allow-local-users"
        ))),
        None => Err(usage(format!(
            "--nbd {nbd}: an address that other hosts can reach needs --tls-certificates; or listen on unix:PATH"
        ))),
        Some(ca) => Err(usage(format!(
            "--nbd {nbd}: an address that other hosts can reach needs client certificates: put the CA certificate that signed them into {}",
            ca.display()
        ))),
    }
}

/// `drover attach`.
///
/// # Errors
/// When the images cannot be served.
pub async fn attach(home: &Home, args: AttachArgs, verbose: u8) -> Result<()> {
    let front = Front::Kernel {
        driver: mounts::choose(args.driver.into(), args.device.as_deref())?,
        device: args.device,
    };
    begin(
        home,
        vec![args.image],
        front,
        args.options,
        &args.daemon,
        verbose,
    )
    .await
}

/// The disks: those of this site in the domain that was named, and snapshots found in their vault.
async fn resolved(home: &Home, options: &OptionArgs, images: Vec<Target>) -> Result<Vec<Target>> {
    let images = options.in_domain(images)?;
    let (home, vault) = (home.clone(), options.vault.chosen());
    let resolve = move || -> Result<Vec<Target>, Error> {
        let found = images.into_iter();
        found
            .map(|image| mounts::resolve(&home, image, &vault))
            .collect()
    };
    let images = tokio::task::spawn_blocking(resolve).await??;
    let is_snapshot = |i: &Target| matches!(i.local, Some(LocalDisk::Snapshot { .. }));
    let chosen = options.vault.vault.is_some() || options.vault.key_file.is_some();
    match !chosen || images.iter().any(is_snapshot) {
        true => Ok(images),
        false => Err(usage(
            "--vault is for snapshots, NAME@TIME or NAME@latest, as is --key-file",
        )),
    }
}

/// Starts a mount in this process or in a daemon.
async fn begin(
    home: &Home,
    images: Vec<Target>,
    front: Front,
    options: OptionArgs,
    daemon: &DaemonArgs,
    verbose: u8,
) -> Result<()> {
    let images = resolved(home, &options, images).await?;
    let how = options.of(&images)?;
    begin_as(home, images, front, how, daemon, verbose).await
}

/// The same with the options as they are recorded.
async fn begin_as(
    home: &Home,
    images: Vec<Target>,
    front: Front,
    how: How,
    daemon: &DaemonArgs,
    verbose: u8,
) -> Result<()> {
    let json = daemon.json;
    let by = match daemon.foreground {
        true => Process::This,
        false => Process::Daemon(verbose),
    };
    let ready = move |name: &str, lines: &[String]| {
        show(name, lines, json).map_err(|e| match out::is_reader_gone(&e) {
            true => Error::CallerGone,
            false => Error::msg(one_line(e.as_ref())),
        })
    };
    let bar = match how.standby {
        true => Bar::new("standing by", json),
        false => Bar::new("waiting", json || how.wait_local.is_none()),
    };
    let waiting = move |local, wanted| bar.at(local, wanted);
    Ok(mounts::begin(home, images, front, how, by, waiting, ready).await?)
}

/// Announces that a mount is ready.
fn show(name: &str, lines: &[String], json: bool) -> Result<()> {
    if json {
        return out::json(&json!({"event": "ready", "name": name, "paths": lines}));
    }
    for line in lines {
        out::line(line)?;
    }
    Ok(())
}

/// `drover mounts`.
///
/// # Errors
/// When the site directory cannot be read, or a site does not respond.
pub async fn mounts(home: &Home, args: MountsArgs) -> Result<()> {
    match args.action {
        Some(MountsAction::Leases { json }) => leases::list(home, json || args.json).await,
        Some(MountsAction::Break {
            what,
            yes,
            json,
            of,
        }) => match what {
            Leased::Image(name) => {
                let home = home.domain(&of.domain)?;
                leases::break_lease(&home, &name, yes, json || args.json).await
            }
            Leased::Store(address) => {
                leases::break_stored(home, address, yes, json || args.json).await
            }
        },
        Some(MountsAction::HandOver {
            what,
            peer,
            lazy,
            json,
        }) => unmount::hand_over(home, &what, peer.as_deref(), lazy, json || args.json).await,
        None if args.metrics => {
            let text = of_mounts(all(home, ANSWER_LIMIT).await?);
            out::line(text.trim_end())
        }
        None => list(home, args.json).await,
    }
}

async fn list(home: &Home, json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for status in all(home, ANSWER_LIMIT).await? {
        if json {
            out::json(&status)?;
        } else {
            rows.push(table::row(&status));
        }
    }
    if json {
        return Ok(());
    }
    if rows.is_empty() {
        out::note("drover: no mounts; `drover mount PEER:IMAGE PATH` creates one");
        return Ok(());
    }
    out::line(&out::table(&table::HEADINGS, rows, &[]))
}
