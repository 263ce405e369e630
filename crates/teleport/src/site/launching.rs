//! Machines that run from images in transit: which transfer that is, and what must not happen to it meanwhile.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_core::ImageName;
use drover_index::ImageId;
use drover_net::{Code, PeerKey};
use drover_store::DataBits;

use super::{Holder, Site};
use crate::TeleportError;
use crate::launch::{Launch, LaunchStatus};
use crate::partials::Contents;
use crate::transfer::{Opening, front_of, read_ahead, read_logged};
use crate::transfers::{TransferState, Unfinished};

/// How long what reads ahead for a machine may hold an image after the machine has ended.
const LETS_GO: Duration = Duration::from_secs(3);

/// Whether a transfer is of this name, and a machine can run from what it has brought.
fn is_usable(transfer: &Unfinished, name: &ImageName) -> bool {
    let usable = matches!(
        transfer.state,
        TransferState::Stopped | TransferState::UnderWay
    );
    usable && transfer.name == name.as_str()
}

impl Site {
    /// Installs `holder`, which says why a machine runs from an image in transit. Replaces the previous one.
    pub fn launched_by(&self, holder: Arc<Holder>) {
        *self.launched.write() = Some(holder);
    }

    fn why_launched(&self, name: &ImageName) -> Option<String> {
        // Clone it first: the callback may be slow.
        let launched = self.launched.read().clone();
        launched.and_then(|launched| launched(name))
    }

    /// The launched images.
    #[must_use]
    pub fn launches(&self) -> Vec<LaunchStatus> {
        self.launches.all().iter().map(|l| l.status()).collect()
    }

    /// Whether an image of that name is in transit.
    #[must_use]
    pub fn is_arriving(&self, name: &ImageName) -> bool {
        self.launches.get(name).is_some_and(|l| !l.is_delivered())
            || self
                .unfinished()
                .is_ok_and(|all| all.iter().any(|t| is_usable(t, name)))
    }

    /// The images in transit that a machine can run from, with their senders.
    pub(super) fn arriving(&self) -> Vec<(PeerKey, ImageName)> {
        // What cannot be listed is not launched either.
        let all = self.unfinished().unwrap_or_default().into_iter();
        let all = all.filter_map(|t| {
            let name = ImageName::new(t.name.clone()).ok()?;
            is_usable(&t, &name).then_some((t.sender, name))
        });
        all.collect()
    }

    /// Opens an image that is in transit for reading: the one that is being sent, else the one that was last; `None` when
    /// there is none of that name. Blocks the thread.
    ///
    /// # Errors
    /// When its files cannot be read.
    pub fn launch(
        self: &Arc<Self>,
        name: &ImageName,
    ) -> Result<Option<Arc<Launch>>, TeleportError> {
        self.launches.open(name, || self.open_launch(name))
    }

    fn open_launch(self: &Arc<Self>, name: &ImageName) -> Result<Option<Launch>, TeleportError> {
        let mut found = self.unfinished()?;
        found.retain(|t| is_usable(t, name));
        let running = found
            .iter()
            .position(|t| t.state == TransferState::UnderWay);
        if found.is_empty() {
            return Ok(None);
        }
        let transfer = found.swap_remove(running.unwrap_or(0));
        let dir = self.transfer_dir(&transfer.key);
        let path = dir.join("image.part");
        let file = File::open(&path);
        // Between its directory and its log nothing is there of it yet.
        let (Some((opening, layout)), Ok(file)) = (front_of(&dir), file) else {
            return Ok(None);
        };
        let layout = Arc::new(layout);
        let image = ImageId(opening.image);
        let exact = self
            .partials
            .get(image)
            .is_some_and(|partial| partial.is_exact());
        if !exact && !self.active.has(&transfer.key) {
            self.read_partial(&opening, &layout, &dir);
        }
        Ok(Some(Launch::new(
            opening,
            transfer.key,
            layout,
            file,
            self.partials.clone(),
            self.launches.sessions.clone(),
            self.images.list().is_empty(),
        )))
    }

