//! Services for replicas that this site keeps.

use std::sync::Arc;

use drover_core::{Digest, ImageName};
use drover_migrate::replica::protocol::{BeginRound, Begun, CompleteRound, TellPoint};
use drover_net::service::{Exchange, Handler, Peer, Request};
use drover_net::{Code, Refusal, Right};
use drover_store::generations::Summary;
use drover_store::machine::{Other, Token};
use drover_store::replica::{Named, Offer, Point, Replica, in_other_rounds};
use drover_store::{Catalog, ImageRecord};
use drover_teleport::Unfinished;

use super::in_domain::InDomain;
use super::machines::has_changes;
use super::moves::OfMachines;
use super::server::OfSite;
use crate::audit::{Event, Record};
use crate::changes::crash;
use crate::error::{Error, failed, one_line, refusal_of};
use crate::home::CleanUp;
use crate::mounts::was_changed;
use crate::profiles;
use crate::replicas::{FailOver, FailedOver, ForgetReplica, now_ms};
use crate::text::moment;

/// Whether an image is one that a round of this replica has brought: its source's, or given to this site by a failover that
/// did not come to its end.
fn is_of_round(image: &ImageRecord, of: &Replica) -> bool {
    match image.owner {
        Some(owner) => owner.0 == of.from.key,
        None => !image.from.is_empty(),
    }
}

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
                // What a round has brought that was under way then is of no use.
                if let Err(e) = self.clear_left(name, known.clone()) {
                    tracing::warn!("{e}");
                }
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
        let known = match records.load(name)? {
            Some(known) => {
                self.check_source(peer, name, &known)?;
                known
            }
            None if its(&records.all()?, peer) >= MAX_REPLICAS => {
                let text = format!("{} keeps too many replicas of this peer", self.server.name);
                return Err(Refusal::new(Code::Busy, text));
            }
            None => Replica::new(ask.seed, from.clone(), ask.is_machine),
        };
        let known = Replica { from, ..known };
        let offer = Offer {
            seed: ask.seed,
            is_machine: ask.is_machine,
            devices: ask.disks.clone(),
            every_seconds: ask.every_seconds,
        };
        let round = Token(drover_net::random_id());
        let mut begun = known.begin(name, &offer, round, now_ms())?;
        let images = begun
            .under_way
            .iter()
            .flat_map(|round| round.images.clone());
        let images: Vec<ImageName> = images.collect();
        // Only what a round has brought is replaced, now and in the next one.
        let others = images.iter().filter_map(in_other_rounds);
        for image in images.iter().cloned().chain(others) {
            let there = self.domain.catalog.by_name(&image).map_err(failed)?;
            let is_its = |there: &ImageRecord| {
                known.has(&image) || known.receives(&image) && is_of_round(there, &known)
            };
            if there.is_some_and(|there| !is_its(&there)) {
                let text = format!(
                    "{} has another image called {image}: use another name for the replica, or remove that image there",
                    self.server.name
                );
                return Err(Refusal::new(Code::Denied, text));
            }
        }
        self.clear(&mut begun)?;
        // Of a failover that did not come to its end: its source replaces them.
        for image in &images {
            let there = self.domain.catalog.by_name(image).map_err(failed)?;
            if there.is_some_and(|there| there.owner.is_none() && is_of_round(&there, &begun)) {
                let given = self.domain.site.give(image, Some(peer.key));
                given.map_err(|e| refusal_of(e.into()))?;
            }
        }
        records.store(name, &begun)?;
        Ok(Begun { round, images })
    }

    fn complete_round(&self, peer: &Peer, ask: &CompleteRound) -> Result<(), Refusal> {
        let known = self.replica_of(peer, &ask.name)?;
        let delivered = |name: &ImageName, digest: &Digest| self.delivered(&known, name, digest);
        let complete = known.complete(ask.round, &ask.digests, ask.age_ms, now_ms(), delivered)?;
        let Some(complete) = complete else {
            return Ok(());
        };
        // From here on it is the replica.
        self.domain.home.replicas().store(&ask.name, &complete)?;
        crash("replica-completed");
        self.hand_profiles_on(known.point.as_ref(), complete.point.as_ref());
        if let Err(e) = self.clear_left(&ask.name, complete) {
            tracing::warn!("{e}");
        }
        Ok(())
    }

    /// Gives the images of a round that came without profiles those of the ones before, which are about to go.
    fn hand_profiles_on(&self, before: Option<&Point>, now: Option<&Point>) {
        let images = |point: Option<&Point>| point.map_or_else(Vec::new, |p| p.images.clone());
        for (old, new) in images(before).iter().zip(&images(now)) {
            let done = profiles::hand_on(
                &self.domain.home,
                &self.domain.catalog,
                [old, new].map(|image| &image.name),
            );
            if let Err(e) = done {
                tracing::warn!("{}: it has no profile: {}", new.name, one_line(&e));
            }
        }
    }

    /// Bytes of the disk of an image of a round, which must have been delivered by its source, and be as it was delivered.
    fn delivered(
        &self,
        known: &Replica,
        name: &ImageName,
        digest: &Digest,
    ) -> Result<u64, Refusal> {
        let image = self.domain.catalog.by_name(name).map_err(failed)?;
        let image = image.filter(|image| image.digest == *digest && is_of_round(image, known));
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
        Ok(image.virtual_bytes)
    }

    /// Removes what earlier rounds have left, and records it.
    fn clear_left(&self, name: &ImageName, mut of: Replica) -> Result<(), Refusal> {
        let before = of.left.len();
        self.clear(&mut of)?;
        match of.left.len() < before {
            true => self.domain.home.replicas().store(name, &of),
            false => Ok(()),
        }
    }

    /// Removes what earlier rounds have left: images, and what has arrived of some. What cannot be removed now stays listed.
    fn clear(&self, of: &mut Replica) -> Result<(), Refusal> {
        if of.left.is_empty() {
            return Ok(());
        }
        let unfinished = self
            .domain
            .site
            .unfinished()
            .map_err(|e| refusal_of(e.into()))?;
        let left = std::mem::take(&mut of.left);
        for name in left {
            if let Err(e) = self.remove_of_round(&name, of, &unfinished) {
                tracing::warn!(image = %name, "left by a round of a replica, it was not removed: {e}");
                of.left.push(name);
            }
        }
        Ok(())
    }

    fn remove_of_round(
        &self,
        name: &ImageName,
        of: &Replica,
        unfinished: &[Unfinished],
    ) -> Result<(), Error> {
        let site = &self.domain.site;
        let mut room = CleanUp::of(&self.domain.home);
        for part in unfinished {
            if part.name == name.as_str() && part.sender.0 == of.from.key {
                room.run(|| Ok(site.remove_transfer(&part.key)?))?;
            }
        }
        match self.domain.catalog.by_name(name)? {
            Some(image) if is_of_round(&image, of) => room.run(|| Ok(site.remove_this(&image)?)),
            _ => Ok(()),
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
            under_way: known.under_way.is_some(),
            is_machine: known.is_machine,
            starts: false,
            not_started: None,
        };
        if ask.dry_run {
            return Ok((answer, known));
        }
        // Silence does not say that it has ended: it may not be reached, or make a round once a day.
        if is_new && !ask.force {
            let uses = if known.is_machine { "run" } else { "use" };
            let text = format!(
                "{} may still {uses} {name}: it was heard {} s ago",
                known.from.name,
                now.saturating_sub(known.heard_ms) / 1000
            );
            return Err(Refusal::new(Code::Held, text));
        }
        let over = known.fail_over(now);
        // Also on a disk that a round has filled.
        let mut room = CleanUp::of(&self.domain.home);
        let taken = room.run(|| {
            // First: once it has taken over, its source must not be able to remove or replace them.
            for image in point.images.iter().filter(|_| is_new) {
                self.domain.site.give(&image.name, None)?;
            }
            crash("replica-given");
            // From here on no round is accepted.
            records.store(name, &over).map_err(Error::Refused)
        });
        taken.map_err(refusal_of)?;
        crash("replica-failed-over");
        answer.failed_over_ms = over.failed_over_ms;
        // It stays listed: a round that is under way may bring more.
        if let Err(e) = self.clear(&mut over.clone()) {
            tracing::warn!("{e}");
        }
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

    /// Notes that the machine of a replica became this site's; the replica.
    fn note_booted(&self, name: &ImageName) -> Result<Replica, Refusal> {
        let known = Replica {
            booted: true,
            ..self.replica(name)?
        };
        self.domain.home.replicas().store(name, &known)?;
        Ok(known)
    }

    fn forget_replica(&self, name: &ImageName) -> Result<(), Refusal> {
        let records = self.domain.home.replicas();
        // One that is damaged says nothing of its images.
        if let Ok(Some(known)) = records.load(name) {
            let mut over = known.fail_over(0);
            if let Err(e) = self.clear(&mut over) {
                tracing::warn!("{e}");
            }
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
        let is_startable =
            replica.is_machine && machines.is_startable(&ask.name, &peer.domain, &replica);
        if ask.start && is_startable {
            // By now it has taken over, whatever becomes of that.
            let name = &ask.name;
            let boots = async {
                if ask.dry_run {
                    return machines.may_boot(name, &replica);
                }
                machines.take_over(name, &replica)?;
                let of = name.clone();
                let noted = site.with_replicas(move |site| site.note_booted(&of));
                machines.boot(name, &noted.await?).await
            };
            answer.not_started = boots.await.err().map(|refusal| refusal.message);
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
