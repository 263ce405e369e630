//! Services for replicas that this site keeps.

use std::sync::Arc;

use drover_core::ImageName;
use drover_migrate::replica::protocol::{BeginRound, Begun, CompleteRound, TellPoint};
use drover_net::service::{Exchange, Handler, Peer, Request};
use drover_net::{Code, Refusal, Right};
use drover_store::Catalog;
use drover_store::generations::Summary;
use drover_store::machine::{Other, Token};
use drover_store::replica::{Named, Point, PointImage, Replica};

use super::in_domain::InDomain;
use super::machines::has_changes;
use super::moves::OfMachines;
use super::server::OfSite;
use crate::audit::{Event, Record};
use crate::changes::crash;
use crate::error::failed;
use crate::home::CleanUp;
use crate::mounts::was_changed;
use crate::replicas::{FailOver, FailedOver, ForgetReplica, SILENCE_MS, now_ms};
use crate::text::moment;

/// Upper bound on the replicas that a domain keeps of a peer.
const MAX_REPLICAS: usize = 256;

/// How many of these are of a peer.
fn its(replicas: &[Named<Replica>], peer: &Peer) -> usize {
    let readable = replicas.iter().flat_map(|(_, replica)| replica);
    readable
        .filter(|replica| replica.from.key == peer.key.0)
        .count()
}

