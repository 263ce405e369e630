//! Services for the profiles of images: given to a site, and taken from it.

use std::sync::Arc;
use std::time::Duration;

use drover_core::ImageName;
use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal};
use drover_store::profile::{MAX_BYTES, Profile};
use drover_teleport::services::{GetProfile, PutProfile, PutProfileReply};
use tokio::time::timeout;

use super::ownership::owns;
use super::server::OfSite;
use crate::error::{Error, Result as AgentResult, failed, one_line, refusal_of};
use crate::profiles::OfImage;

/// Bytes of a profile in a message to a peer.
const SENT_AT_ONCE: usize = 256 << 10;

/// How long the next piece of a profile may take.
const PIECE_LIMIT: Duration = Duration::from_secs(60);

impl Handler<PutProfile> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        PutProfile { name, bytes }: PutProfile,
        exchange: &mut Exchange<'_, PutProfile>,
    ) -> Result<PutProfileReply, Refusal> {
        let arriving = Arc::clone(&self.domain.site);
        let record = match self.record(&name).await {
            // A machine runs from it already, at this site.
            Err(e) if e.code == Code::NotFound && peer.key == self.server.identity.key() => {
                let boot = received(&name, bytes, exchange).await?;
                let (image, reads) = (name.clone(), boot.reads());
                let added = tokio::task::spawn_blocking(move || arriving.add_boot(&image, &reads));
                match added.await.map_err(failed)?? {
                    Some(put) => return Ok(put),
                    None => {
                        let put = self.put(exchange.caller(), name, boot).await;
                        return put.map_err(|other| match other.code {
                            Code::NotFound => e,
                            _ => other,
                        });
                    }
                }
            }
            record => record?,
        };
        if !owns(peer, &record) && !record.may_be_changed_by(&peer.key, peer.rights) {
            let text = format!("{name} does not belong to your site: its profile stays as it is");
            return Err(Refusal::new(Code::Denied, text));
        }
        let boot = received(&name, bytes, exchange).await?;
        self.put(exchange.caller(), name, boot).await
    }
}

/// The profile that comes with a request.
async fn received(
    name: &ImageName,
    bytes: u32,
    exchange: &mut Exchange<'_, PutProfile>,
) -> Result<Profile, Refusal> {
    let length = bytes as usize;
    if length > MAX_BYTES {
        return Err(Refusal::new(Code::OutOfRange, "the profile is too long"));
    }
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let piece = timeout(PIECE_LIMIT, exchange.next_progress()).await;
        let piece = piece.map_err(failed)?.map_err(failed)?;
        if piece.is_empty() || piece.len() > length - bytes.len() {
            let text = "a piece of the profile is empty, or too long";
            return Err(Refusal::new(Code::Protocol, text));
        }
        bytes.extend(piece);
    }
    Profile::decode(&bytes)
        .map_err(|e| Refusal::new(Code::Corrupt, format!("the profile of {name}: {e}")))
}

impl Handler<GetProfile> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        GetProfile { name }: GetProfile,
        exchange: &mut Exchange<'_, GetProfile>,
    ) -> Result<u64, Refusal> {
        self.record(&name).await?;
        let of = name.clone();
        let bytes = self.with_image(exchange.caller(), name, move |image| {
            // Who asks can do without.
            let none =
                |e: &Error| tracing::warn!("{of}: its profile cannot be used: {}", one_line(e));
            let profile = image.get().inspect_err(none).ok().flatten();
            Ok(profile.map_or_else(Vec::new, |profile| profile.encode()))
        });
        let bytes = bytes.await?;
        for piece in bytes.chunks(SENT_AT_ONCE) {
            exchange.report(&piece.to_vec()).await?;
        }
        Ok(bytes.len() as u64)
    }
}

impl OfSite {
    /// Adds a boot to the profile of an image.
    async fn put(
        &self,
        caller: drover_net::PeerKey,
        name: ImageName,
        boot: Profile,
    ) -> Result<PutProfileReply, Refusal> {
        let put = self.with_image(caller, name, move |image| image.add_boot(&boot.reads()));
        let put = put.await?;
        Ok(PutProfileReply {
            blocks: put.blocks,
            pruned: put.pruned,
            boots: put.boots,
        })
    }

    /// Reads an image for its profile, in its turn with long jobs.
    async fn with_image<T: Send + 'static>(
        &self,
        caller: drover_net::PeerKey,
        name: ImageName,
        job: impl FnOnce(OfImage<'_>) -> AgentResult<T> + Send + 'static,
    ) -> Result<T, Refusal> {
        let place = self.server.jobs.take(caller, 1).await;
        let domain = Arc::clone(&self.domain);
        let done = tokio::task::spawn_blocking(move || {
            let _until_it_ends = place;
            job(OfImage::named(&domain.home, &domain.catalog, &name)?)
        });
        done.await.map_err(failed)?.map_err(refusal_of)
    }
}