    /// Finds what there is of a transfer that stopped before the site was started, on a thread of its own.
    fn read_partial(
        self: &Arc<Self>,
        opening: &Opening,
        layout: &Arc<drover_image::Layout>,
        dir: &std::path::Path,
    ) {
        let weak = Arc::downgrade(self);
        let (peer, image) = (opening.peer, ImageId(opening.image));
        let (layout, dir) = (layout.clone(), dir.to_path_buf());
        let partials = self.partials.clone();
        let path = dir.join("image.part");
        let read = move || -> Result<(), TeleportError> {
            let part = File::open(&path).map_err(TeleportError::file("open", &path))?;
            // Not any more once the site is gone, or a session has found out by itself.
            let go_on =
                || weak.strong_count() > 0 && !partials.get(image).is_some_and(|p| p.is_exact());
            let mut contents: Contents = read_logged(&dir, &part, &layout, &go_on)?;
            let from = contents.blocks.batches();
            let [data, zero] = read_ahead(&dir, &part, &layout, from)?;
            contents.ahead = data;
            for (index, bits) in zero {
                let all = contents.ahead.entry(index);
                let all = all.or_insert_with(|| DataBits::new(bits.blocks()));
                bits.iter().for_each(|place| all.set(place));
            }
            if go_on() {
                partials.add_read(image, peer, &path, layout, contents);
            }
            Ok(())
        };
        let name = opening.offer.name.clone();
        let thread = std::thread::Builder::new().name("launch".into());
        let started = thread.spawn(move || {
            if let Err(e) = read() {
                tracing::warn!(image = %name, error = %e, "what has arrived of an image cannot be read");
            }
        });
        if let Err(e) = started {
            tracing::warn!(error = %e, "what has arrived of an image cannot be read");
        }
    }

    /// Fails if a machine runs from another transfer of that name.
    pub(crate) fn check_launch(&self, name: &ImageName, key: &str) -> Result<(), TeleportError> {
        match self.launches.get(name) {
            Some(launch) if !launch.is_delivered() && launch.key() != key => {
                Err(self.launched_refusal(name, "another image of that name"))
            }
            _ => Ok(()),
        }
    }

    /// Fails if a machine runs from what has arrived of an image in transit: it must not become another image, or go. Blocks
    /// the thread for moments.
    pub(crate) fn check_not_launched(&self, name: &ImageName) -> Result<(), TeleportError> {
        let began = Instant::now();
        let is_open = || self.launches.get(name).is_some_and(|l| !l.is_delivered());
        loop {
            if self.why_launched(name).is_none() {
                if !is_open() {
                    return Ok(());
                }
                // What read ahead for a machine that has just ended lets go of it within moments.
                if began.elapsed() < LETS_GO {
                    std::thread::sleep(LETS_GO / 100);
                    continue;
                }
            }
            return Err(self.launched_refusal(name, "what has arrived of it"));
        }
    }

    /// The same for the transfer with this key: a machine may run from another one of that name.
    pub(crate) fn check_not_launched_as(
        &self,
        name: &ImageName,
        key: &str,
    ) -> Result<(), TeleportError> {
        // Not held while the other is asked: it would be what holds it open.
        let other = self
            .launches
            .get(name)
            .is_some_and(|launch| launch.key() != key);
        match other {
            true => Ok(()),
            false => self.check_not_launched(name),
        }
    }

    fn launched_refusal(&self, name: &ImageName, what: &str) -> TeleportError {
        let why = self.why_launched(name);
        let why = why.map_or_else(String::new, |why| format!(" ({why})"));
        let text = format!(
            "a machine runs from {what}{why}: end that first, by `drover unmount` there; or send it under another name"
        );
        TeleportError::refused(Code::Denied, text)
    }
}
