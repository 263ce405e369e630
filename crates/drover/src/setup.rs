//! `init`: the site directory.

use std::path::PathBuf;

use anyhow::Result;
use drover_agent::home::{Chosen, Home};
use drover_agent::site;
use serde_json::json;

use crate::cli::InitArgs;
use crate::out;

/// Creates a site directory.
///
/// # Errors
/// When it cannot be created, or options would change an existing configuration.
pub fn init(dir: PathBuf, args: InitArgs) -> Result<()> {
    let chosen = Chosen {
        name: args.name,
        listen: args.listen,
        images: args.images,
    };
    let (home, fresh) = Home::init(dir, &chosen)?;
    site::open_catalog(&home)?;
    home.try_keep_reserve();
    let key = home.identity()?.key();
    if args.json {
        return out::json(&json!({
            "home": home.dir(), "key": key.to_string(), "name": home.name(), "new": fresh,
        }));
    }
    let what = if fresh {
        "created"
    } else {
        "already initialized as"
    };
    out::line(&format!(
        "{}: {what} site {}, key {key}",
        home.dir().display(),
        home.name()
    ))?;
    if fresh {
        out::note(&format!(
            "drover: the settings are in {}; `drover serve` starts the site",
            home.dir().join("config.toml").display()
        ));
    }
    Ok(())
}
