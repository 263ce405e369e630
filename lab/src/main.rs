//! The lab: everything that measures drover. An image library of real systems, a WAN link in user
//! space, the limit that a perfect deduplicator and compressor would reach, and the experiments
//! that drive the real `drover` binary.
//!
//! Nothing here is used by drover itself.

mod alike;
mod bench;
mod dedup;
mod experiments;
mod files;
mod library;
mod limit;
mod link;
mod rivals;
mod setup;
mod shell;
mod site;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures drover on real images, against the limit and against its rivals.
#[derive(Parser)]
#[command(name = "lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the image library: real Debian systems as disk images; or list or check what there is.
    Library(library::LibraryArgs),
    /// Print what sending images in order costs at least: unique non-zero 4 KiB blocks through
    /// `zstd -3 --long=27`, and what an exact deduplicator matches.
    ///
    /// With --blocks, all of them together for each of these sizes of blocks, as figure 5 of vmflock has it:
    /// lab limit --blocks 1,2,4,8,16,32,64,128 IMAGE...
    Limit {
        /// The images, in the order in which they are sent.
        #[arg(required = true)]
        images: Vec<PathBuf>,
        /// Images that the destination has already.
        #[arg(long, value_name = "IMAGE", num_args = 1..)]
        with: Vec<PathBuf>,
        /// Sizes of blocks in KiB.
        #[arg(long, value_name = "KIB", value_delimiter = ',')]
        blocks: Vec<u64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Join two network namespaces by a WAN link in user space, over TUN devices.
    Link(link::LinkArgs),
    /// Measure drover, its rivals and the limit, most important first
    ///
    /// Results are kept, and what is kept and still holds is not measured again.
    ///
    /// Exit codes (of several, the lowest but 0):
    ///   0    every row is good, or was skipped: a rival is not installed
    ///   1    a row failed, its file was wrong, or it lacks a figure
    ///   4    something whole cannot be measured here: root, namespaces or the library are missing
    ///   2    the command line is wrong
    ///   130  interrupted; what was done is kept
    #[command(verbatim_doc_comment)]
    Bench(bench::BenchArgs),
    /// Render docs/benchmarks.md from the rows that `bench` has kept, without measuring.
    Document,
    /// An end of dedup-separate, a rival for `bench`.
    #[command(hide = true, subcommand)]
    Dedup(dedup::DedupArgs),
    /// Measure one case, for `bench`.
    #[command(hide = true)]
    Case { request: String },
}

fn main() -> ExitCode {
    run(Cli::parse().command).unwrap_or_else(|error| {
        eprintln!("lab: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Library(args) => library::run(&args)?,
        Command::Limit {
            images,
            with,
            blocks,
            json,
        } => match blocks.is_empty() {
            true => limit::print(&images, &with, json)?,
            false => limit::print_sizes(&images, &with, &blocks, json)?,
        },
        Command::Link(args) => return link::run(&args),
        Command::Bench(args) => return bench::bench(experiments::ALL, &args),
        Command::Document => bench::make_document(experiments::ALL)?,
        Command::Dedup(args) => dedup::run(&args)?,
        Command::Case { request } => bench::run_case(experiments::ALL, &request)?,
    }
    Ok(ExitCode::SUCCESS)
}
