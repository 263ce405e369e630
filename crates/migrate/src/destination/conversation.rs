//! What the seeder asks about a move, and what is done for it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use drover_net::service::{IncomingCall, Peer};
use drover_net::{Code, Refusal};
use drover_store::machine::{MAX_DISKS, MachineRecord, Move, Other};

use super::waiting::Waiting;
use super::{
    Coming, Entry, Happened, Moves, Prepared, Site, crash, failed, next_attempt, to_the_end,
};
use crate::error::MigrateError;
use crate::hold::hold;
use crate::leecher::{Event, Leecher};
use crate::protocol::{Answer, Ask, Kind, MAX_DEVICE, MAX_WHY, OpenMove, kind};
use crate::talk::Talk;

/// A conversation about a move.
#[derive(Clone)]
pub(super) struct Conversation {
    pub(super) peer: Peer,
    offer: Arc<OpenMove>,
    entry: Entry,
    number: u64,
}

impl<S: Site> Moves<S> {
    /// Serves a conversation to its end.
    pub(super) async fn converse(
        self: &Arc<Self>,
        peer: &Peer,
        offer: Arc<OpenMove>,
        mut call: IncomingCall,
    ) -> Result<(), MigrateError> {
        let (moves, peer, about) = (Arc::clone(self), peer.clone(), peer.clone());
        let opened = to_the_end(async move { moves.open(&peer, offer).await }).await?;
        let (conversation, answer) = match opened {
            Ok(opened) => opened,
            Err(refusal) => {
                let address = call.reader.peer_text();
                self.site.refused(&about, address, &refusal);
                return Ok(call.refuse(&refusal).await?);
            }
        };
        call.accept::<OpenMove>(&()).await?;
        let talk = Talk::new(call.reader, call.writer);
        let talked = self.talk(talk, &conversation, answer).await;
        let mut slot = conversation.entry.lock().await;
        if let Some(coming) = slot.as_mut()
            && coming.conversation == conversation.number
        {
            coming.silent = Some(Instant::now());
        }
        drop(slot);
        talked
    }

    async fn talk(
        self: &Arc<Self>,
        mut talk: Talk,
        conversation: &Conversation,
        answer: Answer,
    ) -> Result<(), MigrateError> {
        talk.say(kind::ANSWER, &answer).await?;
        loop {
            let ask: Ask = match talk.hear(kind::ASK).await {
                Ok(ask) => ask,
                Err(e) => {
                    let slot = conversation.entry.lock().await;
                    // That is how the seeder leaves.
                    let is_over = slot.as_ref().is_none_or(|coming| coming.leecher.is_over());
                    return if is_over { Ok(()) } else { Err(e) };
                }
            };
            let (moves, about) = (Arc::clone(self), conversation.clone());
            let asked = to_the_end(async move { moves.asked(&about, ask).await });
            let answered = talk.meanwhile(asked).await???;
            let Some(answer) = answered else {
                return Ok(());
            };
            talk.say(kind::ANSWER, &answer).await?;
        }
    }

