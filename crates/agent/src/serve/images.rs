//! Services for images: list, verify, index, remove.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use drover_core::ImageName;
use drover_mount::server::WhyBroken;
use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Code, Refusal};
use drover_store::{Catalog, ImageRecord};
use drover_teleport::services::{
    ImageInfo, IndexImage, KnowFiles, ListImages, Removal, RemoveImage, ShareImage, Taken,
    Verified, VerifyImage,
};

use super::jobs;
use super::server::OfSite;
use crate::changes;
use crate::error::{failed, refusal_of};
use crate::home::CleanUp;
use crate::machines::forget_disk;
use crate::mounts::why_held;

/// Images per message of a list.
const IMAGES_AT_ONCE: usize = 256;

impl Handler<ListImages> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        _: ListImages,
        exchange: &mut Exchange<'_, ListImages>,
    ) -> Result<(), Refusal> {
        let catalog = Arc::clone(&self.domain.catalog);
        let records = tokio::task::spawn_blocking(move || catalog.images()).await;
        let records = records.map_err(failed)?.map_err(failed)?;
        let site = &self.domain.site;
        let about = |record: ImageRecord| {
            let known = site.known_file(&record.path);
            crate::images::info(record, known.as_deref())
        };
        let mut infos: Vec<ImageInfo> = records.into_iter().map(about).collect();
        let stores = Arc::clone(&self.domain.stores);
        let stored = tokio::task::spawn_blocking(move || stores.listed()).await;
        infos.extend(stored.map_err(failed)?);
        infos.sort_by(|one, other| one.name.cmp(&other.name));
        for some in infos.chunks(IMAGES_AT_ONCE) {
            exchange.report(&some.to_vec()).await?;
        }
        Ok(())
    }
}

impl Handler<VerifyImage> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        VerifyImage { name }: VerifyImage,
        exchange: &mut Exchange<'_, VerifyImage>,
    ) -> Result<Verified, Refusal> {
        self.record(&name).await?;
        let (site, of) = (Arc::clone(&self.domain.site), name.clone());
        let job = move |progress: &mut dyn FnMut(u64, u64)| site.verify(&of, progress);
        let uses = Arc::clone(&self.domain);
        let checked = jobs::run(&self.server, exchange, uses, job).await;
        let (expected, found) = checked.map_err(failed)??;
        let metrics = &self.server.metrics;
        if expected == found {
            metrics.verified_good.fetch_add(1, Relaxed);
        } else {
            metrics.verified_bad.fetch_add(1, Relaxed);
            tracing::error!(image = %name, "its file is not what was delivered: {found}, expected {expected}");
        }
        Ok(Verified { expected, found })
    }
}

impl Handler<IndexImage> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        IndexImage { path }: IndexImage,
        exchange: &mut Exchange<'_, IndexImage>,
    ) -> Result<ImageName, Refusal> {
        let path = PathBuf::from(path);
        if !path.is_absolute() {
            return Err(Refusal::new(Code::Failed, "the path must be absolute"));
        }
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| ImageName::new(name).ok());
        if let Some(why) = name.and_then(|name| self.domain.stores.why_held(&name)) {
            return Err(Refusal::new(Code::Denied, why));
        }
        let site = Arc::clone(&self.domain.site);
        let job = move |progress: &mut dyn FnMut(u64, u64)| site.index_image(&path, progress);
        let uses = Arc::clone(&self.domain);
        let indexed = jobs::run(&self.server, exchange, uses, job).await;
        Ok(indexed.map_err(failed)??.name)
    }
}

impl Handler<KnowFiles> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        KnowFiles { directory }: KnowFiles,
        exchange: &mut Exchange<'_, KnowFiles>,
    ) -> Result<Taken, Refusal> {
        let directory = PathBuf::from(directory);
        if !directory.is_absolute() {
            return Err(Refusal::new(Code::Failed, "the path must be absolute"));
        }
        let site = Arc::clone(&self.domain.site);
        let job = move |progress: &mut dyn FnMut(u64, u64)| site.know_files(&directory, progress);
        let uses = Arc::clone(&self.domain);
        let taken = jobs::run(&self.server, exchange, uses, job).await;
        Ok(taken.map_err(failed)??)
    }
}

impl Handler<ShareImage> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ShareImage { name, with, share }: ShareImage,
        _: &mut Exchange<'_, ShareImage>,
    ) -> Result<(), Refusal> {
        let record = self.own_record(peer, &name).await?;
        let (server, domain) = (Arc::clone(&self.server), Arc::clone(&self.domain));
        let its = peer.domain.clone();
        let shared = tokio::task::spawn_blocking(move || {
            let other = server.catalog.peer(&with).map_err(failed)?;
            let other = other
                .filter(|other| !share || other.grant.domain == its)
                .ok_or_else(|| {
                    let text = format!("{} has no peer called {with}", server.name);
                    Refusal::new(Code::NotFound, text)
                })?;
            domain.site.share(&record, other.key, share)?;
            Ok::<_, Refusal>(other.key)
        });
        let other = shared.await.map_err(failed)??;
        let leased = self.domain.devices.leased(&name).map_err(failed)?;
        let holder = leased.and_then(|leased| leased.holder);
        if !share && holder.is_some_and(|holder| holder.peer == other.0) {
            let broken = self.domain.break_lease(&name, WhyBroken::RightLost).await;
            broken.map_err(failed)?;
        }
        Ok(())
    }
}

impl Handler<RemoveImage> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        RemoveImage { name, dry_run }: RemoveImage,
        _: &mut Exchange<'_, RemoveImage>,
    ) -> Result<Removal, Refusal> {
        let record = self.own_record(peer, &name).await?;
        let domain = Arc::clone(&self.domain);
        let remove = move || {
            let held = match dry_run {
                true => why_held(&name, domain.devices.leased(&name)),
                false => None,
            };
            let changes = changes::of_image(&domain.home, &name);
            if !dry_run {
                // Whoever may send can have replaced it meanwhile.
                CleanUp::of(&domain.home).run(|| Ok(domain.site.remove_this(&record)?))?;
                forget_disk(&domain.home.disks(), &name);
            }
            Ok(Removal {
                external: record.external,
                data_bytes: record.data_bytes,
                changed_bytes: changes.map_or(0, |changes| changes.changed_bytes),
                held,
            })
        };
        let removed = tokio::task::spawn_blocking(remove).await;
        removed.map_err(failed)?.map_err(refusal_of)
    }
}
