//! `mounts leases` and `mounts break`: the leases of this site's images.

use anyhow::Result;
use drover_agent::home::{CleanUp, Home};
use drover_agent::mounts::{self, StoreAddress};
use drover_agent::text::{clean, moment};
use drover_core::ImageName;
use drover_store::lease::term_text;

use crate::failure::{no_image, refused};
use crate::{out, prompt};

/// Lists the leases of all domains.
///
/// # Errors
/// When the site does not respond.
pub async fn list(home: &Home, json: bool) -> Result<()> {
    let held = mounts::held(home).await?;
    if json {
        return held.iter().try_for_each(out::json);
    }
    if held.is_empty() {
        out::note("drover: no leases");
        return Ok(());
    }
    let rows = held
        .into_iter()
        .map(|held| {
            let writer = held.writer.as_ref();
            vec![
                clean(&held.image),
                clean(&held.domain),
                writer.map_or_else(|| "-".into(), |w| clean(&w.peer)),
                match &held.problem {
                    Some(problem) => clean(problem),
                    None => writer.map_or_else(String::new, |w| clean(&w.note)),
                },
                writer.map_or_else(String::new, |w| {
                    moment(i64::try_from(w.since_unix).unwrap_or_default())
                }),
                writer.map_or_else(String::new, |w| {
                    w.term_seconds.map_or_else(|| "none".into(), term_text)
                }),
                clean(&held.connected.join(" ")),
            ]
        })
        .collect();
    let heading = [
        "image",
        "domain",
        "writer",
        "mount",
        "since (UTC)",
        "term",
        "connected",
    ];
    out::line(&out::table(&heading, rows, &[]))
}

/// The error when another domain than that of this home has the image.
fn elsewhere(home: &Home, name: &ImageName) -> Result<Option<anyhow::Error>> {
    for domain in home.all_domains()? {
        if mounts::is_known(&domain, name)? {
            let domain = domain.domain_name();
            return Ok(Some(refused(format!(
                "{name} is in the domain {domain}: use --domain {domain}"
            ))));
        }
    }
    Ok(None)
}

/// Revokes the write lease of an image in the domain of this home.
///
/// # Errors
/// When there is no such image, or the site does not respond.
pub async fn break_lease(home: &Home, name: &ImageName, yes: bool, json: bool) -> Result<()> {
    let mut room = CleanUp::of(home);
    if !room.run(|| mounts::is_known(home, name))? {
        return Err(elsewhere(home, name)?.unwrap_or_else(|| no_image(name)));
    }
    let is_frozen = room.run(|| mounts::is_frozen(home, name))?;
    prompt::confirm(
        &match is_frozen {
            true => format!(
                "Thaw {name}? If the machine that it was frozen for still runs at another site, there can be two of it"
            ),
            false => format!(
                "Revoke the write lease of {name}? Data that its holder has not pushed can no longer be pushed"
            ),
        },
        yes,
    )?;
    let broken = room.run_async(|| mounts::break_lease(home, name)).await?;
    if json {
        return out::json(&broken);
    }
    match broken.writer {
        Some(w) => out::note(&format!(
            "drover: revoked the write lease of {name}, held by {} ({})",
            clean(&w.peer),
            clean(&w.note)
        )),
        None if broken.damaged => out::note(&format!(
            "drover: replaced the damaged lease of {name}, and kept a copy beside it; the changes to the image are intact"
        )),
        None if broken.thawed => {}
        None => out::note(&format!("drover: nobody held the write lease of {name}")),
    }
    if broken.thawed {
        out::note(&format!(
            "drover: thawed {name}: it can be mounted for writing"
        ));
    }
    Ok(())
}

/// Revokes the write lease of a disk in a store.
///
/// # Errors
/// When there is no such disk, a mount of this home has it, or the store does not respond.
pub async fn break_stored(home: &Home, address: StoreAddress, yes: bool, json: bool) -> Result<()> {
    let (home, of) = (home.clone(), address.clone());
    let held = tokio::task::spawn_blocking(move || mounts::stored_lease(&home, &of)).await??;
    let Some(writer) = held else {
        let broken = mounts::Broken::of(&address.to_string(), None);
        return match json {
            true => out::json(&broken),
            false => {
                out::note(&format!("drover: nobody held the write lease of {address}"));
                Ok(())
            }
        };
    };
    prompt::confirm(
        &format!(
            "Revoke the write lease of {address}, held by {}? Data that it has not pushed can no longer be pushed",
            clean(&writer.note)
        ),
        yes,
    )?;
    let (of, by) = (address.clone(), writer.clone());
    let broken = tokio::task::spawn_blocking(move || mounts::break_stored(&of, &by)).await??;
    match (json, broken) {
        (true, broken) => out::json(&broken),
        (false, _) => {
            out::note(&format!(
                "drover: revoked the write lease of {address}, held by {}",
                clean(&writer.note)
            ));
            Ok(())
        }
    }
}
