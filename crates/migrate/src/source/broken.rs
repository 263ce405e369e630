//! A person ends a move that nobody works on any more: gives it up, or, if its destination is lost for good, breaks it.

use std::path::Path;
use std::time::Duration;

use drover_core::ImageName;
use drover_hypervisor::Hypervisor;
use drover_hypervisor::libvirt::DomainState;
use drover_hypervisor::machine::RunState;
use drover_net::{Code, ConnectOptions, Refusal, connect_or_tell, decode};
use drover_store::machine::{Decision, MachineRecord, Machines, Move, Token};
use drover_teleport::SendOptions;

use super::disks::Disks;
use super::left::{FORMAT, LeftDisks, TAKEN};
use super::{call_over, lock, restore};
use crate::error::MigrateError;
use crate::protocol::{Answer, Ask, Kind, OpenMove, kind};
use crate::talk::Talk;

/// How long the destination may take, once it is reached, to say what it decided.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Gives up a move that no process works on any more, and lets the machine run on here. The other site is not told. A machine
/// that is to come is refused for good.
///
/// # Errors
/// When there is no such move, a process works on it, or it is committed: then only the other site can tell.
pub async fn give_up(
    hypervisor: Option<Hypervisor>,
    machines: &Machines,
    name: &ImageName,
    work: &Path,
) -> Result<(), MigrateError> {
    let _lock = lock(machines, name)?;
    let known = machines.load(name)?;
    match known.as_ref().and_then(|known| known.under_way.clone()) {
        Some(Move::Leaving(token, _)) => {
            if let Some(hypervisor) = &hypervisor {
                restore(hypervisor, &Disks::default(), None, work).await?;
            }
            if let Some(stays) = known.and_then(|known| known.stay(token)) {
                machines.store(name, &stays)?;
            }
            Ok(())
        }
        // Its memory is lost: a person boots it from its disks.
        Some(Move::Taken(token, _)) => {
            if let Some(started) = known.and_then(|known| known.started(token)) {
                machines.store(name, &started)?;
            }
            Ok(())
        }
        Some(Move::Coming(token, ..)) => {
            if let Some(refused) = known.and_then(|known| known.refuse(token)) {
                machines.store(name, &refused)?;
            }
            Ok(())
        }
        Some(Move::Committed(_, to)) => Err(Refusal::new(
            Code::Held,
            format!(
                "{name} is handed over to {0}, which may run it: migrate it to {0} again to find out, or, if {0} is lost for good, `drover migrate --break {name}`",
                to.name
            ),
        )
        .into()),
        _ => Err(Refusal::new(Code::NotFound, format!("{name} is not leaving this site")).into()),
    }
}

/// Why the destination of a committed move has not said what it decided.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// It was not reached: it may be lost.
    #[error(transparent)]
    Unreached(MigrateError),
    /// It has proved its key and has not said it, or something took a connection at its address and has not shown who it is: it may
    /// have the machine.
    #[error(transparent)]
    Unsaid(MigrateError),
}

/// Asks the destination of a committed move once more what it decided. One that has not taken the machine refuses it, for good: then
/// it stays here.
///
/// # Errors
/// When the destination cannot be reached, or does not say.
pub async fn ask_once(
    send: &SendOptions,
    name: &ImageName,
    known: &MachineRecord,
) -> Result<Decision, NoAnswer> {
    let Some(Move::Committed(token, _)) = known.under_way else {
        return Ok(Decision::Unknown);
    };
    // Without disks: it is only asked.
    let open = OpenMove {
        kind: Kind::Machine,
        token,
        machine: known.name_there.clone().unwrap_or_else(|| name.clone()),
        seed: known.seed,
        generation: known.generation,
        disks: Vec::new(),
        memory_bytes: 0,
        mounted: Vec::new(),
    };
    let to = ConnectOptions::named(&send.peer_name);
    let connection = connect_or_tell(&send.addresses, &send.identity, &send.peer, &to).await;
    let connection = connection.map_err(|none| match none.may_be_there {
        // A process that is stopped, or has too much to do.
        true => NoAnswer::Unsaid(none.error.into()),
        false => NoAnswer::Unreached(none.error.into()),
    })?;
    let asked = async {
        let (reader, writer, _, _) = call_over(connection, send, &open).await?;
        let mut talk = Talk::new(reader, writer);
        let mut answer: Answer = talk.hear(kind::ANSWER).await?;
        if answer.decision == Decision::Open {
            talk.say(kind::ASK, &Ask::Cancel).await?;
            answer = talk.hear(kind::ANSWER).await?;
        }
        Ok(answer.decision)
    };
    let decision = tokio::time::timeout(ASK_LIMIT, asked).await;
    let limit = |_| MigrateError::TooLong {
        what: "its answer",
        seconds: ASK_LIMIT.as_secs(),
    };
    let decision = decision.map_err(limit).and_then(|decision| decision);
    decision.map_err(NoAnswer::Unsaid)
}

