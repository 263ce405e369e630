//! Services for the status and metrics of this process, for its own user.

use drover_net::service::{Exchange, Handler, Peer};
use drover_net::{Refusal, request};
use serde::{Deserialize, Serialize};

use super::server::Common;
use crate::error::failed;
use crate::status::Status;

/// Request: the status of this process.
#[derive(Debug, Serialize, Deserialize)]
pub struct GetStatus;
request!(GetStatus: "site.status", Manage, () => Status);

/// Request: its metrics, in OpenMetrics text.
#[derive(Debug, Serialize, Deserialize)]
pub struct GetMetrics;
request!(GetMetrics: "site.metrics", Manage, () => String);

impl Handler<GetStatus> for Common {
    async fn handle(
        &self,
        _: &Peer,
        _: GetStatus,
        _: &mut Exchange<'_, GetStatus>,
    ) -> Result<Status, Refusal> {
        self.0.status().await.map_err(failed)
    }
}

impl Handler<GetMetrics> for Common {
    async fn handle(
        &self,
        _: &Peer,
        _: GetMetrics,
        _: &mut Exchange<'_, GetMetrics>,
    ) -> Result<String, Refusal> {
        self.0.metrics_text().await.map_err(failed)
    }
}
