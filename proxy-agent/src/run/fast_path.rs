//! The watches of the fast path: on its routes, on the rules that its packets would miss, and on
//! the flows that request liberal conntrack entries.

use anyhow::{Context, Result};
use proxy_datapath::{FastPathWays, LiberalFlows};
use proxy_net::{self as net, JudgedRules};
use rtnetlink::Handle;
use tokio::sync::mpsc;

use crate::conntrack::liberal;

/// The seconds for which the programs may open bypass connections after each permission of the
/// agent.
const OPENS_SECS: u32 = 2;

pub(super) struct FastPathWatch {
    pub(super) ways: FastPathWays,
    pub(super) liberal: LiberalFlows,
    pub(super) judged: JudgedRules,
    pub(super) handle: Handle,
    /// Receives a message when the rules need another evaluation.
    pub(super) changes: mpsc::Sender<()>,
}

/// Watches until a failure. Never returns if there is no fast path.
pub(super) async fn watch(watch: Option<FastPathWatch>) -> Result<()> {
    let Some(FastPathWatch {
        ways,
        liberal,
        judged,
        handle,
        changes,
    }) = watch
    else {
        return std::future::pending().await;
    };
    let of_rules = ways.clone();
    let stop = changes.clone();
    let ended = changes.clone();
    let hold = move |is_judged: bool| of_rules.open_for(is_judged.then_some(OPENS_SECS));
    let rules = async {
        net::on_own_thread(net::watch_rules(handle, judged, changes, hold))
            .await
            .flatten()
    };
    let routes = async {
        net::on_own_thread(net::watch_ways(stop, move || ways.begin_epoch()))
            .await
            .flatten()
    };
    let answers = net::on_own_thread(async move {
        tokio::select! {
            result = liberal::answer(liberal) => result,
            () = ended.closed() => Ok(()),
        }
    });
    tokio::select! {
        result = async { answers.await.flatten() } => result.context("flows that conntrack follows"),
        result = rules => result.context("rules"),
        result = routes => result.context("routes"),
    }
}
