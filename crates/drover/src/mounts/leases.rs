//! `mounts leases` and `mounts break`: who holds this site's images.

use anyhow::Result;
use drover_agent::home::{CleanUp, Home};
use drover_agent::mounts;
use drover_agent::text::{clean, moment};
use drover_core::ImageName;

use crate::failure::no_image;
use crate::{out, prompt};

/// Lists who holds images.
///
/// # Errors
/// When the site does not answer.
pub async fn list(home: &Home, json: bool) -> Result<()> {
    let held = mounts::held(home).await?;
    if json {
        return held.iter().try_for_each(out::json);
    }
    if held.is_empty() {
        out::note("drover: nobody holds an image of this site");
        return Ok(());
    }
    let rows = held
        .into_iter()
        .map(|held| {
            let writer = held.writer.as_ref();
            vec![
                clean(&held.image),
                writer.map_or_else(|| "-".into(), |w| clean(&w.peer)),
                match &held.problem {
                    Some(problem) => clean(problem),
                    None => writer.map_or_else(String::new, |w| clean(&w.note)),
                },
                writer.map_or_else(String::new, |w| {
                    moment(i64::try_from(w.since_unix).unwrap_or_default())
                }),
                clean(&held.connected.join(" ")),
            ]
        })
        .collect();
    let heading = ["image", "writer", "mount", "since (UTC)", "connected now"];
    out::line(&out::table(&heading, rows, &[]))
}

/// Takes the right to write an image from whoever has it.
///
/// # Errors
/// When there is no such image, or the site does not answer.
pub async fn break_lease(home: &Home, name: &ImageName, yes: bool, json: bool) -> Result<()> {
    let mut room = CleanUp::of(home);
    if !room.run(|| mounts::is_known(home, name))? {
        return Err(no_image(name));
    }
    let question = format!(
        "Take the right to write {name} from whoever has it? What they have not pushed is lost to this site"
    );
    prompt::confirm(&question, yes)?;
    let broken = room.run_async(|| mounts::break_lease(home, name)).await?;
    if json {
        return out::json(&broken);
    }
    match broken.writer {
        Some(w) => out::note(&format!(
            "drover: {} of {} may not write {name} any more",
            clean(&w.note),
            clean(&w.peer)
        )),
        None if broken.damaged => out::note(&format!(
            "drover: the damaged lease of {name} is kept beside a new one; nobody may write the image now, and what was written over it is there"
        )),
        None => out::note(&format!("drover: nobody had the right to write {name}")),
    }
    Ok(())
}
