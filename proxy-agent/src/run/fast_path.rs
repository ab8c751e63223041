//! The watches of the fast path: over the routes that its ways depend on, and over the rules that its packets would miss.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use proxy_datapath::FastPathWays;
use proxy_net::{self as net, JudgedRules};
use rtnetlink::Handle;
use tokio::sync::mpsc;

/// The seconds for which the programs go on to open whole connections past the stack, if the agent says no more.
const OPENS_SECS: u32 = 2;

pub(super) struct FastPathWatch {
    ways: Arc<Mutex<FastPathWays>>,
    judged: JudgedRules,
    handle: Handle,
    changes: mpsc::Sender<()>,
}

impl FastPathWatch {
    /// `changes` hears of rules that are to be judged.
    pub(super) fn new(ways: FastPathWays, judged: JudgedRules, handle: Handle, changes: mpsc::Sender<()>) -> Self {
        Self { ways: Arc::new(Mutex::new(ways)), judged, handle, changes }
    }
}

/// Watches until something fails; waits for ever without the fast path.
pub(super) async fn watch(watch: Option<FastPathWatch>) -> Result<()> {
    let Some(FastPathWatch { ways, judged, handle, changes }) = watch else { return std::future::pending().await };
    let (of_rules, stop) = (Arc::clone(&ways), changes.clone());
    let hold = move |is_judged: bool| locked(&of_rules).open_for(is_judged.then_some(OPENS_SECS));
    let rules = async { net::on_own_thread(net::watch_rules(handle, judged, changes, hold)).await.flatten() };
    let routes =
        async { net::on_own_thread(net::watch_ways(stop, move || locked(&ways).begin_epoch())).await.flatten() };
    tokio::select! {
        result = rules => result.context("rules"),
        result = routes => result.context("routes"),
    }
}

fn locked(ways: &Mutex<FastPathWays>) -> MutexGuard<'_, FastPathWays> {
    ways.lock().unwrap_or_else(PoisonError::into_inner)
}
