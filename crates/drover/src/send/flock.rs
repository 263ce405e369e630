//! `send --flock`: sends images as one job.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use drover_agent::error::{Error, kind_of, one_line};
use drover_agent::flocks::{FlockFile, Sending, SentFlock, Source, beginning, path_text, stamps};
use drover_agent::home::Home;
use drover_agent::images;
use drover_agent::mounts::refuse_written;
use drover_agent::signals::Stop;
use drover_agent::site::{self, find_peer};
use drover_agent::text::{bytes, clean, count};
use drover_core::{Digest, ImageName};
use drover_net::{Code, RateLimit};
use drover_store::Peer;
use drover_teleport::progress::{Counters, ImageReport, SendEvent, WireTotals};
use drover_teleport::{
    FlockImage, FlockOrder, FlockRecord, FlockSent, ImageBlocks, ImageState, SendItem, SendLane,
    SendOptions, TeleportError, send_flock,
};
use serde_json::{Value, json};

use super::along::add_profiles;
use super::bars::Bars;
use super::by_nodes::{self, How, NodeSent};
use super::items::{self, must_have_address};
use super::show::{Show, of_report, sampled};
use crate::cli::SendArgs;
use crate::{failure, flock, out};

/// What the command line, or the flock's file, says.
struct Wanted {
    peer: String,
    name: ImageName,
    items: Vec<SendItem>,
    atomic: bool,
    at_once: usize,
}

/// An image that cannot be sent.
type Unsent = (ImageName, anyhow::Error);

/// Sends a flock.
///
/// # Errors
/// Usage errors; errors from the link or the peer; when an image was not delivered.
pub async fn send(home: &Home, mut args: SendArgs) -> Result<()> {
    let mut wanted = wanted(&mut args)?;
    let catalog = site::open_catalog(home)?;
    let peer = find_peer(&catalog, &wanted.peer)?;
    must_have_address(&peer)?;
    let stop = Stop::on_signals()?;
    let sending = Sending::begin(home, &peer, &wanted.name)?;
    let items = std::mem::take(&mut wanted.items);
    let (items, notes, unsent) = readable(home, items, args.with_parts).await?;
    if let Some((name, e)) = unsent.first().filter(|_| wanted.atomic) {
        let line = failure::line(e.as_ref());
        let text = format!("nothing of flock {} is sent: {name}: {line}", wanted.name);
        return Err(Error::of_kind(kind_of(e.as_ref()), text).into());
    }
    let (items, stamped) = tokio::task::spawn_blocking(move || {
        let stamped = stamps(&items);
        (items, stamped)
    })
    .await?;
    let has = digests_at(home, &peer).await?;
    let digests = sending.unchanged(&items, &stamped, &has);
    let sources: HashMap<ImageName, Source> = items
        .iter()
        .zip(&stamped)
        .map(|(item, stamp)| {
            let path = path_text(&item.path);
            (
                item.name.clone(),
                Source {
                    path,
                    stamp: *stamp,
                },
            )
        })
        .collect();
    let (mut changed, mut unchanged, mut notes) = (Vec::new(), Vec::new(), notes);
    for (item, digest) in items.into_iter().zip(digests) {
        match digest {
            Some(digest) => unchanged.push((item.name, digest)),
            None => changed.push(item),
        }
    }
    if args.dry_run {
        let order = order_of(&wanted, changed, unchanged, &unsent);
        return estimate(home, &args, &peer, order, notes, unsent, &stop).await;
    }
    let of = home.clone();
    let (changed, notes) = tokio::task::spawn_blocking(move || {
        add_profiles(&of, &mut changed, &mut notes);
        (changed, notes)
    })
    .await?;
    let job = Job {
        home,
        args: &args,
        peer: &peer,
        sending: &sending,
        sources,
    };
    let order = order_of(&wanted, changed, unchanged, &unsent);
    job.run(order, wanted.at_once, notes, unsent, &stop).await
}

