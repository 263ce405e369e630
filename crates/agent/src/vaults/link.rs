//! Connections to the vault of a peer.

use std::sync::OnceLock;
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use drover_net::{
    Code, FrameReader, FrameWriter, Identity, MAX_FRAME, NetError, close, request, service,
};
use drover_store::Peer;
use drover_vault::peer::{Connect, Frame, Link, LinkError};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::error::{Result, one_line};
use crate::home::Home;
use crate::remote::Call;
use crate::site::{self, find_peer};
use crate::text::clean;

/// Opens the vault of a site, for what a peer may do with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenVault {}
request!(OpenVault: "vault.open", Backup, () => ());

/// How long a peer may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(180);
/// How long a connection may stand still while something is sent.
const STALL_LIMIT: Duration = Duration::from_secs(60);
/// Timeout of closing.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// A peer that has a vault.
pub struct AtPeer {
    identity: Identity,
    peer: Peer,
}

impl AtPeer {
    /// The peer of that name.
    ///
    /// # Errors
    /// When there is no such peer, or the catalog cannot be read.
    pub fn new(home: &Home, name: &str) -> Result<AtPeer> {
        let peer = find_peer(&site::look_at_catalog(home)?, name)?;
        Ok(AtPeer {
            identity: home.identity()?,
            peer,
        })
    }
}

/// The thread that speaks to peers: those who use a vault are threads of all kinds.
fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("vault-peer")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| made))
}

fn lost(why: impl ToString, can_retry: bool) -> LinkError {
    LinkError {
        why: clean(&why.to_string()),
        can_retry,
    }
}

fn of_net(error: &NetError) -> LinkError {
    match error {
        NetError::Refused(refusal) => {
            let later = matches!(refusal.code, Code::Unavailable | Code::Busy);
            lost(&refusal.message, refusal.retry || later)
        }
        error => lost(error, error.retryable()),
    }
}

/// What a connection is to do next. One at a time: each has its answer before the next.
enum Order {
    Send(Vec<Frame>),
    Next,
}

type Done = std::result::Result<Option<Frame>, LinkError>;

impl Connect for AtPeer {
    fn connect(&self) -> std::result::Result<Box<dyn Link>, LinkError> {
        let runtime = runtime().map_err(|e| lost(e, true))?;
        let (orders, ordered) = unbounded_channel();
        let (done, answers) = std_mpsc::channel();
        runtime.spawn(carry(
            self.identity.clone(),
            self.peer.clone(),
            ordered,
            done,
        ));
        let link = NetLink {
            orders: Some(orders),
            answers,
        };
        link.answer()?;
        Ok(Box::new(link))
    }

    fn describe(&self) -> String {
        self.peer.name.clone()
    }
}

struct NetLink {
    /// Until it is dropped.
    orders: Option<UnboundedSender<Order>>,
    answers: std_mpsc::Receiver<Done>,
}

impl NetLink {
    fn answer(&self) -> Done {
        let ended = || lost("the connection is lost", true);
        self.answers.recv().map_err(|_| ended())?
    }

    fn order(&self, order: Order) -> Done {
        let ended = || lost("the connection is lost", true);
        let orders = self.orders.as_ref().ok_or_else(ended)?;
        orders.send(order).map_err(|_| ended())?;
        self.answer()
    }
}

impl Drop for NetLink {
    fn drop(&mut self) {
        self.orders = None;
        // The process may be about to end: the peer is to see an end, not a lost connection.
        while self.answers.recv_timeout(2 * CLOSE_LIMIT).is_ok() {}
    }
}

impl Link for NetLink {
    fn send(&mut self, frames: Vec<Frame>) -> std::result::Result<(), LinkError> {
        self.order(Order::Send(frames)).map(drop)
    }

    fn next(&mut self) -> std::result::Result<Frame, LinkError> {
        let frame = self.order(Order::Next)?;
        frame.ok_or_else(|| lost("the peer has closed the connection", true))
    }
}

/// Opens a connection and does what is ordered, until that ends or the connection is lost.
async fn carry(
    identity: Identity,
    peer: Peer,
    mut orders: UnboundedReceiver<Order>,
    done: std_mpsc::Sender<Done>,
) {
    let (mut reader, mut writer) = match open(&identity, &peer).await {
        Ok(opened) => opened,
        Err(error) => {
            let _ = done.send(Err(error));
            return;
        }
    };
    let mut said = Ok(None);
    loop {
        let failed = said.is_err();
        if done.send(said).is_err() || failed {
            return;
        }
        let Some(order) = orders.recv().await else {
            break;
        };
        said = match order {
            Order::Send(frames) => send(&mut writer, &frames).await.map(|()| None),
            Order::Next => reader.next().await.map(|frame| {
                let frame = frame?;
                Some((frame.kind, frame.payload))
            }),
        }
        .map_err(|e| of_net(&e));
    }
    let _ = close(reader, writer, CLOSE_LIMIT).await;
}

async fn open(
    identity: &Identity,
    peer: &Peer,
) -> std::result::Result<(FrameReader, FrameWriter), LinkError> {
    let call = Call::peer(identity, peer).await;
    // A peer that starts again is waited for.
    let connection = call
        .map_err(|e| lost(one_line(&e), true))?
        .into_connection();
    let opened = async {
        let (mut reader, mut writer) = connection.split();
        reader.set_idle_timeout(Some(ANSWER_LIMIT));
        reader.set_max_frame(MAX_FRAME);
        writer.set_stall_timeout(Some(STALL_LIMIT));
        service::open(&mut writer, &OpenVault {}).await?;
        writer.flush().await?;
        service::read_reply::<OpenVault>(&mut reader).await?;
        Ok::<_, NetError>((reader, writer))
    };
    opened.await.map_err(|e| of_net(&e))
}

async fn send(writer: &mut FrameWriter, frames: &[Frame]) -> std::result::Result<(), NetError> {
    for (kind, payload) in frames {
        writer.send(*kind, payload).await?;
    }
    writer.flush().await
}
