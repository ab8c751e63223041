//! A trace on the node that gets the client's packets.

use anyhow::{Context, Result, bail};
use proxy_view::output::Data;
use serde_json::Value;

use super::Page;
use crate::exec::Answer;
use crate::trace::{TraceArgs, traced};

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
        let (node, answer) = traced(&shared.client, &shared.connect, &args, node).await?;
        let Answer {
            code,
            stdout,
            stderr,
        } = answer.with_context(|| node.clone())?;
        if code != 0 {
            bail!("{node}: {}", stderr.trim().trim_start_matches("kpx: "));
        }
        serde_json::from_slice(&stdout).with_context(|| format!("the trace of {node}"))
    }
}