fn order_of(
    wanted: &Wanted,
    items: Vec<SendItem>,
    unchanged: Vec<(ImageName, Digest)>,
    unsent: &[Unsent],
) -> FlockOrder {
    let why = |(name, e): &Unsent| (name.clone(), failure::line(e.as_ref()));
    FlockOrder {
        name: wanted.name.clone(),
        atomic: wanted.atomic,
        items,
        unchanged,
        failed: unsent.iter().map(why).collect(),
    }
}

/// Says what would be sent of a flock: of each image what the peer has not. What the images have in common counts in each of
/// them.
async fn estimate(
    home: &Home,
    args: &SendArgs,
    peer: &Peer,
    order: FlockOrder,
    notes: Vec<(PathBuf, String)>,
    unsent: Vec<Unsent>,
    stop: &Stop,
) -> Result<()> {
    let counters = Arc::new(Counters::default());
    let wire = Arc::new(WireTotals::default());
    let (name, of_peer) = (peer.name.clone(), counters.clone());
    let show = Arc::new(Show::new(
        args.json,
        true,
        true,
        name,
        of_peer,
        wire.clone(),
    ));
    for (path, text) in notes {
        show.event(SendEvent::Note { path, text });
    }
    said_first(&show, &order);
    let several = order.items.len() > 1;
    if !order.items.is_empty() {
        let options = options_of(home, args, peer)?;
        let events = show.clone();
        let on_event = Arc::new(move |event| events.event(event));
        let (items, stop) = (order.items, stop.watch());
        let sending = drover_teleport::send(items, options, on_event, counters, wire, stop);
        if let Err(e) = sampled(sending, std::slice::from_ref(&show)).await {
            show.failed();
            return Err(failure::of_sending(e, &peer.name));
        }
    }
    show.done(&[])?;
    if several && !args.json {
        out::note("what the images have in common is sent once, but counts in each of them here");
    }
    match unsent.into_iter().next() {
        None => Ok(()),
        Some((name, e)) => {
            let text = format!("{name}: {}", failure::line(e.as_ref()));
            Err(Error::of_kind(kind_of(e.as_ref()), text).into())
        }
    }
}

fn options_of(home: &Home, args: &SendArgs, peer: &Peer) -> Result<SendOptions> {
    let limit = args.limit.or(home.config.limit);
    Ok(SendOptions {
        limit: limit.map(|rate| Arc::new(RateLimit::new(rate))),
        dry_run: args.dry_run,
        connections: args.connections,
        compress: args.compress.0,
        give_up_after: args.give_up_after,
        ..SendOptions::to_peer(home.identity()?, peer)
    })
}

/// Reads the flock's file, if there is one.
fn wanted(args: &mut SendArgs) -> Result<Wanted> {
    let Some(path) = args.together.flock_file.clone() else {
        let (peer, items) = items::from_args(args)?;
        let name = args.together.flock.clone();
        return Ok(Wanted {
            peer,
            name: name.ok_or_else(|| failure::usage("the flock has no name"))?,
            items,
            atomic: args.together.atomic,
            at_once: args.together.at_once.unwrap_or(1),
        });
    };
    let [peer] = &args.images_and_peer[..] else {
        return Err(failure::usage(
            "with --flock-file, name only the peer: the file names the images",
        ));
    };
    let peer = peer.to_str().unwrap_or_default().to_owned();
    let file = FlockFile::load(&path)?;
    args.limit = args.limit.or(file.limit);
    let number = |n: Option<u64>, what: &str, max: u64| match n {
        Some(n) if !(1..=max).contains(&n) => Err(failure::usage(format!(
            "{}: {what} must be from 1 to {max}",
            path.display()
        ))),
        n => Ok(n),
    };
    let connections = number(file.connections.map(u64::from), "connections", 8)?;
    let max = crate::cli::MAX_AT_ONCE as u64;
    let at_once = number(file.at_once.map(|n| n as u64), "at-once", max)?;
    args.connections = args.connections.or(connections.map(|n| n as u16));
    if args.compress.0.is_none() {
        args.compress.0 = file.compress;
    }
    let mut seen = HashSet::new();
    let mut wanted = Vec::new();
    for image in file.images {
        let name = match image.name {
            Some(name) => name,
            None => items::name_of(&image.path).map_err(|e| {
                failure::usage(format!("{}: {e}; give it a `name`", path.display()))
            })?,
        };
        if !seen.insert(name.clone()) {
            let text = format!("{}: two images would be called {name}", path.display());
            return Err(failure::usage(text));
        }
        let profile = image.profile.map(|file| {
            let read = drover_agent::mounts::read_profile(&file);
            let wrong = |e| failure::usage(format!("{}: {}", path.display(), one_line(&e)));
            read.map(Arc::new).map_err(wrong)
        });
        wanted.push(SendItem {
            path: image.path,
            name,
            conversion: image.to,
            snapshot: None,
            profile: profile.transpose()?,
        });
    }
    Ok(Wanted {
        peer,
        name: file.name,
        items: wanted,
        atomic: file.atomic || args.together.atomic,
        at_once: args
            .together
            .at_once
            .or(at_once.map(|n| n as usize))
            .unwrap_or(1),
    })
}

