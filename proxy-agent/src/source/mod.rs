//! Where objects come from: an API server's watches, or a folder of manifests.

use std::path::PathBuf;

use tokio::sync::mpsc::Sender;

use crate::health::Health;
use crate::input::Input;

pub mod kubernetes;
mod manifests;

/// Where objects come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    Kubernetes(kubernetes::Options),
    /// A folder of YAML and JSON files, applied as `kubectl apply -f` would, with kpx as the API server.
    Manifests(PathBuf),
}

impl Source {
    /// Feeds `inputs` until its receiver is gone, which is `Ok`. The first input of every kind is `Update::All`.
    ///
    /// `node_name` selects the Node that is sent. An error is one that waiting does not cure;
    /// all others are in `health` while the source keeps trying.
    pub async fn run(self, node_name: String, inputs: Sender<Input>, health: Health) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(options) => kubernetes::run(&options, &node_name, &inputs, &health).await,
            Self::Manifests(folder) => manifests::run(folder, node_name, inputs, health).await,
        }
    }
}