impl OfSite {
    /// Changes what is known of replicas, one at a time, on a thread that may block.
    async fn with_replicas<T: Send + 'static>(
        &self,
        change: impl FnOnce(&OfSite) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let alone = Arc::clone(&self.server.replicas).lock_owned().await;
        let site = self.clone();
        let changed = tokio::task::spawn_blocking(move || {
            let _alone = alone;
            change(&site)
        });
        changed.await.map_err(failed)?
    }

    fn replica(&self, name: &ImageName) -> Result<Replica, Refusal> {
        let known = self.domain.home.replicas().load(name)?;
        known.ok_or_else(|| {
            let text = format!("{} keeps no replica called {name}", self.server.name);
            Refusal::new(Code::NotFound, text)
        })
    }

    /// The replica, if this peer may send it rounds.
    fn replica_of(&self, peer: &Peer, name: &ImageName) -> Result<Replica, Refusal> {
        let known = self.replica(name)?;
        self.check_source(peer, name, &known)?;
        Ok(known)
    }

    fn check_source(&self, peer: &Peer, name: &ImageName, known: &Replica) -> Result<(), Refusal> {
        let site = &self.server.name;
        if known.from.key != peer.key.0 {
            let text =
                format!("{site} keeps a replica called {name} of another peer: use another name");
            return Err(Refusal::new(Code::Denied, text));
        }
        match known.failed_over_ms {
            None => Ok(()),
            Some(at) => {
                let at = moment((at / 1000).cast_signed());
                let text = format!(
                    "{name} was failed over at {site} at {at}: what is here is the old copy; to replicate from here again, remove the replica there with `drover replicate --forget {name}`"
                );
                Err(Refusal::new(Code::Lost, text))
            }
        }
    }

    fn begin_round(&self, peer: &Peer, ask: &BeginRound) -> Result<Begun, Refusal> {
        let records = self.domain.home.replicas();
        let from = Other {
            key: peer.key.0,
            name: peer.name.clone(),
        };
        let name = &ask.name;
        let mut replica = match records.load(name)? {
            Some(known) => {
                self.check_source(peer, name, &known)?;
                if (known.seed, known.is_machine) != (ask.seed, ask.is_machine) {
                    let text = format!(
                        "{0} keeps a replica of another machine or disk as {name}: use another name, or remove that there with `drover replicate --forget {name}`",
                        self.server.name
                    );
                    return Err(Refusal::new(Code::Denied, text));
                }
                known
            }
            None if its(&records.all()?, peer) >= MAX_REPLICAS => {
                let text = format!("{} keeps too many replicas of this peer", self.server.name);
                return Err(Refusal::new(Code::Busy, text));
            }
            None => Replica::new(ask.seed, from.clone(), ask.is_machine, 0),
        };
        replica.from = from;
        replica.every_seconds = ask.every_seconds;
        replica.heard_ms = now_ms();
        let token = Token(drover_net::random_id());
        let begun = replica.begin(name, ask.disks.clone(), token)?;
        let images = begun
            .under_way
            .iter()
            .flat_map(|round| round.images.clone());
        let images: Vec<ImageName> = images.collect();
        for image in &images {
            let known = self.domain.catalog.by_name(image).map_err(failed)?;
            if known.is_some_and(|known| !known.may_be_changed_by(&peer.key, peer.rights)) {
                let text = format!(
                    "{} has another image called {image}: use another name for the replica, or remove that image there",
                    self.server.name
                );
                return Err(Refusal::new(Code::Denied, text));
            }
        }
        records.store(name, &begun)?;
        let round = token;
        Ok(Begun { round, images })
    }

    fn complete_round(&self, peer: &Peer, ask: &CompleteRound) -> Result<(), Refusal> {
        let records = self.domain.home.replicas();
        let known = self.replica_of(peer, &ask.name)?;
        if known
            .point
            .as_ref()
            .is_some_and(|point| point.round == ask.round)
        {
            return Ok(());
        }
        let round = known.under_way.as_ref();
        let round = round
            .filter(|round| round.token == ask.round && round.images.len() == ask.digests.len());
        let none = || Refusal::new(Code::OutOfOrder, "that round is not under way");
        let round = round.ok_or_else(none)?;
        let mut images = Vec::new();
        let devices = round.images.iter().zip(&round.devices);
        for ((name, device), digest) in devices.zip(&ask.digests) {
            let image = self.domain.catalog.by_name(name).map_err(failed)?;
            let image = image.filter(|image| image.digest == *digest);
            let image = image.filter(|image| image.may_be_changed_by(&peer.key, peer.rights));
            let image = image.ok_or_else(|| {
                let text = format!("{name} is not what the round has brought");
                Refusal::new(Code::Failed, text)
            })?;
            let leased = self.domain.devices.leased(name).map_err(failed)?;
            let is_leased = leased.is_some_and(|leased| leased.holder.is_some());
            if is_leased || has_changes(&self.domain, name) {
                let text = format!("{name} was written here since it was delivered");
                return Err(Refusal::new(Code::Failed, text));
            }
            images.push(PointImage {
                name: name.clone(),
                device: device.clone(),
                digest: *digest,
                size: image.virtual_bytes,
            });
        }
        let now = now_ms();
        let point = Point {
            round: ask.round,
            moment_ms: now.saturating_sub(ask.age_ms),
            images,
        };
        let mut complete = known.complete(point).ok_or_else(none)?;
        complete.heard_ms = now;
        // From here on it is the replica.
        records.store(&ask.name, &complete)?;
        crash("replica-completed");
        let before = known.point.iter().flat_map(|point| &point.images);
        self.remove_all(
            before
                .map(|image| &image.name)
                .filter(|name| !complete.has(name)),
        );
        Ok(())
    }

    /// Removes images of rounds that are of no use any more. What stays is replaced by a later round.
    fn remove_all<'a>(&self, images: impl Iterator<Item = &'a ImageName>) {
        for name in images {
            let remove = || -> Result<(), Refusal> {
                let Some(record) = self.domain.catalog.by_name(name).map_err(failed)? else {
                    return Ok(());
                };
                let removed = CleanUp::of(&self.domain.home)
                    .run(|| Ok(self.domain.site.remove_this(&record)?));
                removed.map_err(failed)
            };
            if let Err(e) = remove() {
                tracing::warn!(image = %name, "of a former state of a replica, it was not removed: {e}");
            }
        }
    }

    fn tell_point(&self, peer: &Peer, told: &TellPoint) -> Result<(), Refusal> {
        let known = self.replica_of(peer, &told.name)?;
        let point = known.point.filter(|point| point.round == told.round);
        let image = point.and_then(|point| point.images.into_iter().nth(told.disk as usize));
        let image = image.ok_or_else(|| {
            Refusal::new(
                Code::OutOfOrder,
                "the replica is not what that round has brought",
            )
        })?;
        let of = Summary::decode(&told.generations);
        let of = of.map_err(|e| Refusal::new(Code::Protocol, e.to_string()))?;
        let succeeded = self.domain.devices.succeed_generations(&image.name, &of);
        succeeded.map_err(failed)
    }

    fn fail_over(&self, ask: &FailOver) -> Result<(FailedOver, Replica), Refusal> {
        let records = self.domain.home.replicas();
        let name = &ask.name;
        let known = self.replica(name)?;
        let Some(point) = &known.point else {
            let text =
                format!("no state of {name} has arrived completely: there is nothing to use");
            return Err(Refusal::new(Code::NotFound, text));
        };
        let now = now_ms();
        let is_new = known.failed_over_ms.is_none();
        for of in point.images.iter().filter(|_| is_new) {
            let image = self.domain.catalog.by_name(&of.name).map_err(failed)?;
            if image.as_ref().is_some_and(was_changed) {
                let text = format!(
                    "{} was changed by another program: the replica {name} is not of one moment any more; `drover replicate --forget {name}` leaves its files as they are",
                    of.name
                );
                return Err(Refusal::new(Code::Corrupt, text));
            }
            if image.is_none_or(|image| image.digest != of.digest) {
                let text = format!(
                    "{} was replaced or removed since it arrived: the replica {name} cannot be used",
                    of.name
                );
                return Err(Refusal::new(Code::Corrupt, text));
            }
        }
        let is_heard = is_new && known.was_heard(now, SILENCE_MS);
        let mut answer = FailedOver {
            from: known.from.name.clone(),
            moment_ms: point.moment_ms,
            failed_over_ms: known.failed_over_ms,
            images: point
                .images
                .iter()
                .map(|image| image.name.to_string())
                .collect(),
            heard_ms: known.heard_ms,
            is_heard,
            starts: false,
            not_started: None,
        };
        if ask.dry_run {
            return Ok((answer, known));
        }
        if is_heard && !ask.force {
            let text = format!(
                "{} was heard {} s ago: it may still run {name}",
                known.from.name,
                now.saturating_sub(known.heard_ms) / 1000
            );
            return Err(Refusal::new(Code::Held, text));
        }
        let over = known.fail_over(now);
        // First: once it has taken over, its source must not be able to remove or replace them.
        for image in point.images.iter().filter(|_| is_new) {
            self.domain.site.give(&image.name, None).map_err(failed)?;
        }
        // From here on no round is accepted.
        records.store(name, &over)?;
        crash("replica-failed-over");
        answer.failed_over_ms = over.failed_over_ms;
        let rest = known.under_way.iter().flat_map(|round| &round.images);
        self.remove_all(rest);
        if is_new {
            let record = Record::new(Event::ReplicaFailedOver)
                .about(&known.from.name, drover_net::PeerKey(known.from.key))
                .in_domain(self.domain.home.domain_name())
                .machine(name)
                .detail(format!(
                    "as of {}",
                    moment((point.moment_ms / 1000).cast_signed())
                ));
            self.server.home.audit().write(record);
        }
        Ok((answer, over))
    }

    fn forget_replica(&self, name: &ImageName) -> Result<(), Refusal> {
        let records = self.domain.home.replicas();
        // One that is damaged says nothing of its images.
        if let Ok(Some(known)) = records.load(name) {
            let rest = known.under_way.iter().flat_map(|round| &round.images);
            self.remove_all(rest);
            let record = Record::new(Event::ReplicaForgotten)
                .about(&known.from.name, drover_net::PeerKey(known.from.key))
                .in_domain(self.domain.home.domain_name())
                .machine(name);
            self.server.home.audit().write(record);
        }
        records.remove(name).map_err(failed)
    }

    fn told_refused<R: Request, T>(
        &self,
        peer: &Peer,
        name: &ImageName,
        done: &Result<T, Refusal>,
    ) {
        if let Err(refusal) = done
            && refusal.code.is_decision()
            && !peer.rights.has(Right::Manage)
        {
            let record = Record::refused(R::SERVICE, refusal, None)
                .by(peer)
                .machine(name);
            self.server.home.audit().write_limited(record);
        }
    }
}