/// The images that can be sent, each after its parts, and notes about these; and the ones that cannot.
async fn readable(
    home: &Home,
    items: Vec<SendItem>,
    parts: bool,
) -> Result<(Vec<SendItem>, Vec<(PathBuf, String)>, Vec<Unsent>)> {
    let home = home.clone();
    let sorted = tokio::task::spawn_blocking(move || {
        let (mut good, mut unsent) = (Vec::new(), Vec::new());
        for item in items {
            let one = || -> Result<()> {
                refuse_written(&home, &item.path)?;
                items::with_parts(vec![item.clone()], parts).map(drop)
            };
            match one() {
                Ok(()) => good.push(item),
                Err(e) => unsent.push((item.name, e)),
            }
        }
        // Parts that images have in common are sent once.
        let sent = items::with_parts(good, parts)?;
        anyhow::Ok((sent.items, sent.notes, unsent))
    });
    sorted.await?
}

/// The digests of the images at the peer.
async fn digests_at(home: &Home, peer: &Peer) -> Result<HashMap<String, Digest>> {
    let catalog = site::open_catalog(home)?;
    let list = images::list_of_peer(home, &catalog, &peer.name).await?;
    Ok(list
        .into_iter()
        .map(|image| (image.name, image.digest))
        .collect())
}

/// A flock that is being sent.
struct Job<'a> {
    home: &'a Home,
    args: &'a SendArgs,
    peer: &'a Peer,
    sending: &'a Sending,
    sources: HashMap<ImageName, Source>,
}

