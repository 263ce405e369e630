//! Arguments of `domains`.

use clap::{Args, Subcommand};
use drover_core::ImageName;
use drover_net::DEFAULT_DOMAIN;

use super::image_name;

/// List, add and remove the domains of this site, or move an image between them
///
/// A domain has its own images, and its own matcher: peers of one domain neither see what is in another nor learn, by what
/// needs not be sent, what others have. A peer is in one domain, which its ticket names (`drover ticket --domain NAME`). Peers
/// and images are in the domain default unless another is named. Commands about images take --domain.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover domains
  drover domains add acme
  drover ticket --domain acme --name acme-web
  drover images --domain acme
  drover domains move web.qcow2 --to acme
  drover domains rm acme"
)]
pub struct DomainsArgs {
    #[command(subcommand)]
    pub action: Option<DomainsAction>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// What to do with domains.
#[derive(Debug, Subcommand)]
pub enum DomainsAction {
    /// List the domains with their images and peers
    List {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Add a domain
    Add {
        /// Its name: lower-case letters, digits, - and _
        #[arg(value_parser = drover_store::domain::check)]
        name: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove an empty domain, without images, changes, unfinished transfers, peers or valid tickets
    ///
    /// Files in its images directory that are no images of it are not removed: then it stays.
    Rm {
        /// Its name
        name: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Move an image to another domain
    ///
    /// Its file is not copied, but read once. It becomes the site's own there: peers of that domain may read it, and with the
    /// right write replace it and write to it. The peer that sent it no longer sees it.
    Move {
        /// Name of the image
        #[arg(value_name = "IMAGE", value_parser = image_name)]
        image: ImageName,
        /// The domain that it is in
        #[arg(long, value_name = "NAME", default_value = DEFAULT_DOMAIN)]
        from: String,
        /// The domain that it goes to
        #[arg(long, value_name = "NAME", default_value = DEFAULT_DOMAIN)]
        to: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}
