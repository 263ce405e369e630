//! Arguments of `nodes`.

use clap::{Args, Subcommand};

/// List the nodes of this site, drain one, or forget one
///
/// Several hosts may run one site: with the same identity, one catalog on a PostgreSQL server (`drover serve --catalog`) and one
/// directory of images, on a shared file system. Each is a node, called like its host unless config.toml has another name. A
/// node that cannot be reached by the others for longer than its term (30 s) is taken for dead: they take over what it was
/// receiving. See docs/tasks/run-a-site-on-several-hosts.md.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  drover nodes
  drover nodes drain lyon-2            # before its host is stopped: sources go to another node
  drover nodes drain lyon-2 --undo
  drover nodes remove lyon-2           # it does not come back"
)]
pub struct NodesArgs {
    #[command(subcommand)]
    pub action: Option<NodesAction>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// What to do with nodes.
#[derive(Debug, Subcommand)]
pub enum NodesAction {
    /// List the nodes: what they do, for how long their terms last, and where they are
    List {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Let a node take no new sessions and mounts: sources go to another one
    ///
    /// What is under way there goes on. A node that is started serves again.
    Drain {
        /// Its name
        name: String,
        /// Let it serve again
        #[arg(long)]
        undo: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Forget a node that does not run and will not come back
    ///
    /// What it was receiving is removed unless another node has taken it over, and changes that mounts made at it no longer
    /// keep their images from being replaced.
    Remove {
        /// Its name
        name: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}
