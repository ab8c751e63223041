//! Look-ups of single nodes, which are too many for a watch: see `kubernetes/node_states.rs`.

use futures::{Stream, StreamExt, stream};
use proxy_core::compact::Shared;
use tokio::sync::{mpsc, oneshot};

/// The maximum number of look-ups in progress. They share the rate limit with lists and Events,
/// which wait no longer than the look-ups.
pub const AT_ONCE: usize = 16;

/// The state of a node in the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// The control plane receives the node's heartbeats.
    There,
    /// The control plane has had no heartbeat for long, or the Node object is gone.
    Lost,
    /// No answer from an API server, with the reason.
    Unknown(String),
}

/// The requesting half of the channel.
#[derive(Clone, Debug)]
pub struct NodeAsker(mpsc::Sender<Question>);

/// The source's half of the channel.
#[derive(Debug)]
pub struct NodeQuestions(pub(crate) mpsc::Receiver<Question>);

#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) node: Shared,
    pub(crate) answer: oneshot::Sender<NodeState>,
}

/// Creates both halves of the channel.
pub fn questions() -> (NodeAsker, NodeQuestions) {
    let (sender, receiver) = mpsc::channel(1);
    (NodeAsker(sender), NodeQuestions(receiver))
}

impl NodeQuestions {
    /// Creates a half that receives no requests.
    pub fn none() -> Self {
        questions().1
    }
}

impl NodeAsker {
    /// Looks up the states of nodes. Answers come in any order.
    pub fn ask(
        &self,
        nodes: impl IntoIterator<Item = Shared>,
    ) -> impl Stream<Item = (Shared, NodeState)> {
        let ask = async |node: Shared| (node.clone(), self.ask_one(node).await);
        stream::iter(nodes).map(ask).buffer_unordered(AT_ONCE)
    }

    async fn ask_one(&self, node: Shared) -> NodeState {
        let (answer, answered) = oneshot::channel();
        if self.0.send(Question { node, answer }).await.is_err() {
            return NodeState::Unknown("there is no API server".to_owned());
        }
        answered.await.unwrap_or_else(|_| {
            NodeState::Unknown("the API server's client has changed".to_owned())
        })
    }
}