impl Job<'_> {
    async fn run(
        &self,
        order: FlockOrder,
        at_once: usize,
        notes: Vec<(PathBuf, String)>,
        unsent: Vec<Unsent>,
        stop: &Stop,
    ) -> Result<()> {
        let args = self.args;
        let options = options_of(self.home, args, self.peer)?;
        let nodes = by_nodes::find(self.home, &order).await?;
        let mut record = begun(self.peer, &order);
        self.note(&record)?;
        let wire = Arc::new(WireTotals::default());
        let bars = (!args.json && std::io::stderr().is_terminal()).then(|| {
            let length = |item: &SendItem| std::fs::metadata(&item.path).map_or(0, |m| m.len());
            let total = order.items.iter().map(length).sum();
            Bars::new(order.name.as_str(), order.items.len(), total, wire.clone())
        });
        let delivered: Arc<Mutex<Vec<ImageReport>>> = Arc::default();
        let (mut lanes, mut shows) = (Vec::new(), Vec::new());
        // Nodes tell of each image by itself.
        let at_a_time = if nodes.is_some() { usize::MAX } else { at_once };
        for _ in 0..at_a_time.min(order.items.len()).max(1) {
            let counters = Arc::new(Counters::default());
            let (peer, bars) = (self.peer.name.clone(), bars.clone());
            let show = Arc::new(Show::of_flock(args.json, bars, peer, counters.clone()));
            let (of_lane, ended) = (show.clone(), delivered.clone());
            let on_event = Arc::new(move |event: SendEvent| {
                if let SendEvent::Delivered(report) = &event {
                    let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                    ended.push((**report).clone());
                }
                of_lane.event(event);
            });
            lanes.push(SendLane { on_event, counters });
            shows.push(show);
        }
        if let Some(show) = shows.first() {
            for (path, text) in notes {
                show.event(SendEvent::Note { path, text });
            }
            said_first(show, &order);
        }
        let limit = args.limit.or(self.home.config.limit);
        let (totals, stopped) = (wire.clone(), stop.watch());
        let sending = async {
            let Some(nodes) = nodes else {
                let sent = send_flock(order, options, lanes, totals, stopped).await?;
                return Ok((sent, BTreeMap::new(), BTreeMap::new()));
            };
            let options = &options;
            let how = How {
                options,
                limit,
                at_once,
            };
            nodes.send(order, how, lanes, totals, stopped).await
        };
        let sent = sampled(sending, &shows).await;
        if let Some(bars) = bars {
            bars.clear();
        }
        match sent {
            Ok((sent, by, nodes)) => {
                record.nodes = by;
                record.images.clone_from(&sent.info.record.images);
                record.state = sent.info.record.state;
                record.why.clone_from(&sent.info.record.why);
                record.id = sent.info.record.id;
                self.note(&record)?;
                show_end(args.json, &sent, &wire, &nodes)?;
                ended(unsent, sent)
            }
            Err(e) => {
                let reports = delivered.lock().unwrap_or_else(PoisonError::into_inner);
                reports.iter().for_each(|report| add(&mut record, report));
                if !matches!(e, TeleportError::Stopped) {
                    record.fail(&e.to_string());
                }
                self.note(&record)?;
                Err(self.failed(e, &record))
            }
        }
    }

    /// Keeps what is known of the flock.
    fn note(&self, record: &FlockRecord) -> Result<()> {
        let source = |image: &FlockImage| {
            let known = self.sources.get(&image.name).cloned();
            known.unwrap_or_else(|| Source {
                path: String::new(),
                stamp: None,
            })
        };
        let mut record = record.clone();
        record.touched_unix = drover_agent::text::now_unix();
        let sources = record.images.iter().map(source).collect();
        Ok(self.sending.record(&SentFlock { record, sources })?)
    }

    /// The error of a flock that was not sent.
    fn failed(&self, error: TeleportError, record: &FlockRecord) -> anyhow::Error {
        let stopped = matches!(error, TeleportError::Stopped);
        let unsupported =
            matches!(&error, TeleportError::Refused(refusal) if refusal.code == Code::Unsupported);
        let e = failure::of_sending(error, &self.peer.name);
        let line = failure::line(e.as_ref());
        if unsupported {
            let text = format!("{line}; without --flock it takes the images one by one");
            return Error::of_kind(kind_of(e.as_ref()), text).into();
        }
        match record.atomic && !stopped {
            true => {
                let text = format!("nothing of flock {} was delivered: {line}", record.name);
                Error::of_kind(kind_of(e.as_ref()), text).into()
            }
            false => e,
        }
    }
}

/// The record of a flock that begins.
fn begun(peer: &Peer, order: &FlockOrder) -> FlockRecord {
    let mut record = beginning(peer, &order.name, order.atomic);
    let waiting = order
        .items
        .iter()
        .map(|item| FlockImage::waiting(item.name.clone()));
    let there = order.unchanged.iter().map(|(name, digest)| FlockImage {
        state: ImageState::Unchanged,
        digest: *digest,
        ..FlockImage::waiting(name.clone())
    });
    let failed = order.failed.iter().map(|(name, _)| FlockImage {
        state: ImageState::Failed,
        ..FlockImage::waiting(name.clone())
    });
    record.images = waiting.chain(there).chain(failed).collect();
    record
}