    /// Finds or records the move.
    pub(super) async fn open(
        &self,
        peer: &Peer,
        offer: Arc<OpenMove>,
    ) -> Result<(Conversation, Answer), Refusal> {
        check(&offer)?;
        let name = &offer.machine;
        let disks: Vec<_> = offer.disks.iter().map(|disk| disk.image.clone()).collect();
        self.site.allow(peer, name, &[]).await?;
        let entry = self.entry(name)?;
        let from = Other {
            key: peer.key.0,
            name: peer.name.clone(),
        };
        let mut slot = entry.lock().await;
        let opened = |coming: &Coming| {
            let conversation = Conversation {
                peer: peer.clone(),
                offer: Arc::clone(&offer),
                entry: Arc::clone(&entry),
                number: coming.conversation,
            };
            (conversation, coming.leecher.answer())
        };
        if let Some(known) = slot.as_mut() {
            let is_own = known.from.key == from.key;
            if known.leecher.token() == offer.token {
                if !is_own {
                    return Err(Refusal::new(Code::Denied, "that move is not yours"));
                }
                known.conversation += 1;
                known.silent = None;
                return Ok(opened(known));
            }
            if !(known.leecher.is_over() || is_own && known.leecher.may_begin()) {
                let text = format!("{name} is being received from {}", known.from.name);
                return Err(Refusal::new(Code::Held, text));
            }
        }
        // A move that is over makes room for the next one, and so does one that its seeder has given up.
        if let Some(mut old) = slot.take().filter(|old| !old.leecher.is_over()) {
            self.discard(name, old.leecher.record(), &mut old.prepared, false)
                .await?;
        }
        let lock = self.site.machines().lock(name).map_err(|e| {
            let text = format!("cannot lock the record of the machine {name}: {e}");
            Refusal::new(Code::Io, text)
        })?;
        let lock = lock.ok_or_else(|| {
            let text = format!("{name} is being moved by another command there");
            Refusal::new(Code::Held, text)
        })?;
        let known = self.site.machines().load(name)?;
        let mut actions = Vec::new();
        let mut leecher = Leecher::start(known.as_ref(), &offer, from.clone(), &mut actions)?;
        // A seeder that has committed, and whose hypervisor has ended, does not say.
        if leecher.may_begin() && !disks.is_empty() && leecher.record().disks != disks {
            let text = format!(
                "{name} has other disks now than when this move began: give it up, and begin anew"
            );
            return Err(Refusal::new(Code::Denied, text));
        }
        if leecher.may_begin() {
            let disks = &leecher.record().disks;
            if offer.kind == Kind::Disk && *disks != [name.clone()] {
                return Err(Refusal::new(
                    Code::Protocol,
                    "a disk is one image of its name",
                ));
            }
            if let Some(known) = known.as_ref().filter(|known| known.seed == offer.seed) {
                self.site.give_disks(name, known, Some(peer)).await;
            }
            self.site.allow(peer, name, disks).await?;
        }
        if let Some(known) = known {
            match &known.under_way {
                // Of an earlier process of this site.
                Some(Move::Coming(old, ..)) if *old != offer.token => {
                    self.discard(name, &known, &mut None, false).await?;
                }
                // What a failed write has left may not be durable.
                Some(_) => self.keep(name, known).await.map_err(failed)?,
                None => {}
            }
        }
        let mut prepared = None;
        let acted = self.act_all(name, &mut leecher, &mut prepared, actions);
        acted.await.map_err(failed)?;
        if !leecher.is_over() {
            self.tell(name, leecher.record(), Happened::Coming);
        }
        let coming = slot.insert(Coming {
            leecher,
            from,
            prepared,
            rest: None,
            conversation: 0,
            attempt: 0,
            early: 0,
            silent: None,
            lock: Some(lock),
        });
        coming.release_when_over();
        Ok(opened(coming))
    }

    /// Does what the seeder asks; `None` when another conversation has taken the place of this one.
    pub(super) async fn asked(
        &self,
        about: &Conversation,
        ask: Ask,
    ) -> Result<Option<Answer>, MigrateError> {
        let mut slot = about.entry.lock().await;
        let is_this = |coming: &&mut Coming| {
            coming.leecher.token() == about.offer.token && coming.conversation == about.number
        };
        let Some(coming) = slot.as_mut().filter(is_this) else {
            return Ok(None);
        };
        match self.answer(about, coming, ask).await {
            Ok(answer) => Ok(Some(answer)),
            // What this process knows is not what is recorded: the next conversation goes on from there.
            Err(e) => {
                if let Some(Coming {
                    prepared: Some(prepared),
                    ..
                }) = slot.take()
                {
                    prepared.transfer.writing.end().await;
                }
                Err(e)
            }
        }
    }

