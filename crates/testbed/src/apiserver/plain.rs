//! A client that watches without a selector, to measure unfiltered data.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, WatchParams};
use tokio::sync::oneshot;

use super::place::client;
use crate::netns::NetNs;

/// A running watch of all EndpointSlices.
#[derive(Debug)]
pub struct PlainWatch {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

impl PlainWatch {
    /// Starts the watch inside a namespace, for the changes after a version.
    pub fn start(ns: &NetNs, kubeconfig: &Path, version: u64) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let kubeconfig = kubeconfig.to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start a runtime")?;
        let thread = ns.thread("plain watch", move || {
            runtime.block_on(watch(kubeconfig, version, stopped))
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends the watch. Returns an error if it has already ended.
    pub fn stop(self) -> Result<()> {
        let _ = self.stop.send(()); // A watch that has ended reports its error below.
        self.thread
            .join()
            .map_err(|_| anyhow!("the watch has panicked"))?
    }
}

async fn watch(
    kubeconfig: PathBuf,
    version: u64,
    mut stopped: oneshot::Receiver<()>,
) -> Result<()> {
    let slices: Api<EndpointSlice> = Api::all(client(&kubeconfig).await?);
    let params = WatchParams::default().disable_bookmarks();
    let mut events = slices
        .watch(&params, &version.to_string())
        .await
        .context("watch EndpointSlices")?
        .boxed();
    loop {
        tokio::select! {
            _ = &mut stopped => return Ok(()),
            event = events.try_next() => match event.context("watch EndpointSlices")? {
                Some(_) => {}
                None => bail!("the watch of EndpointSlices has ended"),
            },
        }
    }
}