impl Handler<BeginRound> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ask: BeginRound,
        _: &mut Exchange<'_, BeginRound>,
    ) -> Result<Begun, Refusal> {
        let peer = peer.clone();
        self.with_replicas(move |site| {
            let begun = site.begin_round(&peer, &ask);
            site.told_refused::<BeginRound, _>(&peer, &ask.name, &begun);
            begun
        })
        .await
    }
}

impl Handler<CompleteRound> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        ask: CompleteRound,
        _: &mut Exchange<'_, CompleteRound>,
    ) -> Result<(), Refusal> {
        let peer = peer.clone();
        self.with_replicas(move |site| {
            let done = site.complete_round(&peer, &ask);
            site.told_refused::<CompleteRound, _>(&peer, &ask.name, &done);
            done
        })
        .await
    }
}

impl Handler<TellPoint> for OfSite {
    async fn handle(
        &self,
        peer: &Peer,
        told: TellPoint,
        _: &mut Exchange<'_, TellPoint>,
    ) -> Result<(), Refusal> {
        let peer = peer.clone();
        self.with_replicas(move |site| site.tell_point(&peer, &told))
            .await
    }
}

impl Handler<FailOver> for OfMachines {
    async fn handle(
        &self,
        peer: &Peer,
        ask: FailOver,
        _: &mut Exchange<'_, FailOver>,
    ) -> Result<FailedOver, Refusal> {
        let (server, machines) = (Arc::clone(self.0.server()), self.0.machines());
        let domain = InDomain(Arc::clone(&server)).of(&peer.domain).await?;
        let site = OfSite { server, domain };
        let order = ask.clone();
        let over = site.with_replicas(move |site| site.fail_over(&order));
        let (mut answer, replica) = over.await?;
        let is_startable = replica.is_machine && machines.is_startable(&ask.name, &peer.domain);
        answer.starts = ask.start && is_startable;
        if answer.starts && !ask.dry_run {
            // It has taken over, whatever becomes of that.
            let booted = machines.boot(&ask.name, &replica).await;
            answer.not_started = booted.err().map(|refusal| refusal.message);
            answer.starts = answer.not_started.is_none();
        }
        Ok(answer)
    }
}

impl Handler<ForgetReplica> for OfSite {
    async fn handle(
        &self,
        _: &Peer,
        ask: ForgetReplica,
        _: &mut Exchange<'_, ForgetReplica>,
    ) -> Result<(), Refusal> {
        self.with_replicas(move |site| site.forget_replica(&ask.name))
            .await
    }
}
