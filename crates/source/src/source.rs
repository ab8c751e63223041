//! Reads objects from a source: an API server's watches, or a folder of manifests.

use std::path::PathBuf;

use tokio::sync::mpsc::Sender;

use crate::health::Health;
use crate::nodes::NodeQuestions;
use crate::peers::Peering;
use crate::{events, kubernetes, manifests};
use proxy_core::input::Input;

#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    Kubernetes(kubernetes::Options),
    /// A folder of YAML and JSON files, applied as by `kubectl apply -f` with kpx as the API
    /// server.
    Manifests(PathBuf),
}

impl Source {
    /// Returns the operator's files and folders that are read repeatedly.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Kubernetes(options) => options.paths(),
            Self::Manifests(folder) => vec![folder.clone()],
        }
    }

    /// Checks that the files on the way to the objects are readable and valid. Sends no request to
    /// the API server and runs no credential plugin.
    pub async fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(options) => options.check().await,
            Self::Manifests(folder) => manifests::check(folder),
        }
    }

    /// Returns the URL of the API server, without credentials; `None` for a folder.
    pub async fn server(&self) -> anyhow::Result<Option<String>> {
        match self {
            Self::Kubernetes(options) => options.server().await.map(Some),
            Self::Manifests(_) => Ok(None),
        }
    }

    /// Sends to `inputs` until its receiver is dropped, which is `Ok`. The first input of every
    /// kind is `Update::All` or `Update::Refused`.
    ///
    /// `node_name` selects the Node that is sent; `None` sends all Nodes. Only an API server
    /// receives `events` and answers `questions`. An error needs the operator; all other failures
    /// are in `health` while the source retries.
    pub async fn run(
        self,
        node_name: Option<String>,
        inputs: Sender<Input>,
        health: Health,
        events: events::Queue,
        questions: NodeQuestions,
        peers: Peering,
    ) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(options) => {
                kubernetes::run(
                    &options,
                    node_name.as_deref(),
                    &inputs,
                    &health,
                    events,
                    questions,
                    peers,
                )
                .await
            }
            Self::Manifests(folder) => {
                drop((events, questions, peers));
                manifests::run(folder, node_name, inputs, health).await
            }
        }
    }
}