/// What has become of a machine whose move was broken.
#[derive(Debug)]
pub struct Broken {
    /// Whether it runs here: else it has to be booted from its disks.
    pub runs: bool,
    /// Disks that are mounts of other sites' images: their write leases may be the destination's.
    pub mounts: Vec<String>,
}

/// Ends a committed move, which nobody works on any more, in favour of this site, and lets the machine run on if its hypervisor has
/// not ended. Only a person knows that the destination, which may have taken the machine, is lost for good. `known` is the record that
/// this person was told of; `taken` is whether it may be broken although the destination has said that it has taken the machine,
/// while its disks were still to follow.
///
/// # Errors
/// When the move is not committed any more, or its record cannot be written: then all is as it was. When the hypervisor does not let the
/// machine run: then the move can be given up ([`give_up`]).
pub async fn break_move(
    hypervisor: Option<Hypervisor>,
    machines: &Machines,
    name: &ImageName,
    known: &MachineRecord,
    taken: bool,
    work: &Path,
) -> Result<Broken, MigrateError> {
    let held = |text: String| MigrateError::from(Refusal::new(Code::Held, text));
    let _lock = lock(machines, name)?;
    let now = machines.load(name)?;
    let Some(Move::Committed(token, _)) = known.under_way else {
        return Err(held(format!("{name} was not handed over")));
    };
    let Some(thawed) = now
        .filter(|now| now == known)
        .and_then(|now| now.thaw(token))
    else {
        let text = format!("the migration of {name} went on meanwhile");
        return Err(held(format!("{text}; see `drover migrate --list`")));
    };
    let file = |kind: &str| machines.directory().join(format!(".{name}.{kind}"));
    if !taken && was_taken(&file("taken"), token) {
        return Err(held(format!(
            "the destination has taken {name}, and runs it: migrate it there again to go on, or, if that site is lost for good with all that {name} wrote there, add --taken"
        )));
    }
    // Before it runs: its disks refuse what it writes as long as the record says that it was handed over.
    machines.store(name, &thawed)?;
    let mounts = mounts(&file("rest"));
    let mut runs = false;
    if let Some(hypervisor) = &hypervisor {
        restore(hypervisor, &Disks::default(), None, work).await?;
        runs = match hypervisor {
            Hypervisor::Qemu(machine) => machine.status().await? == RunState::Running,
            Hypervisor::Libvirt(domain) => domain.state().await? == DomainState::Running,
        };
    }
    if let Some(stays) = thawed.stay(token) {
        machines.store(name, &stays)?;
    }
    for kind in ["rest", "files", "taken"] {
        // A stale one is ignored by its token.
        let _ = std::fs::remove_file(file(kind));
    }
    Ok(Broken { runs, mounts })
}

/// Whether the destination has said that it took the machine by this move. What cannot be read says so, too.
fn was_taken(path: &Path, token: Token) -> bool {
    let read = || {
        let Some(bytes) = TAKEN.read(path).ok()? else {
            return Some(false);
        };
        let of: Token = decode(TAKEN.open(&bytes).ok()?).ok()?;
        Some(of == token)
    };
    read().unwrap_or(true)
}

