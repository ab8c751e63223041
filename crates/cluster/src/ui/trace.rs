//! A trace on the node that gets the client's packets, and on the backend's node.

use anyhow::{Context, Result};
use proxy_view::output::Data;
use serde_json::Value;

use super::Page;
use crate::trace::{TraceArgs, traced};

/// Time limit for each node in seconds. The browser waits 30 s for both, and shows the client's node
/// without the backend's.
const TIMEOUT: u64 = 8;

impl Page {
    /// Returns the result of `kubectl kpx trace`. `node` is where an external client's packets come
    /// to.
    pub async fn trace(&self, from: String, to: String, node: Option<String>) -> Result<Value> {
        let args = TraceArgs {
            from,
            to,
            count: 1,
            output: Data::Json,
        };
        let shared = &self.0;
        let limit = shared.connect.timeout(TIMEOUT);
        let (node, answer) = traced(&shared.client, &shared.connect, &args, node, limit).await?;
        Ok(answer.context(node)?.into_value())
    }
}
