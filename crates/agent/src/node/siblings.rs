//! Calls to the other nodes of the site. They have its key, as this one has, and are found in the database.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use drover_net::service::{Request, call};
use drover_net::{ConnectOptions, Identity, NetError, connect_any};
use drover_store::nodes::{NodeState, Nodes};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// How long a call may take. What is asked for can be done without.
const CALL_LIMIT: Duration = Duration::from_secs(3);

/// How long a node is not called that did not answer.
const SILENT: Duration = Duration::from_secs(5);

/// How long it is known which nodes there are.
const KNOWN: Duration = Duration::from_secs(2);

/// How long the database is not asked for them again once it did not answer.
const AWAY: Duration = Duration::from_secs(30);

/// A node: its name, and where it is reached.
type Sibling = (String, Vec<String>);

/// The other nodes.
pub(super) struct Siblings {
    identity: Option<Identity>,
    runtime: Option<Handle>,
    /// Until when they are known, and they.
    known: Mutex<(Option<Instant>, Vec<Sibling>)>,
    silent: Mutex<HashMap<String, Instant>>,
}

impl Siblings {
    /// Those of the site with this identity, called on the runtime of the caller.
    pub fn new(identity: Option<Identity>) -> Siblings {
        Siblings {
            identity,
            runtime: Handle::try_current().ok(),
            known: Mutex::default(),
            silent: Mutex::default(),
        }
    }

    /// The nodes that serve, this one among them, in the order of their names. While the database is away, those that did.
    fn all(&self, nodes: &Nodes) -> Vec<Sibling> {
        {
            let mut known = self.known.lock();
            if known.0.is_some_and(|until| Instant::now() < until) {
                return known.1.clone();
            }
            // Nobody waits while one asks: the others have those of before.
            known.0 = Some(Instant::now() + AWAY);
        }
        let listed = nodes.list();
        let mut known = self.known.lock();
        match listed {
            Ok(listed) => {
                let serving = listed.into_iter();
                let serving = serving.filter(|node| node.row.state == NodeState::Serving);
                known.1 = serving
                    .map(|node| (node.name, node.row.addresses))
                    .collect();
                known.0 = Some(Instant::now() + KNOWN);
            }
            Err(e) => {
                tracing::debug!("the nodes of this site are not known now: {e}");
                known.0 = Some(Instant::now() + AWAY);
            }
        }
        known.1.clone()
    }

    /// The names of the nodes that serve.
    pub fn names(&self, nodes: &Nodes) -> Vec<String> {
        self.all(nodes).into_iter().map(|(name, _)| name).collect()
    }

    /// Calls a node; none if it does not answer in time, or did not a moment ago. Blocks.
    pub fn ask<R: Request<Progress = ()>>(
        &self,
        nodes: &Nodes,
        name: &str,
        request: &R,
    ) -> Option<R::Reply> {
        let (identity, runtime) = (self.identity.as_ref()?, self.runtime.as_ref()?);
        let silent = self.silent.lock().get(name).copied();
        if silent.is_some_and(|since| since.elapsed() < SILENT) {
            return None;
        }
        let all = self.all(nodes);
        let (_, addresses) = all.iter().find(|(other, _)| other == name)?;
        let asked = async {
            let key = identity.key();
            let options = ConnectOptions::named(name);
            let connection = connect_any(addresses, identity, &key, &options).await?;
            call(connection, request, |()| {}).await
        };
        let answer: Option<Result<R::Reply, NetError>> =
            runtime.block_on(async { timeout(CALL_LIMIT, asked).await.ok() });
        match answer {
            Some(Ok(reply)) => Some(reply),
            failed => {
                let why = failed
                    .and_then(Result::err)
                    .map_or_else(|| "it did not answer in time".to_owned(), |e| e.to_string());
                tracing::debug!(node = name, "a node of this site was asked in vain: {why}");
                self.silent.lock().insert(name.to_owned(), Instant::now());
                None
            }
        }
    }
}