/// The mounts whose leases were to be handed over. What cannot be read says nothing.
fn mounts(rest: &Path) -> Vec<String> {
    let read = || {
        let bytes = FORMAT.read(rest).ok()??;
        decode::<LeftDisks>(FORMAT.open(&bytes).ok()?).ok()
    };
    let known = read().map(|known| known.mounts).unwrap_or_default();
    known.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drover_net::{Identity, encode};
    use drover_store::machine::{Other, Seed};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn only_a_destination_where_nothing_takes_a_connection_counts_as_lost() {
        let (token, to) = (
            Token([1; 16]),
            Other {
                key: [1; 32],
                name: "far".into(),
            },
        );
        let here = MachineRecord::new(Seed([3; 16]), Vec::new());
        let known = here.leave(token, to).unwrap().commit(token).unwrap();
        let name = ImageName::new("web").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let send = SendOptions {
            identity: Identity::generate(),
            peer: Identity::generate().key(),
            peer_name: "far".into(),
            addresses: vec![address],
            route: Arc::default(),
            limit: None,
            dry_run: false,
            connections: None,
            compress: None,
            give_up_after: Duration::ZERO,
            profiles: None,
        };
        let taken = async {
            let taken = listener.accept().await.unwrap();
            drop((taken, listener));
        };
        let (asked, ()) = tokio::join!(ask_once(&send, &name, &known), taken);
        assert!(matches!(asked, Err(NoAnswer::Unsaid(_))), "{asked:?}");
        let asked = ask_once(&send, &name, &known).await;
        assert!(matches!(asked, Err(NoAnswer::Unreached(_))), "{asked:?}");
    }

    #[tokio::test]
    async fn only_the_commitment_that_a_person_was_told_of_is_broken() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().join("machines"));
        let work = directory.path().join("work");
        let name = ImageName::new("web").unwrap();
        let far = Other {
            key: [1; 32],
            name: "far".into(),
        };
        let here = MachineRecord::new(Seed([3; 16]), Vec::new());
        let committed = |n: u8| {
            let token = Token([n; 16]);
            here.leave(token, far.clone())
                .unwrap()
                .commit(token)
                .unwrap()
        };
        let store = |record: &MachineRecord| machines.store(&name, record).unwrap();
        let load = || machines.load(&name).unwrap().unwrap();
        let known = committed(1);
        let gone = known.gone(Token([1; 16])).unwrap();
        for now in [&committed(2), &gone, &here] {
            store(now);
            let broken = break_move(None, &machines, &name, &known, false, &work).await;
            let said = broken.unwrap_err().to_string();
            assert!(said.contains("went on meanwhile"), "{said}");
            assert_eq!(&load(), now);
        }
        store(&known);
        let rest = machines.directory().join(".web.rest");
        std::fs::write(&rest, "torn").unwrap();
        {
            let _moves = lock(&machines, &name).unwrap();
            let broken = break_move(None, &machines, &name, &known, false, &work).await;
            assert!(
                broken
                    .unwrap_err()
                    .to_string()
                    .contains("being migrated by")
            );
            assert_eq!(load(), known);
        }
        // The destination runs it; what it said of another move counts for nothing.
        let taken = machines.directory().join(".web.taken");
        for (token, is_broken) in [(1, false), (2, true)] {
            TAKEN.write(&taken, &encode(&Token([token; 16]))).unwrap();
            store(&known);
            let broken = break_move(None, &machines, &name, &known, false, &work).await;
            assert_eq!(broken.is_ok(), is_broken, "{broken:?}");
        }
        store(&known);
        std::fs::write(&taken, "torn").unwrap();
        let broken = break_move(None, &machines, &name, &known, false, &work).await;
        let said = broken.unwrap_err().to_string();
        assert!(said.contains("--taken"), "{said}");
        let broken = break_move(None, &machines, &name, &known, true, &work).await;
        assert!(!broken.unwrap().runs);
        assert!(!taken.exists());
        assert_eq!(load(), here);
        assert!(!rest.exists());
        let again = break_move(None, &machines, &name, &here, false, &work).await;
        assert!(again.unwrap_err().to_string().contains("not handed over"));
    }
}
