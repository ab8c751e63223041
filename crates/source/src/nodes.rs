//! Questions about single nodes, which are too many to be watched. They are few: see
//! `kubernetes/node_states.rs`.

use futures::{Stream, StreamExt, stream};
use proxy_core::compact::Shared;
use tokio::sync::{mpsc, oneshot};

/// The questions that wait for answers at one time. They share the limit on requests with lists and
/// Events, which wait no longer than these do.
pub const AT_ONCE: usize = 16;

/// The state of a node, as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// The control plane hears of it.
    There,
    /// The control plane has not heard of it for long, or it has no object any more.
    Lost,
    /// No API server has told, and why.
    Unknown(String),
}

/// The end that asks.
#[derive(Clone, Debug)]
pub struct NodeAsker(mpsc::Sender<Question>);

/// The end of the source.
#[derive(Debug)]
pub struct NodeQuestions(pub(crate) mpsc::Receiver<Question>);

#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) node: Shared,
    pub(crate) answer: oneshot::Sender<NodeState>,
}

/// Makes both ends.
pub fn questions() -> (NodeAsker, NodeQuestions) {
    let (sender, receiver) = mpsc::channel(1);
    (NodeAsker(sender), NodeQuestions(receiver))
}

impl NodeQuestions {
    /// Makes an end to which no question comes.
    pub fn none() -> Self {
        questions().1
    }
}

impl NodeAsker {
    /// Asks for the states of nodes. Answers come in any order.
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
