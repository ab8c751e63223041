//! Looks up single nodes. A watch on all Nodes would bring each node's heartbeats to every node.
//!
//! kpx looks up an endpoint's node only for Services with the annotation, and only while this node
//! has open connections to an endpoint that no longer serves. The server answers from its cache. If
//! a zone is lost, each node looks up that zone's nodes at the pace of `--kube-api-qps`. A list
//! would transfer all Nodes of the cluster, each with its list of images.

use std::future::pending;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::api::GetParams;
use kube::core::Request;
use kube::{Client, Resource as _};
use proxy_core::model::is_node_lost;
use tokio::time::{sleep, timeout};

use super::errors::explain;
use super::watch::event::ParsedObject;
use crate::nodes::{AT_ONCE, NodeQuestions, NodeState, Question};

/// The timeout of a look-up. The last of [`AT_ONCE`] look-ups may also wait for the rate limit.
const ANSWER: Duration = Duration::from_secs(30);
/// The random delay that spreads the requests of all nodes.
const SPREAD_MILLIS: u64 = 500;

/// Answers all requests, [`AT_ONCE`] at a time. Cancellation fails the pending requests.
pub(super) async fn answer(questions: &mut NodeQuestions, client: &Client) -> ! {
    let answer_one = async |Question { node, answer }| {
        let _asker_is_gone = answer.send(state(client, &node).await);
    };
    stream::poll_fn(|context| questions.0.poll_recv(context))
        .for_each_concurrent(AT_ONCE, answer_one)
        .await;
    pending().await
}

async fn state(client: &Client, node: &str) -> NodeState {
    sleep(Duration::from_millis(rand::random_range(0..SPREAD_MILLIS))).await;
    let asked = Request::new(Node::url_path(&(), None))
        .get(node, &GetParams::any())
        .map_err(kube::Error::BuildRequest);
    let answer = async { client.request::<ParsedObject<Node>>(asked?).await };
    match timeout(ANSWER, answer).await {
        Ok(Ok(ParsedObject {
            object: Ok(node), ..
        })) if is_node_lost(&node) => NodeState::Lost,
        Ok(Ok(ParsedObject { object: Ok(_), .. })) => NodeState::There,
        Ok(Ok(ParsedObject {
            object: Err(why), ..
        })) => NodeState::Unknown(format!("Node {node}: {why}")),
        // A proxy before the server may have its own 404 pages.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 && status.reason == "NotFound" => {
            NodeState::Lost
        }
        Ok(Err(error)) => NodeState::Unknown(format!("Node {node}: {}", explain(&error))),
        Err(_late) => NodeState::Unknown(format!("Node {node}: no answer")),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::ready;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;
    use tokio::time::Instant;
    use tower::service_fn;

    use super::*;
    use crate::nodes::questions;

    #[tokio::test(start_paused = true)]
    async fn node_is_lost_where_the_server_itself_says_so() {
        let status = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":""}"#;
        let node = r#"{"kind":"Node","apiVersion":"v1","metadata":{"name":"n2"}}"#;
        for (code, body, wanted) in [
            (404, status, "Lost"),
            (404, "<h1>Not Found</h1>", "Unknown"),
            (503, "unavailable", "Unknown"),
            (200, node, "There"),
        ] {
            let answer = move |_: http::Request<Body>| {
                ready(
                    http::Response::builder()
                        .status(code)
                        .body(Body::from(body.as_bytes().to_vec())),
                )
            };
            let found = format!(
                "{:?}",
                state(&Client::new(service_fn(answer), "default"), "n2").await
            );
            assert!(found.starts_with(wanted), "{code} {body}: {found}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_of_lost_zone_are_asked_for_side_by_side() {
        static OPEN: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        const NODES: usize = 1_000;
        const TAKES: Duration = Duration::from_millis(100);
        let serve = |_: http::Request<Body>| async {
            MOST.fetch_max(OPEN.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            sleep(TAKES).await;
            OPEN.fetch_sub(1, Ordering::Relaxed);
            let gone = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":""}"#;
            Ok::<_, Infallible>(
                http::Response::builder()
                    .status(404)
                    .body(Body::from(gone.as_bytes().to_vec()))
                    .unwrap(),
            )
        };
        let (asker, mut questions) = questions();
        let client = Client::new(service_fn(serve), "default");
        let nodes = (0..NODES).map(|nth| format!("n{nth}").into());
        let began = Instant::now();
        let answers: Vec<_> = tokio::select! {
            never = answer(&mut questions, &client) => never,
            answers = asker.ask(nodes).collect() => answers,
        };
        let lost = answers
            .iter()
            .filter(|(_, state)| *state == NodeState::Lost)
            .count();
        assert_eq!((answers.len(), lost), (NODES, NODES));
        let most = MOST.load(Ordering::Relaxed);
        assert!((2..=AT_ONCE).contains(&most), "{most} requests at once");
        let longest = (Duration::from_millis(SPREAD_MILLIS) + TAKES) * (NODES / AT_ONCE + 1) as u32;
        assert!(began.elapsed() <= longest, "{:?}", began.elapsed());
    }
}