    async fn answer(
        &self,
        about: &Conversation,
        coming: &mut Coming,
        ask: Ask,
    ) -> Result<Answer, MigrateError> {
        let name = &about.offer.machine;
        let mut events = Vec::new();
        match ask {
            Ask::Arrived => hold("arriving").await,
            Ask::Commit => hold("asked to take").await,
            _ => {}
        }
        let done = match ask {
            // Too late for all but the answer.
            _ if !coming.leecher.may_begin() => Ok(()),
            Ask::Begin => {
                events.push(Event::Copying);
                (coming.attempt, coming.early) = (next_attempt(), 0);
                let record = coming.leecher.record();
                let discarded = self.discard(name, record, &mut coming.prepared, true).await;
                let begun = async {
                    discarded?;
                    let (token, mounted) = (about.offer.token, &about.offer.mounted);
                    self.site.stand_by(&about.peer, name, token, mounted).await
                };
                begun.await.map_err(MigrateError::from)
            }
            Ask::Prepare => match self.prepare(about, coming.leecher.record()).await {
                Ok(prepared) => {
                    coming.prepared = Some(prepared);
                    Ok(())
                }
                Err(e) => Err(e),
            },
            Ask::Arrived => match self.arrived(name, coming.prepared.as_ref()).await {
                Ok(()) => {
                    // What it lacks may still be on its way, by another connection.
                    events.push(match ready(coming.prepared.as_ref(), about.offer.kind) {
                        Event::Lost(_) if coming.prepared.is_some() => Event::ReadyInPart,
                        event => event,
                    });
                    // A disk that is full shows now, not when the machine is frozen.
                    self.keep(name, coming.leecher.record().clone()).await
                }
                Err(e) => Err(e),
            },
            Ask::Commit => {
                // From the decision on nobody else has it.
                match self.arrived(name, coming.prepared.as_ref()).await {
                    // What it lacks was said since.
                    Ok(()) if coming.leecher.is_ready() => {
                        events.push(ready(coming.prepared.as_ref(), about.offer.kind));
                    }
                    Ok(()) => {}
                    Err(e) => events.push(Event::Lost(e.to_string())),
                }
                Ok(())
            }
            Ask::Cancel => Ok(()),
        };
        events.push(Event::Asked(ask));
        if ask == Ask::Commit {
            crash("asked to take");
        }
        for event in events {
            let mut actions = Vec::new();
            coming.leecher.handle(event, &mut actions);
            let (leecher, prepared) = (&mut coming.leecher, &mut coming.prepared);
            self.act_all(name, leecher, prepared, actions).await?;
            if coming.leecher.is_partial() && coming.rest.is_none() {
                let prepared = coming.prepared.as_ref();
                coming.rest = prepared.map(|prepared| Arc::clone(&prepared.transfer));
            }
            if coming.leecher.is_partial() && !coming.leecher.is_starting() {
                // It runs: its hypervisor is free for others.
                coming.prepared = None;
            }
        }
        let mut answer = coming.leecher.answer();
        coming.release_when_over();
        if let Err(e) = done {
            // It stays open: the seeder may begin anew.
            answer.why = e.to_string();
        }
        let end = answer.why.floor_char_boundary(MAX_WHY);
        answer.why.truncate(end);
        Ok(answer)
    }

    /// Opens the disks, and gives them to the hypervisor that waits.
    pub(super) async fn prepare(
        &self,
        about: &Conversation,
        record: &MachineRecord,
    ) -> Result<Prepared, MigrateError> {
        let (name, offer) = (&about.offer.machine, &about.offer);
        // Images of these names may be there meanwhile, and not be the machine's.
        self.site.allow(&about.peer, name, &record.disks).await?;
        let served = self.site.open_disks(name, record).await?;
        let hypervisor = match self.site.kind() {
            Kind::Disk => Waiting::Image,
            Kind::Machine => {
                let place = self.site.incoming(name).await?;
                Waiting::connect(&place, self.socket(name)).await?
            }
        };
        let mounted = self.site.standing(name, &offer.mounted).await?;
        hypervisor.prepare(offer, &served, mounted).await?;
        Ok(Prepared {
            hypervisor,
            mounted: offer.mounted.clone(),
            transfer: self.transfer(name, offer.token, &served, false),
            disks: served,
        })
    }
}

/// How much of it is there, once the hypervisor has all of it.
fn ready(prepared: Option<&Prepared>, kind: Kind) -> Event {
    let Some(Prepared { transfer, .. }) = prepared else {
        return Event::Lost("it was not prepared".into());
    };
    match transfer.left() {
        0 => Event::Ready,
        _ if kind == Kind::Machine && transfer.is_said() => Event::ReadyInPart,
        _ => Event::Lost("what it lacks was not said".into()),
    }
}

/// Checks an offer for its form.
fn check(offer: &OpenMove) -> Result<(), Refusal> {
    let bad = |text: &str| Err(Refusal::new(Code::Protocol, text));
    if offer.disks.len().saturating_add(offer.mounted.len()) > MAX_DISKS {
        return bad("a machine has too many disks");
    }
    let devices = offer.disks.iter().map(|disk| &disk.device);
    let mut devices = devices.chain(offer.mounted.iter().map(|disk| &disk.device));
    if devices.any(|device| device.len() > MAX_DEVICE) {
        return bad("a disk of a machine has too long a name");
    }
    if offer.kind == Kind::Disk && !offer.mounted.is_empty() {
        return bad("a disk of a program is none of a third site");
    }
    let images: HashSet<_> = offer.mounted.iter().map(|d| (d.site, &d.image)).collect();
    if images.len() != offer.mounted.len() {
        return bad("two disks of a machine are the same image");
    }
    let names: HashSet<_> = offer.disks.iter().map(|disk| &disk.image).collect();
    if names.len() != offer.disks.len() {
        return bad("two disks of a machine have the same name");
    }
    Ok(())
}