/// Adds an image that was delivered before the others failed.
fn add(record: &mut FlockRecord, report: &ImageReport) {
    let Ok(name) = ImageName::new(report.name.clone()) else {
        return;
    };
    if let Some(image) = record.image(&name) {
        let origins = report.origins.unwrap_or_default();
        image.state = match report.waits {
            true => ImageState::Arrived,
            false => ImageState::Delivered,
        };
        image.digest = report.digest;
        image.size_bytes = report.size_bytes;
        image.blocks = ImageBlocks {
            zero: report.zero_blocks,
            own: origins.own,
            flock: origins.flock,
            site: origins.site,
            sent: report.sent_blocks,
            resumed: report.resumed_blocks,
        };
    }
}

/// Says what is not sent.
fn said_first(show: &Show, order: &FlockOrder) {
    for (name, digest) in &order.unchanged {
        show.print(
            json!({"event": "unchanged", "name": name, "digest": digest.to_string()}),
            || format!("{name}: unchanged since it was last sent"),
        );
    }
    for (name, why) in &order.failed {
        show.print(
            json!({"event": "failed", "name": name, "message": clean(why)}),
            || format!("{name}: not sent: {why}"),
        );
    }
}

/// The result.
fn show_end(
    json: bool,
    sent: &FlockSent,
    wire: &WireTotals,
    nodes: &BTreeMap<String, NodeSent>,
) -> Result<()> {
    if json {
        let reports: Vec<Value> = sent.reports.iter().map(of_report).collect();
        let flock = flock::object(&sent.info, "sent", false);
        let mut last = json!({"event": "done", "flock": flock, "images": reports});
        if !nodes.is_empty() {
            last["nodes"] = by_nodes::object(nodes);
        }
        return out::json(&last);
    }
    let record = &sent.info.record;
    let rows = record.images.iter().map(|image| {
        let report = sent.reports.iter().find(|r| r.name == image.name.as_str());
        let mut row = vec![clean(image.name.as_str())];
        let size = report.map_or(image.size_bytes, |r| r.size_bytes);
        row.push(bytes(size));
        row.extend(flock::origins(image));
        row.push(report.map_or_else(
            || "-".into(),
            |r| bytes(r.wire.data + r.wire.digests + r.wire.plan + r.wire.header),
        ));
        row.push(report.map_or_else(|| "-".into(), |r| format!("{:.1} s", r.seconds)));
        row.push(flock::image_state(image.state).into());
        row
    });
    let heading = [
        "image",
        "size",
        "zero",
        "own",
        "flock",
        "site",
        "sent",
        "resumed",
        "transferred",
        "time",
        "state",
    ];
    out::line(&out::table(
        &heading,
        rows.collect(),
        &[1, 2, 3, 4, 5, 6, 7, 8, 9],
    ))?;
    out::note(&format!(
        "{}: {}, {} transferred",
        clean(record.name.as_str()),
        count(record.images.len(), "image"),
        bytes(wire.sent() + wire.received())
    ));
    by_nodes::show(nodes);
    Ok(())
}

