//! Generations of a machine's disks: asked from the site that serves them before they are sent, and told to the peer that has
//! the machine when they were left, so that the way back costs no more than what changed.

use std::pin::Pin;

use drover_agent::error::{Result, one_line};
use drover_agent::home::Home;
use drover_agent::images;
use drover_agent::machines::GetGenerations;
use drover_agent::remote::Call;
use drover_core::ImageName;
use drover_migrate::protocol::TellGenerations;
use drover_migrate::{DiskGenerations, MoveReport};
use drover_store::machine::MAX_DISKS;
use drover_store::{ImageRecord, Peer};
use tokio::task::JoinSet;

/// What the running site knows of the disks of a machine that it serves.
pub struct OfSite {
    /// The site.
    pub home: Home,
    /// The machine.
    pub machine: ImageName,
}

impl OfSite {
    async fn ask(&self, disk: u32) -> Result<Option<Vec<u8>>> {
        let name = self.machine.clone();
        Ok(match Call::local(&self.home).await? {
            Some(call) => call.ask(&GetGenerations { name, disk }, |()| {}).await?,
            None => None,
        })
    }
}

impl DiskGenerations for OfSite {
    fn of(&self, disk: u32) -> Pin<Box<dyn Future<Output = Option<Vec<u8>>> + Send + '_>> {
        Box::pin(async move {
            let asked = self.ask(disk).await;
            if let Err(e) = &asked {
                tracing::warn!(
                    "the generations of disk {disk} are unknown: {}",
                    one_line(e)
                );
            }
            asked.ok()?
        })
    }
}

/// The disks that a machine has left here which are files, by their places in it.
pub struct Left {
    /// As they were indexed.
    pub files: Vec<(u32, ImageRecord)>,
    /// What was noted in them.
    pub marked: Vec<(u32, Vec<u8>)>,
}

/// Tells a peer the generations of the disks that a machine has left here. It has moved: without this, its way back is only slower.
pub async fn tell(home: &Home, peer: &Peer, machine: &ImageName, report: &MoveReport, left: Left) {
    let Ok(there) = ImageName::new(report.machine.as_str()) else {
        return;
    };
    let of_site = OfSite {
        home: home.clone(),
        machine: machine.clone(),
    };
    let mut told = JoinSet::new();
    for disk in 0..MAX_DISKS as u32 {
        let indexed = left.files.iter().find(|(n, _)| *n == disk);
        let marked = left.marked.iter().find(|(n, _)| *n == disk);
        let generations = match (indexed, marked) {
            (Some((_, file)), _) => images::freeze_left(home, machine, file),
            (None, Some((_, marked))) => Ok(Some(marked.clone())),
            _ if report.left_disks.iter().any(|left| left.disk == disk) => Ok(None),
            _ => of_site.ask(disk).await,
        };
        let (peer_name, token) = (peer.name.clone(), report.token);
        let not_told = move |e| {
            let why = one_line(&e);
            tracing::warn!("{peer_name} is not told what disk {disk} has here: {why}");
        };
        let (generations, token) = match (generations, token) {
            (Ok(Some(generations)), Some(token)) => (generations, token),
            (Ok(_), _) => continue,
            // The next ones would fail in the same way.
            (Err(e), _) => {
                not_told(e);
                break;
            }
        };
        let (home, peer, machine) = (home.clone(), peer.clone(), there.clone());
        // Each is a call of its own: they do not wait for each other's round trips.
        told.spawn(async move {
            let tell = async {
                let tell = TellGenerations {
                    machine,
                    token,
                    disk,
                    generations,
                };
                let call = Call::peer(&home.identity()?, &peer).await?;
                call.ask(&tell, |()| {}).await
            };
            let told: Result<()> = tell.await;
            if let Err(e) = told {
                not_told(e);
            }
        });
    }
    told.join_all().await;
}
