//! Where objects come from: an API server's watches, or a folder of manifests.

use std::path::PathBuf;

use tokio::sync::mpsc::Sender;

use crate::health::Health;
use crate::{events, kubernetes, manifests};
use proxy_core::input::Input;

/// Where objects come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    Kubernetes(kubernetes::Options),
    /// A folder of YAML and JSON files, applied as `kubectl apply -f` would, with kpx as the API server.
    Manifests(PathBuf),
}

impl Source {
    /// The files and folders of an operator's that are read again and again.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Kubernetes(options) => options.paths(),
            Self::Manifests(folder) => vec![folder.clone()],
        }
    }

    /// An error if what leads to the objects cannot be read or used. Nothing is asked of the API server, and no plugin is
    /// run for credentials.
    pub async fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(options) => options.check().await,
            Self::Manifests(folder) => manifests::check(folder),
        }
    }

    /// Feeds `inputs` until its receiver is gone, which is `Ok`. The first input of every kind is `Update::All`, or
    /// `Update::Refused`.
    ///
    /// `node_name` selects the Node that is sent; without it all are. `events` go where the objects come from, if that is an API server. An
    /// error is one that waiting does not cure; all others are in `health` while the source keeps trying.
    pub async fn run(
        self,
        node_name: Option<String>,
        inputs: Sender<Input>,
        health: Health,
        events: events::Queue,
    ) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(options) => {
                kubernetes::run(&options, node_name.as_deref(), &inputs, &health, events).await
            }
            Self::Manifests(folder) => {
                drop(events);
                manifests::run(folder, node_name, inputs, health).await
            }
        }
    }
}
