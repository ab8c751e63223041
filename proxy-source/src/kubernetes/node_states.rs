//! Tells whether single nodes are there. A watch on all Nodes would bring each node's heartbeats to every node.
//!
//! Only a node with open connections to an endpoint that has ceased to serve asks for that endpoint's node, and only for Services with the
//! annotation. The server answers from its cache.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::GetParams;
use kube::{Api, Client};
use proxy_core::model::is_node_lost;
use tokio::time::{sleep, timeout};

use crate::nodes::{NodeQuestions, NodeState, Question};

/// The timeout of an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// The time over which the nodes of a cluster spread what all of them ask.
const SPREAD_MILLIS: u64 = 500;

/// Answers all questions. The future may be cancelled: who waits for an answer then hears that there is none.
pub(super) async fn answer(questions: &mut NodeQuestions, client: &Client) -> ! {
    loop {
        match questions.0.recv().await {
            Some(Question { node, answer }) => {
                let _asker_is_gone = answer.send(state(client, &node).await);
            }
            None => std::future::pending().await,
        }
    }
}

async fn state(client: &Client, node: &str) -> NodeState {
    sleep(Duration::from_millis(rand::random_range(0..SPREAD_MILLIS))).await;
    let nodes = Api::<Node>::all(client.clone());
    match timeout(ANSWER, nodes.get_with(node, &GetParams::any())).await {
        Ok(Ok(node)) if is_node_lost(&node) => NodeState::Lost,
        Ok(Ok(_)) => NodeState::There,
        // A proxy before the server has its own pages with 404.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 && status.reason == "NotFound" => NodeState::Lost,
        Ok(Err(error)) => NodeState::Unknown(format!("Node {node}: {error}")),
        Err(_late) => NodeState::Unknown(format!("Node {node}: no answer")),
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn node_is_lost_where_the_server_itself_says_so() {
        let status =
            r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":""}"#;
        let node = r#"{"kind":"Node","apiVersion":"v1","metadata":{"name":"n2"}}"#;
        for (code, body, wanted) in [
            (404, status, "Lost"),
            (404, "<h1>Not Found</h1>", "Unknown"),
            (503, "unavailable", "Unknown"),
            (200, node, "There"),
        ] {
            let answer = move |_: http::Request<Body>| {
                ready(http::Response::builder().status(code).body(Body::from(body.as_bytes().to_vec())))
            };
            let found = format!("{:?}", state(&Client::new(service_fn(answer), "default"), "n2").await);
            assert!(found.starts_with(wanted), "{code} {body}: {found}");
        }
    }
}
