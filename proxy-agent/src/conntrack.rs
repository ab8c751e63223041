//! Works with the kernel's connection tracking. kpx does not depend on it.
//!
//! Netfilter sees the flows of pods and of clients outside translated: client to backend. It sees
//! the host's own flows untranslated, client to frontend, on their way into the anchor. So
//! connections count against `nf_conntrack_max`, conntrack's timeouts apply, and NetworkPolicies
//! may use conntrack states. kube-proxy's conntrack settings ([`sysctl`]) keep their meaning.
//!
//! kpx does not need `tcp_be_liberal`: kube-proxy's rules drop packets that conntrack marks
//! invalid. kpx has no such rule, but other programs may.
//!
//! kube-proxy's entries keep translating after its end ([`stale`]). UDP flows never close, so kpx
//! deletes their entries. The source ports of masqueraded connections stay free ([`foreign_nat`]).

pub mod foreign_nat;
pub mod liberal;
pub mod stale;
pub mod sysctl;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use proxy_common::addr::Proto;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use proxy_core::desired::Desired;
use proxy_core::diff::{Change, ServiceKey};
use proxy_core::ip_family::IpFamily;
use stale::Frontends;

/// The result of deleting the entries of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciled {
    pub ip_family: IpFamily,
    pub deleted: u64,
    pub duration: Duration,
}

/// The sysctl with the number of entries.
const COUNT: &str = "netfilter/nf_conntrack_count";

/// Returns true if the capability or the kernel module is missing.
fn is_denied(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::PermissionDenied
                | io::ErrorKind::Unsupported
                | io::ErrorKind::InvalidInput
        )
    })
}

/// The minimum time between the starts of two scans of the conntrack table.
const PAUSE: Duration = Duration::from_secs(1);
/// The minimum time after a failed scan.
const RETRY: Duration = Duration::from_secs(30);

type WalkResult = (Arc<Frontends>, Result<Vec<Reconciled>>);

/// Removes stale entries on its own task, because the table may be large.
#[derive(Debug, Default)]
pub struct Reconciler {
    due: Option<Arc<Frontends>>,
    /// The frontends of the last request, with their revision. Most changes concern only endpoints.
    known: Option<(u64, Arc<Frontends>)>,
    /// The earliest start of the next scan.
    not_before: Option<Instant>,
    work: Option<JoinHandle<WalkResult>>,
}

impl Reconciler {
    /// Requests a scan for entries of the current frontends; `own` are this node's addresses.
    pub fn set_due(&mut self, desired: &Desired, own: BTreeSet<IpAddr>) {
        let revision = desired.revision();
        let known = self
            .known
            .take()
            .filter(|(of, known)| *of == revision && *known.own() == own);
        let (_, frontends) = self.known.insert(
            known.unwrap_or_else(|| (revision, Arc::new(Frontends::of(desired.tables(), own)))),
        );
        self.due = Some(Arc::clone(frontends));
    }

    /// Waits for the end of the next scan. Cancel-safe: the scan continues, and the next call waits
    /// for it.
    pub async fn next(&mut self) -> Result<Vec<Reconciled>> {
        if self.work.is_none() {
            if self.due.is_none() {
                std::future::pending::<()>().await;
            }
            if let Some(not_before) = self.not_before {
                sleep_until(not_before).await;
            }
            let frontends = self.due.take().unwrap_or_default();
            self.not_before = Some(Instant::now() + PAUSE);
            self.work = Some(tokio::spawn(async move {
                let removed = stale::remove(&frontends).await;
                (frontends, removed)
            }));
        }
        let Some(work) = &mut self.work else {
            return Ok(Vec::new());
        };
        let ended = work.await;
        self.work = None;
        let (frontends, removed) = ended.context("look through the kernel's connections")?;
        if removed.is_err() {
            self.due.get_or_insert(frontends);
            self.not_before = Some(Instant::now() + RETRY);
        }
        removed
    }
}

/// Returns true if a change may make entries stale.
pub fn concerns(change: &Change) -> bool {
    change.services().any(|service| match service {
        ServiceKey::V4(key) => key.proto == Proto::UDP,
        ServiceKey::V6(key) => key.proto == Proto::UDP,
    })
}