/// Fails if an image was not delivered.
fn ended(unsent: Vec<Unsent>, sent: FlockSent) -> Result<()> {
    let (failed, of) = (
        unsent.len() + sent.failed.len(),
        sent.info.record.images.len(),
    );
    if let Some((name, e)) = unsent.into_iter().next() {
        let line = failure::line(e.as_ref());
        let text = format!("{failed} of {of} images were not delivered; {name}: {line}");
        return Err(Error::of_kind(kind_of(e.as_ref()), text).into());
    }
    match sent.failed.into_iter().next() {
        Some((name, first)) => Err(TeleportError::Images {
            failed,
            of,
            name,
            first: Box::new(first),
        }
        .into()),
        None if sent.info.record.why.is_empty() => Ok(()),
        None => Err(Error::msg(sent.info.record.why).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use drover_agent::error::Kind;

    fn args(words: &[&str]) -> SendArgs {
        let cli = Cli::try_parse_from(["drover", "send"].iter().chain(words)).unwrap();
        match cli.command {
            Command::Send(args) => args,
            _ => unreachable!(),
        }
    }

    #[test]
    fn a_flock_is_described_by_words_or_by_a_file() {
        let mut of_words = args(&["web.img", "db.img", "lyon", "--flock", "shop", "--atomic"]);
        let wanted_of_words = wanted(&mut of_words).unwrap();
        assert_eq!(wanted_of_words.items.len(), 2);
        assert!(wanted_of_words.atomic && wanted_of_words.at_once == 1);
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("shop.toml");
        let text = "name = \"shop\"\nat-once = 3\nconnections = 2\nlimit = \"1M\"\n[[image]]\npath = \"web.img\"\n";
        std::fs::write(&path, text).unwrap();
        let file = path.to_str().unwrap();
        let mut of_file = args(&["--flock-file", file, "lyon"]);
        let found = wanted(&mut of_file).unwrap();
        assert_eq!((found.peer.as_str(), found.at_once), ("lyon", 3));
        assert_eq!(found.items[0].path, tmp.path().join("web.img"));
        assert_eq!(
            (of_file.limit, of_file.connections),
            (Some(1_000_000), Some(2))
        );
        // What is given beside it goes first.
        let mut both = args(&[
            "--flock-file",
            file,
            "lyon",
            "--limit",
            "2M",
            "--at-once",
            "2",
        ]);
        assert_eq!(wanted(&mut both).unwrap().at_once, 2);
        assert_eq!(both.limit, Some(2_000_000));
    }

    #[test]
    fn what_is_wrong_with_a_flock_is_a_usage_error() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("shop.toml");
        let file = path.to_str().unwrap().to_owned();
        let is_usage = |mut args: SendArgs, why: &str| {
            let e = wanted(&mut args).err().unwrap();
            assert_eq!(kind_of(e.as_ref()), Kind::Usage, "{e}");
            assert!(e.to_string().contains(why), "{e}");
        };
        let image = "[[image]]\npath = \"a.img\"\n";
        std::fs::write(&path, format!("name = \"x\"\n{image}{image}")).unwrap();
        is_usage(args(&["--flock-file", &file, "lyon"]), "two images");
        std::fs::write(&path, format!("name = \"x\"\nat-once = 9\n{image}")).unwrap();
        is_usage(
            args(&["--flock-file", &file, "lyon"]),
            "at-once must be from 1 to 4",
        );
        std::fs::write(&path, format!("name = \"x\"\n{image}")).unwrap();
        is_usage(
            args(&["--flock-file", &file, "a.img", "lyon"]),
            "only the peer",
        );
        is_usage(
            args(&["a/x.img", "b/x.img", "lyon", "--flock", "x"]),
            "two of the images",
        );
    }

    #[tokio::test]
    async fn an_image_that_cannot_be_read_does_not_stop_the_others() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::create(tmp.path().join("home")).unwrap();
        let item = |name: &str| SendItem {
            path: tmp.path().join(name),
            name: ImageName::new(name).unwrap(),
            conversion: Default::default(),
            snapshot: None,
            profile: None,
        };
        std::fs::write(tmp.path().join("a.img"), vec![1; 8192]).unwrap();
        let items = vec![item("gone.img"), item("a.img")];
        let (good, _, unsent) = readable(&home, items, false).await.unwrap();
        assert_eq!(good.len(), 1);
        assert_eq!(unsent[0].0.as_str(), "gone.img");
        assert!(failure::line(unsent[0].1.as_ref()).contains("gone.img"));
    }
}
