//! A trace on the node that gets the client's packets, and on the backend's node.

use anyhow::{Context, Result};
use proxy_view::output::Data;
use serde_json::Value;

use super::Page;
use crate::trace::{OTHER_VERSION, TraceArgs, traced};

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
        answer
            .and_then(|traced| named(&node, traced.into_value()))
            .context(node)
    }
}

/// Sets the name of a trace's node, so that the page can name a node whose answer it cannot show.
fn named(node: &str, mut trace: Value) -> Result<Value> {
    let fields = trace.as_object_mut().context(OTHER_VERSION)?;
    fields.insert("node".to_owned(), node.into());
    Ok(trace)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answer_in_another_form_has_the_name_of_its_node() {
        let trace = named("n1", json!({"outcome": null})).unwrap();
        assert_eq!(trace, json!({"outcome": null, "node": "n1"}));
        let error = named("n1", Value::Null).unwrap_err();
        assert_eq!(error.to_string(), OTHER_VERSION);
    }
}
